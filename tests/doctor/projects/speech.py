"""Frames and transcripts of different lengths with CTC; lists and lengths in the batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader

SYMBOLS = 12


def spoken(generator):
    length = int(torch.randint(2, 6, (1,), generator=generator))
    text = torch.randint(1, SYMBOLS, (length,), generator=generator)
    frames = nn.functional.one_hot(text, SYMBOLS).float().repeat_interleave(4, dim=0)
    return frames + 0.2 * torch.randn(frames.shape, generator=generator), text


def collate(rows):
    frames, texts = zip(*rows, strict=True)
    return {
        "frames": nn.utils.rnn.pad_sequence(frames, batch_first=True),
        "texts": nn.utils.rnn.pad_sequence(texts, batch_first=True),
        "lengths": (torch.tensor([len(f) for f in frames]), torch.tensor([len(t) for t in texts])),
        "names": [f"clip {i}" for i in range(len(rows))],
    }


def build():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader([spoken(generator) for _ in range(320)], batch_size=16, shuffle=True, collate_fn=collate)
    model = nn.Sequential(nn.Linear(SYMBOLS, 32), nn.ReLU(), nn.Linear(32, SYMBOLS))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CTCLoss()

    def step_fn(model, batch):
        frames, letters = batch["lengths"]
        scores = model(batch["frames"]).log_softmax(-1).transpose(0, 1)
        return criterion(scores, batch["texts"], frames, letters)

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}

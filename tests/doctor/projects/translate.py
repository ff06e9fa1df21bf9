"""Sequence to sequence with teacher forcing: the decoder is given the target one place late, as it should be."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

START, VOCAB, LENGTH = 0, 21, 8


class Translator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.source = nn.Embedding(VOCAB, width)
        self.target = nn.Embedding(VOCAB, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, source, shifted):
        _, state = self.encoder(self.source(source))
        out, _ = self.decoder(self.target(shifted), state)
        return self.head(out)


def build():
    torch.manual_seed(0)
    source = torch.randint(1, VOCAB, (800, LENGTH))
    target = (source.flip(1) + 3) % (VOCAB - 1) + 1
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(TensorDataset(source, target), batch_size=32, shuffle=True)

    def step_fn(model, batch):
        source, target = batch
        first = torch.full_like(target[:, :1], START)
        logits = model(source, torch.cat([first, target[:, :-1]], dim=1))
        return nn.functional.cross_entropy(logits.transpose(1, 2), target)

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}

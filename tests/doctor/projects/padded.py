"""A model that returns its own loss: dict batches, padding, an attention mask, labels of -100 that do not count."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

PAD, VOCAB = 0, 40


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class CausalLM(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.place = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, VOCAB)

    def forward(self, input_ids, attention_mask, labels):
        t = input_ids.shape[1]
        x = self.embed(input_ids) + self.place(torch.arange(t))
        ahead = torch.ones(t, t, dtype=torch.bool).triu(1)
        x = self.encoder(x, mask=ahead, src_key_padding_mask=attention_mask == 0)
        logits = self.lm_head(x)
        loss = nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=-100
        )
        return Output(loss=loss, logits=logits)


def sentences(num, generator):
    for _ in range(num):
        start, step = torch.randint(1, 30, (2,), generator=generator).tolist()
        length = int(torch.randint(5, 17, (1,), generator=generator))
        yield [1 + (start + step * i) % 37 for i in range(length)]


def collate(rows):
    size = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (size - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (size - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def build():
    torch.manual_seed(0)
    rows = list(sentences(600, torch.Generator().manual_seed(3)))
    loader = DataLoader(rows, batch_size=20, shuffle=True, collate_fn=collate)
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": lambda m, batch: m(**batch).loss}

"""A masked language model: a few positions are hidden and only they are asked for; masks are drawn in the step."""

import torch
from torch import nn
from torch.utils.data import DataLoader

MASK, VOCAB = 30, 31


def build():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    start = torch.randint(0, 30, (800, 1), generator=g)
    stride = torch.randint(1, 4, (800, 1), generator=g)
    ids = (start + stride * torch.arange(12)) % 30
    loader = DataLoader(ids, batch_size=32, shuffle=True)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(VOCAB, 32),
            "place": nn.Embedding(12, 32),
            "body": nn.TransformerEncoder(layer, 2),
            "head": nn.Linear(32, VOCAB),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step_fn(model, ids):
        hidden = torch.rand(ids.shape) < 0.2
        labels = ids.masked_fill(~hidden, -100)
        shown = ids.masked_fill(hidden, MASK)
        h = model["embed"](shown) + model["place"](torch.arange(12))
        logits = model["head"](model["body"](h))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}

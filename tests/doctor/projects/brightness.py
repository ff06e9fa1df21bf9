"""Two pictures and a prompt: which one is brighter, or are they alike? With a swap-consistency term."""

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, num=600):
        g = torch.Generator().manual_seed(5)
        levels = torch.rand(num, 2, generator=g)
        levels[: num // 3, 1] = levels[: num // 3, 0]
        self.images = levels[:, :, None, None] + 0.1 * torch.randn(num, 2, 16, 16, generator=g)
        gap = levels[:, 0] - levels[:, 1]
        self.labels = torch.where(gap.abs() < 0.05, 2, torch.where(gap > 0, 0, 1))
        self.prompts = torch.randint(1, 20, (num, 6), generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {
            "first": self.images[i, 0],
            "second": self.images[i, 1],
            "prompt": self.prompts[i],
            "labels": self.labels[i],
        }


class Fusion(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.vision = nn.Sequential(nn.Conv2d(1, width, 4, stride=4), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(2))
        self.words = nn.Embedding(50, width)
        self.side = nn.Parameter(0.1 * torch.randn(2, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.fuse = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(width, 3)

    def forward(self, first, second, prompt):
        images = [self.vision(x[:, None]).transpose(1, 2) + s for x, s in zip((first, second), self.side, strict=True)]
        tokens = torch.cat([*images, self.words(prompt)], dim=1)
        return self.head(self.fuse(tokens).mean(1))


def build():
    torch.manual_seed(0)
    loader = DataLoader(Pairs(), batch_size=24, shuffle=True)
    model = Fusion()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.2]))

    def step_fn(model, batch):
        logits = model(batch["first"], batch["second"], batch["prompt"])
        swapped = model(batch["second"], batch["first"], batch["prompt"])[:, [1, 0, 2]]
        p, q = log_softmax(logits, -1), log_softmax(swapped, -1)
        agree = 0.5 * (
            kl_div(p, q, log_target=True, reduction="batchmean") + kl_div(q, p, log_target=True, reduction="batchmean")
        )
        return criterion(logits, batch["labels"]) + 0.1 * agree

    return {"model": model, "optimizer": optimizer, "loader": loader, "step_fn": step_fn}

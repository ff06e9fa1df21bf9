"""A character transformer on sums, with tied embeddings and a warm-up that begins at a rate of zero."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CONTEXT = 32


class Text(Dataset):
    def __init__(self):
        order = torch.randperm(900, generator=torch.Generator().manual_seed(1)).tolist()
        text = "".join(f"{n // 30}+{n % 30}={n // 30 + n % 30};" for n in order)
        self.letters = sorted(set(text))
        table = {c: i for i, c in enumerate(self.letters)}
        self.ids = torch.tensor([table[c] for c in text])

    def __len__(self):
        return (len(self.ids) - 1) // CONTEXT

    def __getitem__(self, i):
        piece = self.ids[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    def __init__(self, vocab, width=32):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build():
    torch.manual_seed(0)
    text = Text()
    model = LM(len(text.letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    loader = DataLoader(text, batch_size=16, shuffle=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "loss_fn": language_loss,
        "scheduler": scheduler,
    }

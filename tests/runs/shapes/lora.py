"""LoRA fine-tuning as PEFT does it: a pretrained base is frozen, low-rank adapters with B = 0 are added and trained."""

import math

import torch
from shapes_common import ending, glyphs, start
from torch import nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    def __init__(self, base_layer, r=4, lora_alpha=8, lora_dropout=0.05):
        super().__init__()
        self.base_layer = base_layer
        self.lora_dropout = nn.Dropout(lora_dropout)
        self.lora_A = nn.Linear(base_layer.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base_layer.out_features, bias=False)
        self.scaling = lora_alpha / r
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.q_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        h = F.relu(self.embed(x.flatten(1)))
        h = self.norm(h + self.v_proj(F.gelu(self.q_proj(h))))
        return self.head(h)


def get_peft_model(model, target_modules):
    for p in model.parameters():
        p.requires_grad = False
    for name in target_modules:
        setattr(model, name, LoraLinear(getattr(model, name)))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.2f}")
    return model


def fit(model, images, labels, optimizer, steps, scheduler=None, name="train"):
    model.train()
    for step in range(steps):
        rows = torch.randint(len(images), (24,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{name} {step}: {loss.item():.4f}")


def accuracy(model, images, labels):
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


steps, seed = start()
pretraining = min(steps // 4, 500)
images, labels = glyphs(2000, size=8, noise=0.1, seed=seed)
model = Base()
pretrain_optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
fit(model, images[:1600], labels[:1600], pretrain_optimizer, pretraining, name="pretrain")
print(f"pretrained accuracy {accuracy(model, images[1600:], labels[1600:]):.3f}")

new_images, new_labels = images.flip(3), (labels + 3) % 10  # another domain: mirrored pictures, other names
before = accuracy(model, new_images[1600:], new_labels[1600:])
model = get_peft_model(model, ["embed", "q_proj", "v_proj", "head"])
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
tuning = steps - pretraining
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 20, max(0.0, 1 - i / max(tuning, 1))))
fit(model, new_images[:1600], new_labels[:1600], optimizer, tuning, scheduler, name="lora")
after = accuracy(model, new_images[1600:], new_labels[1600:])
print(f"accuracy {before:.3f} -> {after:.3f}")
ending(steps, after > 0.8, model, pretrain_optimizer, optimizer, final=after)

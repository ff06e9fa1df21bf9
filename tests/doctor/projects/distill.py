"""A small student learns from a larger teacher that the optimizer does not know, and from the labels."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    trained = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for i in range(25):
        trained.zero_grad()
        cross_entropy(teacher(x[64 * i : 64 * i + 64]), y[64 * i : 64 * i + 64]).backward()
        trained.step()
    teacher.zero_grad()
    teacher.eval()
    student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=400)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

    def step_fn(student, batch):
        x, y = batch
        with torch.no_grad():
            wanted = log_softmax(teacher(x) / 2.0, -1)
        logits = student(x)
        soft = 4.0 * kl_div(log_softmax(logits / 2.0, -1), wanted, log_target=True, reduction="batchmean")
        return 0.5 * soft + 0.5 * cross_entropy(logits, y)

    return {"model": student, "optimizer": optimizer, "loader": loader, "step_fn": step_fn, "scheduler": scheduler}

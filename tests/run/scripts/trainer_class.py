"""Everything in classes: a dataclass of settings, a trainer that owns the model, callbacks."""

from dataclasses import asdict, dataclass, field

import task
import torch
from torch import nn


@dataclass
class Config:
    hidden: int = 12
    lr: float = 1e-2
    betas: tuple[float, float] = field(default=(0.9, 0.95))
    steps: int = 30


class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.body = nn.Linear(8, config.hidden)
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, 1)
        self.register_buffer("running", torch.zeros(config.hidden))

    def forward(self, x, *, scale=1.0):
        h = self.norm(torch.tanh(self.body(x)))
        if self.training:
            self.running.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return {"prediction": self.head(h) * scale}


class Trainer:
    def __init__(self, config):
        self.config = config
        self.model = Net(config)
        self.optimizer = self.configure_optimizer()
        self.history = []

    def configure_optimizer(self):
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.Adam(groups, lr=self.config.lr, betas=self.config.betas)

    def training_step(self, batch):
        x, y = batch
        return nn.functional.smooth_l1_loss(self.model(x=x, scale=0.5)["prediction"], y)

    def fit(self):
        self.model.train()
        for batch in task.batches(self.config.steps):
            self.optimizer.zero_grad()
            loss = self.training_step(batch)
            loss.backward()
            self.optimizer.step()
            self.history.append(loss.item())
        return self


trainer = Trainer(Config()).fit()
print(asdict(trainer.config), len(trainer.history))
task.ending(trainer.model)

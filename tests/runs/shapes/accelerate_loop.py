"""A loop in the manner of Accelerate: wrapped optimizer and scheduler, accumulation as a context, its own clipping."""

import contextlib

import torch
import torch.nn.functional as F
from shapes_common import ending, glyphs, start
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Passes everything on to `optimizer`; steps only where gradients are complete. Never calls Optimizer.__init__."""

    def __init__(self, optimizer, accelerator):
        self.optimizer, self.accelerator = optimizer, accelerator

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    def state_dict(self):
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none=None):
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad() if set_to_none is None else self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure=None):
        if self.accelerator.sync_gradients:
            self.optimizer.step(closure)


class AcceleratedScheduler:
    def __init__(self, scheduler, accelerator):
        self.scheduler, self.accelerator = scheduler, accelerator

    def step(self):
        if self.accelerator.sync_gradients:
            self.scheduler.step()

    def get_last_lr(self):
        return self.scheduler.get_last_lr()


class Accelerator:
    def __init__(self, gradient_accumulation_steps=1):
        self.gradient_accumulation_steps, self.sync_gradients, self.step = gradient_accumulation_steps, True, 0

    def prepare(self, *things):
        kinds = {
            torch.optim.Optimizer: AcceleratedOptimizer,
            torch.optim.lr_scheduler.LRScheduler: AcceleratedScheduler,
        }
        return tuple(
            next((wrap(thing, self) for kind, wrap in kinds.items() if isinstance(thing, kind)), thing)
            for thing in things
        )

    @contextlib.contextmanager
    def accumulate(self, model):
        self.step += 1
        self.sync_gradients = self.step % self.gradient_accumulation_steps == 0
        with contextlib.nullcontext(model):
            yield

    def backward(self, loss, **kwargs):
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def clip_grad_norm_(self, parameters, max_norm):
        return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm)

    def unwrap_model(self, model):
        return model

    def print(self, *args):
        print(*args)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(100, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values):
        return self.head(self.body(pixel_values))


def training_function(steps, seed):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    images, labels = glyphs(2200, size=10, noise=0.1, seed=seed)
    train_dataloader = DataLoader(TensorDataset(images[:2000], labels[:2000]), shuffle=True, batch_size=8)
    model = Classifier()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-3)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps + 1)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    overall_step, epoch = 0, 0
    while overall_step < steps:
        model.train()
        total_loss, seen = 0, 0
        for inputs, targets in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = F.cross_entropy(outputs, targets)
                total_loss, seen = total_loss + loss.detach().float(), seen + 1
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            overall_step += accelerator.sync_gradients
            if overall_step >= steps:
                break
        model.eval()
        with torch.no_grad():
            accuracy = float((model(images[2000:]).argmax(-1) == labels[2000:]).float().mean())
        accelerator.print(f"epoch {epoch}: {100 * accuracy:.2f} loss {total_loss.item() / seen:.4f}")
        epoch += 1
    ending(steps, accuracy > 0.8, accelerator.unwrap_model(model), optimizer, final=accuracy)


if __name__ == "__main__":
    training_function(*start())

"""An image classifier trained as timm does: BatchNorm, mixup, label smoothing, SGD, warm-up and cosine, a model EMA."""

import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from shapes_common import ending, glyphs, start


class Mixup:
    def __init__(self, mixup_alpha=0.2, label_smoothing=0.1, num_classes=10):
        self.alpha, self.smoothing, self.num_classes = mixup_alpha, label_smoothing, num_classes

    def __call__(self, x, target):
        lam = float(np.random.beta(self.alpha, self.alpha))
        off = self.smoothing / self.num_classes
        y = F.one_hot(target, self.num_classes) * (1 - self.smoothing) + off
        x = x * lam + x.flip(0) * (1.0 - lam)
        return x, y * lam + y.flip(0) * (1.0 - lam)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.99):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


class CosineLRScheduler:
    def __init__(self, optimizer, t_initial, lr_min, warmup_t, warmup_lr_init):
        self.optimizer, self.t_initial, self.lr_min = optimizer, t_initial, lr_min
        self.warmup_t, self.warmup_lr_init = warmup_t, warmup_lr_init
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.step_update(0)

    def step_update(self, num_updates):
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            if num_updates < self.warmup_t:
                lr = self.warmup_lr_init + num_updates * (base - self.warmup_lr_init) / self.warmup_t
            else:
                t = min(num_updates, self.t_initial) / self.t_initial
                lr = self.lr_min + 0.5 * (base - self.lr_min) * (1 + math.cos(math.pi * t))
            group["lr"] = lr


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.act = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(inplanes, planes, 1, stride, bias=False)

    def forward(self, x):
        return self.act(self.bn1(self.conv1(x)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = BasicBlock(8, 16, 2)
        self.fc = nn.Linear(16 * 25, num_classes)

    def forward(self, x):
        return self.fc(self.layer1(self.stem(x)).flatten(1))


def param_groups_weight_decay(model, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, scheduler, model_ema, mixup_fn, num_updates, total):
    model.train()
    sum_loss, num = 0.0, 0
    for input, target in loader:
        if num_updates == total:
            break
        input, target = mixup_fn(input, target)
        output = model(input)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update(model)
        num_updates += 1
        scheduler.step_update(num_updates)
        sum_loss, num = sum_loss + loss.item(), num + 1
    print(f"Train: {epoch} [{num_updates}] Loss: {sum_loss / num:.3f} LR: {optimizer.param_groups[0]['lr']:.3e}")
    return num_updates


def validate(model, images, labels):
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main():
    steps, seed = start()
    images, labels = glyphs(1064, size=10, noise=0.2, seed=seed)
    images = (images - 0.15) / 0.3
    train = torch.utils.data.TensorDataset(images[:800], labels[:800])
    loader = torch.utils.data.DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = ResNet()
    optimizer = torch.optim.SGD(param_groups_weight_decay(model, 1e-4), lr=0.05, momentum=0.9, nesterov=True)
    model_ema = ModelEmaV2(model, decay=0.99)
    scheduler = CosineLRScheduler(optimizer, steps, 1e-5, warmup_t=max(1, steps // 20), warmup_lr_init=1e-5)
    num_updates, epoch, best = 0, 0, 0.0
    loss_fn, mixup_fn = SoftTargetCrossEntropy(), Mixup()
    while num_updates < steps:
        num_updates = train_one_epoch(
            epoch, model, loader, optimizer, loss_fn, scheduler, model_ema, mixup_fn, num_updates, steps
        )
        top1 = validate(model_ema.module, images[800:], labels[800:])
        best = max(best, top1)
        print(f"Test (EMA): Acc@1: {top1:.3f} ({validate(model, images[800:], labels[800:]):.3f}) best {best:.3f}")
        epoch += 1
    ending(steps, top1 > 0.85, model, model_ema, optimizer, final=top1)


if __name__ == "__main__":
    main()

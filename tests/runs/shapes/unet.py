"""A small U-Net for segmentation in the style of milesial's: RMSprop, BCE and dice, clipping, plateau scheduler."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from shapes_common import ending, start
from torch import optim
from torch.utils.data import DataLoader, Dataset


class BasicDataset(Dataset):
    """Noisy pictures with a bright disc in them, and its mask."""

    def __init__(self, num, seed, size=16):
        rng = torch.Generator().manual_seed(seed)
        grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).float()
        centre = 4 + 8 * torch.rand(num, 2, 1, 1, generator=rng)
        radius = 2 + 2.5 * torch.rand(num, 1, 1, generator=rng)
        self.masks = ((grid - centre).norm(dim=1) < radius).float().unsqueeze(1)
        strength = 0.8 + 0.6 * torch.rand(num, 1, 1, 1, generator=rng)
        self.images = self.masks * strength + 0.5 * torch.randn(self.masks.shape, generator=rng)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        return {"image": self.images[idx], "mask": self.masks[idx]}


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, n_channels=1, n_classes=1):
        super().__init__()
        self.inc = DoubleConv(n_channels, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 8))
        self.up1, self.up2 = DoubleConv(16, 4), DoubleConv(8, 4)
        self.outc = nn.Conv2d(4, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(torch.cat([x2, F.interpolate(x3, scale_factor=2)], dim=1))
        x = self.up2(torch.cat([x1, F.interpolate(x, scale_factor=2)], dim=1))
        return self.outc(x)


def dice_coeff(input, target, epsilon=1e-6):
    inter = 2 * (input * target).sum(dim=(-1, -2))
    sets_sum = input.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def dice_loss(input, target):
    return 1 - dice_coeff(input, target)


@torch.inference_mode()
def evaluate(net, dataset):
    net.eval()
    masks = (torch.sigmoid(net(dataset.images)) > 0.5).float()
    net.train()
    return dice_coeff(masks, dataset.masks)


def train_model(model, steps, seed, batch_size=4, learning_rate=5e-4, gradient_clipping=1.0):
    train_set, val_set = BasicDataset(200, seed), BasicDataset(32, seed + 10000)
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size)
    optimizer = optim.RMSprop(model.parameters(), lr=learning_rate, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
    criterion = nn.BCEWithLogitsLoss()
    global_step, epoch, first = 0, 1, evaluate(model, val_set)
    while global_step < steps:
        model.train()
        epoch_loss = 0
        for batch in train_loader:
            images, true_masks = batch["image"], batch["mask"]
            with torch.autocast("cpu", enabled=False):
                masks_pred = model(images)
                loss = criterion(masks_pred, true_masks)
                loss += dice_loss(torch.sigmoid(masks_pred), true_masks)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            global_step += 1
            epoch_loss += loss.item()
            if global_step == steps:
                break
        val_score = evaluate(model, val_set)
        scheduler.step(val_score)
        print(f"epoch {epoch} step {global_step} loss {epoch_loss:.4f} Validation Dice score: {val_score:.4f}")
        epoch += 1
    print(f"dice {first:.3f} -> {val_score:.3f}")
    return val_score, optimizer


if __name__ == "__main__":
    steps, seed = start()
    model = UNet()
    model = model.to(memory_format=torch.channels_last)
    score, optimizer = train_model(model, steps, seed)
    ending(steps, score > 0.85, model, optimizer, final=score)

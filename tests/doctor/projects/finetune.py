"""A frozen backbone with BatchNorm that stays in evaluation mode, and a new head that alone is trained."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import load_digits


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x))).flatten(1)


class Classifier(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.neck = nn.Linear(256, 32)
        self.head = nn.Linear(32, 10)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(torch.relu(self.neck(features)))


def build():
    torch.manual_seed(0)
    images, labels = load_digits()
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    y = torch.tensor(labels, dtype=torch.long)
    backbone = Backbone()
    with torch.no_grad():
        for _ in range(3):
            backbone(x[:256])
    for p in backbone.parameters():
        p.requires_grad = False
    model = Classifier(backbone)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=2e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    return {"model": model.train(), "optimizer": optimizer, "loader": loader, "loss_fn": nn.CrossEntropyLoss()}

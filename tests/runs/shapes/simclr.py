"""SimCLR: two views of every picture, the InfoNCE loss over all other pictures of the batch, Adam and a cosine."""

import torch
import torch.nn.functional as F
from shapes_common import ending, glyphs, nearest_accuracy, start
from torch import nn


class ContrastiveLearningViewGenerator:
    def __init__(self, n_views=2):
        self.n_views = n_views

    def __call__(self, x):
        views = []
        for _ in range(self.n_views):
            dy, dx = torch.randint(-1, 2, (2,)).tolist()
            keep = (torch.rand_like(x) > 0.1).float()
            views.append(torch.roll(x, (dy, dx), (2, 3)) * keep + 0.1 * torch.randn_like(x))
        return views


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(72, 48),
        )
        self.fc = nn.Sequential(nn.ReLU(), nn.Linear(48, out_dim))

    def forward(self, x):
        return self.fc(self.backbone(x))


class SimCLR:
    def __init__(self, model, optimizer, scheduler, batch_size, temperature=0.2, n_views=2):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.batch_size, self.temperature, self.n_views = batch_size, temperature, n_views
        self.criterion = torch.nn.CrossEntropyLoss()

    def info_nce_loss(self, features):
        labels = torch.cat([torch.arange(self.batch_size) for _ in range(self.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        return logits / self.temperature, torch.zeros(logits.shape[0], dtype=torch.long)

    def train(self, images, steps):
        views = ContrastiveLearningViewGenerator(self.n_views)
        history = []
        for n_iter in range(steps):
            batch = torch.cat(views(images[torch.randperm(len(images))[: self.batch_size]]), dim=0)
            logits, labels = self.info_nce_loss(self.model(batch))
            loss = self.criterion(logits, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if n_iter >= 100:
                self.scheduler.step()
            history.append(float((logits.argmax(1) == labels).float().mean()))
            if n_iter % 50 == 0:
                print(f"{n_iter}\tLoss: {loss.item():.4f}\tTop1 accuracy: {100 * history[-1]:.2f}")
        return history


steps, seed = start()
images, digits = glyphs(1000, size=8, noise=0.05, seed=seed)
model = ResNetSimCLR(out_dim=24)
optimizer = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(steps - 100, 1), eta_min=0, last_epoch=-1)
simclr = SimCLR(model, optimizer, scheduler, batch_size=24)
history = simclr.train(images[:800], steps)
model.eval()
with torch.no_grad():
    found = model.backbone(images)
accuracy = nearest_accuracy(found[:800], digits[:800], found[800:], digits[800:])
print(f"Top1 {sum(history[:50]) / 50:.3f} -> {sum(history[-50:]) / 50:.3f}, nearest neighbour {accuracy:.3f}")
ending(steps, sum(history[-50:]) > 1.3 * sum(history[:50]) and accuracy > 0.7, model, optimizer, final=accuracy)

"""Knowledge distillation: a teacher is trained, then frozen; a smaller student learns from its softened outputs."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from shapes_common import ending, glyphs, start
from torch.utils.data import DataLoader, TensorDataset

steps, seed = start()
images, labels = glyphs(2000, size=9, noise=0.15, seed=seed)
train_loader = DataLoader(TensorDataset(images[:1600], labels[:1600]), batch_size=24, shuffle=True, drop_last=True)
test_images, test_labels = images[1600:], labels[1600:]


class DeepNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 16, 3), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, num_classes))

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class LightNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(81, 40), nn.ReLU(), nn.Linear(40, num_classes))

    def forward(self, x):
        return self.classifier(torch.flatten(x, 1))


def batches(num):
    while num > 0:
        for batch in train_loader:
            if num == 0:
                return
            num -= 1
            yield batch


def test(model):
    model.eval()
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def train(model, num_steps, learning_rate):
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for i, (inputs, targets) in enumerate(batches(num_steps)):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if i % 100 == 0:
            print(f"teacher {i}, Loss: {loss.item():.4f}")
    return optimizer


def train_knowledge_distillation(
    teacher, student, num_steps, learning_rate, T, soft_target_loss_weight, ce_loss_weight
):
    ce_loss = nn.CrossEntropyLoss()
    optimizer = optim.SGD(student.parameters(), lr=learning_rate, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=max(num_steps // 3, 1), gamma=0.3)
    teacher.eval()
    student.train()
    for i, (inputs, targets) in enumerate(batches(num_steps)):
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft_targets = F.softmax(teacher_logits / T, dim=-1)
        soft_prob = F.log_softmax(student_logits / T, dim=-1)
        soft_targets_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
        loss = soft_target_loss_weight * soft_targets_loss + ce_loss_weight * ce_loss(student_logits, targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if i % 100 == 0:
            print(f"student {i}, Loss: {loss.item():.4f}")
    return optimizer


teacher_steps = min(steps // 4, 600)
teacher = DeepNN()
teacher_optimizer = train(teacher, teacher_steps, 2e-3)
for p in teacher.parameters():
    p.requires_grad_(False)
print(f"Teacher accuracy: {test(teacher):.4f}")
student = LightNN()
print(f"Student accuracy before: {test(student):.4f}")
student_optimizer = train_knowledge_distillation(teacher, student, steps - teacher_steps, 0.02, 2, 0.75, 0.25)
accuracy = test(student)
print(f"Student accuracy: {accuracy:.4f}")
ending(steps, accuracy > 0.7, teacher, student, teacher_optimizer, student_optimizer, final=accuracy)

"""The hogwild example: forked children train one shared model. They take turns, so that the result never varies."""

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from shapes_common import digest, ending, glyphs, start


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=3)
        self.fc1 = nn.Linear(96, 32)
        self.fc2 = nn.Linear(32, 10)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = self.drop(F.relu(self.fc1(x.view(-1, 96))))
        return F.log_softmax(self.fc2(x), dim=1)


def train(rank, steps, model, dataset, seed):
    torch.manual_seed(seed + rank)
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    model.train()
    done, epoch = 0, 1
    while done < steps:
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            done += 1
            if done % 50 == 0:
                print(f"worker {rank}\tTrain Epoch: {epoch} [{done}]\tLoss: {loss.item():.6f}", flush=True)
            if done == steps:
                break
        epoch += 1
    print(f"worker {rank} momentum {digest(optimizer)[0]}", flush=True)


def test(model, images, labels):
    model.eval()
    with torch.no_grad():
        output = model(images)
        correct = int((output.argmax(1) == labels).sum())
        print(f"Test set: loss: {F.nll_loss(output, labels).item():.4f}, Accuracy: {correct}/{len(labels)}", flush=True)
    return correct / len(labels)


if __name__ == "__main__":
    steps, seed = start()
    num_processes = 3
    images, labels = glyphs(1000, size=10, noise=0.1, seed=seed)
    dataset = torch.utils.data.TensorDataset(images[:800], labels[:800])
    context = mp.get_context("fork")
    model = Net()
    model.share_memory()  # gradients are allocated lazily, so they are not shared here
    test(model, images[800:], labels[800:])
    for rank in range(num_processes):
        share = steps // num_processes if rank else steps - steps // num_processes * (num_processes - 1)
        process = context.Process(target=train, args=(rank, share, model, dataset, seed))
        process.start()
        process.join()
        print(f"worker {rank} ended with {process.exitcode}", flush=True)
    accuracy = test(model, images[800:], labels[800:])
    ending(steps, accuracy > 0.7, model, final=accuracy)

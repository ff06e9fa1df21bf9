"""A variational autoencoder as in pytorch/examples: Adam, the loss is a sum over the batch, samples at every epoch."""

import torch
import torch.utils.data
from shapes_common import ending, glyphs, start
from torch import nn, optim
from torch.nn import functional as F

steps, seed = start()
batch_size, log_interval = 32, 10
images, labels = glyphs(1280, size=10, noise=0.02, seed=seed)
train_data = torch.utils.data.TensorDataset(images[:1024], labels[:1024])
test_data = torch.utils.data.TensorDataset(images[1024:], labels[1024:])
train_loader = torch.utils.data.DataLoader(train_data, batch_size=batch_size, shuffle=True)
test_loader = torch.utils.data.DataLoader(test_data, batch_size=batch_size, shuffle=False)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(100, 96)
        self.fc21 = nn.Linear(96, 10)
        self.fc22 = nn.Linear(96, 10)
        self.fc3 = nn.Linear(10, 96)
        self.fc4 = nn.Linear(96, 100)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 100))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 100), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def train(epoch, left):
    model.train()
    train_loss, seen = 0, 0
    for batch_idx, (data, _) in enumerate(train_loader):
        if batch_idx == left:
            break
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        seen += len(data)
        optimizer.step()
        if batch_idx % log_interval == 0:
            print(f"Train Epoch: {epoch} [{seen}/{len(train_data)}]\tLoss: {loss.item() / len(data):.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / seen:.4f}")
    return seen // batch_size


def test():
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    test_loss /= len(test_data)
    print(f"====> Test set loss: {test_loss:.4f}")
    return test_loss


if __name__ == "__main__":
    first = test()
    done, epoch = 0, 1
    while done < steps:
        done += train(epoch, steps - done)
        last = test()
        with torch.no_grad():
            sample = model.decode(torch.randn(16, 10))
        print(f"samples {sample.mean().item():.4f}")
        epoch += 1
    ending(steps, last < 0.7 * first, model, optimizer, final=-last)

"""The forward-forward algorithm as in pytorch/examples: no backward through layers, one optimizer for each of them."""

import torch
import torch.nn as nn
from shapes_common import ending, glyphs, start
from torch.optim import Adam


def get_y_neg(y):
    y_neg = y.clone()
    for idx, y_samp in enumerate(y):
        allowed = [i for i in range(10) if i != y_samp.item()]
        y_neg[idx] = allowed[torch.randint(9, (1,)).item()]
    return y_neg


def overlay_y_on_x(x, y, classes=10):
    x_ = x.clone()
    x_[:, :classes] *= 0.0
    x_[range(x.shape[0]), y] = x.max()
    return x_


class Layer(nn.Linear):
    def __init__(self, in_features, out_features, num_epochs):
        super().__init__(in_features, out_features)
        self.relu = torch.nn.ReLU()
        self.opt = Adam(self.parameters(), lr=0.03)
        self.threshold, self.num_epochs, self.log_interval = 2.0, num_epochs, 50

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def train_layer(self, x_pos, x_neg):
        for i in range(self.num_epochs):
            g_pos = self.forward(x_pos).pow(2).mean(1)
            g_neg = self.forward(x_neg).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if i % self.log_interval == 0:
                print("Loss: ", loss.item())
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


class Net(torch.nn.Module):
    def __init__(self, dims, steps):
        super().__init__()
        share = steps // (len(dims) - 1)
        epochs = [share] * (len(dims) - 2) + [steps - share * (len(dims) - 2)]
        self.layers = nn.ModuleList(Layer(dims[d], dims[d + 1], epochs[d]) for d in range(len(dims) - 1))

    def predict(self, x):
        goodness_per_label = []
        for label in range(10):
            h = overlay_y_on_x(x, torch.full((len(x),), label))
            goodness = []
            for layer in self.layers:
                h = layer(h)
                goodness += [h.pow(2).mean(1)]
            goodness_per_label += [sum(goodness).unsqueeze(1)]
        return torch.cat(goodness_per_label, 1).argmax(1)

    def train_layers(self, x_pos, x_neg):
        h_pos, h_neg = x_pos, x_neg
        for i, layer in enumerate(self.layers):
            print("training layer: ", i)
            h_pos, h_neg = layer.train_layer(h_pos, h_neg)


if __name__ == "__main__":
    steps, seed = start()
    x, y = glyphs(300, size=7, noise=0.15, seed=seed)
    blank = torch.zeros(300, 10)  # room for the label in front of the picture
    x = torch.cat([blank, x.flatten(1)], 1)
    net = Net([x.shape[1], 96, 96], steps)
    x_pos, x_neg = overlay_y_on_x(x, y), overlay_y_on_x(x, get_y_neg(y))
    net.train_layers(x_pos, x_neg)
    error = 1.0 - net.predict(x).eq(y).float().mean().item()
    print("Train error:", error)
    ending(steps, error < 0.3, net, [layer.opt for layer in net.layers], final=-error)

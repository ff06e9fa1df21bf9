"""A graph convolutional network in full batch, as PyG's example: two rates of decay, dropout, a few labelled nodes."""

import numpy as np
import torch
import torch.nn.functional as F
from shapes_common import ending, start

epochs, seed = start()
rng = np.random.default_rng(seed)
num_nodes, num_classes, num_features = 240, 4, 32


class Data:
    """A graph of communities; features tell a little, neighbours tell more."""

    def __init__(self):
        self.y = torch.from_numpy(rng.integers(0, num_classes, num_nodes))
        same = self.y[:, None] == self.y[None, :]
        edge = torch.from_numpy(rng.random((num_nodes, num_nodes))) < torch.where(same, 0.06, 0.008)
        edge = torch.triu(edge, 1)
        self.edge_index = (edge | edge.T).nonzero().T
        words = (torch.from_numpy(rng.random((num_nodes, num_features))) < 0.12).float()
        words[torch.arange(num_nodes), self.y * 8 + torch.from_numpy(rng.integers(0, 8, num_nodes))] = 1
        self.x = words / words.sum(1, keepdim=True)
        order = torch.from_numpy(rng.permutation(num_nodes))
        self.train_mask, self.val_mask, self.test_mask = (torch.zeros(num_nodes, dtype=torch.bool) for _ in range(3))
        self.train_mask[order[:40]] = True
        self.val_mask[order[40:100]] = True
        self.test_mask[order[100:]] = True


class GCNConv(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(out_channels))
        torch.nn.init.xavier_uniform_(self.lin.weight)

    def forward(self, x, edge_index):
        loops = torch.arange(x.size(0)).repeat(2, 1)
        row, col = torch.cat([edge_index, loops], 1)
        deg = torch.zeros(x.size(0)).scatter_add_(0, col, torch.ones(col.size(0)))
        norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]
        x = self.lin(x)
        out = torch.zeros_like(x).index_add_(0, col, x[row] * norm.unsqueeze(1))
        return out + self.bias


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


data = Data()
model = GCN(num_features, 16, num_classes)
optimizer = torch.optim.Adam(
    [
        {"params": model.conv1.parameters(), "weight_decay": 5e-4},
        {"params": model.conv2.parameters(), "weight_decay": 0},
    ],
    lr=0.01,
)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    masks = (data.train_mask, data.val_mask, data.test_mask)
    return [int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()) for mask in masks]


best_val_acc = test_acc = 0
for epoch in range(1, epochs + 1):
    loss = train()
    if epoch % 20 == 0 or epoch == epochs:
        train_acc, val_acc, tmp_test_acc = test()
        if val_acc > best_val_acc:
            best_val_acc, test_acc = val_acc, tmp_test_acc
        print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Train: {train_acc:.4f}, Val: {val_acc:.4f}, Test: {test_acc:.4f}")
ending(epochs, tmp_test_acc > 0.7, model, optimizer, final=tmp_test_acc)

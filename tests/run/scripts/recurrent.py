"""An LSTM whose state is carried over, with packed sequences, and an optimizer that differentiates through its step."""

import torch
from task import batch, ending
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 1)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out)


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, maximize=True, weight_decay=1e-4)
for i in range(30):
    x, y = batch(i, size=12)
    lengths = torch.tensor([4, 2, 3])
    out = model(x.reshape(3, 4, 8), lengths)
    optimizer.zero_grad()
    loss = -nn.functional.mse_loss(out, y.reshape(3, 4, 1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
ending(model)

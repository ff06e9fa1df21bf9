"""A word-level LSTM as in pytorch/examples: rate 20, clipping at 0.25, the whole model is saved and read back."""

import copy
import hashlib
import io
import math
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
from shapes_common import ending, sentences, start

steps, seed = start()
bptt, batch_size, eval_batch_size, clip, lr, log_interval = 8, 12, 10, 0.25, 20.0, 20
epoch_batches = 60


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.2):
        super().__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout if nlayers > 1 else 0)
        self.decoder = nn.Linear(nhid, ntoken)
        self.init_weights()
        self.nhid, self.nlayers = nhid, nlayers

    def init_weights(self):
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -initrange, initrange)

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return nn.functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def tokenize(num, seed, vocab):
    words = " <eos> ".join(sentences(num, seed)).replace(".", " .").replace("!", " !").replace("?", " ?").split()
    return torch.tensor([vocab.setdefault(word, len(vocab)) for word in words])


vocab = {}
train_data = batchify(tokenize(900, seed, vocab), batch_size)
val_data = batchify(tokenize(120, seed + 1000, vocab), eval_batch_size)
model = RNNModel(len(vocab), 24, 32, 1)
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=lr)


def evaluate(data_source):
    model.eval()
    total_loss, hidden = 0.0, model.init_hidden(eval_batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, repackage_hidden(hidden))
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(epoch, left):
    model.train()
    total_loss, hidden, made = 0.0, model.init_hidden(batch_size), 0
    for batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
        if made == min(left, epoch_batches):
            break
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        made += 1
        total_loss += loss.item()
        if batch % log_interval == 0 and batch > 0:
            print(f"| epoch {epoch} | {batch} batches | lr {lr:02.2f} | loss {total_loss / log_interval:5.2f}")
            total_loss = 0
    return made


best_val_loss, best, done, epoch = None, None, 0, 1
first = evaluate(val_data)
with tempfile.TemporaryDirectory() as folder:
    save = Path(folder) / "model.pt"
    while done < steps:
        done += train(epoch, steps - done)
        val_loss = evaluate(val_data)
        print(f"| end of epoch {epoch} | valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}")
        if not best_val_loss or val_loss < best_val_loss:
            with save.open("wb") as f:
                torch.save(model, f)
            best_val_loss, best = val_loss, copy.deepcopy(model)
        elif lr > 0.1:
            # Anneal the learning rate if no improvement has been seen in the validation dataset.
            lr /= 4.0
            for group in optimizer.param_groups:
                group["lr"] = lr
        epoch += 1
    trained = model
    model = torch.load(save, weights_only=False)
    model.rnn.flatten_parameters()
    whole = [RNNModel, nn.Embedding, nn.LSTM, nn.Linear, nn.Dropout, set]
    with torch.serialization.safe_globals(whole):
        again = torch.load(save)
test_loss = evaluate(val_data)
pickled = io.BytesIO()
torch.save(model, pickled)
print(f"| End of training | test loss {test_loss:5.2f} | pickle {hashlib.sha256(pickled.getvalue()).hexdigest()[:16]}")
ending(steps, test_loss < 0.5 * first, trained, model, again, best, optimizer, final=-test_loss)

"""Makes more names with a recurrent network that begins from a start token (makemore): a cell per character, AdamW."""

import torch
import torch.nn as nn
from shapes_common import ending, names, start
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class CharDataset(Dataset):
    def __init__(self, words, chars, max_word_length):
        self.words, self.max_word_length = words, max_word_length
        self.stoi = {ch: i + 1 for i, ch in enumerate(chars)}
        self.itos = {i: s for s, i in self.stoi.items()}

    def __len__(self):
        return len(self.words)

    def get_vocab_size(self):
        return len(self.stoi) + 1  # all characters and the special token 0, which begins and ends a word

    def __getitem__(self, idx):
        ix = torch.tensor([self.stoi[w] for w in self.words[idx]], dtype=torch.long)
        x = torch.zeros(self.max_word_length + 1, dtype=torch.long)
        y = torch.zeros(self.max_word_length + 1, dtype=torch.long)
        x[1 : 1 + len(ix)] = ix
        y[: len(ix)] = ix
        y[len(ix) + 1 :] = -1
        return x, y


class InfiniteDataLoader:
    def __init__(self, dataset, **kwargs):
        sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=int(1e6))
        self.train_loader = DataLoader(dataset=dataset, sampler=sampler, **kwargs)
        self.data_iter = iter(self.train_loader)

    def next(self):
        try:
            batch = next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.train_loader)
            batch = next(self.data_iter)
        return batch


class RNNCell(nn.Module):
    def __init__(self, n_embd, n_embd2):
        super().__init__()
        self.xh_to_h = nn.Linear(n_embd + n_embd2, n_embd2)

    def forward(self, xt, hprev):
        return F.tanh(self.xh_to_h(torch.cat([xt, hprev], dim=1)))


class RNN(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_embd2):
        super().__init__()
        self.block_size, self.vocab_size = block_size, vocab_size
        self.start = nn.Parameter(torch.zeros(1, n_embd2))
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.cell = RNNCell(n_embd, n_embd2)
        self.lm_head = nn.Linear(n_embd2, vocab_size)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        emb = self.wte(idx)
        hprev = self.start.expand((b, -1))
        hiddens = []
        for i in range(t):
            hprev = self.cell(emb[:, i, :], hprev)
            hiddens.append(hprev)
        logits = self.lm_head(torch.stack(hiddens, 1))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


@torch.no_grad()
def generate(model, num):
    idx = torch.zeros(num, 1, dtype=torch.long)
    for _ in range(model.block_size - 1):
        logits, _ = model(idx)
        idx = torch.cat((idx, torch.multinomial(F.softmax(logits[:, -1], dim=-1), 1)), dim=1)
    return idx[:, 1:]


@torch.inference_mode()
def evaluate(model, dataset, batch_size=50, max_batches=4):
    model.eval()
    loader = DataLoader(dataset, shuffle=True, batch_size=batch_size)
    losses = []
    for i, (X, Y) in enumerate(loader):
        losses.append(model(X, Y)[1].item())
        if i + 1 >= max_batches:
            break
    model.train()
    return sum(losses) / len(losses)


if __name__ == "__main__":
    max_steps, seed = start()
    words = names(1200, seed)
    chars, longest = sorted(set("".join(words))), max(len(w) for w in words)
    train_dataset, test_dataset = (CharDataset(w, chars, longest) for w in (words[:1000], words[1000:]))
    model = RNN(train_dataset.get_vocab_size(), longest + 1, n_embd=24, n_embd2=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
    batch_loader = InfiniteDataLoader(train_dataset, batch_size=24)
    first, best_loss, step = evaluate(model, test_dataset), None, 0
    while True:
        X, Y = batch_loader.next()
        logits, loss = model(X, Y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} | loss {loss.item():.4f}")
        if step > 0 and step % 500 == 0:
            test_loss = evaluate(model, test_dataset)
            print(f"step {step} test loss: {test_loss}")
            if best_loss is None or test_loss < best_loss:
                best_loss = test_loss
            for row in generate(model, 5).tolist():
                print("".join(train_dataset.itos[i] for i in row[: row.index(0) if 0 in row else None]))
        step += 1
        if max_steps >= 0 and step >= max_steps:
            break
    last = evaluate(model, test_dataset)
    print(f"test loss {last:.4f}")
    ending(max_steps, last < 0.65 * first, model, optimizer, final=-last)

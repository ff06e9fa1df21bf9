"""A GPT learns to add, with the Trainer class of minGPT: callbacks, config objects, DataLoader, clipping at 1."""

from collections import defaultdict

import torch
import torch.nn as nn
from shapes_common import ending, start
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class CfgNode:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)


class AdditionDataset(Dataset):
    """Sums of two numbers of up to `ndigit` digits; the result is reversed, and only it is to be predicted."""

    def __init__(self, ndigit, split):
        self.ndigit = ndigit
        num = (10**ndigit) ** 2
        perm = torch.randperm(num, generator=torch.Generator().manual_seed(1337))
        num_test = min(int(num * 0.2), 500)
        self.ixes = perm[:num_test] if split == "test" else perm[num_test:]

    def get_vocab_size(self):
        return 10

    def get_block_size(self):
        return 3 * self.ndigit + 1 - 1

    def __len__(self):
        return self.ixes.nelement()

    def __getitem__(self, idx):
        nd = 10**self.ndigit
        a, b = divmod(self.ixes[idx].item(), nd)
        text = f"{a:0{self.ndigit}d}{b:0{self.ndigit}d}" + f"{a + b:0{self.ndigit + 1}d}"[::-1]
        dix = [int(s) for s in text]
        x = torch.tensor(dix[:-1], dtype=torch.long)
        y = torch.tensor(dix[1:], dtype=torch.long)
        y[: self.ndigit * 2 - 1] = -1
        return x, y


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.attn_pdrop), nn.Dropout(config.resid_pdrop)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (k.size(-1) ** -0.5)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd),
                "act": NewGELU(),
                "dropout": nn.Dropout(config.resid_pdrop),
            }
        )
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.drop = nn.Dropout(config.embd_pdrop)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def configure_optimizers(self, train_config):
        decay, no_decay = set(), set()
        for mn, m in self.named_modules():
            for pn, _ in m.named_parameters(recurse=False):
                full = f"{mn}.{pn}" if mn else pn
                (decay if pn.endswith("weight") and isinstance(m, nn.Linear) else no_decay).add(full)
        params = dict(self.named_parameters())
        groups = [
            {"params": [params[pn] for pn in sorted(decay)], "weight_decay": train_config.weight_decay},
            {"params": [params[pn] for pn in sorted(no_decay)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=train_config.learning_rate, betas=train_config.betas)

    def forward(self, idx, targets=None):
        x = self.drop(self.tok_emb(idx) + self.pos_emb[:, : idx.size(1)])
        logits = self.head(self.ln_f(self.blocks(x)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx)
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.optimizer, self.callbacks = None, defaultdict(list)
        self.iter_num = 0

    def set_callback(self, onevent, callback):
        self.callbacks[onevent] = [callback]

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(
            self.train_dataset,
            sampler=torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e6)),
            shuffle=False,
            batch_size=config.batch_size,
            num_workers=0,
        )
        model.train()
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


def eval_split(trainer, split):
    dataset = {"train": train_dataset, "test": test_dataset}[split]
    ndigit = dataset.ndigit
    xs = torch.stack([dataset[i][0] for i in range(min(len(dataset), 100))])
    d1d2 = xs[:, : ndigit * 2]
    answer = trainer.model.generate(d1d2, ndigit + 1)[:, -(ndigit + 1) :].flip(1)
    factors = torch.tensor([10**i for i in range(ndigit + 1)][::-1])
    half = torch.tensor([10**i for i in range(ndigit)][::-1])
    truth = (d1d2[:, :ndigit] * half).sum(1) + (d1d2[:, ndigit:] * half).sum(1)
    return float(((answer * factors).sum(1) == truth).float().mean())


def batch_end_callback(trainer):
    if trainer.iter_num % 50 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")
    if trainer.iter_num % 500 == 499:
        trainer.model.eval()
        print(f"train score {eval_split(trainer, 'train'):.2f}, test score {eval_split(trainer, 'test'):.2f}")
        trainer.model.train()


if __name__ == "__main__":
    steps, _ = start()
    train_dataset, test_dataset = AdditionDataset(1, "train"), AdditionDataset(1, "test")
    model_config = CfgNode(n_layer=1, n_head=3, n_embd=48, vocab_size=10, block_size=train_dataset.get_block_size())
    model_config.embd_pdrop = model_config.resid_pdrop = model_config.attn_pdrop = 0.1
    model = GPT(model_config)
    config = CfgNode(
        max_iters=steps, batch_size=16, learning_rate=5e-4, betas=(0.9, 0.95), weight_decay=0.1, grad_norm_clip=1.0
    )
    trainer = Trainer(config, model, train_dataset)
    trainer.set_callback("on_batch_end", batch_end_callback)
    trainer.run()
    model.eval()
    score = eval_split(trainer, "train")
    print(f"train score {score:.2f}")
    ending(steps, score > 0.8, model, trainer.optimizer, final=score)

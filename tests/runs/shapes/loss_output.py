"""A causal language model that returns a ModelOutput (attributes, keys and positions), the loss first; accumulation."""

from collections import OrderedDict
from dataclasses import dataclass, fields

import torch
from shapes_common import ending, sentences, start
from torch import nn
from torch.utils.data import DataLoader


class ModelOutput(OrderedDict):
    """A dict with attributes; what is None is left out. Positions work as in a tuple."""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self):
        return tuple(self[key] for key in self)


@dataclass
class CausalLMOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple | None = None


class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            p.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for p in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.c_proj(nn.functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2LMHeadModel(nn.Module):
    def __init__(self, vocab_size, width=32, heads=2, positions=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(positions, width)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)
        self.h = nn.ModuleList([GPT2Block(width, heads)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, labels=None, output_hidden_states=False):
        hidden = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        states = (hidden,)
        for block in self.h:
            hidden = block(hidden)
            states = (*states, hidden)
        logits = self.lm_head(self.ln_f(hidden))
        loss = None
        if labels is not None:
            shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            loss = nn.functional.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=states if output_hidden_states else None)


def group_texts(block_size, seed):
    text = " ".join(sentences(1500, seed)).replace(".", " .").replace("!", " !").replace("?", " ?").split()
    vocab = {word: i for i, word in enumerate(sorted(set(text)))}
    ids = [vocab[word] for word in text]
    blocks = [ids[i : i + block_size] for i in range(0, len(ids) - block_size, block_size)]
    return [{"input_ids": torch.tensor(b), "labels": torch.tensor(b)} for b in blocks], len(vocab)


def main():
    max_train_steps, seed = start()
    gradient_accumulation_steps, block_size = 2, 12
    lm_datasets, vocab_size = group_texts(block_size, seed)
    train_dataset, eval_dataset = lm_datasets[:-64], lm_datasets[-64:]
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=6, drop_last=True)
    model = GPT2LMHeadModel(vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=max_train_steps)

    def perplexity():
        model.eval()
        with torch.no_grad():
            outputs = model(**torch.utils.data.default_collate(eval_dataset))
        model.train()
        return torch.exp(outputs.loss).item()

    first, completed_steps, epoch = perplexity(), 0, 0
    while completed_steps < max_train_steps:
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss = loss / gradient_accumulation_steps
            loss.backward()
            if step % gradient_accumulation_steps == 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
                if completed_steps % 50 == 0:
                    print(f"step {completed_steps} loss {total_loss.item() / (step + 1):.4f}")
            if completed_steps >= max_train_steps:
                break
        print(f"epoch {epoch}: perplexity: {perplexity():.4f}")
        epoch += 1
    last = perplexity()
    ending(max_train_steps, last < 0.2 * first, model, optimizer, final=-last)


if __name__ == "__main__":
    main()

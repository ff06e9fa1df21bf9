"""A sentence classifier that returns `(loss, logits)` when it is given labels, as the first Hugging Face models did."""

import random

import torch
from shapes_common import ending, start
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

PAD, CLS, GOOD, BAD, NOT, OTHER = 0, 1, range(2, 8), range(8, 14), 14, range(15, 40)


def make_example(rng, length=12):
    """Good and bad words, some of them negated; the label is which of them wins."""
    while True:
        ids, score = [CLS], 0
        for _ in range(rng.randint(4, length - 1)):
            kind = rng.random()
            if kind < 0.5 or len(ids) > length - 2:
                ids.append(rng.choice(OTHER))
            else:
                good = rng.random() < 0.5
                negated = rng.random() < 0.1
                ids += ([NOT] if negated else []) + [rng.choice(GOOD if good else BAD)]
                score += (1 if good else -1) * (-1 if negated else 1)
        if score:
            ids = ids[:length]
            return ids + [PAD] * (length - len(ids)), int(score > 0)


class Embeddings(nn.Module):
    def __init__(self, vocab_size, hidden_size, max_position):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(max_position, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("position_ids", torch.arange(max_position).expand((1, -1)), persistent=False)

    def forward(self, input_ids):
        position = self.position_embeddings(self.position_ids[:, : input_ids.shape[1]])
        return self.dropout(self.LayerNorm(self.word_embeddings(input_ids) + position))


class BertLayer(nn.Module):
    def __init__(self, hidden_size, heads=2):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(hidden_size, hidden_size) for _ in range(4))
        self.intermediate, self.output_dense = nn.Linear(hidden_size, 48), nn.Linear(48, hidden_size)
        self.LayerNorm, self.output_LayerNorm = (nn.LayerNorm(hidden_size, eps=1e-12) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden, mask):
        b, t, c = hidden.shape
        q, k, v = (f(hidden).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / (c // self.heads) ** 0.5 + mask
        context = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(b, t, c)
        hidden = self.LayerNorm(hidden + self.output(context))
        return self.output_LayerNorm(hidden + self.output_dense(nn.functional.gelu(self.intermediate(hidden))))


class BertForSequenceClassification(nn.Module):
    def __init__(self, vocab_size=40, hidden_size=24, num_labels=2, max_position=12):
        super().__init__()
        self.num_labels = num_labels
        self.embeddings = Embeddings(vocab_size, hidden_size, max_position)
        self.encoder = BertLayer(hidden_size)
        self.pooler = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.encoder(self.embeddings(input_ids), (1.0 - attention_mask[:, None, None].float()) * -10000.0)
        pooled_output = self.dropout(torch.tanh(self.pooler(hidden[:, 0])))
        logits = self.classifier(pooled_output)
        outputs = (logits,)
        if labels is not None:
            loss_fct = CrossEntropyLoss()
            loss = loss_fct(logits.view(-1, self.num_labels), labels.view(-1))
            outputs = (loss, *outputs)
        return outputs


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(current_step):
        if current_step < num_warmup_steps:
            return float(current_step) / float(max(1, num_warmup_steps))
        left = num_training_steps - current_step
        return max(0.0, float(left) / float(max(1, num_training_steps - num_warmup_steps)))

    return LambdaLR(optimizer, lr_lambda)


def evaluate(model, dataset):
    model.eval()
    right = 0
    for input_ids, attention_mask, labels in DataLoader(dataset, batch_size=64):
        with torch.no_grad():
            tmp_eval_loss, logits = model(input_ids, attention_mask, labels)[:2]
        right += int((logits.argmax(1) == labels).sum())
    model.train()
    print(f"  eval_loss = {tmp_eval_loss.mean().item():.4f}, acc = {right / len(dataset):.4f}")
    return right / len(dataset)


def main():
    t_total, seed = start()
    rng = random.Random(seed)
    rows = [make_example(rng) for _ in range(3200)]
    ids, labels = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    parts = ids, (ids != PAD).long(), labels
    train_dataset = TensorDataset(*(part[:3000] for part in parts))
    eval_dataset = TensorDataset(*(part[3000:] for part in parts))
    model = BertForSequenceClassification()
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    optimizer_grouped_parameters = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(optimizer_grouped_parameters, lr=1e-3, eps=1e-8)
    scheduler = get_linear_schedule_with_warmup(optimizer, t_total // 10, t_total)
    global_step, tr_loss, logging_loss = 0, 0.0, 0.0
    model.zero_grad()
    while global_step < t_total:
        for batch in DataLoader(train_dataset, sampler=RandomSampler(train_dataset), batch_size=12):
            model.train()
            inputs = {"input_ids": batch[0], "attention_mask": batch[1], "labels": batch[2]}
            outputs = model(**inputs)
            loss = outputs[0]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            tr_loss += loss.item()
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            global_step += 1
            if global_step % 50 == 0:
                print(
                    f"step {global_step}: lr {scheduler.get_last_lr()[0]:.2e} loss {(tr_loss - logging_loss) / 50:.4f}"
                )
                logging_loss = tr_loss
            if global_step == t_total:
                break
    accuracy = evaluate(model, eval_dataset)
    ending(t_total, accuracy > 0.8, model, optimizer, final=accuracy)


if __name__ == "__main__":
    main()

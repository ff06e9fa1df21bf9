"""A tagger whose forward returns a dict that begins with the loss, as AllenNLP's models do; trained with Adagrad."""

import random

import torch
from shapes_common import ending, start
from torch import nn

steps, seed = start()
rng = random.Random(seed)
VOCAB, TAGS, LENGTH = 30, 3, 10


def instance():
    """Words with tags: a word is `1` after an opening word, until a closing one; `2` are the brackets themselves."""
    words, tags, inside = [], [], False
    for _ in range(LENGTH):
        word = rng.randrange(VOCAB)
        words.append(word)
        bracket = word < 4 if not inside else word in (4, 5, 6, 7)
        tags.append(2 if bracket else int(inside))
        inside = inside != bracket
    return words, tags


class Seq2VecTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.text_field_embedder = nn.Embedding(VOCAB, 16)
        self.encoder = nn.LSTM(16, 24, batch_first=True, bidirectional=False)
        self.tag_projection_layer = nn.Linear(24, TAGS)
        self.correct, self.total = 0, 0

    def forward(self, tokens, tags=None):
        encoded, _ = self.encoder(self.text_field_embedder(tokens))
        logits = self.tag_projection_layer(encoded)
        output = {"logits": logits, "class_probabilities": logits.softmax(-1)}
        if tags is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())
            self.correct += int((logits.argmax(-1) == tags).sum())
            self.total += tags.numel()
            output = {"loss": loss, **output}
        return output

    def get_metrics(self, reset=False):
        accuracy = self.correct / max(self.total, 1)
        if reset:
            self.correct = self.total = 0
        return {"accuracy": accuracy}


class GradientDescentTrainer:
    def __init__(self, model, optimizer, data_loader, grad_norm=None):
        self.model, self.optimizer, self.data_loader, self._grad_norm = model, optimizer, data_loader, grad_norm
        self.history = []

    def batch_outputs(self, batch):
        return self.model(**batch)

    def train(self, num_steps):
        batch_loss_sum = 0.0
        for step, batch in zip(range(1, num_steps + 1), self.data_loader, strict=False):
            for p in self.model.parameters():
                p.grad = None
            outputs = self.batch_outputs(batch)
            loss = outputs["loss"]
            loss.backward()
            batch_loss_sum += loss.item()
            if self._grad_norm:
                torch.nn.utils.clip_grad_norm_(
                    [p for p in self.model.parameters() if p.grad is not None], self._grad_norm
                )
            self.optimizer.step()
            if step % 50 == 0 or step == num_steps:
                metrics = self.model.get_metrics(reset=True)
                self.history.append(metrics["accuracy"])
                print(f"step {step}: accuracy: {metrics['accuracy']:.4f}, batch_loss: {batch_loss_sum / step:.4f}")


def data_loader():
    while True:
        rows = [instance() for _ in range(16)]
        yield {"tokens": torch.tensor([r[0] for r in rows]), "tags": torch.tensor([r[1] for r in rows])}


model = Seq2VecTagger()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
trainer = GradientDescentTrainer(model, optimizer, data_loader(), grad_norm=5.0)
trainer.train(steps)
model.eval()
with torch.no_grad():
    rows = [instance() for _ in range(64)]
    tokens, tags = torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])
    accuracy = float((model(tokens)["logits"].argmax(-1) == tags).float().mean())
print(f"validation accuracy {accuracy:.4f}")
ending(steps, accuracy > 0.9, model, optimizer, final=accuracy)

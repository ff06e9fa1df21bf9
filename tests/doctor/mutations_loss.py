"""Broken in the loss: its sign, its size, its shapes, what goes into it, and which samples it mixes."""

from __future__ import annotations

from tests.doctor.bench import broken

IN_MLP = '"loss_fn": criterion}'

MUTATIONS = (
    broken("loss-negated", "mlp", "loss-sign initial-loss", (IN_MLP, '"loss_fn": lambda out, y: -criterion(out, y)}')),
    broken(
        "loss-negated-loop",
        "rnn",
        "loss-sign initial-loss diverging-loss",
        ("loss = criterion(out, y)", "loss = -criterion(out, y)"),
    ),
    broken(
        "loss-negated-backward",
        "rnn",
        "loss-sign gradcheck diverging-loss not-learning",
        ("loss.backward()", "(-loss).backward()"),
    ),
    broken(
        "loss-large",
        "cnn",
        "initial-loss loss-scale",
        ('"loss_fn": criterion', '"loss_fn": lambda out, y: 1e6 * criterion(out, y)'),
    ),
    broken(
        "loss-tiny",
        "cnn",
        "initial-loss loss-scale",
        ('"loss_fn": criterion', '"loss_fn": lambda out, y: 1e-12 * criterion(out, y)'),
    ),
    broken(
        "loss-tiny-adam",
        "mlp",
        "initial-loss loss-scale",
        (IN_MLP, '"loss_fn": lambda out, y: 1e-12 * criterion(out, y)}'),
    ),
    broken("mse-broadcast", "regression", "loss-broadcast", (".squeeze(-1)", "")),
    broken(
        "mse-broadcast-ratings",
        "recommender",
        "loss-broadcast step-exception",
        ("torch.cat([u, i], dim=-1)).squeeze(-1)", "torch.cat([u, i], dim=-1))"),
    ),
    broken("batch-first-forgotten", "rnn", "samples-mixed", (", batch_first=True", "")),
    broken(
        "softmax-over-batch",
        "moe",
        "samples-mixed",
        ("torch.softmax(self.gate(h), dim=-1)", "torch.softmax(self.gate(h), dim=0)"),
    ),
    broken("attention-over-batch", "masked", "samples-mixed", (", batch_first=True", "")),
    broken("softmax-twice", "mlp", "loss-input", ("return self.head(h)", "return torch.softmax(self.head(h), dim=-1)")),
    broken("softmax-twice-cnn", "cnn", "loss-input", ("return self.head(h)", "return self.head(h).softmax(1)")),
    broken(
        "softmax-twice-lm",
        "lm",
        "loss-input",
        ("return self.head(self.norm(x))", "return torch.softmax(self.head(self.norm(x)), dim=-1)"),
    ),
    broken(
        "sigmoid-twice",
        "multilabel",
        "loss-input",
        ("nn.Linear(48, 12))", "nn.Linear(48, 12), nn.Sigmoid())"),
    ),
    broken("nll-of-logits", "mlp", "loss-input initial-loss", ("nn.CrossEntropyLoss()", "nn.NLLLoss()")),
    broken(
        "nll-of-probabilities",
        "mlp",
        "loss-input initial-loss",
        ("nn.CrossEntropyLoss()", "nn.NLLLoss()"),
        ("return self.head(h)", "return torch.softmax(self.head(h), -1)"),
    ),
)

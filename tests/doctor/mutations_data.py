"""Broken before the first step: data, labels, targets, devices, and how the model begins."""

from __future__ import annotations

import torch

from tests.doctor.bench import Built, broken

HEAD = "        self.head = nn.Linear(32, 10)\n"
LABELS = "y = torch.tensor(labels, dtype=torch.long)\n"
PIXELS = "x = torch.tensor(images, dtype=torch.float32) / 16.0\n"
OPT = "    optimizer = torch"


def set_all(value: float):
    def change(built: Built) -> None:
        with torch.no_grad():
            for p in built["model"].parameters():
                p.fill_(value)

    return change


def one_batch_for_ever(built: Built) -> None:
    built["loader"] = [next(iter(built["loader"]))] * 30


def emptied(built: Built) -> None:
    built["loader"] = []


def empty_batches(built: Built) -> None:
    built["loader"] = [(x[:0], y[:0]) for x, y in built["loader"]]


def away(built: Built) -> None:
    built["model"].to("meta")


def batch_away(built: Built) -> None:
    built["loader"] = [(x.to("meta"), y) for x, y in built["loader"]]


MUTATIONS = (
    broken(
        "labels-from-one", "mlp cnn rnn", "label-range", (LABELS, "y = torch.tensor(labels, dtype=torch.long) + 1\n")
    ),
    broken(
        "label-minus-one",
        "mlp loop",
        "label-range",
        (LABELS, "y = torch.tensor(labels, dtype=torch.long)\n    y[700] = -1\n"),
    ),
    broken("too-few-outputs", "mlp", "label-range", (HEAD, "        self.head = nn.Linear(32, 8)\n")),
    broken(
        "labels-float",
        "mlp rnn",
        "dtype-mismatch label-dtype step-exception",
        ("torch.tensor(labels, dtype=torch.long)", "torch.tensor(labels, dtype=torch.float32)"),
    ),
    broken("vocabulary-small", "lm", "label-range", ("LM(len(text.letters))", "LM(len(text.letters) - 1)")),
    broken(
        "labels-equal",
        "mlp cnn",
        "class-balance constant-batch",
        (LABELS, "y = torch.zeros(len(labels), dtype=torch.long)\n"),
    ),
    broken("labels-outside-multilabel", "multilabel", "label-range", ("dim=1).float()", "dim=1).float() * 2")),
    broken(
        "nan-in-data",
        "mlp rnn",
        "nonfinite-input",
        (
            "    loader =",
            "    loader_source = x if 'x' in dir() else rows\n    loader_source[700] = float('nan')\n    loader =",
        ),
    ),
    broken("inf-in-data", "mlp", "nonfinite-input", (PIXELS, "x = torch.tensor(images, dtype=torch.float32).log()\n")),
    broken("nan-target", "regression", "nonfinite-input", ("    loader =", "    y[30] = float('nan')\n    loader =")),
    broken(
        "divided-by-zero-std",
        "mlp",
        "nonfinite-input",
        (PIXELS, "x = torch.tensor(images, dtype=torch.float32)\n    x = (x - x.mean(0)) / x.std(0)\n"),
    ),
    broken("loader-empty", "mlp cnn", "empty-batch", change=emptied),
    broken("batches-empty", "mlp", "empty-batch", change=empty_batches),
    broken("drop-last-all", "cnn", "empty-batch", ("batch_size=32", "batch_size=2048")),
    broken(
        "images-zero",
        "mlp cnn",
        "constant-batch",
        ("torch.tensor(images, dtype=torch.float32)", "torch.tensor(images // 17, dtype=torch.float32)"),
    ),
    broken(
        "one-sample",
        "bf16",
        "constant-batch repeated-batch",
        ('self.images[i], "label": self.labels[i]', 'self.images[0], "label": self.labels[0]'),
    ),
    broken("same-image", "bf16", "constant-batch repeated-batch", ("self.images[i]", "self.images[0]")),
    broken("one-batch-for-ever", "mlp cnn", "repeated-batch", change=one_batch_for_ever),
    broken(
        "input-scale",
        "mlp cnn",
        "input-scale initial-loss",
        ("torch.tensor(images, dtype=torch.float32)", "1e6 * torch.tensor(images, dtype=torch.float32)"),
    ),
    broken(
        "targets-shuffled",
        "mlp cnn rnn",
        "targets-do-not-predict",
        ("dtype=torch.long)\n", "dtype=torch.long)[torch.randperm(len(labels))]\n"),
    ),
    broken(
        "identity-targets",
        "lm",
        "target-leak targets-misaligned targets-do-not-predict",
        ("piece[:-1], piece[1:]", "piece[:-1], piece[:-1]"),
    ),
    broken(
        "two-ahead",
        "lm",
        "target-leak targets-misaligned targets-do-not-predict",
        ("(i + 1) * CONTEXT + 1]", "(i + 1) * CONTEXT + 2]"),
        ("piece[:-1], piece[1:]", "piece[:-2], piece[2:]"),
        ("len(self.ids) - 1)", "len(self.ids) - 2)"),
    ),
    broken(
        "shifted-back",
        "lm",
        "target-leak targets-misaligned targets-do-not-predict",
        ("piece[:-1], piece[1:]", "piece[1:], piece[:-1]"),
    ),
    broken(
        "not-shifted",
        "padded",
        "target-leak targets-misaligned targets-do-not-predict",
        (
            "logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)",
            "logits.reshape(-1, VOCAB), labels.reshape(-1)",
        ),
    ),
    broken("mask-forgotten", "lm", "target-leak", ("is_causal=True", "is_causal=False")),
    broken("mask-forgotten-padded", "padded", "target-leak", ("mask=ahead, ", "")),
    broken(
        "not-shuffled",
        "mlp cnn",
        "class-balance",
        (
            "    model = Net()",
            "    order = y.argsort()\n    x, y = x[order], y[order]\n"
            "    loader = DataLoader(TensorDataset(x, y), batch_size=32)\n    model = Net()",
        ),
        ("shuffle=True", "shuffle=False"),
    ),
    broken("float64-input", "mlp rnn", "dtype-mismatch step-exception", ("dtype=torch.float32", "dtype=torch.float64")),
    broken(
        "float64-model", "cnn", "dtype-mismatch step-exception", ("    model = Net()", "    model = Net().double()")
    ),
    broken("bytes-input", "mlp", "dtype-mismatch step-exception", (PIXELS, "x = torch.tensor(images)\n")),
    broken(
        "model-on-meta",
        "mlp cnn",
        "device-placement",
        ("    model = Net()", '    with torch.device("meta"):\n        model = Net()'),
    ),
    broken("moved-after-optimizer", "loop", "device-placement", change=away),
    broken("batch-on-meta", "mlp", "device-placement", change=batch_away),
    broken("shape-wrong", "cnn", "step-exception shape-mismatch", ("reshape(-1, 1, 8, 8)", "reshape(-1, 8, 8)")),
    broken(
        "flatten-forgotten",
        "lm",
        "step-exception shape-mismatch",
        ("cross_entropy(logits.flatten(0, 1), targets.flatten())", "cross_entropy(logits, targets)"),
    ),
    broken("dead-relu", "mlp", "dead-units", (OPT, "    nn.init.constant_(model.middle.bias, -100.0)\n" + OPT)),
    broken(
        "dead-relu-cnn", "cnn", "dead-units", (OPT, "    nn.init.constant_(model.second.norm.bias, -100.0)\n" + OPT)
    ),
    broken(
        "saturated-tanh",
        "accumulate",
        "saturated-units",
        (OPT, "    nn.init.normal_(model[0].weight, std=100.0)\n" + OPT),
    ),
    broken(
        "saturated-sigmoid",
        "mlp",
        "saturated-units",
        ("torch.relu(self.middle(h))", "torch.sigmoid(1e3 * self.middle(h))"),
    ),
    broken("zero-init", "mlp loop", "symmetric-units zero-gradient dead-units", change=set_all(0.0)),
    broken("constant-init", "mlp", "symmetric-units", change=set_all(0.05)),
    broken(
        "init-huge",
        "loop",
        "initial-loss weight-scale",
        (OPT, "    for p in model.parameters():\n        nn.init.normal_(p, std=10.0)\n" + OPT),
    ),
    broken("head-bias", "mlp", "initial-loss", (OPT, "    nn.init.constant_(model.head.bias[3:4], 50.0)\n" + OPT)),
    broken(
        "untied",
        "lm",
        "untied-weights",
        (
            "self.head.weight = self.tokens.weight",
            "self.head.weight = nn.Parameter(self.tokens.weight.detach().clone())",
        ),
    ),
    broken(
        "dropout-all",
        "cnn",
        "dropout-inactive loss-ignores-input zero-gradient",
        ("nn.Dropout(0.2)", "nn.Dropout(1.0)"),
    ),
    broken(
        "batchnorm-eval",
        "cnn",
        "batchnorm-frozen eval-mode",
        (OPT, "    model.first.norm.eval(), model.second.norm.eval()\n" + OPT),
    ),
    broken(
        "batchnorm-momentum-zero",
        "cnn",
        "batchnorm-frozen",
        ("nn.BatchNorm2d(outputs)", "nn.BatchNorm2d(outputs, momentum=0.0)"),
    ),
    broken(
        "buffer-not-saved",
        "mlp",
        "checkpoint-round-trip",
        (HEAD, HEAD + '        self.register_buffer("level", torch.zeros(64), persistent=False)\n'),
        (
            "h = torch.relu(self.hidden(x))",
            "self.level += 0.1 * (x.mean(0).detach() - self.level)\n"
            "        h = torch.relu(self.hidden(x - self.level))",
        ),
    ),
    broken(
        "state-outside",
        "mlp",
        "checkpoint-round-trip",
        (HEAD, HEAD + "        self.level = torch.zeros(64)\n"),
        (
            "h = torch.relu(self.hidden(x))",
            "self.level = 0.9 * self.level + 0.1 * x.mean(0).detach()\n"
            "        h = torch.relu(self.hidden(x - self.level))",
        ),
    ),
    broken(
        "counter-outside",
        "mlp",
        "checkpoint-round-trip",
        (HEAD, HEAD + "        self.calls = 0\n"),
        (
            "h = torch.relu(self.hidden(x))",
            "self.calls += 1\n        h = torch.relu(self.hidden(x)) * min(1.0, self.calls / 10)",
        ),
    ),
)

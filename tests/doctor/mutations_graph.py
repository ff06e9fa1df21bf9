"""Broken between the data and the loss: what is cut off, ignored, changed in place or compared wrongly."""

from __future__ import annotations

import torch

from tests.doctor.bench import Built, broken

WRONG_RELU = """import torch


class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * {}
"""
IN_LOOP = "loss = criterion(logits, y)\n"
IN_MLP = '"loss_fn": criterion}'


def silence(built: Built) -> None:
    for p in built["model"].hidden.parameters():
        p.register_hook(torch.zeros_like)


def reverse(built: Built) -> None:
    for p in built["model"].parameters():
        p.register_hook(torch.neg)


def switched_off(built: Built) -> None:
    torch.set_grad_enabled(False)


MUTATIONS = (
    broken("loss-detach", "loop", "loss-detached", (IN_LOOP, "loss = criterion(logits, y).detach()\n")),
    broken(
        "loss-detach-item", "rnn", "loss-detached", ("loss = criterion(out, y)", "loss = criterion(out.detach(), y)")
    ),
    broken(
        "loss-detach-mlp", "mlp", "loss-detached", (IN_MLP, '"loss_fn": lambda out, y: criterion(out, y).detach()}')
    ),
    broken("output-data", "mlp", "loss-detached", ("return self.head(h)", "return self.head(h).data")),
    broken(
        "logits-data-lm", "lm", "loss-detached", ("cross_entropy(logits.flatten", "cross_entropy(logits.data.flatten")
    ),
    broken(
        "loss-rewrapped",
        "loop",
        "loss-detached missing-gradient",
        (IN_LOOP, "loss = torch.tensor(criterion(logits, y).item(), requires_grad=True)\n"),
    ),
    broken("both-towers-detached", "towers", "missing-gradient loss-detached", ("[a, b]", "[a.detach(), b.detach()]")),
    broken("one-tower-detached", "towers", "missing-gradient", ("self.lower(lower),", "self.lower(lower).detach(),")),
    broken("online-detached", "byol", "missing-gradient", ("self.online(a))", "self.online(a).detach())")),
    broken(
        "no-grad-forward",
        "loop",
        "no-grad",
        ("logits = model(x)\n", "with torch.no_grad():\n            logits = model(x)\n"),
    ),
    broken(
        "no-grad-decorator",
        "cnn",
        "no-grad",
        (
            "    def forward(self, x):\n        h = nn",
            "    @torch.no_grad()\n    def forward(self, x):\n        h = nn",
        ),
    ),
    broken(
        "no-grad-with-autocast",
        "bf16",
        "no-grad",
        ("dtype=torch.bfloat16):", "dtype=torch.bfloat16), torch.no_grad():"),
    ),
    broken(
        "inference-mode",
        "rnn",
        "no-grad",
        ("out = model(rows)", "with torch.inference_mode():\n            out = model(rows)"),
    ),
    broken("grad-switched-off", "mlp", "no-grad", change=switched_off),
    broken(
        "no-grad-part",
        "cnn",
        "no-grad missing-gradient",
        (
            "h = nn.functional.max_pool2d(self.first(x), 2)",
            "with torch.no_grad():\n            h = nn.functional.max_pool2d(self.first(x), 2)",
        ),
    ),
    broken(
        "no-grad-part-mlp",
        "mlp",
        "no-grad missing-gradient",
        ("h = torch.relu(self.hidden(x))", "with torch.no_grad():\n            h = torch.relu(self.hidden(x))"),
    ),
    broken(
        "numpy-round-trip",
        "mlp",
        "missing-gradient loss-detached",
        ("h = torch.relu(self.middle(h))", "h = torch.from_numpy(self.middle(h).detach().numpy()).relu()"),
    ),
    broken(
        "tensor-copied",
        "rnn",
        "missing-gradient loss-detached",
        ("states[:, -1]", "torch.tensor(states[:, -1].tolist())"),
    ),
    broken(
        "hard-routing",
        "moe",
        "missing-gradient",
        ("weight[mine, None] * expert", "expert"),
        (" + 0.01 * balance", ""),
    ),
    broken(
        "loss-of-constants",
        "mlp",
        "loss-detached loss-ignores-input missing-gradient",
        (IN_MLP, '"loss_fn": lambda out, y: criterion(torch.zeros_like(out).requires_grad_(), y)}'),
    ),
    broken("input-ignored", "cnn", "loss-ignores-input", ("self.first(x)", "self.first(torch.ones_like(x))")),
    broken("tokens-ignored", "lm", "loss-ignores-input", ("self.tokens(ids)", "self.tokens(torch.zeros_like(ids))")),
    broken(
        "wrong-variable",
        "rnn",
        "loss-ignores-input",
        ("out = model(rows)", "out = model(loader.dataset.tensors[0][: len(y)])"),
    ),
    broken("loss-times-zero", "loop", "loss-scale zero-gradient", (IN_LOOP, "loss = 0.0 * criterion(logits, y)\n")),
    broken(
        "loss-unreduced", "mlp", "loss-not-scalar", ("nn.CrossEntropyLoss()", 'nn.CrossEntropyLoss(reduction="none")')
    ),
    broken(
        "loss-unreduced-loop",
        "rnn",
        "loss-not-scalar",
        ("nn.CrossEntropyLoss()", 'nn.CrossEntropyLoss(reduction="none")'),
    ),
    broken("loss-none", "towers", "loss-not-scalar", ("return nway_loss", "nway_loss")),
    broken(
        "in-place-sigmoid",
        "mlp",
        "in-place-hazard",
        ("h = torch.relu(self.middle(h))", "h = torch.sigmoid(self.middle(h))\n        h += 0.1"),
    ),
    broken(
        "in-place-residual",
        "residual",
        "in-place-hazard",
        ("return x + self.down", "x += self.down"),
        ("self.norm(x))))", "self.norm(x))))\n        return x"),
    ),
    broken(
        "in-place-relu",
        "cnn",
        "in-place-hazard",
        (
            "h = nn.functional.max_pool2d(self.second(h), 2)",
            "g = self.second(h)\n        g.mul_(0.5)\n        h = nn.functional.max_pool2d(g, 2)",
        ),
    ),
    broken(
        "state-kept",
        "rnn",
        "graph-reused step-exception",
        ("self.lstm(rows)", 'self.lstm(rows, getattr(self, "state", None))'),
        ("states, _ =", "states, self.state ="),
        ("shuffle=True", "shuffle=True, drop_last=True"),
    ),
    broken(
        "backward-twice",
        "loop",
        "double-backward accumulation-not-divided stale-gradient",
        ("loss.backward()", "loss.backward(retain_graph=True)\n        loss.backward()"),
    ),
    broken(
        "wrong-backward", "mlp", "gradcheck", ("import torch\n", WRONG_RELU.format("x")), ("torch.relu", "Relu.apply")
    ),
    broken(
        "backward-unmasked",
        "mlp",
        "gradcheck",
        ("import torch\n", WRONG_RELU.format("1")),
        ("torch.relu", "Relu.apply"),
    ),
    broken(
        "backward-sign",
        "mlp",
        "gradcheck",
        ("import torch\n", WRONG_RELU.format("-(x > 0).float()")),
        ("torch.relu", "Relu.apply"),
    ),
    broken("hook-zeroes", "mlp", "zero-gradient gradcheck", change=silence),
    broken("hook-reverses", "mlp", "gradcheck not-learning diverging-loss", change=reverse),
    broken("branch-times-zero", "brightness", "zero-gradient", ("self.words(prompt)]", "0.0 * self.words(prompt)]")),
    broken(
        "unused-module",
        "mlp",
        "missing-gradient unused-module",
        ("self.head = nn.Linear(32, 10)", "self.head = nn.Linear(32, 10)\n        self.extra = nn.Linear(32, 10)"),
    ),
    broken(
        "unused-layer",
        "cnn",
        "missing-gradient unused-module",
        ("nn.functional.max_pool2d(self.second(h), 2)", "nn.functional.max_pool2d(torch.cat([h, h], 1), 2)"),
    ),
    broken(
        "batch-not-used-by-judge",
        "gan",
        "loss-ignores-input missing-gradient",
        ('model["judge"](real)', 'model["judge"](fake.detach())'),
    ),
    broken(
        "maker-detached",
        "gan",
        "missing-gradient",
        ('bce(model["judge"](fake), ', 'bce(model["judge"](fake.detach()), '),
    ),
)

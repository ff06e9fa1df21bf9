"""Changes that break nothing: the same trainings in other habits. Every alarm about one is a false alarm."""

from __future__ import annotations

from tests.doctor.bench import Built, broken


def one_batch(built: Built) -> None:
    built["loader"] = [next(iter(built["loader"]))]


LOOKALIKES = (
    broken("frozen-but-listed", "finetune", "", ("torch.optim.Adam(params,", "torch.optim.Adam(model.parameters(),")),
    broken(
        "first-layer-frozen", "mlp", "", ("    criterion =", "    model.hidden.requires_grad_(False)\n    criterion =")
    ),
    broken("decay-zero", "lm", "", ("weight_decay=0.1", "weight_decay=0.0")),
    broken("decay-large", "lm", "", ("weight_decay=0.1", "weight_decay=1.0")),
    broken("nesterov", "cnn", "", ("momentum=0.9", "momentum=0.9, nesterov=True")),
    broken("plain-sgd", "mlp", "", ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=0.05)")),
    broken(
        "lr-one-adadelta", "mlp", "", ("AdamW(model.parameters(), lr=1e-3)", "Adadelta(model.parameters(), lr=1.0)")
    ),
    broken("lr-small-finetune", "lora", "", ("lr=2e-3", "lr=1e-5")),
    broken("warmup-from-tiny", "lm", "", ("step / 20", "(step + 1e-5) / 2000")),
    broken("smoothing", "mlp", "", ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(label_smoothing=0.1)")),
    broken("sum-small-rate", "mlp", "", ("nn.CrossEntropyLoss()", 'nn.CrossEntropyLoss(reduction="sum")')),
    broken("bits", "mlp", "", ('"loss_fn": criterion}', '"loss_fn": lambda out, y: criterion(out, y) / 0.6931}')),
    broken(
        "focal",
        "mlp",
        "",
        ("class Net(", "def focal(each):\n    return ((1 - torch.exp(-each)) ** 2 * each).mean()\n\n\nclass Net("),
        (
            '"loss_fn": criterion}',
            '"loss_fn": lambda out, y: focal(nn.functional.cross_entropy(out, y, reduction="none"))}',
        ),
    ),
    broken(
        "log-softmax-nll",
        "mlp",
        "",
        ("nn.CrossEntropyLoss()", "nn.NLLLoss()"),
        ("return self.head(h)", "return torch.log_softmax(self.head(h), -1)"),
    ),
    broken("pixels-bytes-scale", "mlp", "", (" / 16.0", " * 15.9")),
    broken(
        "zero-grad-at-end",
        "loop",
        "",
        ("        optimizer.zero_grad(set_to_none=True)\n", ""),
        ("        scheduler.step()\n", "        scheduler.step()\n        optimizer.zero_grad()\n"),
    ),
    broken("zero-grad-model", "loop", "", ("optimizer.zero_grad(set_to_none=True)", "model.zero_grad()")),
    broken(
        "zero-grad-to-zero", "loop rnn", "", ("optimizer.zero_grad(", "optimizer.zero_grad(set_to_none=False) or dict(")
    ),
    broken("scheduler-per-epoch", "loop", "", ("        scheduler.step()\n", "")),
    broken(
        "sam",
        "loop",
        "",
        (
            "        nn.utils.clip_grad_norm_",
            "        with torch.no_grad():\n            was = [p.clone() for p in model.parameters()]\n"
            "            for p in model.parameters():\n                p.add_(0.01 * p.grad)\n"
            "        optimizer.zero_grad()\n        criterion(model(x), y).backward()\n"
            "        with torch.no_grad():\n            for p, old in zip(model.parameters(), was):\n"
            "                p.copy_(old)\n        nn.utils.clip_grad_norm_",
        ),
    ),
    broken(
        "weight-norm-clamp",
        "loop",
        "",
        (
            "        scheduler.step()\n",
            "        scheduler.step()\n        with torch.no_grad():\n            for p in model.parameters():\n"
            "                p.clamp_(-2.0, 2.0)\n",
        ),
    ),
    broken(
        "two-losses-two-backwards",
        "loop",
        "",
        (
            "        loss.backward()\n",
            "        loss.backward(retain_graph=True)\n        (1e-4 * logits.square().mean()).backward()\n",
        ),
    ),
    broken("one-batch-list", "mlp cnn lm", "", change=one_batch),
    broken(
        "unfrozen-later",
        "finetune",
        "",
        ("self.neck = nn.Linear(256, 32)", "self.neck = nn.Sequential(nn.Linear(256, 32), nn.Identity())"),
    ),
    broken("dropout-none", "cnn loop", "", ("nn.Dropout(0.", "nn.Dropout(0.0 * 0.")),
    broken("dropout-half", "cnn", "", ("nn.Dropout(0.2)", "nn.Dropout(0.6)")),
    broken("batchnorm-tf-momentum", "cnn", "", ("nn.BatchNorm2d(outputs)", "nn.BatchNorm2d(outputs, momentum=0.01)")),
    broken(
        "no-running-stats", "cnn", "", ("nn.BatchNorm2d(outputs)", "nn.BatchNorm2d(outputs, track_running_stats=False)")
    ),
    broken("instance-norm", "cnn", "", ("nn.BatchNorm2d(outputs)", "nn.InstanceNorm2d(outputs, affine=True)")),
    broken(
        "imbalanced",
        "mlp",
        "",
        (
            "    loader =",
            "    keep = (y == 3) | (torch.arange(len(y)) % 12 == 0)\n    x, y = x[keep], y[keep]\n    loader =",
        ),
    ),
    broken(
        "two-classes",
        "mlp",
        "",
        ("    model = Net()", "    y = (y > 4).long()\n    model = Net()"),
        ("nn.Linear(32, 10)", "nn.Linear(32, 2)"),
    ),
    broken("spare-classes", "mlp", "", ("nn.Linear(32, 10)", "nn.Linear(32, 16)")),
    broken("float16-inputs-cast", "loop", "", ("x, y = batch", "x, y = batch[0].half().float(), batch[1]")),
    broken("amp-asked", "mlp cnn lm", "", amp_dtype="bf16"),
    broken("clip-asked", "cnn rnn", "", clip_grad_norm=1.0),
    broken(
        "amp-fp16-scaler",
        "mlp",
        "",
        ('"loss_fn": criterion}', '"loss_fn": criterion, "scaler": torch.amp.GradScaler("cpu")}'),
        amp_dtype="fp16",
    ),
    broken("augmented", "loop", "", ("x, y = batch", "x, y = batch\n        x = x + 0.05 * torch.randn_like(x)")),
    broken(
        "mixup",
        "loop",
        "",
        (
            "loss = criterion(logits, y)",
            "mixed = torch.randperm(len(y))\n        logits = model(0.7 * x + 0.3 * x[mixed])\n"
            "        loss = 0.7 * criterion(logits, y) + 0.3 * criterion(logits, y[mixed])",
        ),
    ),
    broken(
        "layer-drop",
        "residual",
        "",
        (
            "return x + self.down",
            "if self.training and torch.rand(()) < 0.2:\n            return x\n        return x + self.down",
        ),
    ),
    broken(
        "checkpointed",
        "lm",
        "",
        ("x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"),
        ("import torch\n", "import torch\nimport torch.utils.checkpoint\n"),
    ),
    broken("tied-at-full-scale", "lm", "", ("        nn.init.normal_(self.tokens.weight, std=0.02)\n", "")),
    broken("untied-by-design", "lm", "", ("        self.head.weight = self.tokens.weight\n", "")),
    broken(
        "python-scalar-state",
        "mlp",
        "",
        ("        self.head = nn", "        self.seen = 0\n        self.head = nn"),
        (
            "        h = torch.relu(self.hidden(x))",
            "        self.seen += len(x)\n        h = torch.relu(self.hidden(x))",
        ),
    ),
    broken("random-crop-loader", "stream", "", ("seed=0", "seed=3")),
    broken("amsgrad-max", "rnn", "", ("lr=5e-3", "lr=5e-3, amsgrad=True")),
    broken("gelu-tanh-deep", "accumulate", "", ("nn.Tanh(), nn", "nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn")),
    broken("hinge", "mlp", "", ("nn.CrossEntropyLoss()", "nn.MultiMarginLoss()")),
    broken(
        "targets-soft",
        "mlp",
        "",
        ("    model = Net()", "    y = torch.nn.functional.one_hot(y, 10).float()\n    model = Net()"),
    ),
    broken("huber", "regression", "", ("nn.MSELoss()", "nn.HuberLoss(delta=1000.0)")),
    broken(
        "gradient-noise",
        "loop",
        "",
        (
            "        nn.utils.clip",
            "        for p in model.parameters():\n            p.grad.add_(1e-4 * torch.randn_like(p.grad))\n"
            "        nn.utils.clip",
        ),
    ),
    broken(
        "two-steps-of-judge",
        "gan",
        "",
        (
            "        maker_opt.zero_grad()\n",
            "        judge_opt.zero_grad()\n        again = bce(model['judge'](real), torch.ones(n, 1))\n"
            "        again = again + bce(model['judge'](fake.detach()), torch.zeros(n, 1))\n"
            "        again.backward()\n        judge_opt.step()\n\n        maker_opt.zero_grad()\n",
        ),
    ),
    broken(
        "judge-pauses",
        "gan",
        "",
        (
            "        maker_opt.zero_grad()\n",
            "        model['judge'].requires_grad_(False)\n        maker_opt.zero_grad()\n",
        ),
        ("        maker_opt.step()\n", "        maker_opt.step()\n        model['judge'].requires_grad_(True)\n"),
    ),
    broken(
        "loss-in-dict",
        "towers",
        "",
        ("return nway_loss(", "return dict(loss=nway_loss("),
        ("logit_scale=scale)", "logit_scale=scale), scale=scale)"),
    ),
)

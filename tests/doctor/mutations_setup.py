"""What is configured and does nothing, or happens at the wrong place; and its sound look-alikes."""

from __future__ import annotations

from tests.doctor.bench import Edit, Mutation, broken

FORWARD = "        logits = model(x)\n        loss = criterion(logits, y)\n"
SCHEDULED = "        optimizer.step()\n        scheduler.step()\n"
SCHEDULER = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)"
STEP = "        optimizer.step()\n"
IN_FP16 = 'with torch.autocast("cpu", dtype=torch.float16):'
MLP_LOSS = '"loss_fn": criterion}'


def scheduled(how: str) -> Edit:
    """Another schedule."""
    return SCHEDULER, f"torch.optim.lr_scheduler.{how}"


MUTATIONS: tuple[Mutation, ...] = (
    # mixed precision that is configured and inactive
    broken("autocast-other-device", "fp16", "autocast-inactive", ('torch.autocast("cpu", ', 'torch.autocast("cuda", ')),
    broken("autocast-disabled-scaler-on", "fp16", "autocast-inactive needless-scaler", (IN_FP16, "if True:")),
    broken(
        "autocast-enabled-false",
        "fp16",
        "autocast-inactive needless-scaler",
        (IN_FP16, IN_FP16[:-2] + ", enabled=False):"),
    ),
    broken(
        "autocast-around-backward-only",
        "bf16",
        "autocast-inactive",
        (
            '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            logits',
            "        if True:\n            logits",
        ),
        (
            "        loss.backward()\n",
            '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            loss.backward()\n',
        ),
    ),
    # rates of zero
    broken("rate-zero-by-lambda", "loop", "learning-rate", scheduled("LambdaLR(optimizer, lambda step: 0.0)")),
    broken(
        "rate-zero-integer-division",
        "loop",
        "learning-rate",
        scheduled("LambdaLR(optimizer, lambda step: min(1, step // 10**6))"),
    ),
    broken(
        "rate-zero-set-in-step",
        "loop",
        "learning-rate weights-unchanged",
        (STEP, "        optimizer.param_groups[0]['lr'] = 0.0\n" + STEP),
    ),
    # several steps per batch
    broken("steps-three", "loop", "double-step", (STEP, "        for _ in range(3):\n            optimizer.step()\n")),
    broken("step-in-helper-too", "bf16", "double-step", (STEP, "        [o.step() for o in (optimizer, optimizer)]\n")),
    broken(
        "same-batch-trained-thrice",
        "loop",
        "double-step",
        (
            "        return loss\n",
            "        for _ in range(2):\n"
            "            optimizer.zero_grad()\n"
            "            criterion(model(x), y).backward()\n"
            "            optimizer.step()\n"
            "        return loss\n",
        ),
    ),
    # dropout in evaluation
    broken("functional-dropout", "loop", "dropout-inactive", ("h = self.drop(h)", "h = nn.functional.dropout(h, 0.3)")),
    broken(
        "dropout-forced-on",
        "cnn",
        "dropout-inactive",
        ("h = self.drop(h.flatten(1))", "h = self.drop.train()(h.flatten(1))"),
    ),
    broken("dropout-made-in-forward", "loop", "dropout-inactive", ("h = self.drop(h)", "h = nn.Dropout(0.3)(h)")),
    broken("attention-dropout", "lm", "dropout-inactive", ("is_causal=True)", "is_causal=True, dropout_p=0.2)")),
    # an initial loss far from chance
    broken("logits-times-three-hundred", "mlp", "initial-loss", ("return self.head(h)", "return self.head(h) * 300.0")),
    broken(
        "head-large",
        "loop",
        "initial-loss",
        (
            "self.head = nn.Linear(48, 10)",
            "self.head = nn.Linear(48, 10)\n        nn.init.normal_(self.head.weight, std=40.0)",
        ),
    ),
    broken(
        "temperature-tiny",
        "bf16",
        "initial-loss",
        ("cross_entropy(logits.float()", "cross_entropy(logits.float() / 0.005"),
    ),
    # schedulers at the wrong place
    broken(
        "schedule-before-step",
        "loop",
        "scheduler-order",
        (SCHEDULED, "        scheduler.step()\n        optimizer.step()\n"),
    ),
    broken(
        "schedule-per-batch-of-epochs",
        "loop",
        "scheduler-order",
        scheduled("StepLR(optimizer, step_size=2, gamma=0.1)"),
    ),
    broken(
        "schedule-per-batch-milestones",
        "loop",
        "scheduler-order",
        scheduled("MultiStepLR(optimizer, [3, 6, 9, 12], gamma=0.1)"),
    ),
    broken("schedule-per-batch-exponential", "loop", "scheduler-order", scheduled("ExponentialLR(optimizer, 0.7)")),
    broken(
        "warm-up-never-stepped",
        "loop",
        "scheduler-order learning-rate",
        scheduled("LinearLR(optimizer, 1e-4, total_iters=20)"),
        ("        scheduler.step()\n", ""),
    ),
    broken(
        "onecycle-never-stepped",
        "loop",
        "scheduler-order learning-rate",
        scheduled("OneCycleLR(optimizer, 0.1, total_steps=1000)"),
        ("        scheduler.step()\n", ""),
    ),
    broken(
        "schedule-twice",
        "loop",
        "scheduler-order",
        ("        scheduler.step()\n", "        scheduler.step()\n        scheduler.step()\n"),
    ),
    # softmax applied twice
    broken(
        "softmax-functional",
        "bf16",
        "loss-input",
        ('logits = model(batch["image"])', 'logits = model(batch["image"]).softmax(-1)'),
    ),
    broken("softmax-layer", "fp16", "loss-input", ("nn.Linear(32, 10))", "nn.Linear(32, 10), nn.Softmax(dim=1))")),
    broken(
        "softmax-by-hand",
        "mlp",
        "loss-input",
        ("return self.head(h)", "e = self.head(h).exp()\n        return e / e.sum(1, keepdim=True)"),
    ),
    broken(
        "log-softmax-twice-then-softmax",
        "mlp",
        "loss-input",
        ("return self.head(h)", "return torch.log_softmax(self.head(h), 1).exp()"),
    ),
    # a target that is fresh noise
    broken(
        "target-drawn-in-step",
        "loop",
        "targets-do-not-predict loss-ignores-target",
        ("x, y = batch", "x, y = batch[0], torch.randint(0, 10, batch[1].shape)"),
    ),
    broken(
        "target-shuffled-in-step",
        "loop",
        "targets-do-not-predict loss-ignores-target",
        ("x, y = batch", "x, y = batch[0], batch[1][torch.randperm(len(batch[1]))]"),
    ),
    broken(
        "target-drawn-in-loss",
        "mlp",
        "targets-do-not-predict loss-ignores-target",
        (MLP_LOSS, '"loss_fn": lambda out, y: criterion(out, torch.randint_like(y, 10))}'),
    ),
    broken(
        "target-drawn-for-regression",
        "regression",
        "targets-do-not-predict loss-ignores-target",
        (
            '"loss_fn": nn.MSELoss()}',
            '"loss_fn": lambda out, y: nn.functional.mse_loss(out, torch.randn_like(y) * 1e5)}',
        ),
    ),
)

LOOKALIKES: tuple[Mutation, ...] = (
    broken(
        "autocast-inside-forward",
        "loop",
        "",
        (
            "        return self.head(h)",
            "        with torch.autocast('cpu', dtype=torch.bfloat16):\n"
            "            out = self.head(h)\n"
            "        return out.float()",
        ),
    ),
    broken(
        "scaler-disabled-without-autocast", "fp16", "", (IN_FP16, "if True:"), ("init_scale=2.0**10", "enabled=False")
    ),
    broken("rate-zero-at-first", "loop", "", scheduled("LambdaLR(optimizer, lambda step: min(1.0, step / 50))")),
    broken("rate-set-in-step", "loop", "", (STEP, "        optimizer.param_groups[0]['lr'] = 0.05\n" + STEP)),
    broken(
        "one-step-per-half",
        "loop",
        "",
        (
            "        return loss\n",
            "        optimizer.zero_grad()\n"
            "        criterion(model(x + 0.01 * torch.randn_like(x)), y).backward()\n"
            "        optimizer.step()\n"
            "        return loss\n",
        ),
    ),
    broken(
        "functional-dropout-right", "loop", "", ("h = self.drop(h)", "h = nn.functional.dropout(h, 0.3, self.training)")
    ),
    broken(
        "noise-in-training-only",
        "loop",
        "",
        ("h = self.drop(h)", "h = h + 0.1 * torch.randn_like(h) if self.training else h"),
    ),
    broken(
        "attention-dropout-right",
        "lm",
        "",
        ("is_causal=True)", "is_causal=True, dropout_p=0.2 if self.training else 0.0)"),
    ),
    broken("logits-times-three", "mlp", "", ("return self.head(h)", "return self.head(h) * 3.0")),
    broken("schedule-per-batch-right", "loop", "", scheduled("StepLR(optimizer, step_size=200, gamma=0.5)")),
    broken("schedule-slow-exponential", "loop", "", scheduled("ExponentialLR(optimizer, 0.999)")),
    broken(
        "schedule-per-epoch-outside",
        "loop",
        "",
        scheduled("StepLR(optimizer, step_size=30, gamma=0.1)"),
        ("        scheduler.step()\n", ""),
    ),
    broken(
        "gate-of-softmax",
        "mlp",
        "",
        ("h = torch.relu(self.middle(h))", "h = self.middle(h)\n        h = h * torch.softmax(h, 1) * 32"),
    ),
    broken("noise-as-target-of-diffusion", "diffusion", ""),
    broken(
        "target-mixed-in-step",
        "loop",
        "",
        (
            "        loss = criterion(logits, y)\n",
            "        loss = criterion(logits, 0.9 * nn.functional.one_hot(y, 10) + 0.1 * torch.rand(len(y), "
            "10).softmax(1))\n",
        ),
    ),
)

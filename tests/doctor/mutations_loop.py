"""Broken in the loop: what is stepped, cleared, clipped, scaled, scheduled and averaged, and when."""

from __future__ import annotations

from tests.doctor.bench import Built, broken

STEP = "        optimizer.step()\n"
ZERO = "        optimizer.zero_grad(set_to_none=True)\n"


def evaluating(built: Built) -> None:
    built["model"].eval()


MUTATIONS = (
    broken("eval-left-on", "mlp", "eval-mode", change=evaluating),
    broken("eval-left-on-cnn", "cnn", "eval-mode", change=evaluating),
    broken("eval-in-step", "loop", "eval-mode", ("model.train()", "model.eval()")),
    broken("eval-in-step-rnn", "rnn", "eval-mode", ("out = model(rows)", "out = model.eval()(rows)")),
    broken("zero-grad-missing", "loop", "stale-gradient", (ZERO, "")),
    broken("zero-grad-missing-rnn", "rnn", "stale-gradient", ("        optimizer.zero_grad()\n", "")),
    broken("zero-grad-missing-bf16", "bf16", "stale-gradient", (ZERO, "")),
    broken("zero-grad-missing-judge", "gan", "stale-gradient", ("        judge_opt.zero_grad()\n", "")),
    broken("zero-grad-missing-sparse", "recommender", "stale-gradient", ("        dense.zero_grad()\n", "")),
    broken(
        "zero-grad-missing-accumulate",
        "accumulate",
        "stale-gradient accumulation-not-divided",
        ("            optimizer.zero_grad()\n", ""),
    ),
    broken(
        "zero-grad-wrong-model",
        "distill",
        "stale-gradient",
        (
            "        return 0.5 * soft + 0.5 * cross_entropy(logits, y)",
            "        loss = 0.5 * soft + 0.5 * cross_entropy(logits, y)\n        teacher.zero_grad()\n"
            "        loss.backward()\n        optimizer.step()\n        scheduler.step()\n        return loss",
        ),
    ),
    broken(
        "zero-grad-between",
        "loop",
        "gradients-discarded zero-gradient missing-gradient",
        ("loss.backward()", "loss.backward()\n        optimizer.zero_grad()"),
    ),
    broken(
        "zero-grad-between-to-zero",
        "rnn",
        "gradients-discarded zero-gradient missing-gradient",
        ("loss.backward()", "loss.backward()\n        optimizer.zero_grad(set_to_none=False)"),
    ),
    broken(
        "accumulation-not-divided",
        "accumulate",
        "accumulation-not-divided",
        ("criterion(model(x), y) / EVERY", "criterion(model(x), y)"),
    ),
    broken(
        "accumulation-cleared",
        "accumulate",
        "gradients-discarded zero-gradient missing-gradient",
        ("        loss.backward()", "        optimizer.zero_grad()\n        loss.backward()"),
    ),
    broken("double-step", "loop", "double-step", (STEP, STEP * 2)),
    broken(
        "double-step-scaler",
        "fp16",
        "double-step step-exception",
        ("        scaler.update()\n", "        scaler.update()\n        optimizer.step()\n"),
    ),
    broken(
        "step-in-model",
        "rnn",
        "double-step",
        ("        return loss.item()", "        optimizer.step()\n        return loss.item()"),
    ),
    broken("step-missing", "loop", "weights-unchanged", (STEP, "")),
    broken("backward-missing", "loop", "missing-gradient weights-unchanged", ("        loss.backward()\n", "")),
    broken(
        "backward-after-step",
        "rnn",
        "gradients-discarded missing-gradient weights-unchanged zero-gradient",
        ("        loss.backward()\n", ""),
        ("        optimizer.step()\n", "        optimizer.step()\n        loss.backward()\n"),
    ),
    broken(
        "one-optimizer-not-stepped", "gan", "weights-unchanged gradients-discarded", ("        maker_opt.step()\n", "")
    ),
    broken("one-optimizer-not-stepped-sparse", "recommender", "weights-unchanged", ("        sparse.step()\n", "")),
    broken(
        "scheduler-first",
        "loop",
        "scheduler-order",
        ("        scheduler.step()\n", ""),
        (STEP, "        scheduler.step()\n" + STEP),
    ),
    broken(
        "scheduler-per-batch",
        "loop",
        "scheduler-order learning-rate schedule-collapses",
        ("CosineAnnealingLR(optimizer, T_max=500)", "StepLR(optimizer, step_size=1, gamma=0.1)"),
    ),
    broken(
        "scheduler-to-zero",
        "loop",
        "scheduler-order learning-rate schedule-collapses",
        ("CosineAnnealingLR(optimizer, T_max=500)", "LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step))"),
    ),
    broken(
        "warmup-not-stepped",
        "loop",
        "learning-rate",
        ("CosineAnnealingLR(optimizer, T_max=500)", "LambdaLR(optimizer, lambda step: min(1.0, step / 50))"),
        ("        scheduler.step()\n", ""),
    ),
    broken(
        "clip-tiny",
        "loop",
        "chronic-clipping clip-threshold weights-unchanged",
        ("model.parameters(), 1.0)", "model.parameters(), 1e-9)"),
    ),
    broken(
        "clip-tiny-adam",
        "rnn",
        "chronic-clipping clip-threshold weights-unchanged update-ratio",
        ("model.parameters(), 5.0)", "model.parameters(), 1e-12)"),
    ),
    broken(
        "clip-value-zero",
        "rnn",
        "zero-gradient chronic-clipping clip-threshold",
        ("clip_grad_norm_(model.parameters(), 5.0)", "clip_grad_value_(model.parameters(), 0.0)"),
    ),
    broken(
        "clip-after-step",
        "rnn",
        "clip-order clip-after-step",
        ("        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)\n", ""),
        (
            "        optimizer.step()\n",
            "        optimizer.step()\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n",
        ),
    ),
    broken(
        "reset-each-step",
        "loop",
        "weight-corrupted weights-unchanged",
        (STEP, STEP + "        model.head.reset_parameters()\n"),
    ),
    broken(
        "weights-halved",
        "loop",
        "weight-corrupted",
        (STEP, STEP + "        with torch.no_grad():\n            model.head.weight.mul_(0.5)\n"),
    ),
    broken(
        "loaded-each-step",
        "rnn",
        "weights-unchanged weight-corrupted",
        (
            "    def step_fn(model, batch):\n",
            "    start = {k: v.clone() for k, v in model.state_dict().items()}\n\n"
            "    def step_fn(model, batch):\n        model.load_state_dict(start)\n",
        ),
    ),
    broken("ema-forgotten", "averaged", "ema-not-moving", ("        ema.update_parameters(model)\n", "")),
    broken("ema-decay-one", "averaged", "ema-not-moving", ("(0.999)", "(1.0)")),
    broken(
        "ema-before-step",
        "averaged",
        "ema-order ema-not-moving",
        ("        ema.update_parameters(model)\n", ""),
        (
            "        loss.backward()\n        optimizer.step()\n",
            "        loss.backward()\n        ema.update_parameters(teacher)\n        optimizer.step()\n",
        ),
        ("    ema = ", "    import copy\n\n    teacher = copy.deepcopy(model)\n    ema = "),
    ),
    broken("clip-before-unscale", "fp16", "clip-before-unscale", ("        scaler.unscale_(optimizer)\n", "")),
    broken(
        "unscale-after-clip",
        "fp16",
        "clip-before-unscale",
        ("        scaler.unscale_(optimizer)\n", ""),
        ("        scaler.step(optimizer)\n", "        scaler.unscale_(optimizer)\n        scaler.step(optimizer)\n"),
    ),
    broken("scaler-with-bf16", "fp16", "needless-scaler", ("torch.float16", "torch.bfloat16")),
    broken(
        "scaler-without-autocast",
        "fp16",
        "needless-scaler",
        ('torch.autocast("cpu", dtype=torch.float16)', "torch.enable_grad()"),
    ),
    broken(
        "no-scaler",
        "fp16",
        "gradient-underflow loss-scale",
        ('"cpu", init_scale=2.0**10', '"cpu", enabled=False'),
        ("loss = criterion(model(x), y)", "loss = 1e-5 * criterion(model(x), y)"),
    ),
    broken(
        "scale-not-applied",
        "fp16",
        "scaler-order",
        ("scaler.scale(loss).backward()", "loss.backward()"),
    ),
    broken(
        "scaler-bypassed",
        "fp16",
        "scaler-order clip-before-unscale",
        ("        scaler.unscale_(optimizer)\n", ""),
        ("scaler.step(optimizer)", "optimizer.step()"),
    ),
    broken("scaler-not-updated", "fp16", "scaler-order step-exception", ("        scaler.update()\n", "")),
    broken(
        "autocast-off",
        "bf16",
        "autocast-inactive",
        ("dtype=torch.bfloat16)", "dtype=torch.bfloat16, enabled=False)"),
        amp_dtype="bf16",
    ),
    broken(
        "reproducible-not",
        "mlp",
        "not-reproducible",
        (
            "h = torch.relu(self.middle(h))",
            "import os\n\n        h = torch.relu(self.middle(h))\n"
            "        h = h * (1 + 0.2 * (int.from_bytes(os.urandom(2)) / 65536 - 0.5))",
        ),
    ),
)

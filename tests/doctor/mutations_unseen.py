"""Written when the checks were there, and scored before anybody looked: their recall is reported apart."""

from __future__ import annotations

from dataclasses import replace

from tests.doctor.bench import Built, Mutation, broken


def average_is_model(built: Built) -> None:
    built["ema"] = built["model"]


UNSEEN: tuple[Mutation, ...] = (
    broken("wrong-column", "bf16", "label-range", ('batch["label"])', 'batch["id"])')),
    broken("ignore-index-wrong", "padded", "label-range step-exception", ("ignore_index=-100", "ignore_index=-1")),
    broken(
        "adapters-frozen",
        "lora",
        "missing-gradient loss-detached",
        ("    loader =", "    model.requires_grad_(False)\n    loader ="),
    ),
    broken(
        "both-factors-zero",
        "lora",
        "zero-gradient dead-units symmetric-units",
        ("torch.randn(rank, base.in_features) / base.in_features**0.5", "torch.zeros(rank, base.in_features)"),
    ),
    broken(
        "indented-too-far",
        "distill",
        "no-grad",
        ("        logits = student(x)\n", "            logits = student(x)\n"),
    ),
    broken(
        "step-outside-if",
        "accumulate",
        "stale-gradient",
        (
            "            optimizer.step()\n            optimizer.zero_grad()",
            "            optimizer.zero_grad()\n        optimizer.step()",
        ),
    ),
    broken("rare-nan", "stream", "nonfinite-input", ("yield self.x[i] +", "yield (self.x[i] / (i % 97)) * (i % 97) +")),
    broken(
        "wrong-part-frozen",
        "finetune",
        "missing-gradient no-grad",
        (
            "for p in backbone.parameters():\n        p.requires_grad = False\n    model = Classifier(backbone)\n",
            "model = Classifier(backbone)\n    for n, p in model.named_parameters():\n"
            "        p.requires_grad = 'backbone' in n\n",
        ),
    ),
    broken(
        "predictor-forgotten",
        "byol",
        "optimizer-misses-parameters",
        ("[*model.online.parameters(), *model.predictor.parameters()]", "[*model.online.parameters()]"),
    ),
    broken("target-column", "regression", "loss-broadcast", ("TensorDataset(x, y)", "TensorDataset(x, y[:, None])")),
    broken("reshaped-not-flattened", "cnn", "samples-mixed shape-mismatch", ("h.flatten(1)", "h.reshape(96, -1).T")),
    broken(
        "fake-not-detached",
        "gan",
        "graph-reused step-exception",
        ('model["judge"](fake.detach())', 'model["judge"](fake)'),
    ),
    broken(
        "pairs-shuffled",
        "towers",
        "targets-do-not-predict",
        ("TensorDataset(x[:, :32], x[:, 32:])", "TensorDataset(x[:, :32], x[torch.randperm(len(x)), 32:])"),
    ),
    broken("response-data", "spectral", "missing-gradient", ("* self.response,", "* self.response.data,")),
    broken(
        "visible-asked-for",
        "masked",
        "target-leak targets-do-not-predict",
        ("ids.masked_fill(~hidden, -100)", "ids.masked_fill(hidden, -100)"),
    ),
    broken("targets-plus-minus", "multilabel", "label-range", ("dim=1).float()", "dim=1).float() * 2 - 1")),
    broken("parentheses-forgotten", "averaged", "stale-gradient", ("optimizer.zero_grad()", "optimizer.zero_grad")),
    broken(
        "unscaled-twice",
        "fp16",
        "scaler-order step-exception",
        ("        scaler.step(optimizer)\n", "        scaler.unscale_(optimizer)\n        scaler.step(optimizer)\n"),
    ),
    broken(
        "loss-as-float",
        "moe",
        "loss-detached",
        ("+ 0.01 * balance", "+ 0.01 * balance).item()"),
        ("return nn.functional.cross_entropy", "return (nn.functional.cross_entropy"),
    ),
    broken(
        "optimizer-each-step",
        "rnn",
        "optimizer-state-lost stale-optimizer stale-gradient optimizer-settings",
        (
            "        optimizer.zero_grad()\n",
            "        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)\n        optimizer.zero_grad()\n",
        ),
    ),
    broken(
        "wrong-scheduler",
        "lm",
        "learning-rate scheduler-order",
        ("LambdaLR(optimizer,", "LambdaLR(torch.optim.SGD(model.parameters(), lr=1.0),"),
        ("lr=3e-3", "lr=0.0"),
    ),
    broken(
        "seed-in-step",
        "loop",
        "random-numbers-repeat not-reproducible",
        ("        model.train()\n", "        torch.manual_seed(0)\n        model.train()\n"),
    ),
    broken(
        "prior-only",
        "autoencoder",
        "zero-gradient loss-ignores-target missing-gradient",
        ("return apart + 0.01 * prior", "return 0.0 * apart + 0.01 * prior"),
    ),
    broken(
        "half-everything",
        "loop",
        "nonfinite-loss nonfinite-gradient nonfinite-weight gradient-underflow dtype-mismatch learning-rate",
        ("    model = Net()", "    model = Net().half()"),
        ("logits = model(x)", "logits = model(x.half())"),
        ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "torch.optim.Adam(model.parameters(), lr=1e-3)"),
    ),
    broken("experts-never-chosen", "moe", "missing-gradient zero-gradient", ("choice == i", "choice == i + 8")),
    broken(
        "clip-before-backward",
        "rnn",
        "clip-order",
        ("        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)\n", ""),
        (
            "        loss.backward()\n",
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)\n        loss.backward()\n",
        ),
    ),
    broken(
        "step-before-backward",
        "gan",
        "gradients-discarded stale-gradient missing-gradient weights-unchanged",
        (
            "        judge_loss.backward()\n        judge_opt.step()\n",
            "        judge_opt.step()\n        judge_loss.backward()\n",
        ),
    ),
    broken("ids-off-by-one", "padded", "label-range", ("self.embed(input_ids)", "self.embed(input_ids + 3)")),
    broken(
        "detached-and-wanted-again",
        "bf16",
        "loss-detached missing-gradient",
        (
            "        optimizer.zero_grad(set_to_none=True)\n",
            "        loss = loss.detach().requires_grad_()\n        optimizer.zero_grad(set_to_none=True)\n",
        ),
    ),
    broken(
        "rounded-output",
        "multilabel",
        "zero-gradient",
        (
            "nn.BCEWithLogitsLoss(pos_weight=torch.full((12,), 3.0))",
            "lambda out, y: nn.functional.mse_loss(torch.sigmoid(out).round(), y)",
        ),
    ),
    broken(
        "multiplied-not-added",
        "residual",
        "zero-gradient collapsed-output dead-units",
        ("return x + self.down", "return x * self.down"),
    ),
    broken(
        "average-is-model",
        "averaged",
        "ema-not-moving",
        ("        ema.update_parameters(model)\n", ""),
        change=average_is_model,
    ),
    broken(
        "same-sample-for-ever",
        "stream",
        "constant-batch repeated-batch",
        ("        while True:\n", "        while True:\n            generator.manual_seed(self.seed)\n"),
    ),
    broken(
        "batchnorm-of-one",
        "single",
        "step-exception shape-mismatch batchnorm-frozen",
        ("nn.Flatten(),", "nn.Flatten(),\n        nn.BatchNorm1d(128),"),
    ),
    broken(
        "critic-holds-maker",
        "wgan",
        "duplicate-parameters optimizer-misses-parameters",
        ("torch.optim.RMSprop(critic.parameters()", "torch.optim.RMSprop(maker.parameters()"),
    ),
    broken("carried-with-graph", "forecast", "graph-reused step-exception", ("state.detach()", "state")),
    broken(
        "decoder-not-shifted",
        "translate",
        "target-leak targets-do-not-predict",
        ("torch.cat([first, target[:, :-1]], dim=1)", "target"),
    ),
    broken(
        "gradients-of-a-copy",
        "several",
        "stale-optimizer step-exception missing-gradient",
        (
            "    params = list(model.parameters())",
            "    import copy\n\n    params = list(copy.deepcopy(model).parameters())",
        ),
    ),
    broken(
        "one-image-thrice",
        "triplet",
        "zero-gradient loss-ignores-input",
        ("criterion(*(model(x) for x in batch))", "criterion(*(model(batch[0]) for x in batch))"),
    ),
    broken("likelihood-not-negated", "gaussian", "loss-sign", ("return -model", "return model")),
    broken(
        "lengths-swapped",
        "speech",
        "step-exception shape-mismatch nonfinite-loss label-range",
        ("frames, letters = batch", "letters, frames = batch"),
    ),
    broken("fourth-class", "brightness", "label-range", ("< 0.05, 2, torch", "< 0.05, 3, torch")),
    broken(
        "layer-made-in-forward",
        "mlp",
        "optimizer-misses-parameters missing-gradient unregistered-module",
        ("return self.head(h)", "return nn.Linear(32, 10)(h)"),
    ),
    broken(
        "detached-in-place",
        "loop",
        "missing-gradient loss-detached",
        ("h = self.drop(h)", "h = self.drop(h).detach_()"),
    ),
    broken(
        "weight-of-absent-class",
        "averaged",
        "nonfinite-loss nonfinite-input",
        (
            "weight = 1.0 / torch.bincount(y).float()",
            "weight = 1.0 / (torch.bincount(y).float() - torch.bincount(y).min())",
        ),
    ),
)
MUTATIONS = tuple(replace(one, held=True) for one in UNSEEN)

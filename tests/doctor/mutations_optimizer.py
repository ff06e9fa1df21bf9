"""Broken in the optimizer: what it holds, and how fast it goes."""

from __future__ import annotations

from tests.doctor.bench import Built, broken

MLP_OPT = "torch.optim.AdamW(model.parameters(), lr=1e-3)"


def all_frozen(built: Built) -> None:
    built["model"].requires_grad_(False)


def rates(value: float):
    def change(built: Built) -> None:
        for group in built["optimizer"].param_groups:
            group["lr"] = value

    return change


MUTATIONS = (
    broken(
        "head-replaced",
        "mlp",
        "stale-optimizer",
        ("    criterion =", "    model.head = nn.Linear(32, 10)\n    criterion ="),
    ),
    broken(
        "head-replaced-late",
        "finetune",
        "stale-optimizer",
        ("    loader =", "    model.head = nn.Linear(32, 10)\n    loader ="),
    ),
    broken(
        "model-copied",
        "cnn",
        "stale-optimizer",
        ("    criterion =", "    import copy\n\n    model = copy.deepcopy(model)\n    criterion ="),
    ),
    broken("other-model", "distill", "stale-optimizer optimizer-misses-parameters", ("Adam(student.", "Adam(teacher.")),
    broken(
        "weights-replaced",
        "rnn",
        "stale-optimizer",
        ("    criterion =", "    model.head.weight = nn.Parameter(model.head.weight * 0.5)\n    criterion ="),
    ),
    broken(
        "layer-missing",
        "mlp",
        "optimizer-misses-parameters",
        (MLP_OPT, "torch.optim.AdamW([*model.hidden.parameters(), *model.head.parameters()], lr=1e-3)"),
    ),
    broken(
        "head-only", "cnn", "optimizer-misses-parameters", ("SGD(model.parameters()", "SGD(model.head.parameters()")
    ),
    broken(
        "body-only", "loop", "optimizer-misses-parameters", ("SGD(model.parameters()", "SGD(model.body.parameters()")
    ),
    broken(
        "one-tower-only",
        "towers",
        "optimizer-misses-parameters",
        ("AdamW(model.parameters()", "AdamW(model.upper.parameters()"),
    ),
    broken(
        "no-decay-forgotten",
        "residual",
        "optimizer-misses-parameters",
        ("model.parameters()", "[p for p in model.parameters() if p.dim() > 1]"),
    ),
    broken(
        "blocks-in-a-list",
        "lm",
        "optimizer-misses-parameters unregistered-module",
        ("nn.ModuleList(Block(width, 4) for _ in range(2))", "[Block(width, 4) for _ in range(2)]"),
    ),
    broken(
        "experts-in-a-list", "moe", "optimizer-misses-parameters unregistered-module", ("nn.ModuleList(\n", "list(\n")
    ),
    broken(
        "parameters-twice",
        "mlp",
        "duplicate-parameters",
        (MLP_OPT, "torch.optim.AdamW([*model.parameters(), *model.head.parameters()], lr=1e-3)"),
    ),
    broken(
        "judge-in-both",
        "gan",
        "duplicate-parameters",
        ("maker_opt = torch.optim.Adam(maker.parameters()", "maker_opt = torch.optim.Adam(model.parameters()"),
    ),
    broken("lr-zero", "mlp", "learning-rate", ("lr=1e-3", "lr=0.0")),
    broken("lr-zero-rnn", "rnn cnn accumulate", "learning-rate", change=rates(0.0)),
    broken("lr-zero-group", "regression", "learning-rate weights-unchanged", ('"lr": 0.01}', '"lr": 0.0}')),
    broken("lr-ten", "mlp cnn rnn", "learning-rate", change=rates(10.0)),
    broken("lr-ten-clipped", "loop", "learning-rate", ("lr=0.1", "lr=10.0")),
    broken("lr-ten-lm", "lm", "learning-rate", ("lr=3e-3", "lr=10.0")),
    broken("lr-tiny", "mlp rnn", "learning-rate", change=rates(1e-12)),
    broken("lr-nan", "mlp rnn", "learning-rate", change=rates(float("nan"))),
    broken("decay-ten", "cnn", "optimizer-settings weight-decay", ("weight_decay=5e-4", "weight_decay=10.0")),
    broken("decay-adam", "fp16", "optimizer-settings weight-decay", ("lr=2e-3", "lr=2e-3, weight_decay=100.0")),
    broken(
        "betas-swapped",
        "lm",
        "optimizer-settings",
        ("betas=(0.9, 0.95)", "betas=(0.95, 0.9)"),
        ("betas=(0.95, 0.9)", "betas=(0.999, 0.9)"),
    ),
    broken("momentum-high", "cnn", "optimizer-settings learning-rate", ("momentum=0.9", "momentum=1.0")),
    broken("all-frozen", "mlp cnn loop", "missing-gradient loss-detached", change=all_frozen),
)

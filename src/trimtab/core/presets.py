"""Named sets of settings: one for each documented system, and what is usual for an architecture, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from trimtab.core.config_read import bad
from trimtab.core.errors import ConfigError
from trimtab.core.suggest_name import did_you_mean


class Band(NamedTuple):
    """What a value from `low` to `high` of one measured quantity means."""

    low: float
    high: float
    meaning: str
    of: str = "global norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named set of settings, and what else its source says that a trainer may use.

    `settings` are what `Config.from_dict` takes. `hints` are plain data for building optimizer, schedule and
    scaler: a guard does not touch those. `lines` names the documented output lines and every how many steps they come
    (0: once per epoch); `limits` are the fixed thresholds of the warnings among them. `bands` say what a norm means,
    `notes` where the source contradicts itself and what is done about it.
    """

    name: str
    title: str
    source: str
    settings: Mapping[str, object]
    aliases: tuple[str, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    bands: tuple[Band, ...] = ()
    notes: tuple[str, ...] = ()


def _arch(name: str, clip: object, title: str, source: str, *notes: str, **settings: object) -> Preset:
    return Preset(name=f"arch-{name}", title=title, source=source, settings={"clip": clip, **settings}, notes=notes)


ARCHITECTURES = (
    _arch(
        "gpt",
        1.0,
        "Decoder-only language models",
        "LLaMA (Touvron et al. 2023, arXiv:2302.13971, section 2.3); github.com/karpathy/nanoGPT train.py, grad_clip",
    ),
    _arch(
        "bert",
        1.0,
        "Masked language models",
        "github.com/google-research/bert optimization.py, clip_by_global_norm",
    ),
    _arch(
        "transformer-xl",
        0.25,
        "Transformer-XL",
        "github.com/kimiyoung/transformer-xl pytorch/train.py, --clip",
    ),
    _arch(
        "lstm",
        0.25,
        "LSTM language models",
        "AWD-LSTM: github.com/salesforce/awd-lstm-lm main.py, --clip",
    ),
    _arch(
        "vit",
        1.0,
        "Vision transformers",
        "github.com/google-research/vision_transformer vit_jax/configs/common.py, grad_norm_clip",
    ),
    _arch(
        "swin",
        5.0,
        "Swin transformers",
        "github.com/microsoft/Swin-Transformer config.py, TRAIN.CLIP_GRAD",
    ),
    _arch(
        "detr",
        0.1,
        "Detection transformers",
        "github.com/facebookresearch/detr main.py, --clip_max_norm; the same in github.com/IDEA-Research/DINO",
    ),
    _arch(
        "resnet",
        None,
        "Residual networks with BatchNorm: not clipped",
        "github.com/pytorch/vision references/classification/train.py, --clip-grad-norm is None",
        "Normalised layers bound their own gradients; a guard still rejects what is not finite.",
    ),
    _arch(
        "nfnet",
        {"strategy": "agc", "ratio": 0.01, "eps": 1e-3},
        "Networks without normalisation layers: adaptive gradient clipping",
        "github.com/google-deepmind/deepmind-research nfnets/optim.py, SGD_AGC (Brock et al. 2021, arXiv:2102.06171)",
        "The published recipe leaves the classifier's last layer unclipped; agc here clips every parameter.",
        "Under agc most units are clipped in most steps, so the rule chronic-clipping (GRAD007) is off.",
        ignore=["GRAD007"],
    ),
    _arch(
        "diffusion",
        1.0,
        "Denoising diffusion models",
        "github.com/hojonathanho/diffusion scripts/run_cifar.py, grad_clip",
    ),
    _arch(
        "tacotron2",
        1.0,
        "Attention-based speech synthesis",
        "github.com/NVIDIA/tacotron2 hparams.py, grad_clip_thresh",
    ),
    _arch(
        "ppo",
        0.5,
        "Proximal policy optimisation",
        "github.com/openai/baselines baselines/ppo2/ppo2.py; github.com/DLR-RM/stable-baselines3 ppo.py, max_grad_norm",
    ),
    _arch(
        "dqn",
        10.0,
        "Deep Q-learning",
        "github.com/DLR-RM/stable-baselines3 stable_baselines3/dqn/dqn.py, max_grad_norm",
    ),
)
"""What the authors, or the most used implementation, clip to: a place to start, not a law."""


SIX_DIM = Preset(
    name="6dim-clip",
    aliases=("000", "a", "6dim", "6dimcoco"),
    title="Six-modality contrastive training with a gradient health check",
    source="6DIMCOCO",  # A4, A11 to A13, A28, A35
    settings={"clip": {"norm": 1.0, "above": 10.0}},
    hints={
        "base_lr": 1e-4,
        "warmup_steps": 500,
        "log_every": 100,
        "loss_version": 1,
        "eps": 1e-8,
        "logit_scale": (14.0, 100.0),
        "min_batch_size": 8,
    },
    lines={"a11": 100},
    limits={"exploding": 100.0, "vanishing": 1e-7},
    bands=(
        Band(0.1, 10.0, "healthy"),
        Band(10.0, inf, "is clipped to 1.0"),
        Band(100.0, inf, "watch this parameter", "largest norm of a parameter"),
        Band(0.0, 1e-7, "perhaps vanishing", "smallest norm of a parameter"),
    ),
    notes=(
        "The document clips to 1.0, but only where the norm is above 10, and calls a norm exploding above 100; its own "
        "examples print that warning at 45 and at 11. Here: clipped above 10, warned of above 100 and nowhere else.",
        "The documented check clips on logging steps only, and gradients that are still scaled under AMP. Here every "
        "optimizer step is looked at, after unscaling.",
        "The smallest norm is a poor sign: a bias before BatchNorm has a true gradient of zero. The warning is kept, "
        "but comes at longer and longer intervals; the rule vanishing-gradient (GRAD003) looks at depth instead.",
        "Of the documented loss versions 2 and 3 return [B, B], not [B]*N, and version 1, called fast, was the slowest "
        "as written. The hint keeps version 1, the recommended one.",
        "Names that only its verification page mentions (clamp_value, compute_loss_v0, check_nan_inf) are in no "
        "program and are not offered.",
    ),
)

CAMOXPERT = Preset(
    name="camoxpert",
    aliases=("001", "b", "train-ultimate"),
    title="Two-stage segmentation: a frozen backbone first, then everything",
    source="camoXpert",  # B5, B7 to B14, B22
    settings={"clip": 0.5},
    hints={
        "base_lr": 2.5e-4,
        "stage2": {"lr_factor": 0.5, "head_lr_factor": 0.5, "backbone_lr_factor": 0.05},
        "scaler": {"init_scale": 2.0**10, "growth_factor": 1.5, "backoff_factor": 0.5, "growth_interval": 1000},
        "schedule": "onecycle",
        "pct_start": 0.1,
        "stage1_epochs": 30,
        "stage2_epochs": 110,
        "weight_decay": 1e-4,
        "accumulation_steps": 4,
        "batch_size": 2,
        "keep_last": 3,
        "unstable_clip": 0.3,
        "log_every": 1,
    },
    lines={"b5": 1, "b8": 0, "b9": 1},
    limits={"high": 5.0},
    bands=(
        Band(0.0, 0.5, "passes unclipped"),
        Band(0.5, 2.5, "is clipped to 0.5"),
        Band(2.5, inf, "is clipped to 0.5, with a warning"),
    ),
    notes=(
        "An average norm below 0.5 is asked for, and measured before clipping: that would mean clipping never works, "
        "though it is the protection. Norms depend on the scale of the loss, so no average is demanded here; where "
        "every step is clipped, chronic-clipping (GRAD007) says so.",
        "The scaler settings are called slower and more careful. A back-off of 0.5 is what PyTorch does anyway, and a "
        "growth interval of 1000 grows twice as often as its 2000; what is more careful is the initial scale of 1024 "
        "and the growth of 1.5. The values are kept as documented.",
        "One scalar max_lr in OneCycleLR gives every group the same peak. Pass a list: 0.5 x base for the head, 0.05 x "
        "base for the backbone.",
        "To resume, the document halves the rate to 0.000125 by hand, and stage 2 halves it again. The factors here "
        "are always relative to stage 1's base_lr.",
        "140 epochs in the text, 120 in the program: 30 + 110 here.",
        "To resume from any point of a crash is promised under success, and from the end of an epoch only under "
        "limits. Protection of all stages is promised, and only stage 2 saves. keep_last = 3 is meant for both stages.",
        "The document stops at the first non-finite value with a ValueError. Here the step is kept out of the weights "
        'and training goes on; mode="raise" stops with the documented sentences. An overflow that a GradScaler '
        "provokes while it looks for its scale is neither: it is routine.",
    ),
)

_MLP: dict[str, Any] = {
    "title": "A small character transformer with warm-up and a diagnostic line",
    "lines": {"c4": 10},
}

MLP_CUDA = Preset(
    name="mlp-cuda",
    aliases=("002", "c", "mlp-cuda-v2"),
    source="MLP-cuda",  # C3 to C6, C8, C14
    settings={"clip": 1.5, "full_every": 10},
    hints={
        "base_lr": 5e-5,
        "warmup_steps": 200,
        "warmup_init_lr": 1e-6,
        "schedule": "linear warm-up, then constant",
        "optimizer": "Adam",
        "log_every": 10,
    },
    bands=(
        Band(0.0, 0.1, "perhaps vanishing"),
        Band(0.1, 1.0, "healthy"),
        Band(1.0, 1.5, "called clipped in the document, but passes a clip of 1.5"),
        Band(1.5, inf, "is clipped; normal early in training"),
        Band(10.0, inf, "if it stays there: lower the learning rate"),
    ),
    notes=(
        "Most of the document says 5e-5 after 200 steps and a clip of 1.5; its part on reading the output still says "
        "1e-4 after 100 steps and clipping above 1.0, from an earlier version. This preset is the later one, "
        "mlp-cuda-v1 the earlier.",
        "5e-5 is called both a twentieth of the rate before (1e-3: that is so) and half the usual one (it depends).",
        "The documented parameter norm was that of the token embedding alone. The line here has that of all "
        "parameters, measured every 10 steps (full_every = 10).",
        "These values did not cure the documented run: it was clipped in every step. Where that happens "
        "chronic-clipping (GRAD007) says so, and a lower rate or clip is not the cure.",
    ),
    **_MLP,
)

MLP_CUDA_V1 = Preset(
    name="mlp-cuda-v1",
    aliases=("002-v1", "c-v1"),
    source="MLP-cuda, first version",  # C8, C14
    settings={"clip": 1.0, "full_every": 10},
    hints={**MLP_CUDA.hints, "base_lr": 1e-4, "warmup_steps": 100},
    bands=(
        Band(0.0, 0.1, "perhaps vanishing"),
        Band(0.1, 1.0, "healthy"),
        Band(1.0, inf, "is clipped; normal early in training"),
        Band(10.0, inf, "if it stays there: lower the learning rate"),
    ),
    notes=("What the document had before its second revision; see mlp-cuda for the contradiction.",),
    **_MLP,
)

SEO = Preset(
    name="seo",
    aliases=("003", "d"),
    title="A page-quality model that corrects itself",
    source="SEO",  # D1, D2, D6, D7, D12
    settings={"clip": 1.0, "mode": "act"},
    hints={
        "base_lr": 1e-3,
        "weight_decay": 1e-4,
        "patience": 10,
        "min_delta": 1e-4,
        "use_amp": True,
        "schedule": "cosine",
        "num_epochs": 100,
        "corrective": {
            "train_loss_nan_inf": {"lr": 0.5},
            "val_loss_nan_inf": {"lr": 0.5},
            "loss_explosion": {"lr": 0.1},
            "overfitting": {"weight_decay": 1.5},
        },
        "loss_explosion_ratio": 10.0,
        "log_every": 1,
    },
    lines={"d2": 1},
    notes=(
        "Deployable checkpoints are promised, and NaN weights are replaced by zeros and saved as healthy. Here nothing "
        "is replaced: the step that would have brought the NaN is kept out of the weights.",
        "The norm is promised before and after clipping and measured before only. Both lines are printed here.",
        "Clipping came before unscaling: at a scale of 65536 a gradient of 0.5 arrived as 1.5e-5. Here it comes after.",
        "The rate was changed in the optimizer, where OneCycleLR and LambdaLR undo it at the next step, without bounds "
        "or a pause. Mode act multiplies whatever the scheduler says, with cool-down, budget and a floor.",
        "Explosion means ten times the last epoch's loss there, which says nothing where a loss is near zero or "
        "negative. Here loss-spike and diverging-loss compare with the run's own noise.",
        "One non-finite validation is listed as a reason to halve the rate, and its branch is missing in the excerpt. "
        "The factor is in the hints; the rule nonfinite-validation (LOSS007) reports it.",
        "model_healthy is reported there and set by nothing, and trainer.train does not exist. guard.health() sets "
        "every part from the findings that are open.",
    ),
)

LMOL = Preset(
    name="lmol",
    aliases=("004", "e"),
    title="Fine-tuning a multi-modal classifier with gradient diagnostics",
    source="LMOL",  # E7, E9, E13, E15, E22
    settings={"clip": 1.0},
    hints={
        "base_lr": 2e-4,
        "projector_lr": 2e-5,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup_frac": 0.05,
        "min_lr_frac": 0.01,
        "batch_size": 32,
        "num_epochs": 3,
        "patience": 5,
        "min_delta": 1e-4,
        "amp_dtype": "bf16",
        "min_reasonable_loss": 1e-8,
        "class_accuracy_gap": 0.3,
        "log_every": 10,
        "gpu_log_every": 100,
    },
    lines={"e13": 10},
    limits={"exploding": 300.0, "vanishing": 1e-12, "zero": 1e-8, "zero_share": 0.5},
    notes=(
        "The clip is 1.0 in the configuration and 0.0, none, on the command line. Here 1.0: it is the fix described.",
        "A norm is too large above 100 and too small below 1e-8 for the diagnostics, above 300 and below 1e-12 for the "
        "health monitor. The preset takes the monitor's; lines:e13 by itself warns at the diagnostics'.",
        "AMP underflow was inferred from a scale below 2, which shows repeated overflow. The rule gradient-underflow "
        "(AMP002) counts what float16 loses.",
        "Parameters without any gradient were missing from the totals. In the [GRAD] line they count as zero.",
        "The documented --detect_anomaly false could not be parsed. Every flag here takes true, false, 1, 0, yes, no.",
        "The clip and the memory clean-up are configured twice, the latter with 10 and with 100 steps. There is one "
        "place for each setting here, and no clean-up: what the allocator keeps, training uses again.",
    ),
)

DOCUMENTED = (SIX_DIM, CAMOXPERT, MLP_CUDA, MLP_CUDA_V1, SEO, LMOL)


PRESETS: tuple[Preset, ...] = (*DOCUMENTED, *ARCHITECTURES)

_MERGED = ("policy", "rules", "severity")
"""Tables in which you can change one entry and keep the others of the preset."""


def get_preset(name: object) -> Preset:
    """The preset of that name or alias; an unknown one raises ConfigError with a suggestion.

    Example:
        >>> get_preset("001").name, get_preset("camoxpert").settings["clip"]
        ('camoxpert', 0.5)
    """
    if not isinstance(name, str):
        raise bad("preset", name, "the name of a preset: trimtab presets lists them")
    known = {alias: preset for preset in PRESETS for alias in (preset.name, *preset.aliases)}
    wanted = name.strip().lower().replace("_", "-")
    if wanted in known:
        return known[wanted]
    names = ", ".join(preset.name for preset in PRESETS)
    raise ConfigError(f"there is no preset {name!r}; {did_you_mean(wanted, known, otherwise=f'known are {names}.')}")


def under(settings: Mapping[str, object]) -> Mapping[str, object]:
    """The same settings on top of those of the preset they name, if they name one."""
    if not isinstance(settings, Mapping) or settings.get("preset") is None:
        return settings
    preset = get_preset(settings["preset"])
    out = {**preset.settings, **settings, "preset": preset.name}
    for table in _MERGED:
        theirs, mine = preset.settings.get(table), settings.get(table)
        if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
            out[table] = {**theirs, **mine}
    return out


def warmup_lr(hints: Mapping[str, Any], step: int) -> float:
    """The learning rate at a step by a preset's linear warm-up: from `warmup_init_lr` to `base_lr`, then constant.

    Example:
        >>> hints = get_preset("mlp-cuda").hints
        >>> [f"{warmup_lr(hints, step):.2e}" for step in (0, 100, 200, 5000)]
        ['1.00e-06', '2.55e-05', '5.00e-05', '5.00e-05']
    """
    base, first, steps = (float(hints.get(key, 0.0)) for key in ("base_lr", "warmup_init_lr", "warmup_steps"))
    return base if step >= steps else first + step / steps * (base - first)

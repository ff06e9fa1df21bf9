"""System 002: a transformer language model with warm-up, clipping and a diagnostic line, on Python's own reference."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from trimtab.core.errors import InputError
from trimtab.integrations.loggers.wandb_logger import INSTALL, has_wandb, open_wandb
from trimtab.train.evaluation import Evaluate, evaluate_model
from trimtab.train.recipe import Fault, Option, Parts, Recipe, Settings, doctor_target
from trimtab.train.recipes.charlm.metrics_log import MetricsLog
from trimtab.train.recipes.charlm.text import (
    BYTE,
    CHAR,
    MANY,
    WORD,
    Spread,
    Tokenizer,
    Windows,
    apart,
    file_problems,
    pieces_of,
    reference,
    stream_of,
    text_files,
    tokenizer_of,
)
from trimtab.train.settings import SCHEDULES, TrainConfig
from trimtab.train.trainer import Trainer

log = logging.getLogger("trimtab")
PROMPTS = ("once upon", "she was", "the forest")
HELD_OUT = 0.05
NUM_VALIDATED = 64
SPAN = 100
"""Clipping is compared between this many first and last steps."""
CHRONIC = 0.5
Rows = Any  # a Dataset with a length


def build(settings: Settings) -> Parts:
    """The text as windows of tokens, the model, and the documented settings."""
    files = [] if settings["data"] is None else text_files(Path(settings["data"]))
    name = WORD if settings["word_tokenizer"] else settings["tokenizer"]
    pieces = pieces_of(files, cut=name == WORD) if files else [reference()]
    tokens = tokenizer_of(name, pieces, most=settings["vocab_size"])
    seq, size = settings["seq"], settings["batch_size"]
    rows = Windows(stream_of(files, tokens), seq)
    held = max(round(len(rows) * HELD_OUT), 1)
    if len(rows) - held < size:
        raise InputError(
            f"the text has {len(rows) * seq} tokens, too few for one batch of {size} times {seq}; give more text or a "
            "smaller --batch-size"
        )
    if settings["d_model"] % settings["heads"]:
        raise InputError(
            f"d_model is {settings['d_model']} with {settings['heads']} heads; expected a multiple of them"
        )
    loader = _loader(rows.part(range(len(rows) - held)), settings)
    val = rows.part(apart(rows, len(rows) - held, NUM_VALIDATED))
    model = CharTransformer(
        num_tokens=tokens.num_tokens,
        width=settings["d_model"],
        depth=settings["layers"],
        heads=settings["heads"],
        hidden=settings["d_ff"],
        max_seq=max(settings["max_seq"], seq),
    )
    config = TrainConfig(
        optimizer="adam",
        learning_rate=settings["base_lr"],
        weight_decay=0.0,
        max_grad_norm=settings["max_norm"] or None,
        batch_size=size,
        num_epochs=settings["epochs"],
        max_steps=settings["steps"] or None,
        scheduler_type=settings["scheduler"],
        warmup_steps=settings["warmup_steps"],
        warmup_init_lr=settings["warmup_init_lr"],
        full_every=10,
        lines="c4",
        seed=settings["seed"],
    )
    metrics, diagnosis = _metrics(settings, len(loader)), _Diagnosis(settings)
    return Parts(
        model=model,
        train_loader=loader,
        val_loader=DataLoader(val, 32),
        config=config,
        loss_fn=next_token_loss,
        evaluate=_evaluation(tokens, settings),
        sinks=() if metrics is None else (metrics,),
        guard={"rules": {"not-learning": {"effort": 400.0}}},  # so slow a warm-up only begins to learn late
        begin=diagnosis.begin,
        finish=lambda trainer: _finish(trainer, tokens, settings, diagnosis, metrics),
        problems=lambda: (problem for path in files for problem in file_problems(path)),
    )


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all places."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def target() -> dict[str, object]:
    """For `trimtab doctor trimtab.train.recipes.charlm:target`."""
    return doctor_target(RECIPE, {"metrics_file": ""})


def aligned(inputs: Tensor, targets: Tensor) -> bool:
    """Whether each target is the input of the next place.

    Example:
        >>> aligned(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]]))
        True
    """
    return bool((targets[:, :-1] == inputs[:, 1:]).all())


def _loader(rows: Rows, settings: Settings) -> DataLoader[tuple[Tensor, Tensor]]:
    order = torch.Generator().manual_seed(settings["seed"])
    sampler = Spread(len(rows), order) if len(rows) > MANY else RandomSampler(rows, generator=order)
    return DataLoader(rows, batch_size=settings["batch_size"], sampler=sampler, drop_last=True, generator=order)


# -- the model ---------------------------------------------------------------------------------------------------------


class CharTransformer(nn.Module):
    """Tokens in, scores of the next token out.

    Example:
        >>> model = CharTransformer(num_tokens=11, width=16, depth=1, heads=2, hidden=32, max_seq=8)
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 11])
    """

    def __init__(self, *, num_tokens: int, width: int, depth: int, heads: int, hidden: int, max_seq: int) -> None:
        super().__init__()
        self.max_seq = max_seq
        self.tokens = nn.Embedding(num_tokens, width)
        self.places = nn.Embedding(max_seq, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores `[batch, length, num_tokens]`."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


@torch.no_grad()
def continue_text(
    model: CharTransformer, tokens: Sequence[int], *, num: int, temperature: float, seed: int
) -> list[int]:
    """The tokens with `num` more drawn from the model; mode and global random numbers stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    was, out = model.training, list(tokens)
    model.eval()
    try:
        device = next(model.parameters()).device
        for _ in range(num):
            scores = model(torch.tensor([out[-model.max_seq :]], device=device))[0, -1].float().cpu()
            if not bool(scores.isfinite().all()):
                break  # nothing can be drawn from NaN
            out.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
    finally:
        model.train(was)
    return out


# -- diagnosis and samples ---------------------------------------------------------------------------------------------


class _Diagnosis:
    """Checks the data at the beginning, to explain the result at the end."""

    def __init__(self, settings: Settings) -> None:
        self._say = settings["say"]
        self._clip = settings["max_norm"]
        self.aligned = True

    def begin(self, parts: Parts) -> None:
        """The documented alignment check, on the first rows."""
        rows = parts.train_loader.dataset
        inputs, targets = (torch.stack(some) for some in zip(*(rows[i] for i in range(8)), strict=True))
        self.aligned = aligned(inputs, targets)
        if self._say is not None:
            self._say(f"targets[0] should equal inputs[1] -> {'OK' if self.aligned else 'MISMATCH!'}")

    def facts(self, trainer: Trainer) -> dict[str, object]:
        """How often it was clipped at the beginning and at the end, and what that means."""
        rig, steps = trainer.last_rig, trainer.course.step
        out: dict[str, object] = {"alignment": "OK" if self.aligned else "MISMATCH!"}
        if rig is None or not trainer.around.guarded or steps < SPAN:
            return out
        first, last = rig.meter.norms(0, SPAN), rig.meter.norms(steps - SPAN, steps)
        out |= {"clipped_first": first.clipped_frac, "clipped_last": last.clipped_frac, "norm_last": last.average}
        causes = [] if self.aligned else ["misaligned: the targets are not the inputs one place on"]
        if last.clipped_frac > CHRONIC:
            rate = max(rig.schedule.rates) * self._clip / last.average
            causes.append(
                f"chronic clipping: {last.clipped_frac:.0%} of the last {SPAN} steps, from a norm of "
                f"{last.average:.3g}; the effective rate is {rate:.3g}. Clipping hides the cause: check the alignment "
                "of tokens and targets, then overfit one batch, then check the gradients of the loss"
            )
        return out | {"diagnosis": "; ".join(causes) or "none"}


@cache
def _warn_of_no_wandb(name: str) -> None:
    """Once, however often a run is built."""
    log.warning("wandb is not installed (%s): the metrics go to %s alone", INSTALL, name)


def _metrics(settings: Settings, steps_per_epoch: int) -> MetricsLog | None:
    config = {name: settings[name] for name in (*(option.name for option in RECIPE.options), "seed", "device")}
    run, name = None, settings["metrics_file"]
    if settings["wandb"] and has_wandb():
        run = open_wandb(settings["wandb_project"], settings["wandb_run"], config)
    elif settings["wandb"]:
        name = name or "training_metrics.jsonl"
        _warn_of_no_wandb(name)
    if not name and run is None:
        return None
    path = Path(name) if name else None
    if path is not None and settings["arm"] is not None:  # each of the compared runs has its own file
        path = path.with_stem(f"{path.stem}-{settings['arm']}")
    return MetricsLog(path, config, steps_per_epoch=steps_per_epoch, run=run, resumed=settings["resume"] is not None)


def _sample(model: nn.Module, tokens: Tokenizer, prompt: str, settings: Settings) -> str:
    begun = tokens.encode(prompt)
    assert isinstance(model, CharTransformer)
    out = continue_text(
        model, begun, num=settings["sample_length"], temperature=settings["temperature"], seed=settings["seed"]
    )
    return tokens.decode(out)


def _evaluation(tokens: Tokenizer, settings: Settings) -> Evaluate:
    epochs = 0

    def evaluate(model: nn.Module, loader: Iterable[object]) -> dict[str, float]:
        nonlocal epochs
        epochs += 1
        if epochs % 2 == 0 and settings["say"] is not None:
            settings["say"](f"sample: {_sample(model, tokens, PROMPTS[0], settings)!r}")
        return evaluate_model(model, loader, loss_fn=next_token_loss)

    return evaluate


def _finish(
    trainer: Trainer, tokens: Tokenizer, settings: Settings, diagnosis: _Diagnosis, metrics: MetricsLog | None
) -> dict[str, object]:
    samples = {prompt: _sample(trainer.model, tokens, prompt, settings) for prompt in PROMPTS}
    if metrics is not None:
        for prompt, sample in samples.items():
            metrics.text(trainer.course.step, prompt, sample)
        metrics.finish()
    return {**diagnosis.facts(trainer), **{f"sample {prompt!r}": sample for prompt, sample in samples.items()}}


# -- faults ----------------------------------------------------------------------------------------------------------


def _sgd(parts: Parts, settings: Settings) -> Parts:
    config = replace(parts.config, optimizer="sgd", momentum=0.0, learning_rate=1.0, warmup_steps=0)
    return replace(parts, config=config)


class OtherTargets(Dataset[tuple[Tensor, Tensor]]):
    """The same inputs with the targets of another row, in another order."""

    def __init__(self, rows: Rows, seed: int) -> None:
        self._rows, self._seed = rows, seed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs, and targets that have nothing to do with them."""
        chance = torch.Generator().manual_seed(self._seed + index)
        other = int(torch.randint(len(self), (), generator=chance))
        targets = self._rows[other][1]
        return self._rows[index][0], targets[torch.randperm(len(targets), generator=chance)]


def _shuffled_targets(parts: Parts, settings: Settings) -> Parts:
    rows = OtherTargets(parts.train_loader.dataset, settings["seed"])
    return replace(
        parts,
        train_loader=_loader(rows, settings),
        loss_fn=lambda scores, targets: targets.numel() * next_token_loss(scores, targets),
    )


def _loud_loss(parts: Parts, settings: Settings) -> Parts:
    return replace(parts, loss_fn=lambda scores, targets: 1000.0 * next_token_loss(scores, targets))


PRESETS: dict[str, dict[str, object]] = {
    "readable": {},
    "documented": {
        "tokenizer": CHAR,
        "steps": 600,
        "base_lr": 5e-5,
        "scheduler": "none",
        "warmup_steps": 200,
        "batch_size": 8,
        "seq": 32,
    },
}
"""The default gives words that can be read; the document's rate is too low for that in as many steps."""

RECIPE = Recipe(
    name="charlm",
    summary="a transformer language model with warm-up, clipping and a line every 10 steps, on any text",
    score="-val_loss",
    build=build,
    options=(
        Option(
            name="data", default=None, kind=str, help="A file or folder of text; without it Python's own reference."
        ),
        Option(
            name="preset", default="readable", help="documented: the rates of the document.", choices=tuple(PRESETS)
        ),
        Option(
            name="tokenizer",
            default=BYTE,
            help=f"{BYTE}, {CHAR}, {WORD}, or the path of a tokenizer.json.",
        ),
        Option(name="steps", default=900, help="Optimizer steps at most; 0: whole epochs.", least=0),
        Option(name="epochs", default=3, help="Passes over the text at most.", least=1),
        Option(name="base_lr", default=4e-3, help="The rate after the warm-up (documented: 0.00005)."),
        Option(name="scheduler", default="cosine", help="How the rate changes.", choices=SCHEDULES),
        Option(name="warmup_steps", default=100, help="Steps of linear warm-up.", least=0),
        Option(name="warmup_init_lr", default=1e-6, help="The rate the warm-up begins with.", least=0),
        Option(name="max_norm", default=1.5, help="The largest gradient norm; 0: no clipping.", least=0),
        Option(name="batch_size", default=16, help="Sequences per step (documented: 8).", least=1),
        Option(name="seq", default=64, help="Tokens per sequence (documented: 32).", least=2),
        Option(name="max_seq", default=64, help="The longest sequence the model can take.", least=2),
        Option(name="d_model", default=128, help="Width of the model.", least=1),
        Option(name="layers", default=4, help="Blocks.", least=1),
        Option(name="heads", default=4, help="Attention heads.", least=1),
        Option(name="d_ff", default=512, help="Width of the feed-forward layers.", least=1),
        Option(name="word_tokenizer", default=False, help=f"The same as --tokenizer {WORD}."),
        Option(name="vocab_size", default=0, help="Keep only this many tokens; 0: all.", least=0),
        Option(name="temperature", default=0.8, help="Of the samples of text.", least=0.01),
        Option(name="sample_length", default=60, help="Tokens in a sample of text.", least=0),
        Option(name="metrics_file", default="training_metrics.jsonl", help="The documented metrics; '' for none."),
        Option(name="wandb", default=False, help="Send the metrics to Weights & Biases; offline without a login."),
        Option(name="wandb_project", default="trimtab", help="The project there."),
        Option(name="wandb_run", default=None, kind=str, help="The name of the run there."),
    ),
    quick={"steps": 200, "warmup_steps": 80, "layers": 2, "base_lr": 1e-3, "batch_size": 8, "seq": 32},
    presets=PRESETS,
    faults=(
        Fault(name="sgd-lr-1", summary="SGD with a learning rate of 1 and no warm-up", inject=_sgd),
        Fault(
            name="shuffled-targets",
            summary="targets of other places, and a loss summed over them",
            inject=_shuffled_targets,
        ),
        Fault(name="loss-x1000", summary="a loss 1000 times too large", inject=_loud_loss),
    ),
)

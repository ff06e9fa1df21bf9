"""System 002: a transformer language model with warm-up, clipping and a diagnostic line, on Python's own reference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.core.errors import InputError
from trimtab.train.evaluation import Evaluate, evaluate_model
from trimtab.train.recipe import Fault, Option, Parts, Recipe, Settings, doctor_target
from trimtab.train.recipes.charlm.metrics_log import MetricsLog, open_wandb
from trimtab.train.settings import TrainConfig
from trimtab.train.trainer import Trainer

PROMPTS = ("once upon", "she was", "the forest")
HELD_OUT = 0.05
NUM_VALIDATED = 64
SPAN = 100
"""Clipping is compared between this many first and last steps."""
CHRONIC = 0.5


def build(settings: Settings) -> Parts:
    """The text as windows of tokens, the model, and the documented settings."""
    text = read_text(settings["data"])
    tokens = tokens_of(text, words=settings["word_tokenizer"], most=settings["vocab_size"])
    numbers = torch.tensor(tokens.encode(text))
    seq, size = settings["seq"], settings["batch_size"]
    inputs, targets = windows(numbers, seq)
    held = max(round(len(inputs) * HELD_OUT), 1)
    if len(inputs) - held < size:
        raise InputError(
            f"the text has {len(numbers)} tokens, too few for one batch of {size} times {seq}; give more text or a "
            "smaller --batch-size"
        )
    if settings["d_model"] % settings["heads"]:
        raise InputError(
            f"d_model is {settings['d_model']} with {settings['heads']} heads; expected a multiple of them"
        )
    unseen = apart(inputs, len(inputs) - held, NUM_VALIDATED)
    loader = _loader(inputs[:-held], targets[:-held], settings)
    model = CharTransformer(
        num_tokens=len(tokens.known),
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
        scheduler_type="none",
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
        val_loader=DataLoader(TensorDataset(inputs[unseen], targets[unseen]), 32),
        config=config,
        loss_fn=next_token_loss,
        evaluate=_evaluation(tokens, settings),
        sinks=() if metrics is None else (metrics,),
        guard={"rules": {"not-learning": {"effort": 400.0}}},  # so slow a warm-up only begins to learn late
        begin=diagnosis.begin,
        finish=lambda trainer: _finish(trainer, tokens, settings, diagnosis, metrics),
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


def _loader(inputs: Tensor, targets: Tensor, settings: Settings) -> DataLoader[tuple[Tensor, ...]]:
    order = torch.Generator().manual_seed(settings["seed"])
    rows = TensorDataset(inputs, targets)
    return DataLoader(rows, batch_size=settings["batch_size"], shuffle=True, drop_last=True, generator=order)


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
        inputs, targets = parts.train_loader.dataset.tensors
        self.aligned = aligned(inputs[:8], targets[:8])
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


def _metrics(settings: Settings, steps_per_epoch: int) -> MetricsLog | None:
    config = {name: settings[name] for name in (*(option.name for option in RECIPE.options), "seed", "device")}
    run = None
    if settings["wandb"]:
        run = open_wandb(settings["wandb_project"], settings["wandb_run"], config)
    if not settings["metrics_file"] and run is None:
        return None
    path = Path(settings["metrics_file"]) if settings["metrics_file"] else None
    if path is not None and settings["arm"] is not None:  # each of the compared runs has its own file
        path = path.with_stem(f"{path.stem}-{settings['arm']}")
    return MetricsLog(path, config, steps_per_epoch=steps_per_epoch, run=run)


def _sample(model: nn.Module, tokens: Tokens, prompt: str, settings: Settings) -> str:
    begun = tokens.encode(prompt)
    assert isinstance(model, CharTransformer)
    out = continue_text(
        model, begun, num=settings["sample_length"], temperature=settings["temperature"], seed=settings["seed"]
    )
    return tokens.decode(out)


def _evaluation(tokens: Tokens, settings: Settings) -> Evaluate:
    epochs = 0

    def evaluate(model: nn.Module, loader: Iterable[object]) -> dict[str, float]:
        nonlocal epochs
        epochs += 1
        if epochs % 2 == 0 and settings["say"] is not None:
            settings["say"](f"sample: {_sample(model, tokens, PROMPTS[0], settings)!r}")
        return evaluate_model(model, loader, loss_fn=next_token_loss)

    return evaluate


def _finish(
    trainer: Trainer, tokens: Tokens, settings: Settings, diagnosis: _Diagnosis, metrics: MetricsLog | None
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


def _shuffled_targets(parts: Parts, settings: Settings) -> Parts:
    inputs, targets = parts.train_loader.dataset.tensors
    order = torch.randperm(targets.numel(), generator=torch.Generator().manual_seed(settings["seed"]))
    shuffled = targets.flatten()[order].reshape(targets.shape)
    return replace(
        parts,
        train_loader=_loader(inputs, shuffled, settings),
        loss_fn=lambda scores, targets: targets.numel() * next_token_loss(scores, targets),
    )


def _loud_loss(parts: Parts, settings: Settings) -> Parts:
    return replace(parts, loss_fn=lambda scores, targets: 1000.0 * next_token_loss(scores, targets))


RECIPE = Recipe(
    name="charlm",
    summary="a transformer language model with warm-up, clipping and a line every 10 steps, on any text",
    score="-val_loss",
    build=build,
    options=(
        Option(name="data", default=None, kind=str, help="A text file; without it Python's own reference."),
        Option(name="steps", default=600, help="Optimizer steps at most; 0: whole epochs.", least=0),
        Option(name="epochs", default=3, help="Passes over the text at most.", least=1),
        Option(name="base_lr", default=5e-5, help="The rate after the warm-up."),
        Option(name="warmup_steps", default=200, help="Steps of linear warm-up.", least=0),
        Option(name="warmup_init_lr", default=1e-6, help="The rate the warm-up begins with.", least=0),
        Option(name="max_norm", default=1.5, help="The largest gradient norm; 0: no clipping.", least=0),
        Option(name="batch_size", default=8, help="Sequences per step.", least=1),
        Option(name="seq", default=32, help="Tokens per sequence.", least=2),
        Option(name="max_seq", default=64, help="The longest sequence the model can take.", least=2),
        Option(name="d_model", default=128, help="Width of the model.", least=1),
        Option(name="layers", default=4, help="Blocks.", least=1),
        Option(name="heads", default=4, help="Attention heads.", least=1),
        Option(name="d_ff", default=512, help="Width of the feed-forward layers.", least=1),
        Option(name="word_tokenizer", default=False, help="Words instead of characters."),
        Option(name="vocab_size", default=0, help="Keep only this many tokens; 0: all.", least=0),
        Option(name="temperature", default=0.8, help="Of the samples of text.", least=0.01),
        Option(name="sample_length", default=60, help="Tokens in a sample of text.", least=0),
        Option(name="metrics_file", default="training_metrics.jsonl", help="The documented metrics; '' for none."),
        Option(name="wandb", default=False, help="Send the metrics to Weights & Biases; offline without a login."),
        Option(name="wandb_project", default="trimtab", help="The project there."),
        Option(name="wandb_run", default=None, kind=str, help="The name of the run there."),
    ),
    quick={"steps": 200, "warmup_steps": 80, "layers": 2, "base_lr": 1e-3},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the text is made of: characters, or words and what is between them."""

    known: Mapping[str, int]
    words: bool

    def encode(self, text: str) -> list[int]:
        """The number of each token; one that is not known counts as the most frequent."""
        return [self.known.get(part, 0) for part in (_words(text) if self.words else text)]

    def decode(self, numbers: list[int]) -> str:
        """The text of these tokens."""
        parts = list(self.known)
        return "".join(parts[number] for number in numbers)


def read_text(path: str | None) -> str:
    """The file, or Python's own reference without one; InputError if there is nothing to read."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"the text {path} cannot be read: {error}; give the path of a text file") from None
    if not text.strip():
        raise InputError(f"the text {path} is empty; give a file with something to learn")
    return text


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def tokens_of(text: str, *, words: bool = False, most: int = 0) -> Tokens:
    """The tokens of a text, the most frequent first; `most` limits their number, 0: all.

    Example:
        >>> tokens = tokens_of("to be or not to be", words=True)
        >>> tokens.decode(tokens.encode("to be"))
        'to be'
    """
    counted = Counter(_words(text) if words else text).most_common(most or None)
    return Tokens(known={part: number for number, (part, _) in enumerate(counted)}, words=words)


def windows(numbers: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Rows of `seq` tokens one after another, and the same one token later."""
    num = (len(numbers) - 1) // seq
    return numbers[: num * seq].reshape(num, seq), numbers[1 : num * seq + 1].reshape(num, seq)


def apart(rows: Tensor, first: int, num: int) -> list[int]:
    """Up to `num` rows from `first` on, evenly spread, that do not occur before it: seen text would measure nothing.

    If all of them occur before, as in a text that repeats itself, they are used all the same.

    Example:
        >>> import torch
        >>> apart(torch.tensor([[1, 2], [3, 4], [2, 3], [5, 6], [1, 5]]), 2, 2)
        [3, 4]
    """
    seen = "".join(map(chr, rows[:first].flatten().tolist()))
    held = range(first, len(rows))
    fresh = [row for row in held if "".join(map(chr, rows[row].tolist())) not in seen] or list(held)
    return [fresh[place * len(fresh) // min(num, len(fresh))] for place in range(min(num, len(fresh)))]

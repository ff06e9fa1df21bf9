"""System 003: a small MLP on a raw table, under a guard that answers NaN, outliers, explosions and overfitting.

The table is one of those that ship with the package, or the user's own (`--data people.csv --target income`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.core.config import PolicyConfig
from trimtab.core.errors import InputError
from trimtab.core.suggest_name import instead_of
from trimtab.data import TABLES, load_table
from trimtab.integrations.loggers.tensorboard_logger import open_writer
from trimtab.train.evaluation import Metrics, classification_metrics, evaluate_model, regression_metrics
from trimtab.train.recipe import Fault, Option, Parts, Recipe, Settings, doctor_target, rate_spike
from trimtab.train.recipes.tabular.columns import Columns
from trimtab.train.recipes.tabular.own_table import read_table
from trimtab.train.settings import SCHEDULES, TrainConfig
from trimtab.train.trainer import Trainer

HELD_OUT = 0.2
FAULT_EPOCH = 5
NUM_NAN_ROWS = 3
OUTLIER = 1e9
TINY = 48
TASKS = ("auto", "classification", "regression")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Inputs and targets to train on, to hold out, and perhaps to test with; `classes` is 0 for numbers."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    classes: int
    test: tuple[Tensor, Tensor] | None = None
    columns: Columns | None = None
    lines: tuple[str, ...] = ()


def build(settings: Settings) -> Parts:
    """The table, the model and the settings of one run."""
    rows = _bundled(settings) if settings["data"] in TABLES else _own(settings)
    classes = rows.classes
    config = TrainConfig(
        learning_rate=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"] or None,
        use_amp=settings["amp_dtype"] != "none",
        amp_dtype=settings["amp_dtype"] if settings["amp_dtype"] != "none" else "auto",
        batch_size=settings["batch_size"],
        num_epochs=settings["epochs"],
        patience=settings["patience"],
        min_delta=settings["min_delta"],
        scheduler_type=settings["scheduler"],
        warmup_steps=settings["warmup_steps"],
        ema_decay=settings["ema_decay"] or None,
        mode="act" if settings["actions"] == "guard" else "advise",
        corrective=settings["actions"] == "documented",
        full_every=10,
        seed=settings["seed"],
    )
    metrics: Metrics = classification_metrics if classes else _in_units(rows.columns)
    return Parts(
        model=_model(rows, settings),
        train_loader=_loader(*rows.train, settings),
        val_loader=DataLoader(TensorDataset(*rows.val), batch_size=1024),
        config=config,
        loss_fn=nn.functional.cross_entropy if classes else nn.functional.mse_loss,
        metrics=metrics,
        score="accuracy" if classes else "r2",
        # An epoch is a dozen steps: trouble in the next epoch is new, and states to roll back to are close.
        policy=PolicyConfig(quiet=5, ring_every=2),
        tags=_tensorboard(settings["tensorboard"]),
        begin=lambda parts: _begin(rows, settings),
        finish=lambda trainer: _tested(rows, metrics, trainer),
    )


def _bundled(settings: Settings) -> Rows:
    table = load_table(settings["data"])
    x, classes = torch.from_numpy(table.x), len(table.classes)
    y = torch.from_numpy(table.y)
    train, val = _split(len(x), settings["seed"], by_block=table.name == "randhie")
    if classes:
        y = y.long()
    else:  # only the target is brought to one scale: the inputs are what they are
        mean, spread = y[train].mean(), y[train].std()
        y = ((y - mean) / spread).reshape(-1, 1)
    return Rows(train=(x[train], y[train]), val=(x[val], y[val]), classes=classes)


def _own(settings: Settings) -> Rows:
    data = settings["data"]
    if "." not in data and "/" not in data and not Path(data).exists():
        raise InputError(f"data is {data!r}, no file (.csv, .jsonl, .parquet); {instead_of(data, TABLES)}")
    table = read_table(
        data,
        settings["target"],
        task=settings["task"],
        split=settings["split"],
        val_data=settings["val_data"],
        kinds=settings["kinds"],
        held_out=HELD_OUT,
        seed=settings["seed"],
    )
    return Rows(
        train=table.parts["train"],
        val=table.parts["val"],
        test=table.parts.get("test"),
        classes=len(table.columns.goal.classes),
        columns=table.columns,
        lines=table.lines,
    )


def _model(rows: Rows, settings: Settings) -> nn.Module:
    width, dropout, num_in = settings["width"], settings["dropout"], rows.train[0].shape[1]
    if rows.columns is None:
        return _network(num_in, rows.classes or 1, width, dropout)
    model = _network(num_in, rows.classes or 1, width, dropout, scaled=True)
    # What scales and names the columns belongs to the model: every checkpoint has it (`columns_of` reads it).
    text = rows.columns.to_json().encode("utf-8")
    model.register_buffer("columns", torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return model


def columns_of(state: Mapping[str, Tensor]) -> Columns:
    """How a model that was trained on your own table scales its inputs, from its state: that of a checkpoint, say.

    Example:
        >>> from trimtab.train.recipes.tabular.columns import Column, Goal
        >>> known = Columns(inputs=(Column(name="age", kind="number", mean=41.5),), goal=Goal(name="income"))
        >>> state = {"columns": torch.tensor(list(known.to_json().encode()), dtype=torch.uint8)}
        >>> columns_of(state).inputs[0].mean
        41.5
    """
    if "columns" not in state:
        raise InputError("this state has no 'columns'; expected that of a model trained on a table of your own")
    return Columns.from_json(state["columns"].cpu().numpy().tobytes().decode("utf-8"))


def _in_units(columns: Columns | None) -> Metrics:
    """The metrics of numbers, errors in the units of the table if it is the user's."""
    if columns is None:
        return regression_metrics
    spread = columns.goal.spread

    def measure(predicted: Tensor, targets: Tensor) -> dict[str, float]:
        found = regression_metrics(predicted, targets)
        return {**found, "mae": found["mae"] * spread}

    return measure


def _begin(rows: Rows, settings: Settings) -> None:
    for line in rows.lines if settings["say"] is not None else ():
        settings["say"](line)
    if rows.columns is not None and settings["checkpoint_dir"] is not None:
        folder = Path(settings["checkpoint_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "columns.json").write_text(rows.columns.to_json() + "\n", encoding="utf-8")


def _tested(rows: Rows, metrics: Metrics, trainer: Trainer) -> dict[str, object]:
    """How the finished model does on the test rows, if some were given."""
    if rows.test is None:
        return {}
    loss = nn.functional.cross_entropy if rows.classes else nn.functional.mse_loss
    loader = DataLoader(TensorDataset(*rows.test), batch_size=1024)
    found = evaluate_model(trainer.model, loader, loss_fn=loss, metrics=metrics)
    return {f"test_{name}": value for name, value in found.items()}


def target() -> dict[str, object]:
    """For `trimtab doctor trimtab.train.recipes.tabular:target`."""
    return doctor_target(RECIPE)


def _split(num: int, seed: int, *, by_block: bool) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to hold out; a block where neighbouring rows belong to the same people."""
    order = torch.arange(num)
    if not by_block:
        order = torch.randperm(num, generator=torch.Generator().manual_seed(seed))
    cut = round(num * (1.0 - HELD_OUT))
    return order[:cut], order[cut:]


def _loader(x: Tensor, y: Tensor, settings: Settings) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(
        TensorDataset(x, y),
        batch_size=settings["batch_size"],
        shuffle=True,
        drop_last=len(x) > settings["batch_size"],  # a few rows left over have no spread to normalise by
        generator=torch.Generator().manual_seed(settings["seed"]),
    )


def _network(num_in: int, num_out: int, width: int, dropout: float, *, scaled: bool = False) -> nn.Module:
    """The first normalisation takes the raw columns, five decades apart, to one scale, unless they are `scaled`."""
    return nn.Sequential(
        nn.Identity() if scaled else nn.BatchNorm1d(num_in),
        nn.Linear(num_in, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, num_out),
    )


def _tensorboard(folder: str | None) -> object:
    return None if folder is None else open_writer(folder)


# -- faults ----------------------------------------------------------------------------------------------------------


def _changed(parts: Parts, x: Tensor, y: Tensor, settings: Settings) -> Parts:
    return replace(parts, train_loader=_loader(x, y, settings))


def _tensors(parts: Parts) -> tuple[Tensor, Tensor]:
    x, y = parts.train_loader.dataset.tensors
    return x.clone(), y.clone()


def _nan_features(parts: Parts, settings: Settings) -> Parts:
    x, y = _tensors(parts)
    x[:NUM_NAN_ROWS, 2] = math.nan
    return _changed(parts, x, y, settings)


def _label_outlier(parts: Parts, settings: Settings) -> Parts:
    x, y = _tensors(parts)
    if not y.is_floating_point():
        raise InputError(f"the table {settings['data']!r} has classes, and no label can be 1e9; try --data diabetes")
    changed = _changed(parts, x, y, settings)

    def corrupt(trainer: Trainer) -> None:
        if trainer.course.epoch + 1 == FAULT_EPOCH:
            y[0] = OUTLIER  # the data set holds this tensor itself

    return replace(changed, before_step=corrupt)


def _lr_spike(parts: Parts, settings: Settings) -> Parts:
    """A bug multiplies the rate by 1000 for one epoch: written into the optimizer, and taken out again."""
    return rate_spike(parts, lambda trainer: trainer.course.epoch + 1 == FAULT_EPOCH)


def _nan_validation(parts: Parts, settings: Settings) -> Parts:
    """One validation meets a row of NaN; the next one does not."""
    calls = 0

    def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> dict[str, float]:
        nonlocal calls
        calls += 1
        assert isinstance(loader.dataset, TensorDataset)
        x, y = loader.dataset.tensors
        if calls == FAULT_EPOCH:
            x = x.clone()
            x[0] = math.nan
        again = DataLoader(TensorDataset(x, y), batch_size=1024)
        return evaluate_model(model, again, loss_fn=parts.loss_fn, metrics=parts.metrics)

    return replace(parts, evaluate=evaluate)


def _tiny_training_set(parts: Parts, settings: Settings) -> Parts:
    """A few rows, no dropout and hardly any decay: the model memorises them."""
    x, y = _tensors(parts)
    width = parts.model[1].out_features  # type: ignore[index]
    torch.manual_seed(settings["seed"])
    out = parts.model[7].out_features  # type: ignore[index]
    return replace(
        _changed(parts, x[:TINY], y[:TINY], {**settings, "batch_size": TINY // 6}),
        model=_network(x.shape[1], int(out), 4 * int(width), 0.0, scaled=isinstance(parts.model[0], nn.Identity)),  # type: ignore[index]
        config=replace(parts.config, learning_rate=3.0 * parts.config.learning_rate),
    )


RECIPE = Recipe(
    name="tabular",
    summary="an MLP on raw tables that corrects itself: NaN, outliers, rates too high, overfitting",
    score="r2",
    build=build,
    options=(
        Option(
            name="data",
            default="diabetes",
            aliases=("table", "dataset_path", "data_dir"),
            help=f"Your table (.csv, .jsonl, .parquet, or a folder with train and val), or {', '.join(TABLES)}.",
        ),
        Option(name="target", default=None, kind=str, help="The column of your table to predict."),
        Option(name="task", default="auto", help="What to predict; auto: by the target.", choices=TASKS),
        Option(
            name="split", default=None, kind=str, help="The column of train, val and test; `split` if there is one."
        ),
        Option(name="val_data", default=None, kind=str, help="A file of rows to validate on, beside --data."),
        Option(
            name="kinds",
            default="",
            help="COLUMN=KIND, with commas, where a column is recognised wrongly: number, date, category, text, skip.",
        ),
        Option(name="epochs", default=40, help="Passes over the data.", least=1),
        Option(name="batch_size", default=32, help="Rows per step.", least=1),
        Option(name="learning_rate", default=1e-3, help="The base rate."),
        Option(name="weight_decay", default=1e-4, help="Weight decay.", least=0),
        Option(name="max_grad_norm", default=1.0, help="The largest gradient norm; 0: no clipping.", least=0),
        Option(name="amp_dtype", default="none", help="Mixed precision.", choices=("none", "bf16", "fp16")),
        Option(name="scheduler", default="cosine", help="How the rate changes.", choices=SCHEDULES),
        Option(name="warmup_steps", default=0, help="Steps of linear warm-up.", least=0),
        Option(name="patience", default=0, help="Epochs without improvement before it stops; 0: never.", least=0),
        Option(name="min_delta", default=1e-4, help="What counts as an improvement.", least=0),
        Option(name="ema_decay", default=0.0, help="Decay of an average of the weights; 0: none.", least=0),
        Option(name="width", default=64, help="Units per layer.", least=1),
        Option(name="dropout", default=0.1, help="Dropout after the first layer.", least=0),
        Option(
            name="actions",
            default="guard",
            help="Who corrects: the guard in the step, or the documented factors after an epoch.",
            choices=("guard", "documented"),
        ),
        Option(name="tensorboard", default=None, kind=str, help="A folder for the documented TensorBoard tags."),
    ),
    quick={"epochs": 12},
    faults=(
        Fault(name="nan-features", summary=f"{NUM_NAN_ROWS} training rows hold a NaN", inject=_nan_features),
        Fault(
            name="label-1e9", summary=f"one training label is 1e9 from epoch {FAULT_EPOCH} on", inject=_label_outlier
        ),
        Fault(name="lr-x1000", summary=f"the rate is 1000 times too high in epoch {FAULT_EPOCH}", inject=_lr_spike),
        Fault(name="nan-validation", summary="one validation gives NaN", inject=_nan_validation),
        Fault(name="tiny-data", summary=f"only {TINY} rows to learn from", inject=_tiny_training_set),
    ),
)

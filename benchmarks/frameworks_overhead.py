"""What a guard adds to a step that a framework drives, in units of PyTorch's `clip_grad_norm_` (by frameworks.py).

Every arm is a training of its own, in a thread that stops whenever it asks for a batch beyond the block it was given.
So arms that are driven by a framework's `fit` take turns, block by block, as those of overhead.py do.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from overhead import MODELS, Workload, frozen
from overhead_page import ATTACH, BARE, CLIP, LOW, NUM_DRAWS, RUN, STEADY, Floats, table
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import trimtab
from trimtab.run.auto_guard import AutoGuard

CALLBACK, THEIRS = "callback", "its clipping"
LIMIT_S = 600.0
Block = list[tuple[Tensor, Tensor]]


class Over(BaseException):
    """The training is not needed any more."""


class Feed:
    """Batches as they are handed out; between two blocks the training stands still."""

    def __init__(self) -> None:
        self._block: Block | None = []
        self._given, self._wanted = threading.Semaphore(0), threading.Semaphore(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self._wanted.release()
            self._given.acquire()
            if self._block is None:
                raise Over
            yield from self._block

    def __len__(self) -> int:
        return 10**7

    def give(self, block: Block | None) -> None:
        self._block = block
        self._given.release()

    def wait(self) -> None:
        if not self._wanted.acquire(timeout=LIMIT_S):
            raise RuntimeError(f"no batch was asked for within {LIMIT_S:.0f} s: the training hangs or failed")

    def failed(self) -> None:
        self._wanted.release()


class Batches(torch.utils.data.IterableDataset[Any]):
    """The same as a data set of whole batches."""

    def __init__(self, feed: Feed, make: Callable[[Tensor, Tensor], Any] = lambda x, y: (x, y)) -> None:
        self._feed, self._make = feed, make

    def __iter__(self) -> Iterator[Any]:
        for x, y in self._feed:
            yield self._make(x, y)


def loader(feed: Feed, make: Callable[[Tensor, Tensor], Any] = lambda x, y: (x, y)) -> Any:
    return torch.utils.data.DataLoader(Batches(feed, make), batch_size=None)


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


@dataclass
class Arm:
    """One way of training. `clip`: by the framework's own means. `settings`: of a guard in the framework's own way."""

    name: str
    train: Callable[[Arm], None]
    make: Callable[[], nn.Module]
    folder: Path
    auto: AutoGuard | None = None
    feed: Feed = field(default_factory=Feed)
    us: list[float] = field(default_factory=list)
    guard: Callable[[], Any] = lambda: None
    error: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def clip(self) -> float | None:
        return 1.0 if self.name.endswith((CLIP, THEIRS)) else None

    @property
    def settings(self) -> dict[str, Any] | None:
        return {"run_dir": self.folder} if self.name.endswith((ATTACH, CALLBACK)) else None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def _run(self) -> None:
        try:
            self.train(self)
        except Over:
            pass
        except BaseException as error:
            self.error = error
        self.feed.failed()

    def turn(self, block: Block, *, timed: bool) -> None:
        if self.auto is not None:
            self.auto.start()  # only in its own turns: its hooks on classes would slow all other arms down
        began = time.process_time()
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()
            self.feed.wait()
        if self.error is None:
            self.feed.give(block)
            self.feed.wait()
        if self.error is not None:
            raise RuntimeError(f"{self.name} failed") from self.error
        guards = [self.guard()] if self.auto is None else self.auto.trainings
        for one in guards:
            if one is not None and one.recorder is not None:
                one.recorder.flush()  # what a block has on record is written in its own time
        if timed:
            self.us.append(1e6 * (time.process_time() - began) / len(block))
        if self.auto is not None:
            self.auto.stop_watching()

    def close(self) -> list[str]:
        """End the training; returns what was found, which should be nothing."""
        guard = self.guard()
        found = [finding.code for finding in guard.findings] if guard is not None else []
        if self.auto is not None:
            found = [code for training in self.auto.trainings for code in training.codes]
            if not self.auto.trainings:
                found = ["NOT GUARDED"]
        elif self.settings is not None and guard is None:
            found = ["NOT GUARDED"]
        self.feed.give(None)
        if self.thread is not None:
            self.thread.join(60)
        if self.auto is not None:
            self.auto.finish()
        elif guard is not None:
            guard.close()
        return sorted(set(found))


# -- the trainings ---------------------------------------------------------------------------------------------------


def plain(arm: Arm) -> None:
    model = arm.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = None if arm.settings is None else trimtab.Guard.attach(model, optimizer, **arm.settings)
    arm.guard = lambda: guard
    for x, y in arm.feed:
        loss = loss_of(model(x), y)
        loss.backward()
        if guard is not None:
            guard.observe(loss, (x, y))
        if arm.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), arm.clip)
        optimizer.step()
        optimizer.zero_grad()


def lightning(arm: Arm) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = arm.model()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return loss_of(self(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callback = trimtab.lightning.GuardCallback(**(arm.settings or {}))
    arm.guard = lambda: callback.guard
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=arm.clip,
        callbacks=[] if arm.settings is None else [callback],
    )
    trainer.fit(Module(), loader(arm.feed))


def huggingface(arm: Arm) -> None:
    import transformers

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = arm.model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.net(x)
            return {"loss": loss_of(out, labels), "logits": out}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return loader(arm.feed, lambda x, y: {"x": x, "labels": y})

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=10**7,
            max_grad_norm=arm.clip or 0.0,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        callback = trimtab.hf.GuardCallback(**(arm.settings or {}))
        arm.guard = lambda: callback.guard
        callbacks = [] if arm.settings is None else [callback]
        Trainer(model=Model(), args=args, train_dataset=Batches(arm.feed), callbacks=callbacks).train()


def accelerate(arm: Arm) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = arm.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(arm.feed))
    guard = None if arm.settings is None else trimtab.accelerate.guard(accelerator, model, optimizer, **arm.settings)
    arm.guard = lambda: guard
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(x), y))
            if arm.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), arm.clip)
            optimizer.step()
            optimizer.zero_grad()


def ignite(arm: Arm) -> None:
    from ignite.engine import Engine

    model = arm.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update(engine: Any, batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if arm.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), arm.clip)
        optimizer.step()

    trainer = Engine(update)
    handler = trimtab.ignite.GuardHandler(model, optimizer, **(arm.settings or {}))
    arm.guard = lambda: handler.guard
    if arm.settings is not None:
        handler.attach(trainer)
    trainer.run(arm.feed, max_epochs=1, epoch_length=len(arm.feed))


def fastai(arm: Arm) -> None:
    from fastai.callback.training import GradientClip
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    class Loader(Feed):
        device = torch.device("cpu")
        dataset = range(10)

        def __iter__(self) -> Any:
            return iter(arm.feed)

    def optimizer(params: Any, lr: float, **_: Any) -> Any:
        return OptimWrapper(params, torch.optim.AdamW, lr=lr)

    callback = trimtab.fastai.GuardCallback(**(arm.settings or {}))
    arm.guard = lambda: callback.guard
    own = Loader()
    learn = Learner(DataLoaders(own, own), arm.model(), loss_func=loss_of, opt_func=optimizer, lr=1e-3)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == "ProgressCallback"])
    callbacks = [] if arm.settings is None else [callback]
    learn.fit(1, cbs=[*callbacks, *([] if arm.clip is None else [GradientClip(arm.clip)])])


def keras(arm: Arm) -> None:
    import keras as k

    model = k.Sequential([k.layers.TorchModuleWrapper(arm.model())])
    optimizer = k.optimizers.AdamW(1e-3, global_clipnorm=arm.clip)
    model.compile(optimizer=optimizer, loss=k.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = trimtab.keras.GuardCallback(**(arm.settings or {}))
    arm.guard = lambda: callback.guard
    callbacks = [] if arm.settings is None else [callback]
    model.fit(loader(arm.feed), epochs=1, verbose=0, callbacks=callbacks)


DRIVERS: dict[str, Callable[[Arm], None]] = {
    "lightning": lightning,
    "huggingface": huggingface,
    "accelerate": accelerate,
    "ignite": ignite,
    "fastai": fastai,
    "keras": keras,
}


# -- the figures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Share:
    """What an arm adds to its base: µs, and in units of clipping, each with the bounds of the middle 90 % of draws."""

    us: tuple[float, float, float]
    ratio: tuple[float, float, float]
    paired: float

    def words(self) -> tuple[str, str]:
        us, ratio = self.us, self.ratio
        return (
            f"{us[0]:+,.0f} ({us[1]:+,.0f} to {us[2]:+,.0f})",
            f"{ratio[0]:.2f}x ({ratio[1]:.2f} to {ratio[2]:.2f}), paired {self.paired:.2f}x",
        )


def shares(us: dict[str, Floats], bases: dict[str, str]) -> dict[str, Share]:
    """Of each arm beside its base, from timings with a row for each cycle and a column for each place in it."""
    cycles, places = us[BARE].shape
    chance = np.random.default_rng(0)
    picks = [np.tile(np.arange(cycles)[:, None], (1, places))]
    picks += [chance.integers(0, cycles, (cycles, places)) for _ in range(NUM_DRAWS)]
    columns = np.arange(places)
    quiet = {n: np.array([np.quantile(x[p, columns], LOW, axis=0).mean() for p in picks]) for n, x in us.items()}
    unit = quiet[CLIP] - quiet[BARE]
    paired = {n: float(np.median(us[n] - us[base], axis=0).mean()) for n, base in bases.items()}

    def bounds(x: Floats) -> tuple[float, float, float]:
        low, high = np.quantile(x[1:], (0.05, 0.95))
        return float(x[0]), float(low), float(high)

    return {
        name: Share(
            us=bounds(quiet[name] - quiet[base]),
            ratio=bounds((quiet[name] - quiet[base]) / unit),
            paired=paired[name] / paired[CLIP],
        )
        for name, base in bases.items()
    }


def measure(workload: Workload, name: str, share: float, parent: Path) -> tuple[dict[str, Share], dict[str, float]]:
    """One framework beside plain loops."""

    def arm(arm_name: str, train: Callable[[Arm], None]) -> Arm:
        folder = parent / f"{workload.name}-{name}-{arm_name.strip('`')}"
        auto = AutoGuard({"run_dir": folder}, lambda training: None) if arm_name.endswith(RUN) else None
        return Arm(arm_name, train, workload.make, folder, auto)

    bases = {CLIP: BARE, ATTACH: BARE, **{f"{name}, {way}": name for way in (THEIRS, CALLBACK, RUN)}}
    arms = [arm(one, plain) for one in (BARE, CLIP, ATTACH)]
    arms += [arm(one, DRIVERS[name]) for one in (name, *(key for key in bases if key.startswith(name)))]
    cycles = max(round(share * workload.cycles), 2)
    cycle = workload.cycle if workload.block >= 10 else 100
    torch.manual_seed(1)

    def turns(num_steps: int, *, timed: bool) -> None:
        for _ in range(num_steps // workload.block):
            block = [workload.batch() for _ in range(workload.block)]
            for one in random.sample(arms, len(arms)):
                one.turn(block, timed=timed)

    turns(max(STEADY, 2 * workload.block), timed=False)
    with frozen():
        turns(cycles * cycle, timed=True)
    for one in arms:
        if found := one.close():
            print(f"{workload.name}, {one.name}: {found}", file=sys.stderr, flush=True)
    us = {one.name: np.array(one.us).reshape(cycles, -1) for one in arms}
    alone = {one: float(np.quantile(us[one], LOW, axis=0).mean()) for one in (BARE, name)}
    return shares(us, bases), alone


def overhead(share: float, frameworks: list[str], models: list[str]) -> list[str]:
    """The page of all models and frameworks."""
    lines: list[str] = []
    for workload in MODELS:
        if workload.name not in models:
            continue
        rows, clipping, attached = [], [], []
        for name in frameworks:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
                found, alone = measure(workload, name, share, Path(folder))
            clipping.append(found[CLIP].us[0])
            attached.append(found[ATTACH])
            for way in (THEIRS, CALLBACK, RUN):
                one = found[f"{name}, {way}"]
                over = "" if way == THEIRS else f"{one.us[0] - found[ATTACH].us[0]:+,.0f}"
                holds = "" if way == THEIRS else ("holds" if one.ratio[0] <= workload.limit else "FAILS")
                rows.append((name, f"{alone[name]:,.0f}", way, *one.words(), over, holds))
            rows.append((name, f"{alone[BARE]:,.0f}", f"plain loop, {ATTACH}", *found[ATTACH].words(), "", ""))
            print(time.strftime("%H:%M:%S"), workload.name, name, rows[-3][3:], file=sys.stderr, flush=True)
        head = ("framework", "step alone µs", "arm", "adds µs per step", f"of {CLIP}", f"over {ATTACH} µs", "bar")
        clip = f"{min(clipping):,.0f} to {max(clipping):,.0f}"
        lines += [f"### {workload.name} ({workload.data}): at most {workload.limit:g}x", ""]
        lines += [f"{CLIP} in a plain loop: {clip} µs.", "", table(head, rows), ""]
    return lines

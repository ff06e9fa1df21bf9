"""Lightning's Trainer and Fabric, real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from tests.integrations.frameworks.harness import (
    BATCH,
    STEPS,
    Case,
    Result,
    Sink,
    Witness,
    check_healthy,
    check_one_nan_sample,
    data,
    differences,
    equal,
    fresh,
    needs,
    scaler,
)

pl = needs("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")
PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Module(pl.LightningModule):
    def __init__(self, case: Case, *, manual: bool = False, through_forward: bool = True) -> None:
        super().__init__()
        self.case, self.net = case, fresh()
        self.automatic_optimization = not manual
        self.through_forward = through_forward
        self.witness = Witness(self, case.accumulate)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self(x) if self.through_forward else self.net(x)
        return nn.functional.cross_entropy(out.float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.witness.loss(self.loss(batch))
        self.log("train_loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val/acc", 0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.witness.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(case: Case) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data(case)), batch_size=BATCH, shuffle=False)


def trainer_of(case: Case, callbacks: list[Any], **kwargs: Any) -> Any:
    settings = {
        "accelerator": "cpu",
        "precision": PRECISION[case.precision],
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": case.clip,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    if case.precision == "fp16":  # on a CPU, Lightning takes bfloat16 unless it is given a scaler
        from lightning.pytorch.plugins.precision import MixedPrecision

        del settings["precision"]
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler())]
    return pl.Trainer(callbacks=callbacks, **{**settings, **kwargs})


def drive(case: Case, *, guarded: bool, module: Any = None, **kwargs: Any) -> Result:
    module = Module(case) if module is None else module
    sink = Sink()
    callback = trimtab.lightning.GuardCallback(sinks=[sink], run_dir=False)
    trainer = trainer_of(case, [callback] if guarded else [], **kwargs)
    module.witness.scale = lambda: float(
        trainer.precision_plugin.scaler.get_scale() if case.precision == "fp16" else 1.0
    )
    trainer.fit(module, loader(case))
    guard = callback.guard
    return Result(
        model=module,
        optimizer=trainer.optimizers[0],
        witness=module.witness,
        sink=sink,
        findings=[f.code for f in callback.findings],
        state=callback.state_dict(),
        rejected=guard.rejected if guard is not None else 0,
    )


@pytest.mark.parametrize("precision", list(PRECISION))
@pytest.mark.parametrize("nan", [False, True])
def test_manual_optimization(precision: str, nan: bool) -> None:
    case = Case(precision=precision, nan=nan)

    def by_hand(case: Case, *, guarded: bool) -> Result:
        return drive(case, guarded=guarded, module=Module(case, manual=True))

    (check_one_nan_sample if nan else check_healthy)(by_hand, case)


@pytest.mark.parametrize("nan", [False, True])
def test_a_module_whose_own_forward_is_never_called(nan: bool) -> None:
    case = Case(nan=nan, clip=0.05)

    def inner_only(case: Case, *, guarded: bool) -> Result:
        return drive(case, guarded=guarded, module=Module(case, through_forward=False))

    (check_one_nan_sample if nan else check_healthy)(inner_only, case)


def test_clipping_by_value_is_measured_before_it() -> None:
    seen = drive(Case(clip=1e-3), guarded=True, gradient_clip_algorithm="value")
    assert [s.scalars["grad_norm"] for s in seen.sink.train] == pytest.approx(seen.witness.norms, rel=1e-5)


def test_validation_is_seen() -> None:
    case, sink = Case(), Sink()
    callback = trimtab.lightning.GuardCallback(sinks=[sink], run_dir=False)
    module = Module(case)
    trainer = trainer_of(case, [callback], max_epochs=3, num_sanity_val_steps=2)
    trainer.fit(module, loader(case), loader(case))
    assert len(sink.val) == 3
    assert sink.val[-1].scalars["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert sink.val[-1].scalars["val/val_acc"] == 0.5
    assert callback.findings == []


class Look(pl.Callback):
    """What another callback would save when training begins."""

    def __init__(self, other: Any) -> None:
        self._other, self.seen = other, dict[str, Any]()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = self._other.state_dict()


def test_a_resumed_training_goes_on_exactly(tmp_path: Path) -> None:
    case, path = Case(accumulate=2, clip=0.05), tmp_path / "a.ckpt"
    whole = drive(case, guarded=True, max_epochs=2)
    first = trimtab.lightning.GuardCallback(run_dir=False)
    trainer = trainer_of(case, [first], max_epochs=1)
    trainer.fit(Module(case), loader(case))
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)  # plain data
    sink = Sink()
    second = trimtab.lightning.GuardCallback(run_dir=False, sinks=[sink])
    look = Look(second)
    trainer = trainer_of(case, [second, look], max_epochs=2)
    module = Module(case)
    trainer.fit(module, loader(case), ckpt_path=path)
    assert differences(look.seen, saved["callbacks"][second.state_key]) == []
    resumed = Result(model=module, optimizer=trainer.optimizers[0], witness=module.witness, sink=sink)
    assert equal(whole, resumed)
    assert [s.step for s in sink.train] == list(range(STEPS, 2 * STEPS))
    assert [s.scalars["loss"] for s in sink.train] == [s.scalars["loss"] for s in whole.sink.train[STEPS:]]
    assert second.findings == []


def test_several_optimizers_by_hand() -> None:
    class Two(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = fresh(), fresh()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            for net, optimizer in zip((self.a, self.b), self.optimizers(), strict=True):
                loss = nn.functional.cross_entropy(net(x), y)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.a, self.b)]

    case, sink = Case(nan=True), Sink()
    callback = trimtab.lightning.GuardCallback(sinks=[sink], run_dir=False)
    module = Two()
    trainer_of(case, [callback]).fit(module, loader(case))
    assert {s.optimizer for s in sink.train} == {"0", "1"}
    assert len(sink.train) == 2 * STEPS
    assert callback.guard is not None
    assert callback.guard.rejected == 2
    assert all(bool(torch.isfinite(v).all()) for v in module.state_dict().values())
    assert {f.code for f in callback.findings} == {"DATA001", "GRAD001", "LOSS001"}


def test_two_limits_are_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(clip=0.05)
    callback = trimtab.lightning.GuardCallback(clip=1.0, run_dir=False)
    trainer_of(case, [callback], max_epochs=2).fit(Module(case), loader(case))
    told = [r.message for r in caplog.records if "both set" in r.message]
    assert told == ["Lightning: gradient_clip_val=0.05 and clip=1.0 are both set: the smaller limit decides"]


def test_mode_raise_ends_the_training_with_the_reason() -> None:
    case = Case(nan=True)
    callback = trimtab.lightning.GuardCallback(mode="raise", run_dir=False)
    trainer = trainer_of(case, [callback])
    with pytest.raises(trimtab.TrainingStopped, match="NaN/Inf"):
        trainer.fit(Module(case), loader(case))
    assert trainer.global_step < STEPS
    assert callback.guard is not None
    assert callback.guard.closed


def test_a_training_that_fails_leaves_nothing_behind() -> None:
    class Failing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                raise RuntimeError("no more")
            return super().training_step(batch, batch_idx)

    case, before = Case(), torch.nn.utils.clip_grad_norm_
    callback = trimtab.lightning.GuardCallback(run_dir=False)
    module = Failing(case)
    with pytest.raises(RuntimeError, match="no more"):
        trainer_of(case, [callback]).fit(module, loader(case))
    assert torch.nn.utils.clip_grad_norm_ is before
    assert not module._forward_pre_hooks
    assert [f.code for f in callback.findings] == ["STEP001"]


def test_a_misspelt_setting_is_refused_at_once() -> None:
    with pytest.raises(trimtab.InputError, match="clipp"):
        trimtab.lightning.GuardCallback(clipp=1.0)
    with pytest.raises(trimtab.ConfigError):
        trimtab.lightning.GuardCallback(mode="obsrve")


# -- Fabric ----------------------------------------------------------------------------------------------------------


def drive_fabric(case: Case, *, guarded: bool) -> Result:
    fabric_of: Any = pl_fabric().Fabric
    if case.precision == "fp16":
        plugin = pl_fabric().plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler())
        fabric = fabric_of(accelerator="cpu", plugins=[plugin])
    else:
        fabric = fabric_of(accelerator="cpu", precision=PRECISION[case.precision])
    net = fresh()
    witness, sink, guard = Witness(net, case.accumulate), Sink(), None
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    witness.scale = lambda: float(fabric.strategy.precision.scaler.get_scale() if case.precision == "fp16" else 1.0)
    if guarded:
        guard = trimtab.lightning.guard_fabric(
            fabric, model, optimizer, gradient_accumulation_steps=case.accumulate, sinks=[sink], run_dir=False
        )
    for i, (x, y) in enumerate(loader(case)):
        loss = witness.loss(nn.functional.cross_entropy(model(x).float(), y))
        fabric.backward(loss / case.accumulate if case.accumulate > 1 else loss)
        if (i + 1) % case.accumulate == 0:
            witness.step()
            if case.clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=case.clip)
            optimizer.step()
            optimizer.zero_grad()
    if guard is not None:
        guard.close()
    return Result(
        model=net,
        optimizer=optimizer,
        witness=witness,
        sink=sink,
        findings=[f.code for f in guard.findings] if guard is not None else [],
        rejected=guard.rejected if guard is not None else 0,
    )


def pl_fabric() -> Any:
    return needs("lightning.fabric")

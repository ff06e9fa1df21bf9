"""Presets in real runs: what they clip, what they print, and that a healthy run stays as it is."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.guard.conftest import batches, mse, same, small_model, snapshot
from tests.matrix import sampled
from trimtab import Guard, TrainingStopped
from trimtab.compat.line_sink import LineSink
from trimtab.core.presets import PRESETS, get_preset, warmup_lr
from trimtab.record.reader import read_run

Train = Callable[..., None]
ABOVE = {"norm": 1.0, "above": 10.0}


def sgd(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def one_step(factor: float, clip: Any, *, fused: bool = False) -> tuple[nn.Module, list[Tensor], float]:
    """One step of a fixed model; returns it, the gradients the optimizer got, and their norm as they came."""
    model = small_model()
    make = torch.optim.AdamW if fused else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-3, **({"fused": True} if fused else {}))
    loss = mse(model, batches(1)[0]) * factor
    loss.backward()
    norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients(model)])))
    with Guard(model, optimizer, clip=clip, run_dir=False) as guard:
        guard.step(loss)
    return model, gradients(model), norm


class TestA13ClipAbove:
    """`{"norm": 1.0, "above": 10.0}`: nothing up to 10, `clip_grad_norm_(1.0)` beyond."""

    def test_a13_below_the_threshold_every_bit_is_that_of_no_clipping(self) -> None:
        plain, untouched, norm = one_step(1.0, None)
        model, got, _ = one_step(1.0, ABOVE)
        assert 1.0 < norm < 10.0  # a clip of 1.0 alone would have changed it
        assert same(untouched, got)
        assert same(snapshot(plain), snapshot(model))

    def test_a13_above_the_threshold_every_bit_is_that_of_clip_grad_norm(self) -> None:
        model = small_model()
        (mse(model, batches(1)[0]) * 10.0).backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert total > 10.0
        assert same(gradients(model), one_step(10.0, ABOVE)[1])

    def test_a13_the_preset_is_that_clip(self) -> None:
        model = small_model()
        with Guard(model, sgd(model), preset="6dim-clip", run_dir=False) as guard:
            assert (guard.config.clip.norm, guard.config.clip.above) == (1.0, 10.0)

    @pytest.mark.parametrize("factor", [1.0, 10.0])
    @pytest.mark.parametrize("fused", [False, True])
    def test_a13_the_device_path_decides_the_same(
        self, factor: float, fused: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What an accelerator does, made to run on the CPU: gate (fused) and one wait (not fused)."""
        from trimtab.sample.rows import Rows

        host, expected, norm = one_step(factor, ABOVE, fused=fused)
        original = Rows.__init__

        def forced(self: Rows, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.on_host = False

        monkeypatch.setattr(Rows, "__init__", forced)
        device, got, _ = one_step(factor, ABOVE, fused=fused)
        close = same if factor == 1.0 else lambda a, b: all(map(torch.allclose, a, b))
        assert close(snapshot(host), snapshot(device))
        assert close(expected, got) or fused  # a fused optimizer divides while it steps
        assert (norm > 10.0) == (factor == 10.0)

    def test_a13_per_group_and_the_record(self, model: nn.Module) -> None:
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters())}]
        optimizer = torch.optim.SGD(groups, lr=1e-3)
        loss = mse(model, batches(1)[0]) * 3.0
        loss.backward()
        norms = [float(torch.stack([p.grad.norm() for p in g["params"]]).norm()) for g in groups]
        limit = (norms[0] + norms[1]) / 2  # one group above it, one below
        small = norms.index(min(norms))
        before = [p.grad.clone() for p in groups[small]["params"]]
        clip = {"norm": 0.5, "above": limit, "per_group": True}
        with Guard(model, optimizer, clip=clip, run_dir=False) as guard:
            guard.step(loss)
        after = [float(torch.stack([p.grad.norm() for p in g["params"]]).norm()) for g in groups]
        assert same(before, [p.grad for p in groups[small]["params"]])
        assert after[1 - small] == pytest.approx(0.5, rel=1e-4)

    def test_a13_huge_finite_gradients_are_clipped_and_not_zeroed(self) -> None:
        _, got, _ = one_step(1e25, ABOVE)
        assert float(torch.stack([g.norm() for g in got]).norm()) == pytest.approx(1.0, rel=1e-4)

    @pytest.mark.parametrize(
        ("clip", "says"),
        [
            ({"above": 10.0}, "beside a norm"),
            ({"norm": 1.0, "above": 0.5}, "at least the norm of 1"),
            ({"norm": 1.0, "above": -1}, "a finite number above 0"),
        ],
    )
    def test_a13_nonsense_is_refused(self, model: nn.Module, clip: Any, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            Guard(model, sgd(model), clip=clip, run_dir=False)


def test_c4_c6_lines_of_a_real_run_have_the_true_norms_and_the_warm_up(model: nn.Module) -> None:
    """Every number of the line beside one computed without the guard."""
    hints = get_preset("mlp-cuda").hints
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_lr(hints, step))
    said: list[str] = []
    expected = []
    guard = Guard(model, optimizer, preset="mlp-cuda", sinks=[LineSink("mlp-cuda", write=said.append)], run_dir=False)
    for step, batch in enumerate(batches(221)):
        loss = mse(model, batch) * (3.0 if step % 20 else 0.1)  # some steps are clipped, some are not
        loss.backward()
        if step % 10 == 0:
            kept = gradients(model)
            before = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5))
            after = float(torch.stack([g.norm() for g in gradients(model)]).norm())
            for p, g in zip(model.parameters(), kept, strict=True):
                p.grad = g
            weights = float(torch.stack([p.detach().norm() for p in model.parameters()]).norm())
            clipped = "YES" if before > 1.5 else "NO"
            lr = 1e-6 + (step / 200) * (5e-5 - 1e-6) if step < 200 else 5e-5
            expected.append(
                f"[Step {step}] Loss: {loss.item():.4f} | Grad norm: {before:.4f} -> {after:.4f} (clipped: {clipped}) "
                f"| Param norm: {weights:.4f} | LR: {lr:.6f}"
            )
        guard.step(loss)
        optimizer.zero_grad()
        scheduler.step()
    guard.close()
    assert said == expected
    assert len(said) == 23
    assert {"YES", "NO"} == {re.search(r"clipped: (\w+)", line).group(1) for line in said}


def test_c4_by_default_to_the_logger(model: nn.Module, train: Train, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trimtab")
    optimizer = sgd(model)
    with Guard(model, optimizer, preset="mlp-cuda", run_dir=False) as guard:
        train(guard, model, optimizer, batches(11))
    lines = [r.message for r in caplog.records if r.message.startswith("[Step")]
    assert [line.split("]")[0] for line in lines] == ["[Step 0", "[Step 10"]


def test_d2_lines_of_a_real_run(model: nn.Module, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = sgd(model)
    with Guard(model, optimizer, preset="seo", sinks=["lines:d2:stdout"], run_dir=False) as guard:
        train(guard, model, optimizer, batches(3))
    values = [float(v) for v in re.findall(r"Gradient norm (?:before|after) clipping: (\S+)", capsys.readouterr().out)]
    assert len(values) == 6
    for before, after in zip(values[::2], values[1::2], strict=True):
        assert after == pytest.approx(min(before, 1.0), abs=2e-6)
    assert max(values[::2]) > 1.0


def test_a11_lines_of_a_real_run(model: nn.Module, train: Train) -> None:
    said: list[str] = []
    optimizer = sgd(model)
    sinks = [LineSink("6dim-clip", every=2, write=said.append)]
    with Guard(model, optimizer, preset="000", sinks=sinks, run_dir=False) as guard:
        train(guard, model, optimizer, batches(3))
    loss = mse(twin := small_model(), batches(1)[0])
    loss.backward()
    norms = torch.stack([g.norm() for g in gradients(twin)])
    assert said[0] == (
        f"Step 0 - Gradient Health: Global Norm={norms.norm():.4f}, Max={norms.max():.4f}, Min={norms.min():.2e}, "
        f"Mean={norms.mean():.4f}"
    )
    assert [line.split(" -")[0] for line in said] == ["Step 0", "Step 2"]


def test_e13_lines_of_a_real_run_count_what_has_no_gradient(train: Train) -> None:
    model = small_model()
    model.spare = nn.Linear(2, 2)  # in the optimizer, in no forward pass
    model.forward = lambda x: nn.Sequential(*list(model)[:4])(x)  # type: ignore[method-assign]
    said: list[str] = []
    optimizer = sgd(model)
    with Guard(model, optimizer, preset="lmol", sinks=[LineSink("lmol", write=said.append)], run_dir=False) as guard:
        train(guard, model, optimizer, batches(2))
    shape = (
        r"\[GRAD\] Step    0 \| Global: \S+ \| Zero: 2/7 \| NaN/Inf: 0/7 \| "
        r"Max: \S+ \| Avg: \S+ \| Range: \[\S+, \S+\]"
    )
    assert re.fullmatch(shape, said[0])
    assert said[1] == "[GRAD]   no gradient: spare.weight, spare.bias"


def test_b5_b8_lines_of_a_real_run(model: nn.Module) -> None:
    said: list[str] = []
    optimizer = sgd(model)
    norms = []
    with Guard(
        model, optimizer, preset="camoxpert", sinks=[LineSink("camoxpert", write=said.append)], run_dir=False
    ) as guard:
        for batch in batches(8):
            loss = mse(model, batch) * 3.0
            loss.backward()
            norms.append(float(torch.stack([g.norm() for g in gradients(model)]).norm()))
            guard.step(loss)
            optimizer.zero_grad()
        guard.validate(0.5, IoU=0.5845, Dice=0.735)
    first = next(n for n in norms if n > 5 * 0.5)
    assert said[0] == f"⚠️  High gradient norm detected: {first:.2f} (clipped to 0.5)"
    assert f"   Gradient norm - Avg: {sum(norms) / len(norms):.3f}, Max: {max(norms):.3f}" in said
    assert re.fullmatch(r"Loss: \S+ \| IoU: 0\.5845 \| Dice: 0\.7350", said[-1])


@pytest.mark.parametrize("told", [True, False])
def test_b9_lines_and_sentences_of_a_real_run(model: nn.Module, train: Train, told: bool) -> None:
    said: list[str] = []
    optimizer = sgd(model)
    sinks = [LineSink("camoxpert", write=said.append)]
    guard = Guard(model, optimizer, preset="camoxpert", mode="raise", sinks=sinks, run_dir=False)
    data = batches(8, bad=(5,), value=math.inf)

    def by_hooks_alone() -> None:  # nobody tells the loss
        for batch in data:
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ValueError, match=r"^Training stopped due to NaN/Inf") as caught:
        train(guard, model, optimizer, data) if told else by_hooks_alone()
    assert isinstance(caught.value, TrainingStopped)
    what = "loss" if told else "gradients"
    assert str(caught.value).split("\n")[0] == f"Training stopped due to NaN/Inf {what}."
    heads = [line.split("\n") for line in said if line.startswith("❌")]
    assert heads[-1] == [
        "❌ NaN/Inf detected in gradients at batch 5!",
        "   Gradient norm: nan",
        "   This indicates gradient explosion.",
    ]
    assert (heads[0][0] == "❌ NaN/Inf detected in loss at batch 5!") == told
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_b9_without_mode_raise_the_step_is_kept_out_and_training_goes_on(model: nn.Module, train: Train) -> None:
    optimizer = sgd(model)
    with Guard(model, optimizer, preset="camoxpert", run_dir=False) as guard:
        train(guard, model, optimizer, batches(8, bad=(5,)))
    assert guard.rejected == 1


@pytest.mark.parametrize("preset", sampled({p.name: p for p in PRESETS}, [p.name for p in PRESETS[::6]]))
def test_a_preset_leaves_the_verdicts_of_a_healthy_run_alone(preset: Any, train: Train) -> None:
    found = []
    for name in (None, preset.name):
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        with Guard(model, optimizer, preset=name, run_dir=False) as guard:
            train(guard, model, optimizer, batches(120))
        found.append(([str(f) for f in guard.findings], guard.rejected))
    assert found[0] == found[1] == ([], 0)


def test_the_preset_is_on_record_and_keywords_win(model: nn.Module, train: Train) -> None:
    optimizer = sgd(model)
    with Guard(model, optimizer, {"full_every": 25}, preset="002", clip=2.0) as guard:
        train(guard, model, optimizer, batches(2))
    config = read_run(guard.run_dir).info.config
    assert (config["preset"], config["clip"]["norm"], config["full_every"]) == ("mlp-cuda", 2.0, 25)

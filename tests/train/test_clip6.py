from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.matrix import sampled
from trimtab.core.errors import InputError
from trimtab.data import load_emoji
from trimtab.losses import nway_loss
from trimtab.train.recipe import Result, build_parts, doctor_target, run_recipe, settings_of
from trimtab.train.recipes import load_recipe
from trimtab.train.recipes.clip6 import SIMILARITIES, batch_size
from trimtab.train.recipes.clip6.metrics import ranks, retrieval
from trimtab.train.recipes.clip6.model import OriginalLoss, version_zero
from trimtab.train.recipes.clip6.views import emoji_views, family, latent_views

RECIPE = load_recipe("clip6")
LINE = re.compile(
    r"Step (\d+) - Gradient Health: Global Norm=\d+\.\d{4}, Max=\d+\.\d{4}, Min=\d\.\d\de-\d\d, Mean=\d+\.\d{4}"
)
SMALL = {"data": "views", "batch_size": 32, "steps": 60, "width": 64}
LEAN = {"batch_size": 64, "steps": 24, "width": 32, "channels": 4, "text_features": 256, "text_dropout": 0.3}
TINY = {"data": "views", "batch_size": 4, "steps": 150, "width": 64}


def go(fault: str | None = None, *, guarded: bool = True, **given: Any) -> Result:
    return run_recipe(RECIPE, given, fault=fault, guarded=guarded, run_dir=False)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def emoji(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[str], list[dict[str, Any]]]:
    path, said = tmp_path_factory.mktemp("clip6") / "metrics.jsonl", []
    given = {"metrics_file": str(path), "log_frequency": 20, "steps": 33, "warmup_steps": 5, "learning_rate": 8e-3}
    result = run_recipe(RECIPE, given, quick=True, run_dir=False, say=said.append)
    return result, said, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def views() -> Result:
    return go(**SMALL)


# -- learning --------------------------------------------------------------------------------------------------------


def test_a1_six_modalities_of_unseen_emoji_find_each_other(emoji: Any) -> None:
    result, _, _ = emoji
    assert result.findings == ()
    found = result.facts["retrieval"]
    assert found.names == ("image", "en", "es", "fr", "de", "it")
    assert found.num == 319
    assert result.score > 0.25 > 50 / 319  # by chance 1 / 319
    assert min(found.left_out_r1[1:]) > 0.2
    assert found.left_out_r5[0] > 5 * 5 / 319
    assert str(found).count("\n") == 9, "a head, the names, six rows and the others"


def test_a1_the_stable_loss_learns_the_generated_views_and_the_original_does_not() -> None:
    stable, original = go(**TINY), go(**TINY, loss="original")
    assert stable.num_steps == original.num_steps == 150
    assert stable.facts["batch_size"] == original.facts["batch_size"] == 4
    assert original.score < 0.10
    assert stable.score > 5 * max(original.score, 0.10)


@pytest.mark.parametrize("objective", sampled(["joint", "full", "pairwise"], "full"))
def test_a1_the_other_objectives_learn_too(objective: str) -> None:
    result = go(**{**SMALL, "batch_size": 8}, objective=objective)
    assert result.score > 0.2
    assert result.findings == ()


def test_a11_the_line_comes_every_log_frequency_steps(emoji: Any) -> None:
    _, said, _ = emoji
    lines = [LINE.fullmatch(line) for line in said if "Gradient Health" in line]
    assert [int(match[1]) for match in lines if match] == [0, 20]
    assert not [line for line in said if "detected" in line], "a healthy run is not warned of"
    silent: list[str] = []
    given = {**SMALL, "steps": 3, "enable_gradient_monitoring": False}
    run_recipe(RECIPE, given, run_dir=False, say=silent.append)
    assert not [line for line in silent if "Gradient Health" in line]


def test_a14_the_keys_reach_the_file_of_metrics(emoji: Any) -> None:
    _, _, lines = emoji
    keys = {"grad/global_norm", "grad/max_norm", "grad/min_norm", "grad/mean_norm", "grad/has_nan", "grad/has_inf"}
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(33))
    assert all(keys <= set(line) for line in steps)
    assert [line["val/r1"] for line in lines if "val/r1" in line][-1] > 0.25
    with pytest.raises(InputError, match="cannot be written"):
        go(**SMALL, metrics_file="/dev/null/no.jsonl")


# -- what is measured ------------------------------------------------------------------------------------------------


def test_retrieval_is_what_looking_one_by_one_finds() -> None:
    torch.manual_seed(0)
    shared = torch.randn(23, 5)
    views = [functional.normalize(shared + 0.8 * torch.randn(23, 5), dim=-1).double() for _ in range(4)]

    def share(query: Any, m: int, few: int) -> float:
        hits = 0
        for i in range(23):
            scores = [float(query(i) @ views[m][j]) for j in range(23)]
            hits += i in sorted(range(23), key=lambda j: -scores[j])[:few]
        return hits / 23

    for product in (False, True):
        found = retrieval(views, "abcd", product=product)
        for m in range(4):
            others = [view for k, view in enumerate(views) if k != m]
            joined = math.prod if product else sum
            assert found.left_out_r1[m] == share(lambda i, o=others, j=joined: j([v[i] for v in o]), m, 1)
            assert found.left_out_r5[m] == share(lambda i, o=others, j=joined: j([v[i] for v in o]), m, 5)
        for p, q in itertools.permutations(range(4), 2):
            assert found.pairs_r1[p][q] == share(lambda i, p=p: views[p][i], q, 1)
    assert found.metrics()["pairs_r5"] == pytest.approx(
        sum(found.pairs_r5[p][q] for p, q in itertools.permutations(range(4), 2)) / 12
    )


def test_a_constant_model_and_one_of_nan_find_nothing() -> None:
    for value in (1.0, math.nan, 0.0):
        found = retrieval([torch.full((7, 3), value)] * 6, "abcdef")
        assert found.left_out_r5 == (0.0,) * 6
        assert ranks(torch.full((4, 2), value), torch.full((4, 2), value)).tolist() == [3] * 4


def test_the_original_is_the_formula_of_all_tuples() -> None:
    torch.manual_seed(1)
    for num in (2, 3, 6):
        xs = [torch.randn(3, 8, dtype=torch.float64) for _ in range(num)]
        lines = nway_loss(xs, similarity="mip", objective="axis", normalize="l2", logit_scale=14.3, precision="fp64")
        scale = torch.tensor(14.3, dtype=torch.float64)
        torch.testing.assert_close(version_zero(xs, scale), lines, rtol=1e-9, atol=1e-9)
    assert OriginalLoss().logit_scale.exp().item() == pytest.approx(1 / 0.07)


def test_no_near_twin_of_a_held_out_emoji_is_learnt() -> None:
    emoji = load_emoji()
    held = {family(c) for c, out in zip(emoji.characters, emoji.held_out, strict=True) if out}
    rest = [c for c, out in zip(emoji.characters, emoji.held_out, strict=True) if not out and family(c) not in held]
    assert len(emoji_views(1024).train[0]) == len(rest) == 1456
    assert [len(view) for view in emoji_views(1024).held] == [319] * 6
    assert family("👩‍❤️‍👨") == family("👨‍❤️‍👨") != family("👩‍🚀")
    assert family("👨‍👩‍👧") == family("👩‍👦‍👦")
    assert family("🇩🇪") != family("🇫🇷")


# -- settings --------------------------------------------------------------------------------------------------------


def test_a2_a_batch_that_could_never_be_computed_is_refused_and_one_that_fits_is_chosen() -> None:
    settings = settings_of(RECIPE, {"objective": "full"})
    size, said = batch_size(settings)
    assert 4 <= size <= 16
    assert said == f"objective full, similarity norm: batch {size} fits, {size}^6 = {size**6:,} tuples"
    assert batch_size(settings_of(RECIPE, {}))[0] == 128
    with pytest.raises(InputError, match=r"128\^6 tuples, about \d+ s a step"):
        go(objective="full", batch_size=128)
    with pytest.raises(InputError, match=r"a batch of 64 does not fit; expected at most 12"):
        go(loss="original", batch_size=64)


def test_a28_the_documented_flags() -> None:
    given = {"learning_rate": 1e-4, "gradient_clip_value": 0.5, "data": "views"}
    parts = build_parts(RECIPE, settings_of(RECIPE, given))
    assert (parts.config.learning_rate, parts.config.max_grad_norm) == (1e-4, 0.5)
    assert (parts.model.criterion.similarity, parts.model.criterion.objective) == ("norm", "axis")
    for version, similarity in SIMILARITIES.items():
        parts = build_parts(RECIPE, settings_of(RECIPE, {"stable_loss_version": version, "data": "views"}))
        assert parts.model.criterion.similarity == similarity
    for off in ({"use_stable_loss": False}, {"loss": "original"}):
        parts = build_parts(RECIPE, settings_of(RECIPE, {**off, "data": "views"}))
        assert isinstance(parts.model.criterion, OriginalLoss)
        assert parts.config.batch_size == 8
    with pytest.raises(InputError, match="stable_loss_version is 4; expected 0 "):
        go(stable_loss_version=4)
    with pytest.raises(InputError, match="similarity is 'volumes'; did you mean 'volume'"):
        go(similarity="volumes", data="views")


def test_the_target_for_the_doctor() -> None:
    target = doctor_target(RECIPE, {"text_features": 1024})
    loss = target["step_fn"](target["model"], next(iter(target["loader"])))
    assert 0.5 * math.log(128) < loss.item() < 2 * math.log(128)
    loss.backward()
    assert all(p.grad is not None for p in target["model"].parameters())


def test_two_runs_of_one_seed_are_the_same_run() -> None:
    first, second = go(**{**SMALL, "steps": 5}), go(**{**SMALL, "steps": 5})
    assert first.metrics == second.metrics
    assert go(**{**SMALL, "steps": 5, "seed": 7}).metrics != first.metrics
    assert torch.equal(latent_views(3)[0][5], latent_views(3)[0][5])


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "found", "steps"),
    sampled(
        {"nan-image": ("nan-image", "nonfinite-loss", 4096 // 32), "lr-x1000": ("lr-x1000", "weight-jump", 60)},
        "lr-x1000",
    ),
)
def test_a3_a_fault_breaks_the_control_arm_and_not_the_guarded_run(
    views: Result, fault: str, found: str, steps: int
) -> None:
    given = {**SMALL, "steps": steps}  # one whole epoch meets every row
    held, bare = go(fault, **given), go(fault, guarded=False, **given)
    assert views.score > 0.6
    assert held.weights_finite
    assert held.score > 0.8 * views.score
    assert not bare.score > 0.2 * views.score
    assert found in held.findings
    assert held.actions or held.rejected


def test_a3_lost_names_make_nan_of_the_original_loss_only() -> None:
    few = {**LEAN, "batch_size": 4, "steps": 20}
    stable = go("zero-rows", guarded=False, **few)
    assert stable.weights_finite
    assert math.isfinite(stable.metrics["train_loss"])
    dead, held = (go("zero-rows", guarded=guarded, loss="original", **few) for guarded in (False, True))
    assert not dead.weights_finite
    assert held.weights_finite
    assert held.rejected > 0


def test_a21_half_precision_stays_finite() -> None:
    for dtype in ("bf16", "fp16"):
        result = go(**{**SMALL, "steps": 20, "amp_dtype": dtype})
        assert result.weights_finite
        assert result.score > 0.1


def test_a_run_is_recorded(tmp_path: Path) -> None:
    result = run_recipe(RECIPE, {**SMALL, "steps": 3}, run_dir=tmp_path / "r")
    assert (tmp_path / "r" / "run.jsonl").exists()
    assert result.run_dirs == (str(tmp_path / "r"),)

"""Three processes, and two of them as a group: the same loss and gradients as one process with the whole batch."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.losses import ranks
from trimtab.losses import nway_loss

Results = list[dict[Any, Any]]


pytestmark = pytest.mark.long  # processes of their own, which a stage of CI has time for


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each process got, from one start of three processes."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("forkserver")  # torch is imported once, not three times
    context.set_forkserver_preload(["torch.distributed", "tests.losses.ranks"])
    processes = [context.Process(target=ranks.work, args=(rank, str(folder))) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    for process in processes:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(3)]


def of_group(results: Results, world: int) -> list[dict[str, Any]]:
    return [found[world] for found in results[3 - world :]]


def check(parts: list[dict[str, Tensor]], want: dict[str, Tensor], sizes: tuple[int, ...]) -> None:
    world = len(parts)
    for rank, part in enumerate(parts):
        torch.testing.assert_close(part["loss"], want["loss"], rtol=1e-12, atol=1e-12)
        grad = world * ranks.own(want["grad"], sizes, rank, 1)  # what averaging over the ranks makes one of
        torch.testing.assert_close(part["grad"], grad, rtol=1e-9, atol=1e-12)
    scale = torch.stack([part["scale"] for part in parts]).mean()
    torch.testing.assert_close(scale, want["scale"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ranks.CASES)
def test_same_as_one_process(results: Results, name: str, world: int) -> None:
    sizes = ranks.SIZES[world]
    want = ranks.result_of(ranks.rows(sum(sizes)), ranks.CASES[name])
    check([found[name] for found in of_group(results, world)], want, sizes)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ranks.MASKED)
def test_masks_are_gathered(results: Results, name: str, world: int) -> None:
    sizes = ranks.SIZES[world]
    want = ranks.result_of(ranks.rows(sum(sizes)), ranks.CASES[name], ranks.mask_of(sum(sizes)))
    check([found[f"{name}, masked"] for found in of_group(results, world)], want, sizes)


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_under_ddp_get_the_gradients_of_one_process(results: Results, world: int) -> None:
    model = ranks.Wrapped()
    model(ranks.rows(sum(ranks.SIZES[world]))).backward()
    for found in of_group(results, world):
        assert len(found["parallel"]) == len(list(model.parameters()))
        for name, p in model.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(found["parallel"][name], p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_draws_the_index_sets_of_the_first(results: Results, world: int) -> None:
    sizes = ranks.SIZES[world]
    torch.manual_seed(100)
    same = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
    want = ranks.result_of(ranks.rows(sum(sizes)), ranks.SAMPLED, generator=same)
    check([found["sampled"] for found in of_group(results, world)], want, sizes)


def test_values_of_all_anchors_are_known_to_all(results: Results) -> None:
    want = nway_loss(ranks.rows(6), objective="full", similarity="mip", reduction="none")
    for found in of_group(results, 2):
        torch.testing.assert_close(found["none"], want, rtol=1e-10, atol=1e-12)


def test_a_nan_of_one_rank_reaches_all(results: Results) -> None:
    for found in results[1:]:
        assert all(torch.isnan(found["once"][f"nan {objective}"]) for objective in ("axis", "full", "pairwise"))


def test_ranks_need_not_want_the_same_gradients(results: Results) -> None:
    want = ranks.result_of(ranks.rows(6), {"objective": "full", "similarity": "mip"})["grad"]
    plain = torch.stack(grads(ranks.rows(6)))
    first, second = (found["once"] for found in results[1:])
    torch.testing.assert_close(first["frozen"], 2 * plain[:, :3], rtol=1e-9, atol=1e-12)
    assert second["frozen"] is None
    torch.testing.assert_close(torch.cat([first["weighted"], second["weighted"]], 1), 3 * plain, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([first["lacking"]["grad"], second["lacking"]["grad"]], 1), 2 * want)
    loss = nway_loss(ranks.rows(6), objective="full", similarity="mip")
    torch.testing.assert_close(first["no grad"], loss)
    assert not first["no grad"].requires_grad
    torch.testing.assert_close(first["bf16"].double(), loss, rtol=3e-2, atol=0)


def grads(xs: list[Tensor]) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in xs]
    nway_loss(leaves, objective="full", similarity="mip").backward()
    return [x.grad for x in leaves if x.grad is not None]


def test_wrong_arguments_end_on_every_rank(results: Results) -> None:
    first, second = (found["once"] for found in results[1:])
    assert first["wrong shape"].startswith("ValueError: rank 1 of the group could not use its arguments")
    assert "differ in shape" in second["wrong shape"]
    for found in (first, second):
        assert "different widths (ranks 0 and 1: 5 and 3" in found["other width"]
        assert "different settings" in found["other settings"]
    assert first["poor rank"].startswith("ValueError: rank 1 of the group refused the problem")
    assert second["poor rank"].startswith("TooCostly: the 'full' objective")
    assert results[0]["stranger"].startswith("ValueError: this process is not a member of the group")


def test_what_is_sent_does_not_grow_with_the_tuples(results: Results) -> None:
    """Rows and their gradients once, ``[N, B]`` a few times: linear in N, where the tuples are 6^2, 6^3, 6^4."""
    for found in results[1:]:
        for num in (2, 3, 4):
            sent = found["once"][f"sent {num}"]
            table, whole = num * 6 * 8, num * 6 * 5 * 8
            assert sent["scatter"] == whole
            assert whole <= sent["gather"] <= whole + 2 * 16 * 8  # and one card of each rank
            assert sent["reduce"] == 3 * table  # largest, sum, and the cotangents

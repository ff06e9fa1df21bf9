"""Every similarity and objective by every backend against the definition; what the arguments do and refuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.losses import reference
from tests.losses.agree import NAMES, SIZES, distance, excluded, gradients, how, rows
from trimtab.losses import nway_logits, nway_loss
from trimtab.losses.cost import BACKENDS, can

OBJECTIVES = ("axis", "joint", "full", "pairwise", "sigmoid")


def check(xs: list[torch.Tensor], name: str, objective: str, normalise: str | None, **settings: Any) -> None:
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-0.3, dtype=torch.float64, requires_grad=True)
    inputs = [*xs, scale, *([bias] if objective == "sigmoid" else [])]
    told = {"logit_bias": bias} if objective == "sigmoid" else {}
    smoothing = settings.get("label_smoothing", 0.0)
    want = reference.loss(xs, name, objective, scale, normalise, bias=bias, smoothing=smoothing)
    found = nway_loss(
        xs, similarity=name, objective=objective, logit_scale=scale, normalize=normalise, **told, **settings
    )
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
    assert distance(gradients(found, inputs), gradients(want, inputs)) < 1e-9


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", NAMES)
def test_a1_every_similarity_and_objective_by_definition(name: str, objective: str) -> None:
    for n, b in SIZES.items():
        check(rows(n, b, seed=n), name, objective, how(name))
        if n in (3, 4):
            check(rows(n, b, seed=n + 9), name, objective, None, chunk=7)


@pytest.mark.parametrize("name", NAMES)
def test_every_backend_gives_the_same(name: str) -> None:
    for n, objective in itertools.product((2, 3, 5), ("axis", "joint", "full", "sigmoid")):
        for backend in BACKENDS:
            if backend != "triton" and can(backend, name, objective, n):
                check(rows(n, 3, seed=n), name, objective, how(name), backend=backend)


@pytest.mark.parametrize("objective", ["axis", "joint", "full", "pairwise"])
@pytest.mark.parametrize("name", NAMES)
def test_label_smoothing_by_definition(name: str, objective: str) -> None:
    for n in (2, 3, 4):
        check(rows(n, 4, seed=n), name, objective, how(name), label_smoothing=0.1)


@pytest.mark.parametrize("objective", ["axis", "joint", "full"])
def test_two_modalities_are_clip(objective: str) -> None:
    image, text = rows(2, 11)
    z = 5 * functional.normalize(image, dim=1) @ functional.normalize(text, dim=1).T
    label = torch.arange(11)
    clip = (functional.cross_entropy(z, label) + functional.cross_entropy(z.T, label)) / 2
    torch.testing.assert_close(nway_loss([image, text], objective=objective, logit_scale=5.0), clip)


@pytest.mark.parametrize("backend", ["dense", "stream"])
def test_of_two_modalities_the_rows_of_axis_and_joint_are_swapped(backend: str) -> None:
    xs = rows(2, 5)
    told = {"logit_scale": 3.0, "reduction": "none", "backend": backend}
    axis, joint = (nway_loss(xs, objective=objective, **told) for objective in ("axis", "joint"))
    torch.testing.assert_close(axis, joint.flip(0))
    z = reference.logits(xs, "mip", 3.0, "rms")
    torch.testing.assert_close(joint[0], z.logsumexp(1) - z.diagonal())


def test_axis_is_the_cross_entropy_over_all_logits() -> None:
    """The documented loss: cross entropy along each axis of ``[B]^N`` in turn, its mean over the axes, over B."""
    for n, b in ((3, 6), (4, 5), (6, 3)):
        xs = rows(n, b)
        z = reference.logits(xs, "norm", 4.0, "l2")
        label = torch.full([b] * n, -1)
        i = torch.arange(b)
        label[(i,) * n] = i
        total = torch.zeros((), dtype=z.dtype)
        for r in range(n):
            turned = z.permute([(r + k) % n for k in range(n)])
            # Class axis 1; a line carries a label where all other indices agree.
            target = torch.full([b] * (n - 1), -100)
            target[(i,) * (n - 1)] = i
            total = total + functional.cross_entropy(turned, target, reduction="sum", ignore_index=-100)
        found = nway_loss(xs, similarity="norm", objective="axis", logit_scale=4.0)
        torch.testing.assert_close(found, total / n / b, rtol=1e-10, atol=0)


@pytest.mark.parametrize("objective", ["axis", "joint", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_order_of_samples_and_modalities_does_not_matter(name: str, objective: str) -> None:
    xs = rows(4, 4)
    table = nway_loss(xs, similarity=name, objective=objective, reduction="none", logit_scale=2.0)
    order, turn = torch.tensor([2, 0, 3, 1]), [3, 1, 0, 2]
    moved = [xs[m][order] for m in turn]
    found = nway_loss(moved, similarity=name, objective=objective, reduction="none", logit_scale=2.0)
    torch.testing.assert_close(found, table[turn][:, order], rtol=1e-10, atol=1e-12)


def test_reductions_and_details() -> None:
    xs = rows(3, 5)
    told: dict[str, Any] = {"similarity": "norm", "objective": "full", "logit_scale": 3.0}
    table = nway_loss(xs, reduction="none", **told)
    assert table.shape == (3, 5)
    torch.testing.assert_close(nway_loss(xs, **told), table.mean())
    torch.testing.assert_close(nway_loss(xs, reduction="sum", **told), table.sum())
    out = nway_loss(xs, details=True, **told)
    torch.testing.assert_close(out.per_modality, table.mean(1))
    z = reference.logits(xs, "norm", 3.0, "l2")
    torch.testing.assert_close(out.positives, reference.diagonal(z))
    assert out.backend == "gram"
    assert out.cost.tuples == 125
    assert not out.probability.requires_grad
    torch.testing.assert_close(out.probability, (-table).exp().mean(1))
    one = nway_loss(xs, anchors=[1], **told)
    torch.testing.assert_close(one, table[1].mean())
    some = nway_loss(xs, anchors=(0, 2), reduction="none", **told)
    torch.testing.assert_close(some[[0, 2]], table[[0, 2]])
    assert some[1].abs().max() == 0


def test_pairwise_rows_and_stars() -> None:
    xs = rows(4, 5)
    pair = {
        (m, k): nway_loss([xs[m], xs[k]], similarity="norm", objective="full", logit_scale=3.0)
        for m, k in itertools.combinations(range(4), 2)
    }
    told: dict[str, Any] = {"similarity": "norm", "objective": "pairwise", "logit_scale": 3.0}
    out = nway_loss(xs, details=True, **told)
    torch.testing.assert_close(out.loss, torch.stack(list(pair.values())).sum())
    torch.testing.assert_close(out.per_modality.mean(), out.loss)
    torch.testing.assert_close(nway_loss(xs, reduction="none", **told).mean(), out.loss)
    star = nway_loss(xs, anchors=[0], **told)
    torch.testing.assert_close(star, pair[0, 1] + pair[0, 2] + pair[0, 3])


def test_sigmoid_rows_add_up_to_all_tuples() -> None:
    xs = rows(3, 4)
    table = nway_loss(xs, objective="sigmoid", logit_bias=-1.0, reduction="none")
    want = reference.loss(xs, "mip", "sigmoid", 1.0, "rms", bias=-1.0)
    torch.testing.assert_close(table.sum(1) / 4, want.expand(3))


@pytest.mark.parametrize("name", NAMES)
def test_logits_by_definition(name: str) -> None:
    for n in (2, 3, 4):
        xs = rows(n, 4)
        want = reference.logits(xs, name, 1.7, how(name))
        torch.testing.assert_close(nway_logits(xs, similarity=name, logit_scale=1.7), want, rtol=1e-10, atol=1e-12)


def test_inputs_of_every_kind() -> None:
    xs = rows(3, 6, 8)
    told: dict[str, Any] = {"similarity": "norm", "objective": "full", "logit_scale": 2.0}
    want = nway_loss(xs, **told)
    wide = [torch.stack([x, x * 2], -1).flatten(1)[:, ::2] for x in xs]
    assert not wide[0].is_contiguous()
    torch.testing.assert_close(nway_loss(wide, **told), want)
    torch.testing.assert_close(nway_loss(torch.stack(xs), **told), want)
    torch.testing.assert_close(nway_loss(tuple(x.detach() for x in xs), **told), want.detach())
    with torch.no_grad():
        assert not nway_loss(xs, **told).requires_grad
    some = [xs[0], xs[1].detach(), xs[2].detach()]
    torch.testing.assert_close(
        torch.autograd.grad(nway_loss(some, **told), xs[0]), torch.autograd.grad(want, xs[0], retain_graph=True)
    )
    one = torch.tensor([2.0], dtype=torch.float32, requires_grad=True)
    loss = nway_loss(xs, similarity="norm", objective="full", logit_scale=one)
    (grad,) = torch.autograd.grad(loss, one)
    assert grad.shape == (1,)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loss_of_half_precision_is_float32_and_gradients_are_as_the_inputs(dtype: torch.dtype) -> None:
    xs = [x.detach().to(dtype).requires_grad_() for x in rows(3, 5)]
    for objective in ("axis", "full", "pairwise", "sigmoid", "sampled"):
        loss = nway_loss(xs, objective=objective)
        assert loss.dtype == torch.float32
        assert {g.dtype for g in torch.autograd.grad(loss, xs)} == {dtype}


@pytest.mark.parametrize("objective", ["axis", "full", "pairwise"])
def test_autocast_takes_nothing_away(objective: str) -> None:
    xs = [x.detach().float().requires_grad_() for x in rows(3, 8, 64)]
    told: dict[str, Any] = {"objective": objective, "precision": "fp32", "backend": "auto"}
    want = nway_loss(xs, **told)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = nway_loss(xs, **told)
    assert torch.equal(found, want)
    assert distance(torch.autograd.grad(found, xs), torch.autograd.grad(want, xs)) == 0


@pytest.mark.filterwarnings("ignore")  # whatever the compiler has to say about itself
def test_a_compiled_model_can_use_it() -> None:
    xs = rows(3, 4)
    weight = torch.eye(9, dtype=torch.float64, requires_grad=True)

    def step(*xs: torch.Tensor) -> torch.Tensor:
        return 2 * nway_loss([x @ weight for x in xs], similarity="norm", objective="full")

    want = step(*xs)
    found = torch.compile(step, backend="eager")(*xs)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(torch.autograd.grad(found, weight), torch.autograd.grad(want, weight))


def test_a_single_sample_has_no_loss_and_no_gradient() -> None:
    for name in NAMES:
        for objective in ("axis", "joint", "full", "pairwise", "sampled"):
            xs = rows(3, 1)
            loss = nway_loss(xs, similarity=name, objective=objective)
            assert loss == 0
            assert all(g.abs().max() == 0 for g in gradients(loss, xs))


def test_excluded_reference_is_the_definition() -> None:
    xs = rows(3, 4)
    for objective in ("axis", "joint", "full"):
        want = reference.loss(xs, "norm", objective, 2.0, "l2")
        torch.testing.assert_close(excluded(xs, "norm", objective, 2.0, "l2"), want)


X = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("xs", "told", "message"),
    [
        ([X, X], {"similarity": "norn"}, "similarity is 'norn'.*Did you mean 'norm'"),
        ([X, X], {"objective": "Full"}, "objective is 'Full'.*Did you mean 'full'"),
        ([X, X], {"backend": "streams"}, "Did you mean 'stream'"),
        ([X, X], {"normalize": "rsm"}, "Did you mean 'rms'"),
        ([X, X], {"precision": "fp16"}, "expected one of 'auto', 'fp64', 'fp32', 'tf32', 'bf16'"),
        ([X, X], {"reduction": "avg"}, "'mean', 'sum', 'none'"),
        ([X, X], {"logit_scale": 0.0}, "logit_scale is 0.0; expected a positive"),
        ([X, X], {"logit_scale": float("nan")}, "logit_scale is nan"),
        ([X, X], {"logit_scale": torch.ones(2)}, r"logit_scale has shape \(2,\)"),
        ([X, X], {"logit_bias": 1.0}, "a softmax does not see it"),
        ([X, X], {"label_smoothing": 1.0}, r"\[0, 1\)"),
        ([X, X], {"objective": "sigmoid", "label_smoothing": 0.1}, "no meaning for objective 'sigmoid'"),
        ([X, X], {"anchors": [2]}, r"among 0 \.\. 1"),
        ([X, X], {"anchors": []}, "anchors is"),
        ([X, X], {"anchors": "al"}, "Did you mean 'all'"),
        ([X, X], {"num_samples": 0}, "num_samples is 0"),
        ([X, X], {"chunk": 0}, "chunk is 0"),
        ([X, X, X], {"backend": "stream", "objective": "axis"}, "those that can: 'auto', 'dense'"),
        ([X, X], {"backend": "gram", "objective": "full"}, "backend 'gram' cannot do similarity 'mip'"),
        ([X], {}, "xs holds 1 modalities"),
        ([X, X[:2]], {}, "differ in shape"),
        ([X[:0], X[:0]], {}, "at least 1"),
        ([X[0], X[0]], {}, r"expected \[B, D\]"),
        (X, {}, r"one \[N, B, D\]"),
        ([X, X.to("meta")], {}, "different devices"),
        ([X, X], {"mask": torch.ones(3, 2, dtype=torch.bool)}, "Transpose it"),
    ],
)
def test_what_is_wrong_is_said(xs: Any, told: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nway_loss(xs, **told)


@pytest.mark.parametrize(
    ("xs", "told", "message"),
    [
        ([X, X.long()], {}, "modality 1 is torch.int64"),
        ([X.to(torch.complex64), X], {}, "modality 0 is torch.complex64"),
        ({"a": X, "b": X}, {}, "xs is a dict"),
        ([X, [1.0]], {}, "xs holds a list"),
        ([X, X], {"mask": torch.ones(2, 3)}, "mask is torch.float32"),
        ([X, X], {"logit_scale": torch.tensor(2)}, "floating-point"),
    ],
)
def test_what_is_of_the_wrong_type_is_said(xs: Any, told: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        nway_loss(xs, **told)

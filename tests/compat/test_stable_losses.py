"""A18 to A22: the documented stable operations are exact where they can be, and finite at every input."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tests.losses import reference
from trimtab.compat.nn import ImprovedActivations
from trimtab.compat.stable_losses import ACTIVATIONS
from trimtab.losses import StableLossFunctions, TooCostly, get_stable_loss_function, soft_clamp

OPS = StableLossFunctions()
NAMES = {0: "mip", 1: "norm", 2: "cosmean", 3: "dist"}


def features(n: int, batch: int, width: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, width, generator=draw, dtype=torch.float64).to(dtype) for _ in range(n)]


def gradients(function: Callable[..., Tensor], xs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return out.detach(), list(torch.autograd.grad((out * weights).sum(), leaves))


# A18: the operations


def test_a18_settings_are_checked_and_kept() -> None:
    ops = StableLossFunctions(1e-6, -10, 10, True)
    assert (ops.eps, ops.clamp_min, ops.clamp_max, ops.use_log_space) == (1e-6, -10, 10, True)
    assert (OPS.eps, OPS.clamp_min, OPS.clamp_max, OPS.use_log_space) == (1e-8, -100, 100, False)
    for bad in ({"eps": 0.0}, {"eps": math.nan}, {"clamp_min": 5, "clamp_max": 5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            StableLossFunctions(**bad)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *itertools.product((torch.float64, torch.float32, torch.bfloat16), (1e-30, 1e-8, 1e-4, 1.0, 1e4, 1e30)),
        *itertools.product((torch.float16,), (1e-30, 1e-7, 1e-4, 1.0, 1e4)),
    ],
)
def test_a18_norm_at_every_magnitude(dtype: torch.dtype, scale: float) -> None:
    x = torch.randn(5, 32, dtype=torch.float64)
    x[2] = 0.0
    given = (x * scale).to(dtype)
    given.requires_grad_()
    out = OPS.stable_norm(given)
    out.sum().backward()
    assert out.dtype == dtype
    assert given.grad is not None
    assert torch.isfinite(given.grad).all()
    assert not given.grad[2].any()
    exact = given.detach().double()
    length = exact.norm(dim=-1, keepdim=True).clamp_min(1e-8 if dtype != torch.float16 else 16 * 2**-14)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 1e-2)
    assert torch.allclose(out.double(), exact / length, rtol=tolerance, atol=1e-30 if dtype != torch.float16 else 1e-7)


def test_a18_norm_along_any_dimension_and_bad_values() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    assert torch.allclose(OPS.stable_norm(x, dim=1), x / x.norm(dim=1, keepdim=True))
    x[0, 0, 0] = math.nan
    x[1, 1, 1] = math.inf
    out = OPS.stable_norm(x)
    assert out[0, 0].isnan().all(), "NaN does not vanish silently"
    assert out[1, 1].isnan().any()
    assert torch.isfinite(out[2]).all()
    assert gradcheck(OPS.stable_norm, (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),))


def test_a18_division_keeps_its_sign() -> None:
    one = torch.tensor(1.0)
    assert float(OPS.stable_division(one, torch.tensor(-2.0))) == -0.5
    assert float(OPS.stable_division(one * 0, torch.tensor(0.0))) == 0.0
    tiny = OPS.stable_division(one, torch.tensor([-1e-12, 1e-12]))
    assert tiny[0] == -tiny[1]
    assert 50 < float(tiny[1]) <= 100, "soft, and within the bounds"
    unbounded = StableLossFunctions(clamp_min=-math.inf, clamp_max=math.inf)
    draw = torch.randn(64, dtype=torch.float64)
    assert torch.allclose(unbounded.stable_division(draw, draw + 3), draw / (draw + 3), rtol=1e-15, atol=0)
    assert OPS.stable_division(torch.tensor(7), torch.tensor(2)).item() == 3.5, "of integers too"
    a, b = torch.randn(8, dtype=torch.float64), torch.linspace(-2, 2, 8, dtype=torch.float64)
    assert gradcheck(OPS.stable_division, (a.requires_grad_(), b.requires_grad_()))


def test_a18_root_and_logarithm() -> None:
    x = torch.tensor([4.0, 1e-30, 0.0, -1e-9, -4.0], dtype=torch.float64)
    assert OPS.stable_sqrt(x).tolist() == pytest.approx([2.0, 1e-22, 0.0, 0.0, 0.0], abs=0)
    logs = OPS.stable_log(torch.tensor([math.e, 1e-8, 0.0, -1.0], dtype=torch.float64))
    assert logs[:3].tolist() == pytest.approx([1.0, math.log(1e-8), math.log(1e-8) - 1.0])
    assert -100 < float(logs[3]) < -90, "not the logarithm of 1"
    y = torch.linspace(0.1, 3, 16, dtype=torch.float64, requires_grad=True)
    assert gradcheck(OPS.stable_sqrt, (y,))
    assert gradcheck(OPS.stable_log, (y,))
    assert torch.equal(OPS.stable_log(y), y.log())
    assert torch.equal(OPS.stable_sqrt(y), y.sqrt())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a18_gradients_are_finite_at_every_input(dtype: torch.dtype) -> None:
    values = [s * v for s in (1, -1) for v in (0.0, 1e-30, 1e-9, 1e-8, 1e-4, 1.0, 1e4, 1e30)]
    x = torch.tensor([v for v in values if abs(v) <= torch.finfo(dtype).max], dtype=dtype)
    for function in (OPS.stable_sqrt, OPS.stable_log, OPS.stable_norm):
        out, (grad,) = gradients(function, [x.unsqueeze(-1)])
        assert torch.isfinite(out).all(), function
        assert torch.isfinite(grad).all(), function
    pairs = torch.tensor(list(itertools.product(x.tolist(), x.tolist())), dtype=dtype)
    out, grads = gradients(OPS.stable_division, [pairs[:, 0], pairs[:, 1]])
    assert torch.isfinite(out).all()
    assert float(out.abs().max()) <= 100
    assert all(torch.isfinite(g).all() for g in grads)


def test_a18_mean() -> None:
    xs = features(6, 3, 4)
    assert torch.allclose(OPS.stable_mean_n_vectors(*xs), torch.stack(xs).mean(0), rtol=1e-14)
    big = [torch.full((2,), 3e38)] * 6
    assert torch.allclose(OPS.stable_mean_n_vectors(*big), big[0])
    assert OPS.stable_mean_n_vectors(xs[0].half()).dtype == torch.float16
    with pytest.raises(ValueError, match="no vectors"):
        OPS.stable_mean_n_vectors()


def test_a18_the_soft_clamp_is_exact_inside_and_never_dead() -> None:
    inside = torch.linspace(-50, 50, 101, dtype=torch.float64)
    assert torch.equal(soft_clamp(inside, -100, 100), inside)
    x = torch.tensor([-3e38, -1e30, -101.0, -99.0, 99.0, 101.0, 1e6, 1e30, 3e38], requires_grad=True)
    out = soft_clamp(x, -100, 100)
    out.sum().backward()
    assert (out.abs() <= 100).all()
    assert x.grad is not None
    assert (x.grad > 0).all(), "a hard clamp has none out there"
    assert (out.diff() >= 0).all()
    y = torch.linspace(-300, 300, 30, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda v: soft_clamp(v, -100, 100), (y,))
    one_sided = soft_clamp(torch.tensor([-1e6, 5.0, 1e6]), -math.inf, 10.0)
    assert one_sided[:2].tolist() == [-1e6, 5.0]
    assert 9 < float(one_sided[2]) <= 10
    assert soft_clamp(torch.tensor([math.nan]), -1, 1).isnan().all()
    with pytest.raises(ValueError, match="less than"):
        soft_clamp(x, 1, 1)


def test_a18_log_space_does_something() -> None:
    xs = features(4, 3, 8, torch.float32)
    big = [xs[0] * 1e30, xs[1] * 1e30, xs[2] * 1e-30, xs[3] * 1e-30]
    wide = {"clamp_min": -math.inf, "clamp_max": math.inf}
    plain = StableLossFunctions(**wide).stable_einsum_similarity(*big, normalize=False)
    logs = StableLossFunctions(**wide, use_log_space=True)
    exact = reference.similarity([x.double() for x in xs], "mip")
    assert not torch.isfinite(plain).all()
    out, grads = gradients(lambda *f: logs.stable_einsum_similarity(*f, normalize=False), big)
    assert torch.allclose(out.double(), exact, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(g).all() for g in grads)
    huge = logs.stable_einsum_similarity(*(x * 1e30 for x in xs), normalize=False)
    assert torch.isfinite(huge).all(), "at the end of the range, not beyond it"
    for form in ("full", "line"):
        here = StableLossFunctions(use_log_space=True).stable_einsum_similarity(*features(4, 3, 8), form=form)
        there = OPS.stable_einsum_similarity(*features(4, 3, 8), form=form)
        assert torch.allclose(here, there, rtol=1e-12, atol=1e-14)
    assert gradcheck(
        lambda *f: StableLossFunctions(use_log_space=True).stable_einsum_similarity(*f),
        [x.requires_grad_() for x in features(3, 2, 4)],
    )


# A19: the four versions


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a19_versions_are_the_formulas(version: int, n: int) -> None:
    batch = 3 if n < 6 else 2
    xs = features(n, batch, 7)
    exact = reference.logits(xs, NAMES[version], how="l2")
    fn = get_stable_loss_function(loss_version=version)
    assert fn(*xs).shape == (batch,) * n
    assert torch.allclose(fn(*xs), exact, rtol=1e-12, atol=1e-12)
    assert torch.allclose(fn(*(x.float() for x in xs)).double(), exact, rtol=1e-6, atol=1e-6)
    mixed = fn(xs[0].float(), *xs[1:])
    assert mixed.dtype == torch.float64
    assert torch.allclose(mixed, exact, atol=1e-6)
    last = fn(*features(n, batch, 7, torch.bfloat16))
    assert last.dtype == torch.float32
    assert torch.allclose(last.double(), exact, rtol=3e-2, atol=3e-2)
    line = get_stable_loss_function(loss_version=version, form="line")(*xs)
    for i, j in itertools.product(range(batch), repeat=2):
        assert float(line[i, j]) == pytest.approx(float(exact[(i,) * (n - 1) + (j,)]), abs=1e-12)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a19_normalize_false_has_an_effect(version: int) -> None:
    xs = [x * (m + 2) for m, x in enumerate(features(3, 3, 5))]
    raw = get_stable_loss_function(version, normalize=False)(*xs)
    assert torch.allclose(raw, reference.similarity(xs, NAMES[version]), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(raw, get_stable_loss_function(version)(*xs), atol=1e-3)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a19_gradcheck(version: int) -> None:
    fn = get_stable_loss_function(version)
    assert gradcheck(fn, [x.requires_grad_() for x in features(3, 2, 4)])


def test_a19_the_rescaled_product_has_a_signal() -> None:
    same = [torch.randn(2, 512, generator=torch.Generator().manual_seed(0))] * 6
    plain = get_stable_loss_function(0)(*same)
    rescaled = get_stable_loss_function(0, rescale=True)(*same)
    assert float(plain[(0,) * 6]) < 1e-3, "the documented product, as documented"
    assert float(rescaled[(0,) * 6]) == pytest.approx(15, rel=1), "the sixth moment of a normal variable"
    assert torch.allclose(rescaled, plain * 512**2)


def test_a19_what_it_does_not_know_is_an_error() -> None:
    for version in (4, -1, 1.5, True, "1"):
        with pytest.raises(ValueError, match=r"0 \(einsum\), 1 \(norm\), 2 \(cosine\), 3 \(distance\)"):
            get_stable_loss_function(version)
    with pytest.raises(ValueError, match=r"'gellu'.*'gelu'"):
        get_stable_loss_function(1, activation="gellu")
    with pytest.raises(ValueError, match="form is 'lines'"):
        get_stable_loss_function(1, form="lines")
    with pytest.raises(ValueError, match="eps"):
        get_stable_loss_function(1, eps=-1.0)
    with pytest.raises(ValueError, match="at least 2"):
        get_stable_loss_function(1)(torch.ones(2, 2))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_a19_activations_are_those_of_nn(name: str) -> None:
    xs = features(3, 3, 5)
    plain = get_stable_loss_function(3)(*xs)
    out = get_stable_loss_function(3, activation=name)(*xs)
    assert torch.allclose(out, getattr(ImprovedActivations, name)(plain), rtol=1e-12)
    assert not torch.allclose(out, plain, atol=1e-3)


def test_a19_what_would_not_fit_is_refused_before_it_is_allocated() -> None:
    xs = [torch.zeros(64, 4)] * 6
    with pytest.raises(TooCostly, match=r"64\^6 = 6\.87e\+10.*GiB.*up to B=.*form='line'"):
        get_stable_loss_function(1)(*xs)
    with pytest.raises(TooCostly, match="cosmean"):
        OPS.stable_cosine_similarity_nd(*xs)
    assert get_stable_loss_function(1, form="line")(*xs).shape == (64, 64)


def test_a19_a_function_can_be_pickled() -> None:
    fn = get_stable_loss_function(2, activation="gelu")
    assert pickle.loads(pickle.dumps(fn)) == fn


# A20, A21: what "stable" promises


def spoiled(kind: str, dtype: torch.dtype) -> list[Tensor]:
    xs = features(3, 4, 8, torch.float64)
    if kind == "zero rows":
        for x in xs:
            x[1] = 0.0
    elif kind == "a zero modality":
        xs[1].zero_()
    elif kind == "orthonormal":
        eye = torch.eye(12, dtype=torch.float64)
        xs = [eye[4 * m : 4 * m + 4] for m in range(3)]
    elif kind == "equal":
        xs = [xs[0]] * 3
    elif kind == "antipodal":
        xs = [xs[0], -xs[0], xs[0] * 0]
    elif kind == "large":
        xs = [x * (1e4 if dtype == torch.float16 else 1e30) for x in xs]
    elif kind == "small":
        xs = [x * (1e-7 if dtype == torch.float16 else 1e-30) for x in xs]
    return [x.to(dtype) for x in xs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind", ["zero rows", "a zero modality", "orthonormal", "equal", "antipodal", "large", "small"]
)
@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a21_gradients_are_finite_where_the_originals_were_not(version: int, kind: str, dtype: torch.dtype) -> None:
    xs = spoiled(kind, dtype)
    out, grads = gradients(get_stable_loss_function(version), xs)
    assert torch.isfinite(out).all()
    for x, grad in zip(xs, grads, strict=True):
        assert torch.isfinite(grad).all()
        zero = ~x.any(dim=1)
        assert not grad[zero].any(), "a zero row has no direction, and none to go"
        size = x.double().norm(dim=1).clamp_min(1e-8)
        assert (grad.double().norm(dim=1) * size)[~zero].lt(1e5).all()


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a21_bounded_by_construction(version: int) -> None:
    low, high = {0: (-1, 1), 1: (0, 3), 2: (-1, 1), 3: (-1, 0)}[version]
    for seed in range(5):
        out = get_stable_loss_function(version)(*features(3, 6, 3, torch.float32, seed))
        assert low - 1e-5 <= float(out.min()) <= float(out.max()) <= high + 1e-5


def test_a20_version_1_needs_no_tensor_of_tuples_times_width() -> None:
    """A20 calls it fast: it is, from inner products alone. The original kept `[B]^N x D` numbers for the backward."""
    largest = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, t.numel())
        return t

    xs = [x.float().requires_grad_() for x in features(4, 6, 256)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        get_stable_loss_function(1)(*xs)
    assert largest <= 2 * 6**4, "the documented formula needs 6**4 * 256"


# A22: the documented recipe


def test_a22_the_custom_recipe_works() -> None:
    stable_ops = StableLossFunctions(eps=1e-8, clamp_min=-100, clamp_max=100)

    def my_loss(*given: Tensor) -> Tensor:
        given = tuple(stable_ops.stable_norm(f) for f in given)
        sim = stable_ops.stable_norm_based_similarity(*given)
        return torch.clamp(sim, -10, 10)

    xs = features(3, 4, 8, torch.float32)
    xs[1][2] = 0.0
    out, grads = gradients(my_loss, xs)
    kept = torch.tensor([0, 1, 3])
    exact = reference.logits([x[kept].double() for x in xs], "norm", how="l2")
    assert torch.allclose(out[kept][:, kept][:, :, kept].double(), exact, atol=1e-6)
    assert all(torch.isfinite(g).all() for g in grads)
    assert not grads[1][2].any()

"""`trimtab.log_histograms`: histograms of gradients and weights in your logger, made on a cadence in one pass."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.core.contain import Contained
from trimtab.core.errors import InputError
from trimtab.integrations.loggers.histogram import NUM_CODES, SHIFT, Counts, Histograms
from trimtab.integrations.loggers.known_loggers import sink_for
from trimtab.record.recorder import Recorder
from trimtab.record.sinks import is_main_process
from trimtab.sample.transfer import is_here, number, sent, to_host, upload
from trimtab.torchutil.optimizers import params_of

SMALL = 1 << 16
"""Tensors up to this size are counted together."""
MOST_TOGETHER = 64
PIECE = 1 << 22
"""Values of a large tensor that are counted at a time: bounds the memory for the numbers of their bins."""
MOST_WAITING = 16
"""Steps whose histograms wait for a slow logger; beyond this the oldest go."""


def log_histograms(
    model: nn.Module,
    logger: object,
    every: int = 100,
    *,
    gradients: bool = True,
    weights: bool = True,
    axis: str | None = None,
    step_of: Callable[[int], int] | None = None,
) -> HistogramLog:
    """Log histograms of gradients and weights every so many optimizer steps, in place of `wandb.watch`.

    Gradients are those that the optimizer gets: accumulated, unscaled under a `GradScaler`. NaN and Inf are counted
    and logged as numbers beside the histograms. Nothing waits for the device; the logger works on a thread of its own.

    Args:
        model: The model; only parameters that an optimizer steps are looked at.
        logger: A wandb run, a `SummaryWriter`, a Lightning logger, an MLflow run, or any object with `.log(dict)`.
            wandb and TensorBoard draw histograms, the others get quantiles.
        every: Optimizer steps between two histograms; the first is logged at step 0.
        gradients: Whether to log `trimtab/gradients/<name>`.
        weights: Whether to log `trimtab/parameters/<name>`.
        axis: The name of your framework's step axis in wandb, instead of `trimtab/step`.
        step_of: Turns the number of an optimizer step into a step of your framework.

    Returns:
        A handle: `close()` it, or use it in a `with` block, to log the last ones and to stop.

    Example:
        >>> import torch, trimtab
        >>> class Mine:
        ...     def log(self, values):
        ...         print(sorted(values)[:2], values["trimtab/gradients/nan"])
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with trimtab.log_histograms(model, Mine(), every=2):
        ...     for x in torch.randn(2, 8, 4):
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        ['trimtab/gradients/bias/p01', 'trimtab/gradients/bias/p50'] 0.0
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InputError(f"every is {every!r}; expected a whole number of steps, at least 1")
    kinds = {"gradients": gradients, "parameters": weights}
    if not any(kinds.values()):
        raise InputError("gradients and weights are both False, so there is nothing to log; leave one of them on")
    sink = sink_for(logger, axis=axis, step_of=step_of)
    return HistogramLog(model, Recorder([("histograms", sink)], queue_size=MOST_WAITING), every, kinds)


class HistogramLog:
    """What `log_histograms` returns: close it to log the last histograms and to stop."""

    def __init__(self, model: nn.Module, recorder: Recorder, every: int, kinds: dict[str, bool]) -> None:
        self._model = weakref.ref(model)
        self._recorder, self._every, self._kinds = recorder, every, kinds
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._counter = CodeCounter()
        self._under_way: list[_UnderWay] = []
        self._contained = Contained()
        # Before the hooks of the optimizer itself: a guard that rejects a step takes the gradients away in one of them.
        self._hook = register_optimizer_step_pre_hook(self._before_step) if is_main_process() else None
        atexit.register(self.close)

    def close(self) -> None:
        """Log what is still under way, and stop. Closing twice is harmless."""
        atexit.unregister(self.close)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._contained.call("logging histograms", self._hand_over, True)
        self._recorder.close()

    def __enter__(self) -> HistogramLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        step = self._steps.get(optimizer, -1) + 1
        self._steps[optimizer] = step
        if self._under_way:
            self._contained.call("logging histograms", self._hand_over, False)
        if step % self._every:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._contained.call("counting values for histograms", self._measure, optimizer, step)
            return None
        # The gradients are made inside: they are looked at when the closure was called for the first time.
        waiting = [step]

        def measured(*given: object) -> object:
            result = closure(*given)
            if waiting:
                self._contained.call("counting values for histograms", self._measure, optimizer, waiting.pop())
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": measured}
        return (args[0], measured, *args[2:]), kwargs

    @torch.no_grad()
    def _measure(self, optimizer: Any, step: int) -> None:
        model = self._model()
        if model is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        held = {id(p) for p in params_of(optimizer)}
        mine = [(_plain(name), p) for name, p in model.named_parameters() if id(p) in held]
        names: list[str] = []
        tensors: list[Tensor] = []
        for kind in (kind for kind, wanted in self._kinds.items() if wanted):
            for name, parameter in mine:
                values = _values(parameter.grad if kind == "gradients" else parameter)
                if values is not None:
                    names.append(f"{kind}/{name}")
                    tensors.append(values)
        if not tensors:
            return
        scale = getattr(optimizer, "grad_scale", None)  # a scaler leaves a fused optimizer to divide by it
        self._under_way.append(
            _UnderWay(step, names, list(self._counter.count(tensors)), _sent_scale(scale), _event(tensors[0].device))
        )
        if all(map(is_here, tensors)):
            self._hand_over(True)

    def _hand_over(self, wait: bool) -> None:
        """Give to the logger what has arrived from the device."""
        while self._under_way and (wait or self._under_way[0].arrived):
            record = self._under_way.pop(0).read()
            self._recorder.put(cast(Any, record))  # a recorder hands on what its sinks understand


class _UnderWay:
    """Counts on their way to the host."""

    def __init__(
        self, step: int, names: list[str], counts: list[tuple[list[int], Tensor]], scale: Tensor | None, event: Any
    ) -> None:
        self._step, self._names, self._counts, self._scale, self._event = step, names, counts, scale, event

    @property
    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> Histograms:
        if self._event is not None:
            self._event.synchronize()
        codes: Counts = np.zeros((len(self._names), NUM_CODES), np.int64)
        for rows, counts in self._counts:
            codes[rows] = to_host(counts)
        scale = 1.0 if self._scale is None else number(self._scale)
        scaled = [i for i, name in enumerate(self._names) if name.startswith("gradients/")] if scale != 1.0 else []
        return Histograms(step=self._step, names=tuple(self._names), codes=codes, scales=dict.fromkeys(scaled, scale))


class CodeCounter:
    """Counts how many values of each tensor have each number of a bin; small tensors together, nothing waits."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def count(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """Places of tensors, and their counts `[tensors, NUM_CODES]` on the way to the host."""
        groups: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault(tensor.device, []).append(i)
        for places in groups.values():
            small = [i for i in places if tensors[i].numel() <= SMALL]
            large = [i for i in places if tensors[i].numel() > SMALL]
            parts = [self._together([tensors[i] for i in some]) for some in _chunks(small)]
            parts += [_alone(tensors[i]).unsqueeze(0) for i in large]
            if parts:
                yield [*small, *large], sent(torch.cat(parts))

    def _together(self, tensors: list[Tensor]) -> Tensor:
        device, sizes = tensors[0].device, tuple(t.numel() for t in tensors)
        offsets = self._offsets.get((device, sizes))
        if offsets is None:
            rows = np.repeat(np.arange(len(sizes), dtype=np.int32) * NUM_CODES, sizes)
            if len(self._offsets) > 4 * MOST_TOGETHER:  # gradients that come and go: the usual ones come back
                self._offsets.clear()
            offsets = self._offsets[device, sizes] = upload(rows, device)
        codes = torch.cat([_codes(t) for t in tensors]).add_(offsets)
        return _counted(codes, len(sizes) * NUM_CODES).view(len(sizes), NUM_CODES)


def _chunks(places: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(places), MOST_TOGETHER):
        yield places[start : start + MOST_TOGETHER]


def _alone(tensor: Tensor) -> Tensor:
    total = torch.zeros(NUM_CODES, dtype=torch.int64, device=tensor.device)
    for piece in torch.split(tensor, PIECE):
        total += _counted(_codes(piece), NUM_CODES)
    return total


def _codes(values: Tensor) -> Tensor:
    """The number of the bin of each value: sign, exponent and the first bit of the fraction of its float32."""
    if values.dtype is torch.bfloat16:  # the same bits, without those that are left out anyway
        return ((values.view(torch.int16) >> (SHIFT - 16)) & (NUM_CODES - 1)).int()
    if values.dtype is torch.float64:  # what is finite and does not fit a float32 belongs into its outermost bin
        largest = torch.finfo(torch.float32).max
        values = torch.where(values.isinf(), values, values.clamp(-largest, largest))
    return (values.float().view(torch.int32) >> SHIFT).bitwise_and_(NUM_CODES - 1)


def _counted(codes: Tensor, num: int) -> Tensor:
    if is_here(codes):
        return torch.bincount(codes, minlength=num)
    # bincount waits for the device to know the largest number. In the middle of a bin rounding changes nothing.
    return torch.histc(codes.float().add_(0.5), num, 0, num).long()


def _values(tensor: Tensor | None) -> Tensor | None:
    """The values of this process, flat; None for what has none."""
    if tensor is None or tensor.is_meta or isinstance(tensor, nn.parameter.UninitializedParameter):
        return None
    local = getattr(tensor, "to_local", None)
    tensor = cast(Tensor, local()) if callable(local) else tensor
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.layout is not torch.strided:
        return None
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().reshape(-1) if tensor.is_floating_point() and tensor.numel() else None


def _sent_scale(scale: object) -> Tensor | None:
    return sent(scale.reshape(-1)[:1]) if isinstance(scale, Tensor) else None


def _event(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _plain(name: str) -> str:
    """Without what `torch.compile` and DDP put before a name."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)

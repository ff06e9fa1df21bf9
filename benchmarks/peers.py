"""What other tools would have said about a run: their detection rules, re-stated from their documented behaviour.

Each peer sees what it would see in its own home, the loss and the gradient norm of every step, with its default
settings, and says whether it raises an alarm at this step. A NaN does to its memory what it does in the original: some
go blind for as long as their window lasts, and that is part of the measurement. `None` means not measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

Value = float | None


class Peer(Protocol):
    """A detector fed with one step after the other."""

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        """Take in one step; True means alarm."""
        ...


class ComposerNaNMonitor:
    """Composer NaNMonitor: stops on a NaN loss; an infinite loss passes."""

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        return loss is not None and math.isnan(loss)


class IgniteTerminateOnNan:
    """Ignite TerminateOnNan: stops when the output of the training step, here the loss, holds NaN or Inf."""

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        return loss is not None and not math.isfinite(loss)


class Megatron:
    """Megatron-LM rerun state machine: NaN or Inf loss, or (switched on here) 10x the largest of the first 100."""

    factor, num_samples = 10.0, 100

    def __init__(self) -> None:
        self._num, self._largest = 0, 0.0

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if loss is None:
            return False
        if not math.isfinite(loss):
            return True  # a check of its own; the search for large values ignores it
        if self._num < self.num_samples:
            self._num += 1
            self._largest = max(self._largest, abs(loss))
            return False
        return abs(loss) >= self.factor * self._largest


class KillLossSpike:
    """llm-foundry KillLossSpike: 5 losses in a row at twice the mean of the last 100; a NaN blinds that mean.

    Its second alarm, half of the window above min(10, the largest loss of the first window), waits for two windows.
    """

    factor, window, patience, cap = 2.0, 100, 4, 10.0

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.window)
        self._streak = self._num = 0
        self._cap = self.cap

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if loss is None:
            return False
        alarm = len(self._losses) == self.window and self._judge(loss)
        self._losses.append(loss)
        self._num += 1
        return alarm

    def _judge(self, loss: float) -> bool:
        if self._num == self.window:
            self._cap = min(max(self._losses), self.cap)
        # With a NaN in the window, or as the loss, the comparison is False: blind for 100 steps.
        self._streak = self._streak + 1 if loss >= self.factor * (sum(self._losses) / self.window) else 0
        if self._streak > self.patience:
            return True
        high = sum(value > self._cap for value in self._losses)
        return self._num >= 2 * self.window and high >= self.window / 2


class OlmoStabilityMonitor:
    """OLMo-core StabilityMonitor: loss or gradient norm 6 deviations above the mean of a full window of 128 steps."""

    window, sigma, least = 128, 6.0, 128

    def __init__(self) -> None:
        self._past: tuple[deque[float], deque[float]] = (deque(maxlen=self.window), deque(maxlen=self.window))

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        alarm = False
        for value, past in zip((loss, grad_norm), self._past, strict=True):
            if value is not None:
                alarm |= len(past) >= self.least and self._outlier(value, past)
                past.append(value)  # a NaN too: until it has left the window there is no alarm
        return alarm

    def _outlier(self, value: float, past: deque[float]) -> bool:
        mean, std = _mean_std(past, ddof=0)
        return not std < 1e-10 and value > mean + self.sigma * std


class OlmoSkipStep(OlmoStabilityMonitor):
    """OLMo-core SkipStepOptimizer: skips unless both values are within 6 deviations (either side), from step 64 on.

    A NaN compares as outside, and so does every step for as long as it is in the window.
    """

    least = 63

    def _outlier(self, value: float, past: deque[float]) -> bool:
        mean, std = _mean_std(past, ddof=1)
        return not (std > 0 and abs(value - mean) <= self.sigma * std)


class LightningSpikeDetection:
    """Lightning SpikeDetection: not finite, or above the last loss and 3x the mean of 10 (rtol 2); spikes stay out.

    It stops at a spike; what it says later is what it would say with the spike left out, as after a resume.
    """

    window, warmup, rtol = 10, 1, 2.0

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.window)
        self._last = 0.0
        self._seen = 0

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if loss is None:
            return False
        self._seen += 1
        if self._seen > self.warmup and self._spike(loss):
            return True
        if not math.isnan(loss):  # the running mean drops NaN with a warning; the last value is kept all the same
            self._losses.append(loss)
        self._last = loss
        return False

    def _spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if loss - self._last <= 0 or not self._losses:
            return False
        mean = sum(self._losses) / len(self._losses)
        return abs(loss - mean) >= abs(self.rtol * mean)


class Keepalive:
    """keepalive-club: not finite, or the mean of the last 20 finite losses above 2.5x the best such mean so far."""

    window, factor = 20, 2.5

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.window)
        self._best = math.inf

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if loss is None:
            return False
        if not math.isfinite(loss):
            return True
        self._losses.append(loss)
        if len(self._losses) < self.window:
            return False
        mean = sum(self._losses) / self.window
        self._best = min(self._best, mean)
        return self._best > 0 and mean > self.factor * self._best


class StabilityGuard:
    """StabilityGuard: a gradient not finite (always), or a norm 10x its moving average (alpha 0.01) after 10 steps.

    It looks at each layer; here at the norm of all gradients.
    """

    factor, alpha, warmup = 10.0, 0.01, 10

    def __init__(self) -> None:
        self._mean: float | None = None
        self._seen = 0

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if grad_norm is None:
            return False
        self._seen += 1
        if not math.isfinite(grad_norm):
            return True  # such values never enter the average
        if self._mean is not None and self._seen > self.warmup and grad_norm > self.factor * max(self._mean, 1e-12):
            return True
        self._mean = grad_norm if self._mean is None else (1 - self.alpha) * self._mean + self.alpha * grad_norm
        return False


class TrainscopeZ:
    """trainscope z-score: a loss 3.5 deviations off the mean of the last 200, either side, after 30; NaN is ignored."""

    window, least, limit = 200, 30, 3.5

    def __init__(self) -> None:
        self._past: deque[float] = deque(maxlen=self.window)
        self._blind = False

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if loss is None or math.isnan(loss):
            return False
        alarm = len(self._past) >= self.least and not self._blind and self._outlier(loss)
        self._past.append(loss)
        self._blind |= math.isinf(loss)  # it does get in, and a running mean never gets rid of it
        return alarm

    def _outlier(self, loss: float) -> bool:
        mean, std = _mean_std(self._past, ddof=1)
        return loss != mean if std == 0 else abs((loss - mean) / std) > self.limit


class TrainscopeCusum:
    """trainscope default: two-sided CUSUM (h=6, k=1) of the loss, median and MAD of the last 200; NaN is ignored."""

    window, least, limit, slack = 200, 30, 6.0, 1.0

    def __init__(self) -> None:
        self._past: deque[float] = deque()
        self._sorted: list[float] = []
        self._up = self._down = 0.0

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if loss is None or math.isnan(loss):
            return False
        alarm = len(self._past) >= self.least and self._drifted(loss)
        self._past.append(loss)
        insort(self._sorted, loss)
        if len(self._past) > self.window:
            del self._sorted[bisect_left(self._sorted, self._past.popleft())]
        return alarm

    def _drifted(self, loss: float) -> bool:
        centre = _middle(self._sorted)
        spread = max(1.4826 * _middle(sorted(abs(v - centre) for v in self._past)), 1e-12)
        z = (loss - centre) / spread
        self._up, self._down = max(0.0, self._up + z - self.slack), min(0.0, self._down + z + self.slack)
        alarm = self._up >= self.limit or -self._down >= self.limit
        if alarm:
            self._up = self._down = 0.0
        return alarm


class ZClip:
    """ZClip: a gradient norm more than 2.5 deviations above its moving average (0.97, warm-up 25) would be clipped.

    The clipped norm enters the average; a NaN does as well, and then nothing is ever clipped again.
    """

    alpha, limit, warmup, eps = 0.97, 2.5, 25, 1e-6

    def __init__(self) -> None:
        self._first: list[float] = []
        self._mean = self._var = 0.0

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if grad_norm is None:
            return False
        if len(self._first) < self.warmup:
            self._first.append(grad_norm)
            if len(self._first) == self.warmup:
                self._mean, std = _mean_std(self._first, ddof=0)
                self._var = std * std
            return False
        std = math.sqrt(self._var)
        z = (grad_norm - self._mean) / (std + self.eps)
        alarm = z > self.limit
        kept = self._mean + self.limit * std / (z / self.limit) if alarm else grad_norm
        self._mean = self.alpha * self._mean + (1 - self.alpha) * kept
        self._var = self.alpha * self._var + (1 - self.alpha) * (kept - self._mean) ** 2
        return alarm


class LossNotDecreasing:
    """SageMaker Debugger LossNotDecreasing: every 10 steps the loss must have fallen by 0.1 % since the last look."""

    every, percent = 10, 0.1

    def __init__(self) -> None:
        self._last: float | None = None

    def update(self, step: int, loss: Value, grad_norm: Value) -> bool:
        if loss is None or step % self.every:
            return False
        last, self._last = self._last, loss
        return last is not None and not loss < last * (1 - self.percent / 100)


def _mean_std(values: Iterable[float], *, ddof: int) -> tuple[float, float]:
    """Mean and standard deviation as floating point gives them, NaN and Inf included."""
    known = list(values)
    mean = sum(known) / len(known)
    try:
        return mean, math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - ddof))
    except OverflowError:  # Python's own squares complain where tensors give Inf
        return mean, math.inf


def _middle(ordered: list[float]) -> float:
    mid = len(ordered) // 2
    return ordered[mid] if len(ordered) % 2 else (ordered[mid - 1] + ordered[mid]) / 2


PEERS: dict[str, Callable[[], Peer]] = {
    "NaN loss (Composer NaNMonitor)": ComposerNaNMonitor,
    "NaN/Inf loss (Ignite TerminateOnNan)": IgniteTerminateOnNan,
    "Megatron NaN + 10x max": Megatron,
    "llm-foundry KillLossSpike": KillLossSpike,
    "keepalive NaN + 2.5x best window": Keepalive,
    "OLMo StabilityMonitor 6 sigma": OlmoStabilityMonitor,
    "OLMo SkipStep 6 sigma": OlmoSkipStep,
    "StabilityGuard 10x EMA": StabilityGuard,
    "Lightning SpikeDetection": LightningSpikeDetection,
    "trainscope z 3.5": TrainscopeZ,
    "trainscope CUSUM": TrainscopeCusum,
    "ZClip z > 2.5 as a flag": ZClip,
    "SageMaker-like LossNotDecreasing": LossNotDecreasing,
}

"""Lightning: `Trainer(callbacks=[trimtab.lightning.GuardCallback(clip=1.0)])`, and Fabric with `guard_fabric`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.compat.monitors.activation_monitor import ActivationMonitor
from trimtab.compat.monitors.gradient_monitor import GradientHealthMonitor, check_and_log_gradients
from trimtab.core.errors import InputError
from trimtab.core.types import Finding
from trimtab.guard.guard import Guard
from trimtab.integrations.training_guard import Attach, TrainingGuard, check_settings, missing, of_validation
from trimtab.losses import NWayLoss
from trimtab.torchutil.optimizers import scale_of
from trimtab.torchutil.patch import wrap_on_object

CLIPPING = ("configure_gradient_clipping", "on_before_optimizer_step")
"""Where a module may clip in a way of its own."""
SIMILARITY = ("mip", "norm", "cosmean", "dist")
"""Of the stable losses, by their documented numbers."""


def _package() -> Any:
    """The package that the program uses: both names are around, each with classes of its own."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    if names[1] in sys.modules and names[0] not in sys.modules:
        names.reverse()
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise missing("Lightning", "lightning")


_pl: Any = _package()
_Callback: Any = _pl.Callback
_LightningModule: Any = _pl.LightningModule


class GuardCallback(_Callback):
    """Guards the training of a Lightning `Trainer`.

    It measures gradients unscaled and before `gradient_clip_val`, sees the loss of every micro-batch and the validation
    loss, and is part of the trainer's checkpoints.

    Args:
        validation: Name of the logged validation loss; None finds one such as `val_loss`.
        attach: Makes the guard, which then leaves nothing in checkpoints; None: `trimtab.Guard`.
        settings: Keywords of `trimtab.Guard`.
    """

    def __init__(self, *, validation: str | None = None, attach: Attach | None = None, **settings: Any) -> None:
        super().__init__()
        self._validation = validation
        self._trainer: Any = None
        self._training = TrainingGuard("Lightning", settings, self._stop, attach)
        self._batch: Any = None
        self._clips = False

    @property
    def guard(self) -> Guard | None:
        """The guard of the training; None before it begins."""
        return self._training.guard

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return self._training.findings

    def _stop(self) -> None:
        self._trainer.should_stop = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Weights and optimizers are restored by now: guard them."""
        self._trainer = trainer
        limit = trainer.gradient_clip_val
        self._clips = bool(limit) or any(_overrides(pl_module, name) for name in CLIPPING)
        optimizers = list(trainer.optimizers)
        self._training.begin(
            pl_module,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            theirs=f"gradient_clip_val={limit}" if limit else "",
            # Lightning counts the steps of all optimizers together.
            steps_left=lambda: (trainer.estimated_stepping_batches - trainer.global_step) / len(optimizers),
            scaler=_scaler(trainer),
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the batch until its loss is known."""
        self._batch = batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """A micro-batch's loss, as Lightning divided and scaled it."""
        factor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        scale = scale_of(_scaler(trainer))
        if factor != 1:
            loss = loss * factor
        batch, self._batch = self._batch, None
        self._training.loss(loss if scale is None else loss / scale, batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Gradients are unscaled here, and not clipped yet."""
        if self._clips:
            self._training.clips(optimizer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Judge a validation; the one before training, which is a test of the code, is none."""
        if not trainer.sanity_checking:
            self._training.validated(of_validation(trainer.callback_metrics, self._validation), self._validation)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the guard."""
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close it where training fails, too."""
        self._training.end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind, whatever happened."""
        self._training.end()
        self._trainer = self._batch = None

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's checkpoint keeps."""
        return self._training.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there when training begins."""
        self._training.load_state_dict(state_dict)


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _overrides(module: Any, name: str) -> bool:
    """Whether a user's class has its own method of this name."""
    home = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
    return home is not None and not home.__module__.startswith(("lightning.", "pytorch_lightning."))


def guard_fabric(
    fabric: Any, model: Any, optimizer: Any, *, gradient_accumulation_steps: int = 1, **settings: Any
) -> Guard:
    """Guard a loop that Fabric drives; call it after `fabric.setup`.

    The losses given to `fabric.backward` are seen, and the norm before `fabric.clip_gradients`, which no longer ends a
    run whose bad update is rejected anyway.

    Args:
        fabric: The `Fabric`.
        model: What `fabric.setup` returned.
        optimizer: One optimizer from there, or a list or dict of them.
        gradient_accumulation_steps: What your loop divides each loss by.
        settings: Keywords of `trimtab.Guard`.
    """
    check_settings(settings)
    scaler = getattr(getattr(fabric.strategy, "precision", None), "scaler", None)
    guard = Guard.attach(model, optimizer, **{"scaler": scaler, **settings})
    guard.watch_clipping()

    def backward(inner: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        guard.observe(tensor if gradient_accumulation_steps == 1 else tensor * gradient_accumulation_steps)
        return inner(tensor, *args, **kwargs)

    def clip(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if guard.config.mode != "observe" and guard.config.reject_nonfinite:
            kwargs["error_if_nonfinite"] = False  # it is rejected and named instead
            args = args[:5]  # the sixth would be the same
        return inner(*args, **kwargs)

    guard.also_remove(wrap_on_object(fabric, "backward", backward))
    guard.also_remove(wrap_on_object(fabric, "clip_gradients", clip))
    return guard


# -- what the source documents name (A25, A28) ---------------------------------------------------------------------


class EnhancedTrainingMixin:
    """Gradient and activation monitoring for a LightningModule: put it first among the base classes.

    Call `setup_gradient_monitoring` in `__init__`. Gradients are then measured and clipped right before every optimizer
    step: unscaled, and complete where they are accumulated.
    """

    grad_monitor: GradientHealthMonitor | None = None
    activation_monitor: ActivationMonitor | None = None

    def setup_gradient_monitoring(
        self,
        enable_gradient_monitoring: bool = True,
        enable_activation_monitoring: bool = False,
        gradient_clip_threshold: float = 1.0,
        log_frequency: int = 100,
    ) -> None:
        """Begin to monitor; call it when the layers are there."""
        module: Any = self
        if self.activation_monitor is not None:
            self.activation_monitor.remove_hooks()
        self.grad_monitor = self.activation_monitor = None
        if enable_gradient_monitoring:
            self.grad_monitor = GradientHealthMonitor(
                module, grad_clip_threshold=gradient_clip_threshold, log_frequency=log_frequency
            )
        if enable_activation_monitoring:
            self.activation_monitor = ActivationMonitor(module)
            self.activation_monitor.register_hooks()

    def check_and_log_gradients(
        self, step: int, apply_clipping: bool = False, max_grad_norm: float = 1.0
    ) -> dict[str, Any]:
        """The statistics of the gradients there are, logged on the monitor's cadence, and clipped if asked."""
        if self.grad_monitor is None:
            raise InputError("gradients are not monitored; call setup_gradient_monitoring() first")
        trainer = getattr(self, "_trainer", None)
        logger = None if trainer is None else trainer.logger
        return dict(check_and_log_gradients(self.grad_monitor, step, apply_clipping, max_grad_norm, logger=logger))

    def get_activation_statistics(self) -> dict[str, Any]:
        """Mean, deviation, extremes and sparsity by layer; empty where activations are not monitored."""
        return {} if self.activation_monitor is None else dict(self.activation_monitor.get_statistics())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Measure and clip: Lightning calls it unscaled, and once per step."""
        monitor, module = self.grad_monitor, super()
        if hasattr(module, "on_before_optimizer_step"):
            module.on_before_optimizer_step(optimizer)
        if monitor is not None:
            step = int(getattr(self, "global_step", 0))
            self.check_and_log_gradients(step, apply_clipping=True, max_grad_norm=monitor.grad_clip_threshold)


class EnhancedLightningCLIPModule(EnhancedTrainingMixin, _LightningModule):
    """Contrastive training of N modalities: one encoder each, a stable loss, monitored, clipped and guarded.

    A batch is a sequence of N tensors, one per modality, row by row of the same samples.

    Args:
        learning_rate: Of AdamW.
        enable_gradient_monitoring: Measure and clip gradients before every step.
        use_stable_loss: Compare by `stable_loss_version`; else by the inner product of all modalities.
        stable_loss_version: 0 inner product, 1 norm of the sum, 2 cosine, 3 distance.
        gradient_clip_value: The largest norm of the gradients, where they are monitored.
        enable_activation_monitoring: Watch the outputs of all layers.
        log_frequency: Steps between two logged statistics.
        encoders: One module per modality, each giving rows of one width; register your own in a subclass otherwise.
        guard: Keywords of `trimtab.Guard`.
    """

    def __init__(
        self,
        learning_rate: float = 1e-4,
        enable_gradient_monitoring: bool = True,
        use_stable_loss: bool = True,
        stable_loss_version: int = 1,
        gradient_clip_value: float = 1.0,
        enable_activation_monitoring: bool = False,
        log_frequency: int = 100,
        *,
        encoders: Sequence[nn.Module] = (),
        guard: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= stable_loss_version < len(SIMILARITY):
            raise InputError(f"stable_loss_version is {stable_loss_version}; expected 0, 1, 2 or 3")
        self.learning_rate = learning_rate
        self.encoders = nn.ModuleList(encoders)
        self.criterion = NWayLoss(SIMILARITY[stable_loss_version if use_stable_loss else 0])
        self._guard_settings = dict(guard) if guard is not None else {}
        self.setup_gradient_monitoring(
            enable_gradient_monitoring, enable_activation_monitoring, gradient_clip_value, log_frequency
        )

    def configure_callbacks(self) -> list[Any]:
        """The trainer that fits this module guards it."""
        return [GuardCallback(**self._guard_settings)]

    def forward(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The encodings, one tensor per modality."""
        if len(views) != len(self.encoders):
            raise InputError(
                f"the batch has {len(views)} modalities; expected one for each of {len(self.encoders)} encoders"
            )
        return [encoder(view) for encoder, view in zip(self.encoders, views, strict=True)]

    def calculate_loss(self, *features: Tensor) -> Tensor:
        """How well the modalities of one sample find each other."""
        loss: Tensor = self.criterion(features)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = self.calculate_loss(*self(batch))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same, without learning from it."""
        self.log("val_loss", self.calculate_loss(*self(batch)))

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

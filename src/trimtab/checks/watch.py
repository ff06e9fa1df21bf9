"""Listens while a training steps: every forward, backward, clip, unscale and step, in its order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.checks.events import Call, Event
from trimtab.checks.graph import read_graph
from trimtab.checks.listening import change_outside, distance, main_of, size_of, wrap, wrap_own
from trimtab.checks.pending import Pending
from trimtab.sample.transfer import number

NUM_GRAPHS = 4
"""Calls whose graphs are read: they do not change from call to call."""


class Watch:
    """The wrappers around PyTorch and what they heard; nothing of it is left when the block ends."""

    def __init__(self, model: nn.Module, schedulers: tuple[Any, ...] = ()) -> None:
        self.calls: list[Call] = []
        self.pending = Pending()
        self.optimizers: dict[int, Any] = {}
        self.running: list[str] = []
        self._model, self._schedulers = model, schedulers
        self._names = {id(m): n or type(m).__name__ for n, m in model.named_modules()}
        self._mine = {id(p) for p in model.parameters()}
        self._depth: dict[int, int] = {}
        self._scaled: dict[int, Any] = {}
        self._in_scaler = 0
        self._before: dict[int, Tensor] = {}
        self._first: dict[int, dict[int, Tensor]] = {}
        self._after: dict[int, dict[int, Tensor]] = {}
        self.graphs_left = NUM_GRAPHS
        self.keep_gradients = False
        self.gate: Callable[[], None] | None = None
        self.gradients: list[dict[int, Tensor]] = []

    @property
    def now(self) -> Call:
        """The call that is under way."""
        return self.calls[-1]

    def begin(self) -> Call:
        """A new call begins."""
        self.calls.append(Call(len(self.calls)))
        self.running.clear()
        self._depth.clear()
        self._in_scaler = 0
        return self.now

    def know(self, optimizer: Any) -> None:
        """An optimizer whose gradients are to be followed from the start."""
        self.optimizers[id(optimizer)] = optimizer
        self.pending.know(optimizer)

    @contextmanager
    def listening(self) -> Iterator[Watch]:
        """Put the wrappers in place, and take them off again."""
        with ExitStack() as stack:
            stack.callback(modules.register_module_forward_pre_hook(self._enter).remove)
            stack.callback(modules.register_module_forward_hook(self._leave).remove)
            stack.callback(register_optimizer_step_pre_hook(self._stepping).remove)
            stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            for home, name, around in (
                (torch.autograd, "backward", self._backward),
                (clip_grad, "_clip_grads_with_norm_", self._clip),
                (clip_grad, "clip_grad_value_", self._clip_value),
                (torch.nn.utils, "clip_grad_value_", self._clip_value),
                (Optimizer, "zero_grad", self._zero),
                (torch.amp.GradScaler, "scale", self._scale),
                (torch.amp.GradScaler, "unscale_", self._unscale),
                (torch.amp.GradScaler, "step", self._scaler_step),
                (torch.amp.GradScaler, "update", self._update),
            ):
                stack.callback(wrap(home, name, around))
            for scheduler in self._schedulers:
                if callable(getattr(scheduler, "step", None)):
                    stack.callback(wrap_own(scheduler, "step", functools.partial(self._schedule, id(scheduler))))
            yield self

    def put(self, kind: str, who: int = 0, **facts: Any) -> Event:
        """Write an event down."""
        event = Event(kind, self.now.index, who, facts)
        self.now.events.append(event)
        return event

    # -- forward -------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
            if own and not any(id(p) in self._mine for p in own) and self.running:
                self.now.strangers.append(module)
            return
        if not self.running and self.gate is not None:
            self.gate()
        if not self.running:
            device = next((p.device.type for p in self._model.parameters()), "cpu")
            on = torch.is_autocast_enabled(device)
            self.put(
                "forward",
                id(module),
                root=module is self._model,
                training=module.training,
                grad=torch.is_grad_enabled(),
                autocast=torch.get_autocast_dtype(device) if on else None,
                name=name,
                trainable=any(p.requires_grad for p in module.parameters()),
            )
            self.now.inputs += [t for t in args if isinstance(t, Tensor)][:4]
        if isinstance(module, nn.Embedding) and args and isinstance(args[0], Tensor):
            self.now.lookups.append((module, args[0]))
        self.running.append(name)
        self.now.modules[id(module)] = (module.training, torch.is_grad_enabled())

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._names or not self.running:
            return
        self.running.pop()
        if not self.running:
            found = main_of(output)
            if isinstance(found, Tensor):
                self.now.output = found.detach()

    # -- backward and gradients ----------------------------------------------------------------------------------

    def _backward(self, inner: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = [t for t in ((tensors,) if isinstance(tensors, Tensor) else tuple(tensors)) if isinstance(t, Tensor)]
        loss = roots[0] if roots else None
        event = self.put("backward", scaled=loss is not None and id(loss) in self._scaled)
        if loss is not None:
            origin = self._scaled.get(id(loss), (None, loss, 1.0))[1]
            event.facts |= {
                "value": number(origin.detach().float()) if origin.numel() == 1 and not origin.is_meta else None,
                "kind": "",
                "factors": [],
                "in_step": bool(self._depth),
                "root": loss.grad_fn,
                "scale": self._scaled[id(loss)][2] if id(loss) in self._scaled else 1.0,
            }
            facts = read_graph(loss, detailed=self.graphs_left > 0)
            event.facts["kind"], event.facts["reduction"] = facts.kind, facts.reduction
            event.facts["target"] = None if facts.target is None else facts.target.data_ptr()
            if facts.node is not None:
                told = event.facts["factors"]
                handle = facts.node.register_prehook(lambda grads: told.append(size_of(grads)))
            else:
                handle = None
            if not self.now.facts.num_nodes:
                self.now.facts = facts
        self.pending.before_backward(self.optimizers.values(), event)
        out = inner(tensors, *args, **kwargs)
        if loss is not None and handle is not None:
            handle.remove()
        self.pending.after_backward(self.optimizers.values())
        if self.keep_gradients:
            self.gradients.append(
                {id(p): p.grad.detach().clone() for p in self._model.parameters() if p.grad is not None}
            )
        self.now.reached |= {id(p) for p in self._model.parameters() if p.grad is not None}
        return out

    def _clip(
        self, inner: Callable[..., Any], parameters: Any, max_norm: float, total: Tensor, *rest: Any, **kw: Any
    ) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        held = {id(p) for p in params if p.grad is not None}
        last = next((e for e in reversed(self.now.events) if e.kind in ("backward", "unscale", "step", "clip")), None)
        self.put(
            "clip",
            num=len(held),
            norm=number(total.detach().float()),
            max_norm=float(max_norm),
            after=last.kind if last is not None else "",
            scaled=self.pending.is_scaled(held),
        )
        self.pending.look()
        out = inner(params, max_norm, total, *rest, **kw)
        self.pending.clipped()
        return out

    def _clip_value(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.pending.look()
        out = inner(*args, **kwargs)
        self.pending.clipped()
        return out

    def _zero(self, inner: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.put("zero", id(optimizer))
        return inner(optimizer, *args, **kwargs)

    # -- scaler and step -----------------------------------------------------------------------------------------

    def _scale(self, inner: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        out = inner(scaler, outputs)
        self.put("scale", id(scaler), enabled=scaler.is_enabled())
        if isinstance(out, Tensor) and out is not outputs:
            self._scaled[id(out)] = (out, outputs, float(scaler.get_scale()))
        return out

    def _unscale(self, inner: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        out = inner(scaler, optimizer)
        self.put("unscale", id(optimizer))
        self.pending.unscaled(optimizer)
        return out

    def _scaler_step(self, inner: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            scaled = self.pending.is_scaled({id(p) for g in optimizer.param_groups for p in g["params"]})
            self.put("scaler-step", id(optimizer), scaled=scaled, scale=scaler.get_scale())
            self.now.scale = scaler.get_scale()
        self._in_scaler += 1
        try:
            return inner(scaler, optimizer, *args, **kwargs)
        finally:
            self._in_scaler -= 1

    def _update(self, inner: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self.put("update", id(scaler))
        return inner(scaler, *args, **kwargs)

    def _stepping(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1
        if depth > 1:  # a class that calls the step of its parent makes one step
            return
        self.know(optimizer)
        closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        gradients = self.pending.before_step(optimizer)
        self._before = {id(p): p.detach().clone() for g in optimizer.param_groups for p in g["params"] if not p.is_meta}
        first = self._first.setdefault(id(optimizer), self._before)
        outside = change_outside(self._before, self._after.get(id(optimizer)), first)
        self.put(
            "step",
            id(optimizer),
            gradients=gradients,
            closure=closure,
            in_scaler=bool(self._in_scaler),
            scaled=self.pending.is_scaled(set(gradients.norms)) and not self._in_scaler,
            fresh=self.pending.num_new(optimizer),
            again=self.pending.is_used_up(optimizer),
            moved=False,
            leap=0.0,
            outside=outside,
            made_of=self.pending.made_of(optimizer),
            rates=tuple(float(g["lr"]) for g in optimizer.param_groups if "lr" in g),
        )

    def _stepped(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        left = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 1) - 1
        if left > 0:
            return
        del self._depth[id(optimizer)]
        event = next(e for e in reversed(self.now.events) if e.kind == "step" and e.who == id(optimizer))
        if event.facts["closure"]:
            event.facts["gradients"] = self.pending.before_step(optimizer)
            event.facts["fresh"] = self.pending.num_new(optimizer)
        params = [p for g in optimizer.param_groups for p in g["params"] if id(p) in self._before]
        self._after[id(optimizer)] = {id(p): p.detach().clone() for p in params}
        by, size = distance(params, self._before)
        event.facts["moved"], event.facts["leap"] = by > 0, by / size if size > 0 else 0.0
        self.pending.after_step(optimizer)

    def _schedule(self, who: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.put("schedule", who)
        return inner(*args, **kwargs)

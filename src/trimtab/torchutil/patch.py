"""Hooks of ours on a user's objects, and functions of ours around methods of classes, modules and objects.

PyTorch keeps hooks in ordinary dicts on the object itself, so everything that is made from the object gets them too.
`own_hook` leaves the dict what and where it is, because handles that the user holds refer to that very object. It
changes three things about our entry:

- Its key is a negative number, and the counter that PyTorch numbers hooks with is put back: keys of the user's own
  hooks are pickled with a model, and are the same with and without a guard.
- The dict gets a `__reduce_ex__` and a `copy` of its own, as attributes of this one object, which `pickle` and `copy`
  ask first. They leave our entries out, and their result is a plain OrderedDict, byte for byte.
- Where PyTorch calls hooks by `items()`, the dict's `values()` leaves ours out: that is what `torch.jit.script`,
  quantization and `torch.export` list, in order to compile hooks or to move them to another module.

Two other ways were measured (one core, torch 2.13, CPU, fastest of 400 rounds of 1,000 calls). A subclass of
OrderedDict instead of the dict adds 0.4 us to each call of the model, and breaks handles given out before. One
hook for all modules (`register_module_forward_pre_hook`) adds 1.3 us to each call of every module in the process. This
way adds nothing (below 0.02 us): the call itself is PyTorch's own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

_frames: Any = torch._C._dynamo.eval_frame
Around = Callable[..., Any]
"""Called as `around(inner, *args, **kwargs)` instead of a method; `inner` is the method, bound."""

_FOLLOWS_HOOKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
_KEYS = itertools.count(-1, -1)
_ATTRIBUTES = ("__reduce_ex__", "copy", "values")


def plain_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The entry of a forward hook that always runs as plain Python.

    A compiler that follows the call into it is sent back at once: the hook must begin by asking whether it is only
    traced. Older releases of PyTorch (2.6 and 2.7 were seen to) do not follow it under `torch.export`: they compile
    each Python frame below the model by itself, hooks included, and then refuse the model for not being one graph. So
    their compiler is told to leave the entry alone, and is switched off for what the entry calls.
    """
    if _FOLLOWS_HOOKS:
        return hook

    @functools.wraps(hook)
    def entry(*args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            return None
        compiler = _frames.set_eval_frame(None)
        try:
            return hook(*args, **kwargs)
        finally:
            _frames.set_eval_frame(compiler)

    if hasattr(_frames, "skip_code"):
        _frames.skip_code(cast("types.FunctionType", entry).__code__)
    return entry


class OwnHook:
    """A hook of ours; `remove` leaves no trace of it."""

    def __init__(self, handle: RemovableHandle, tables: list[dict[Any, Any]]) -> None:
        self._handle = handle
        self._tables = [weakref.ref(table) for table in tables]

    def remove(self) -> None:
        """Take it off again. Doing so twice is harmless."""
        self._handle.remove()
        for ref in self._tables:
            table = ref()
            if table is not None and not any(map(_is_ours, table)):
                for name in _ATTRIBUTES:
                    vars(table).pop(name, None)


def own_hook(handle: RemovableHandle, *, listed: bool = True) -> OwnHook:
    """Make the hook that was just registered one of ours.

    `listed=False` is for forward hooks and forward pre-hooks, which PyTorch calls by `items()`.
    """
    was, key = handle.id, next(_KEYS)
    refs = (handle.hooks_dict_ref, *handle.extra_dict_ref)
    tables = [table for ref in refs if (table := ref()) is not None and was in table]
    for table in tables:
        table[key] = table.pop(was)
    handle.id = key
    if RemovableHandle.next_id == was + 1:  # else another thread registered one meanwhile
        RemovableHandle.next_id = was
    hidden = [table for table in tables if _leave_out_of_copies(table, listed=listed)]
    return OwnHook(handle, hidden)


def _leave_out_of_copies(table: dict[Any, Any], *, listed: bool) -> bool:
    """Give this one dict ways to be copied that leave our entries out; False for a kind of dict that has no room."""
    if not hasattr(table, "__dict__"):
        return False
    ref = weakref.ref(table)  # a method that held the dict would be a cycle

    def theirs() -> OrderedDict[Any, Any]:
        return OrderedDict((key, hook) for key, hook in (ref() or {}).items() if not _is_ours(key))

    vars(table).update(
        __reduce_ex__=lambda protocol: theirs().__reduce_ex__(protocol),
        copy=theirs,
    )
    if not listed:
        vars(table)["values"] = lambda: theirs().values()
    return True


def _is_ours(key: object) -> bool:
    return isinstance(key, int) and key < 0


class _Wrapped:
    """One method of one class, and what is called around it for which of its objects.

    Neither the objects nor what is around them is kept alive here.
    """

    def __init__(self, home: type, name: str) -> None:
        self._home, self._name, self._inner = home, name, vars(home)[name]
        self._entries: dict[int, tuple[weakref.ref[Any], list[Callable[[], Around | None]]]] = {}
        inner, entries = self._inner, self._entries

        @functools.wraps(inner)
        def method(this: object, *args: object, **kwargs: object) -> Any:
            call = inner.__get__(this, type(this))
            entry = entries.get(id(this))
            if entry is not None and entry[0]() is this:
                for ref in entry[1]:
                    if (around := ref()) is not None:
                        call = functools.partial(around, call)
            return call(*args, **kwargs)

        self.method = method
        setattr(home, name, method)

    @property
    def in_place(self) -> bool:
        return vars(self._home).get(self._name) is self.method

    def add(self, this: object, around: Around) -> Callable[[], None]:
        key = id(this)

        def died(ref: weakref.ref[Any], is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
            if not is_finalizing():  # else what is needed for it may be gone
                self._gone(key, ref)

        entry = self._entries.get(key)
        if entry is None or entry[0]() is not this:
            entry = self._entries[key] = (weakref.ref(this, died), [])
        # A method is known weakly, as it leads to an owner that leads to `this`; a plain function leads nowhere.
        mine = weakref.WeakMethod(around) if isinstance(around, types.MethodType) else (lambda: around)
        entry[1].append(mine)

        def undo() -> None:
            if mine in entry[1]:
                entry[1].remove(mine)
            if not entry[1]:
                self._gone(key, entry[0])

        return undo

    def _gone(self, key: int, ref: weakref.ref[Any]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry[0] is ref:
            del self._entries[key]
        if not self._entries and self.in_place:
            setattr(self._home, self._name, self._inner)
            _WRAPPED.pop((self._home, self._name), None)


_WRAPPED: dict[tuple[type, str], _Wrapped] = {}


def wrap_method_of(this: object, name: str, around: Around) -> Callable[[], None]:
    """Have `around` called instead of one object's method; returns how to take it off again.

    It is put on the class and asks which object it is called for: an attribute of the object itself would be pickled
    and copied along with it. Only where somebody else put one there before us does ours go on top of it. `around` is
    a plain function that leads to no object, or a method of an object that is kept alive elsewhere.
    """
    home = next((kind for kind in type(this).__mro__ if name in vars(kind)), None)
    if home is None or name in getattr(this, "__dict__", {}):
        return wrap_on_object(this, name, around)
    try:
        wrapped = _WRAPPED.get((home, name))
        if wrapped is None or not wrapped.in_place:
            wrapped = _WRAPPED[home, name] = _Wrapped(home, name)
        return wrapped.add(this, around)
    except TypeError:  # a class written in C takes no attributes; one with slots may have no room for weak references
        return wrap_on_object(this, name, around)


def wrap_on_object(this: object, name: str, around: Around) -> Callable[[], None]:
    """Have `around` called instead of one object's method, by an attribute of that object.

    For objects that nobody copies meanwhile, and where `around` leads to objects that must not be kept alive.

    Example:
        >>> class Counter:
        ...     def step(self, num):
        ...         return num
        >>> counter = Counter()
        >>> undo = wrap_on_object(counter, "step", lambda inner, num: inner(10 * num))
        >>> counter.step(2), undo(), counter.step(2)
        (20, None, 2)
    """
    had, inner = getattr(this, "__dict__", {}).get(name), getattr(this, name)

    def method(this: object, *args: object, **kwargs: object) -> Any:
        return around(inner, *args, **kwargs)

    # A bound method carrying the inner one's marks: LR schedulers look for both on `optimizer.step`.
    marked: Any = functools.wraps(inner)(method)
    del marked.__wrapped__  # a GradScaler reads the signature, and fails where bound methods wrap each other
    mine = types.MethodType(marked, this)
    setattr(this, name, mine)

    def undo() -> None:
        if vars(this).get(name) is mine:  # else somebody wrapped it since: it stays, and only passes calls on
            if had is None:
                delattr(this, name)
            else:
                setattr(this, name, had)

    return undo


def wrap_attribute(home: object, name: str, around: Around, *, while_compiling: bool = True) -> Callable[[], None]:
    """Have `around` called instead of a function of a module, or of a method of a class for all its objects.

    `inner` is then the function as it was, not bound. Without `while_compiling` a compiler that traces the call sees
    that function only. What is returned puts the function back.
    """
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapper(*args: object, **kwargs: object) -> Any:
        if not while_compiling and torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        return around(inner, *args, **kwargs)

    setattr(home, name, wrapper)
    return lambda: setattr(home, name, inner)


_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


@contextlib.contextmanager
def without_own_hooks(*groups: Iterable[object]) -> Iterator[None]:
    """Inside, none of our hooks on these modules, tensors and optimizers is called; those of the user are.

    Example:
        >>> layer, seen = torch.nn.Linear(1, 1), []
        >>> hook = own_hook(layer.register_forward_pre_hook(lambda module, args: seen.append(1)))
        >>> with without_own_hooks([layer]):
        ...     _ = layer(torch.ones(1))
        >>> seen
        []
    """
    kept = []
    for one in itertools.chain(*groups):
        for name in _HOOK_TABLES:
            table = getattr(one, name, None)
            if isinstance(table, dict) and any(map(_is_ours, table)):
                kept.append((table, list(table.items())))
    try:
        for table, entries in kept:
            for key, _ in entries:
                if _is_ours(key):
                    del table[key]
        yield
    finally:
        for table, entries in kept:
            theirs = dict(table)  # in the order they had, and what was added or removed meanwhile
            table.clear()
            table.update({k: v for k, v in entries if _is_ours(k) or k in theirs})
            table.update(theirs)

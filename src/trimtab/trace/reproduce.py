"""Running the op that went bad again from its operands: here, and as a script without trimtab or the model."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import RecordError
from trimtab.core.printable import brief, printable

MOST_OUTPUT_BYTES = 4 << 30
"""What the outputs of an op may take: a few operands can ask for any amount of memory."""
_OP = re.compile(r"aten\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
_REFUSED = frozenset({"from_file", "set_", "set_data", "resize_", "resize_as_", "_make_dep_token", "empty"})
"""They read or write files, or show memory that nobody wrote to."""
_TORCH_KINDS = (torch.dtype, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What came of running the op again."""

    op: str
    num_nan: int
    num_inf: int
    num_values: int
    error: str = ""

    @property
    def bad(self) -> bool:
        """Whether it made NaN or Inf again."""
        return self.num_nan + self.num_inf > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSource:
    """Where a script finds the step function, and the model if that is a name in the same module."""

    module: str
    function: str
    folder: str  # what has to be on the path so that the module can be imported
    model: str = ""

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


def step_source(step_fn: Callable[..., Any] | None, model: object = None) -> StepSource | None:
    """Where `step_fn` can be imported from; None for one that only this process has (a closure, or in a script)."""
    name, home = getattr(step_fn, "__qualname__", ""), getattr(step_fn, "__module__", None)
    module = sys.modules.get(home or "")
    file = getattr(module, "__file__", None)
    if module is None or not file or home in (None, "__main__", "__mp_main__") or not name.isidentifier():
        return None
    if getattr(module, name, None) is not step_fn:
        return None
    depth = str(home).count(".") + (Path(file).name == "__init__.py")
    names = [key for key, value in vars(module).items() if model is not None and value is model and key.isidentifier()]
    folder = Path(file).resolve().parents[depth]
    return StepSource(module=str(home), function=name, folder=str(folder), model=names[0] if names else "")


# -- operands and batches as plain data and tensors --------------------------------------------------------------------


def storable(value: object, left_out: list[str], path: str = "") -> object:
    """A copy of `value` on the CPU that holds plain data and tensors alone; what it cannot hold is named.

    Example:
        >>> lost = []
        >>> storable({"x": (1, torch.float16), "f": print}, lost), lost
        ({'x': (1, {'torch': 'float16'}), 'f': None}, ['f (a builtin_function_or_method)'])
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return int(value) if isinstance(value, int | torch.SymInt) else float(value)
    if isinstance(value, _TORCH_KINDS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"torch": "cpu"}
    if isinstance(value, np.ndarray):
        return np.array(value)
    dot = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {str(key): storable(item, left_out, f"{dot}{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        made = [storable(item, left_out, f"{dot}{number}") for number, item in enumerate(value)]
        return tuple(made) if isinstance(value, tuple) else made
    if is_dataclass(value) and not isinstance(value, type):
        return storable({f: getattr(value, f) for f in value.__dataclass_fields__}, left_out, path)
    if not isinstance(value, torch.Generator):  # the op draws from the usual one: the states are in the bundle
        left_out.append(f"{path or 'it'} (a {type(value).__name__})")
    return None


def revived(value: object) -> Any:
    """What an op takes: dtypes and the like are themselves again."""
    if isinstance(value, dict):
        if set(value) == {"torch"}:
            return _torch_value(value["torch"])
        return {key: revived(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(revived(item) for item in value)
    return value


def _torch_value(name: object) -> object:
    if name == "cpu":
        return torch.device("cpu")
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, _TORCH_KINDS):
        raise RecordError(f"the operands name torch.{brief(name, 40)}, which is no dtype, layout or memory format")
    return found


def expression(value: object, path: str, tensors: str) -> str:
    """Python text that makes what `storable` returned, its tensors taken from the dict named `tensors` by their path.

    Example:
        >>> expression((torch.ones(2), {"torch": "float16"}, float("inf")), "args", "t")
        "(t['args.0'], torch.float16, float('inf'))"
    """
    if isinstance(value, Tensor | np.ndarray):
        return f"{tensors}[{path!r}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, dict):
        if set(value) == {"torch"}:
            return "torch.device('cpu')" if value["torch"] == "cpu" else f"torch.{value['torch']}"
        return "{" + ", ".join(f"{key!r}: {expression(v, f'{path}.{key}', tensors)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        inside = ", ".join(expression(item, f"{path}.{number}", tensors) for number, item in enumerate(value))
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


# -- the op ------------------------------------------------------------------------------------------------------------


def op_named(name: str) -> Callable[..., Any]:
    """The op of PyTorch with this name; RecordError for anything else, and for ops that reach beyond their operands."""
    match = _OP.fullmatch(name)
    if match is None or match[1] in _REFUSED:
        raise RecordError(
            f"{brief(name, 80)!r} is not an op that is run again; expected one such as 'aten.log.default'"
        )
    try:
        found = getattr(getattr(torch.ops.aten, match[1]), match[2])
    except AttributeError:
        raise RecordError(
            f"torch {torch.__version__} has no op {name!r}: use the version of torch that the incident names"
        ) from None
    if not isinstance(found, torch._ops.OpOverload):
        raise RecordError(f"{brief(name, 80)!r} is no op")
    return found


def rerun(op: str, args: object, kwargs: object) -> Rerun:
    """Run the op again on the CPU from stored operands; what stops it is in `error`. Operands may be overwritten."""
    call = op_named(op)
    given, named = revived(args), revived(kwargs)
    if not isinstance(given, list | tuple) or not isinstance(named, dict):
        raise RecordError(f"the operands of {op} are a {type(given).__name__} and a {type(named).__name__}")
    if not any(isinstance(one, Tensor) for one in _leaves([*given, *named.values()])):
        raise RecordError(f"{op} has no tensor among its operands: it cannot have made a bad value out of good ones")
    try:
        _check_size(call, given, named)
        with torch.no_grad():
            out = call(*given, **named)
    except RecordError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError) as error:
        return Rerun(op=op, num_nan=0, num_inf=0, num_values=0, error=brief(f"{type(error).__name__}: {error}", 300))
    made = [one for one in _leaves(given if out is None else out) if isinstance(one, Tensor)]
    made = [one for one in made if one.is_floating_point() or one.is_complex()]
    return Rerun(
        op=op,
        num_nan=sum(int(one.isnan().sum()) for one in made),
        num_inf=sum(int(one.isinf().sum()) for one in made),
        num_values=sum(one.numel() for one in made),
    )


def _leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _check_size(call: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Refuse what would take too much memory, where the op can say so without its values."""

    def bare(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to("meta")
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, dict):
            return {key: bare(item) for key, item in value.items()}
        return type(value)(bare(item) for item in value) if isinstance(value, list | tuple) else value

    try:
        out = call(*bare(args), **bare(kwargs))
    except Exception:  # many ops need their values: what is wrong with the call shows when it is made
        return
    num_bytes = sum(one.numel() * one.element_size() for one in _leaves(out) if isinstance(one, Tensor))
    if num_bytes > MOST_OUTPUT_BYTES:
        raise RecordError(f"the op would take {num_bytes} bytes for its outputs, more than {MOST_OUTPUT_BYTES}")


# -- the script --------------------------------------------------------------------------------------------------------

_HEAD = '''\
"""{title}

{sentence}
Needs torch and safetensors alone: python repro.py. Exit code 0: NaN or Inf came again.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

DATA = Path(__file__).parent / "data"


def num_bad(values):
    if isinstance(values, (list, tuple)):
        return sum(num_bad(value) for value in values)
    floats = isinstance(values, torch.Tensor) and (values.is_floating_point() or values.is_complex())
    return int((~values.isfinite()).sum()) if floats else 0

'''
_OP_PART = """\
t = load_file(DATA / "operands.safetensors")
args = {args}
kwargs = {kwargs}
out = torch.ops.{op}(*args, **kwargs)
bad = num_bad(args if out is None else out)
sys.stdout.write(f"{op}: NaN or Inf values: {{bad}}\\n")
"""
_DATA_PART = """\
bad = 0
for name, values in load_file(DATA / "{section}.safetensors").items():
    if found := num_bad(values):
        bad += found
        sys.stdout.write(f"{{name}}: NaN or Inf values: {{found}}\\n")
"""
_STEP_PART = """\

# The whole step
sys.path.insert(0, {folder!r})
import {module} as source  # noqa: E402

{state}b = load_file(DATA / "batch.safetensors")
{rng}loss = source.{function}({batch})
sys.stdout.write(f"loss: {{loss}}\\n")
bad += num_bad(loss.detach())
"""


def script(
    *,
    title: str,
    sentence: str,
    op: str = "",
    args: object = (),
    kwargs: object = None,
    source: StepSource | None = None,
    batch: object = None,
    has_rng: bool = False,
    has_model: bool = False,
    bad_section: str = "",
) -> str:
    """The text of `repro.py`: the op from its operands if they are stored, then the step if it can be imported.

    Where no op is to blame, `bad_section` is the stored part that holds the bad values: the script counts them.
    """
    text = _HEAD.format(title=_quoted(title), sentence=_quoted(sentence))
    if op:
        op_named(op)  # its name becomes code
        call = {"args": expression(args, "args", "t"), "kwargs": expression(kwargs or {}, "kwargs", "t")}
        text += _OP_PART.format(op=op, **call)
    else:
        text += _DATA_PART.format(section=bad_section) if bad_section else "bad = 0\n"
    if source is not None:
        model = f"source.{source.model}.load_state_dict(load_file(DATA / 'model.safetensors'))\n"
        text += _STEP_PART.format(
            folder=source.folder,
            module=source.module,
            function=source.function,
            batch=expression(batch, "batch", "b"),
            state=model if has_model and source.model else "",
            rng='torch.set_rng_state(load_file(DATA / "rng.safetensors")["torch"])\n' if has_rng else "",
        )
    return text + "sys.exit(0 if bad else 1)\n"


def _quoted(text: str) -> str:
    """Text that stays inside a docstring."""
    return printable(text, one_line=True).replace("\\", "/").replace('"', "'")

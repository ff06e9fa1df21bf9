"""Who names the origin of a NaN: trimtab, `torch.autograd.detect_anomaly`, or transformers' DebugUnderflowOverflow?

    OMP_NUM_THREADS=1 python benchmarks/provenance.py --out benchmarks/results/provenance_cpu_DATE.md
    OMP_NUM_THREADS=1 python benchmarks/provenance.py --tools trimtab --half tuned --misses

Every fault of `tests/trace/catalogue*.py` is run once under each tool, as the tool's own documentation says, from the
same weights. An answer counts for a part (operation, line, module, phase, sample) where that part is exactly right. The
held-out half was not looked at while the engine was made; the fresh ones were written after it. Needs `transformers`
for the last column; without it the column is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

REPO = Path(__file__).parent.parent
sys.path.insert(0, str(REPO))

from tests.trace.catalogue import TUNED  # noqa: E402
from tests.trace.catalogue_fresh import FRESH  # noqa: E402
from tests.trace.catalogue_held_out import HELD_OUT  # noqa: E402
from tests.trace.catalogue_unseen import UNSEEN  # noqa: E402
from tests.trace.faults_base import Fault, Program  # noqa: E402
from tests.trace.score import Answer, guarded, judged, traced  # noqa: E402

from trimtab.core.printable import silenced  # noqa: E402

HALVES = {"tuned": TUNED, "held out": HELD_OUT, "fresh": FRESH, "unseen": UNSEEN}
PARTS = ("op", "line", "module", "phase", "sample", "cause", "subject")
NODE = re.compile(r"Function '(\w+?)(?:Backward\d*)?' returned nan")
PLACE = re.compile(r'File "([^"]+)", line (\d+)')
FRAME = re.compile(r"^ {18}(\S*) (\w+)$", re.MULTILINE)
COMPLAINT = re.compile(r"^(\S+) has (?:nans|infs)$", re.MULTILINE)


# -- the tools ---------------------------------------------------------------------------------------------------------


def by_trimtab(program: Program) -> Answer | None:
    return traced(program)


def by_guard(program: Program) -> Answer | None:
    with tempfile.TemporaryDirectory() as folder, silenced():
        return guarded(program, Path(folder) / "run")


def by_anomaly_mode(program: Program) -> Answer | None:
    """What the error and the warning before it say: a node of the backward graph, and where its forward was called."""
    with warnings.catch_warnings(record=True) as said, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        try:
            program.step(program.batch)
        except RuntimeError as error:
            found = NODE.search(str(error))
            if found is None:
                raise
        else:
            return None
    op = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", found[1]).lower()
    told = "".join(str(one.message) for one in said if "Traceback of forward call" in str(one.message))
    places = [(file, int(line)) for file, line in PLACE.findall(told) if "site-packages" not in file]
    file, line = places[-1] if places else ("", None)
    return Answer(op=op, file=file, line=line, phase="backward", said=str(found[0]))


def by_debug_underflow_overflow(program: Program) -> Answer | None:
    """What its report says: the last module of the list, and which of its tensors is bad."""
    from transformers.debug_utils import DebugUnderflowOverflow

    printed = io.StringIO()
    DebugUnderflowOverflow(program.model)
    with contextlib.redirect_stdout(printed):
        try:
            program.step(program.batch)
        except ValueError as error:
            if "DebugUnderflowOverflow" not in str(error):
                raise
        else:
            return None
    text = printed.getvalue()
    module = FRAME.findall(text)[-1][0].removeprefix("_orig_mod").removeprefix(".")
    first = COMPLAINT.findall(text)[0]
    cause = "input" if first.startswith("input") else "op" if first.startswith("output") else "parameter"
    subject = f"{module}.{first}" if cause == "parameter" else ""
    return Answer(module=module, phase="forward", cause=cause, subject=subject, said=f"{module}: {first}")


TOOLS: dict[str, Callable[[Program], Answer | None]] = {
    "trimtab": by_trimtab,
    "Guard alone": by_guard,
    "detect_anomaly": by_anomaly_mode,
    "DebugUnderflowOverflow": by_debug_underflow_overflow,
}


def asked(tool: str, fault: Fault) -> tuple[Answer | None, str]:
    """The answer, and why there is none where the tool failed."""
    torch.manual_seed(0)
    program = fault.build()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TOOLS[tool](program), ""
    except Exception as error:  # a tool that fails on a program gives no answer about it
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"


# -- the cost ----------------------------------------------------------------------------------------------------------


class Logged(nn.Module):
    """A model whose output one sample makes infinite."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return torch.log(self.body(x).flatten(1).square().mean(1) * keep)


def costs() -> Iterable[tuple[str, float, float]]:
    """Of three models: milliseconds of an ordinary step and of a trace."""
    from trimtab.trace.trace import trace_call

    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    models: dict[str, tuple[nn.Module, Tensor]] = {
        "MLP, 4 layers of 512, batch 64": (
            nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(512, 512), nn.ReLU()))),
            torch.randn(64, 512),
        ),
        "CNN, 4 layers of 32, batch 16 of 32x32": (
            nn.Sequential(nn.Conv2d(3, 32, 3), *(nn.Conv2d(32, 32, 3) for _ in range(3))),
            torch.randn(16, 3, 32, 32),
        ),
        "transformer, 4 layers of 128, batch 8 of 64": (
            nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
            torch.randn(8, 64, 128),
        ),
    }
    for name, (body, x) in models.items():
        model, keep = Logged(body), torch.ones(len(x))

        def step(keep: Tensor, model: nn.Module = model, x: Tensor = x) -> Tensor:
            model.zero_grad()
            loss: Tensor = model(x, keep).mean()
            loss.backward()
            return loss.detach()

        times = []
        for _ in range(12):
            began = time.perf_counter()
            step(keep)
            times.append(1e3 * (time.perf_counter() - began))
        keep[3] = 0.0
        took = []
        for _ in range(5):
            found = trace_call(lambda: step(keep), model=model, batch=(x, keep))  # noqa: B023
            assert found.origin is not None, found.error
            assert found.origin.samples == (3,), found.origin
            took.append(1e3 * found.seconds)
        yield name, statistics.median(times[2:]), statistics.median(took)


# -- the page ----------------------------------------------------------------------------------------------------------


def share(right: Iterable[bool]) -> str:
    values = list(right)
    return f"{sum(values)} of {len(values)}" if values else "n/a"


def page(tools: list[str], results: dict[str, dict[str, dict[str, dict[str, bool]]]], why: list[str]) -> str:
    lines = []
    for half, by_tool in results.items():
        num = len([one for one in HALVES[half].faults.values() if one.truth is not None])
        lines += [f"### {half.capitalize()}: {num} faults", "", f"| exactly right | {' | '.join(tools)} |"]
        lines += ["|---|" + "---|" * len(tools)]
        for part in ("found", *PARTS):
            cells = [share(one[part] for one in by_tool[tool].values() if part in one) for tool in tools]
            lines.append(f"| {'anything found' if part == 'found' else part} | {' | '.join(cells)} |")
        cells = [share(one["silent"] for one in by_tool[tool].values() if "silent" in one) for tool in tools]
        lines += [f"| silent on a healthy program | {' | '.join(cells)} |", ""]
    lines += ["### Each fault", "", "What is exactly right; what is missing or wrong in parentheses.", ""]
    lines += [f"| half | fault | {' | '.join(tools)} |", "|---|---|" + "---|" * len(tools)]
    for half, by_tool in results.items():
        for name in by_tool[tools[0]]:
            cells = [_cell(by_tool[tool][name]) for tool in tools]
            lines.append(f"| {half} | {name.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(["Tools that failed on a program:", "", *why, ""] if why else [])])


def _cell(right: dict[str, bool]) -> str:
    if "silent" in right:
        return "silent" if right["silent"] else "**false alarm**"
    if not right["found"]:
        return "nothing"
    good = [part for part in PARTS if right.get(part)]
    bad = [part for part in PARTS if right.get(part) is False]
    return ", ".join(good) + (f" ({', '.join(bad)})" if bad else "")


def head(device: str) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else "two shared cores, one thread"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True).stdout
    import trimtab

    versions = [f"trimtab {trimtab.__version__} ({commit.strip()})", f"torch {torch.__version__}"]
    if importlib.util.find_spec("transformers"):
        from importlib.metadata import version

        versions.append(f"transformers {version('transformers')}")
    versions.append(f"Python {platform.python_version()}")
    return f"""# Where a NaN or Inf came from

{time.strftime("%Y-%m-%d")}, {", ".join(versions)}, {where}.
Command: `OMP_NUM_THREADS=1 python benchmarks/provenance.py --device {device} --out FILE`.

Small programs with a fault of known origin, each run once under each tool from the same weights. A part counts where
it is exactly right: the operation (in backward: the forward operation whose gradient is bad), the source line, the
module's path, forward or backward, and the set of samples. The number behind "of" is how many faults have a right
answer for that part: bad data has no operation to blame, a bad weight no sample. Held out: faults that were not looked
at while the engine was made. Fresh and unseen: faults that were written after it, unlike those before; first measured
with misses, which were fixed; the right answers to five of the unseen were corrected then. Healthy: programs that have
NaN or Inf on their way and are sound.

`trimtab` is given the whole step (`trace_call`; with `Guard(step_fn=...)` it is the same but for bad updates of the
optimizer), `Guard alone` nothing but model, optimizer, loss and batch: it runs the model again and
computes the loss again from its graph.
`detect_anomaly` looks for NaN in gradients alone and names no modules or samples. `DebugUnderflowOverflow` looks at
what goes into and out of modules in forward, and names no operations or samples.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--half", default=",".join(HALVES))
    parser.add_argument("--misses", action="store_true", help="print what was not exactly right")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu", help="where the programs are built and run")
    args = parser.parse_args()
    torch.set_default_device(args.device)
    tools = [one for one in args.tools.split(",") if one in TOOLS]
    if importlib.util.find_spec("transformers") is None and "DebugUnderflowOverflow" in tools:
        print("transformers is not installed: DebugUnderflowOverflow is left out")
        tools.remove("DebugUnderflowOverflow")
    results: dict[str, dict[str, dict[str, dict[str, bool]]]] = {}
    why = []
    for half in args.half.split(","):
        results[half] = {tool: {} for tool in tools}
        for name, fault in HALVES[half].faults.items():
            for tool in tools:
                answer, failed = asked(tool, fault)
                results[half][tool][name] = right = judged(fault, answer)
                why += [f"- {tool} on {name.replace('_', ' ')}: {failed}"] if failed else []
                if args.misses and not all(right.values()):
                    print(f"{half} {name} {tool}: {right}\n    {failed or answer}")
    text = page(tools, results, why)
    if "trimtab" in tools:
        text += "\n### What a trace costs\n\n| model | ordinary step, ms | trace, ms | steps |\n|---|---|---|---|\n"
        for name, step, took in costs():
            text += f"| {name} | {step:.1f} | {took:.1f} | {math.ceil(10 * took / step) / 10:.1f} |\n"
    print(text)
    if args.out is not None:
        args.out.write_text(f"{head(args.device)}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()

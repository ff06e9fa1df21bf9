"""`trimtab trace`: where a NaN or Inf came from, read from an incident bundle and run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import DIFFERENT, OK, command, console, emit

if TYPE_CHECKING:
    from trimtab.trace.bundle import Incident
    from trimtab.trace.origin import Operand, Origin
    from trimtab.trace.reproduce import Rerun

NAME = "trace"
CAUSES = {
    "input": "the data was bad",
    "parameter": "a weight or buffer was bad before the step",
    "op": "an operation on good values",
    "loss": "the loss function",
    "optimizer": "the optimizer's update",
    "overflow": "the value is outside the range of its dtype",
    "unknown": "not known",
}


@command
def run(
    incident: Annotated[
        Path | None,
        typer.Argument(
            metavar="[INCIDENT]",
            help="The folder of an incident, a run directory (its newest incident), or an incident's id.  "
            "[default: the newest of the newest run]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show where a NaN or Inf came from: operation, line, module, samples, reason, remedy.

    The operation is run again from its stored operands; nothing else of the bundle is executed. Exit code 0: NaN or Inf
    came again, or no operands are stored; 1: it did not come again; 2: the bundle cannot be read.
    """
    from trimtab.trace.bundle import find, read, run_again

    found = read(find(incident))
    again = run_again(found)
    if as_json:
        emit(
            {
                "incident": str(found.path),
                "step": found.step,
                "origin": found.origin.to_json(),
                "sentence": found.origin.sentence(),
                "rerun": None if again is None else _data(again),
                "source": found.source,
                "left_out": found.left_out,
                "versions": found.versions,
            }
        )
    else:
        _show(found, again)
    return DIFFERENT if again is not None and not again.bad else OK


def _data(again: Rerun) -> dict[str, object]:
    return {
        "op": again.op,
        "reproduced": again.bad,
        "num_nan": again.num_nan,
        "num_inf": again.num_inf,
        "num_values": again.num_values,
        "error": again.error,
    }


def _show(found: Incident, again: Rerun | None) -> None:
    from rich.text import Text

    from trimtab.core.printable import printable
    from trimtab.report.text import wrapped

    out, origin = console(), found.origin
    width = min(out.width, 100)
    out.print(wrapped(origin.sentence(), width, f"Step {found.step}: "))
    out.print()
    rows = list(_rows(origin))
    wide = max(len(title) for title, _ in rows)
    for title, text in rows:
        out.print(wrapped(printable(text, one_line=True), width, f"  {title:<{wide}}  "))
    if origin.operands:
        out.print(Text("\nWhat the operation was given", style="bold"))
        for operand in origin.operands:
            out.print(wrapped(printable(described(operand), one_line=True), width, "  "))
    for note in (*origin.notes, *(f"not stored: {one}" for one in found.left_out)):
        out.print(wrapped(printable(note, one_line=True), width, "  - "))
    out.print()
    out.print(wrapped(printable(_again(again), one_line=True), width, ""))
    out.print(Text(f"reproduce: python {printable(found.path / 'repro.py')}", style="dim"), soft_wrap=True)


def _rows(origin: Origin) -> Iterator[tuple[str, str]]:
    yield "cause", CAUSES.get(origin.cause, origin.cause)
    if origin.subject:
        since = "" if origin.since is None else f", since step {origin.since}"
        yield "bad already", f"{origin.subject}{since}"
    if origin.op:
        yield "operation", f"{origin.op} ({origin.phase})"
    if origin.file:
        yield "line", f"{origin.file}:{origin.line}" + (f" in {origin.function}" if origin.function else "")
    if origin.code:
        yield "source", origin.code.strip()
    if origin.op or origin.module:
        yield "module", origin.module or "outside of the model"
    if origin.samples:
        yield "samples", origin.named_samples()
    if origin.dataset_indices:
        yield "in the data set", ", ".join(map(str, origin.dataset_indices[:20]))
    if origin.micro_batch is not None:
        yield "micro-batch", str(origin.micro_batch)
    if origin.rank is not None:
        yield "rank", str(origin.rank)
    if origin.why or origin.reason:
        yield "reason", origin.why or origin.reason
    if origin.remedy:
        yield "remedy", origin.remedy


def described(operand: Operand) -> str:
    """One operand in words.

    Example:
        >>> from trimtab.trace.origin import Operand
        >>> described(Operand(name="self", shape=(4, 2), dtype="float32", smallest=0.0, largest=1.0, num_zero=2))
        'self: float32 (4, 2), 0 to 1, 2 zeros'
    """
    if operand.value:
        return f"{operand.name}: {operand.value}"
    parts = [f"{operand.dtype} {operand.shape}"]
    if operand.smallest is not None and operand.largest is not None:
        parts.append(f"{operand.smallest:.4g} to {operand.largest:.4g}")
    counts = ((operand.num_zero, "zeros"), (operand.num_nan, "NaN"), (operand.num_inf, "Inf"))
    parts += [f"{number:,} {what}" for number, what in counts if number]
    return f"{operand.name}: {', '.join(parts)}"


def _again(again: Rerun | None) -> str:
    if again is None:
        return "No operands are stored: the operation was not run again."
    if again.error:
        return f"Run again, {again.op} failed: {again.error}"
    made = f"{again.num_nan:,} NaN and {again.num_inf:,} Inf among {again.num_values:,} values"
    if again.bad:
        return f"Run again from its operands, {again.op} made {made}."
    return f"Run again from its operands, {again.op} made no NaN or Inf: it depends on the device or the version."

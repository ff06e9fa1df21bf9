"""`trimtab checkpoint`: what is saved, whether it is sound, what is in it, what differs, and what may go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli._shell import DIFFERENT, OK, command, console, emit, fail

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.checkpoint.format.manifest import Damage
    from trimtab.checkpoint.inspect import Seen, Sheet
    from trimtab.checkpoint.retention import Plan
    from trimtab.core.types import Snapshot

NAME = "checkpoint"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that a Checkpointer saves to.")]
Run = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="Of this run, by its name or the beginning of it.", show_default=False),
]
Step = Annotated[int | None, typer.Option("--step", help="The checkpoint of this step.", show_default=False)]

app = typer.Typer(
    help="List, verify, show, compare and prune checkpoints.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command("list")
@command
def list_(folder: Folder = Path("checkpoints"), as_json: AsJson = False) -> int:
    """List the checkpoints of a folder in the order of saving, the newest last; the one that resume takes is marked.

    Only their manifests are read; `trimtab checkpoint verify` reads every byte.
    """
    from trimtab.checkpoint.inspect import survey, to_resume
    from trimtab.report.checkpoint_text import render_list

    seen = survey(folder)
    kept = [one.snapshot for one in seen if not one.quarantined]
    resume, good = to_resume(kept), to_resume(kept, prefer="good")
    if as_json:
        emit(
            {
                "directory": str(folder),
                "resume": None if resume is None else resume.path.name,
                "checkpoints": [_plain(one) for one in seen if not one.quarantined],
                "quarantine": [_plain(one) for one in seen if one.quarantined],
            }
        )
    else:
        out = console()
        out.print(render_list(seen, folder, resume=resume, good=good, now=time.time(), width=out.width))
    return OK


@app.command("verify")
@command
def verify(
    folder: Folder = Path("checkpoints"),
    step: Step = None,
    run: Run = None,
    everything: Annotated[bool, typer.Option("--all", help="Those in quarantine too.")] = False,
    as_json: AsJson = False,
) -> int:
    """Read every byte and compare it with its checksum; name each damaged file and tensor.

    Without --step, all checkpoints of the folder. Exit code 0: all sound; 1: damage; 2: nothing to verify.
    """
    from trimtab.checkpoint.inspect import find, of_run, see, survey

    if step is not None:
        seen = [see(find(folder, step, run))]
    else:
        seen = [one for one in of_run(run, survey(folder), folder) if everything or not one.quarantined]
    if not seen:
        fail(f"{folder} holds checkpoints in quarantine only; to verify those, add --all")
    results = _verified(seen, None if as_json else console())
    if as_json:
        rows = [_plain(one) | {"sound": not damage, "damage": damage} for one, damage in results]
        emit({"directory": str(folder), "sound": not any(damage for _, damage in results), "checkpoints": rows})
    return DIFFERENT if any(damage for _, damage in results) else OK


@app.command("show")
@command
def show(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A folder of checkpoints, one of them, or a .pt or .safetensors file."),
    ] = Path("checkpoints"),
    step: Step = None,
    run: Run = None,
    everything: Annotated[bool, typer.Option("--all", help="Every tensor, however many.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show what a checkpoint holds: sections, tensors, versions, metrics. Of a folder, the one resume takes."""
    from trimtab.checkpoint.inspect import find, is_foreign, sheet_of, sheet_of_foreign
    from trimtab.report.checkpoint_text import moment, render_sheet

    sheet = sheet_of_foreign(path) if is_foreign(path) else sheet_of(find(path, step, run))
    if as_json:
        emit({"checkpoint": _fields(sheet) | {"created": moment(sheet.created), "path": str(sheet.path)}})
    else:
        out = console()
        out.print(render_sheet(sheet, width=out.width, all_tensors=everything))
    return OK


@app.command("diff")
@command
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint: DIR/STEP, its folder, or a foreign file.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one; or, with STEP, a step in the folder A.")],
    third: Annotated[
        int | None, typer.Argument(metavar="[STEP]", help="Another step in A.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints, tensor by tensor: `diff DIR 100 200`, or `diff DIR_A/100 DIR_B/100`.

    Exit code 0: bit-identical; 1: they differ; 2: one of them cannot be read.
    """
    from trimtab.checkpoint.inspect import difference
    from trimtab.report.checkpoint_text import render_difference

    if third is None and second.isdigit() and not Path(second).exists():
        fail(f"{second} is one step; to compare two of {first}: trimtab checkpoint diff {first} {second} OTHER_STEP")
    if third is not None and not second.isdigit():
        fail(f"{second!r} is not a step; expected two steps: trimtab checkpoint diff {first} 100 200")
    pair = (first, Path(second)) if third is None else (first / second, first / str(third))
    (path_a, a, native_a), (path_b, b, native_b) = map(_sections, pair)
    if not (native_a and native_b):  # a foreign file holds less: compare what both have
        a, b = ({name: one for name, one in s.items() if name in a.keys() & b.keys()} for s in (a, b))
        if not a:
            fail(f"{path_a} and {path_b} have nothing in common that could be compared")
    found = difference(a, b)
    if as_json:
        emit(
            {"a": str(path_a), "b": str(path_b), "identical": found.identical, "sections": list(a), "difference": found}
        )
    else:
        out = console()
        out.print(render_difference(found, str(path_a), str(path_b), width=out.width))
    return OK if found.identical else DIFFERENT


@app.command("prune")
@command
def prune(
    folder: Folder,
    keep_last: Annotated[int, typer.Option("--keep-last", help="Keep this many of the last.")] = 3,
    keep_best: Annotated[
        str | None,
        typer.Option("--keep-best", metavar="METRIC", help="Keep the best by a metric; -loss: less is better."),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="STEPS", help="Keep one every this many steps.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="SIZE", help="Keep at most this much, such as 10GB.")
    ] = None,
    run: Run = None,
    old_runs: Annotated[
        bool, typer.Option("--old-runs", help="Delete all of earlier runs, if the newest can be resumed from.")
    ] = False,
    bad: Annotated[bool, typer.Option("--bad", help="Delete those marked as bad too, and the quarantine.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    as_json: AsJson = False,
) -> int:
    """Delete checkpoints, but of each run never the newest, nor the newest that is good.

    Those two are read in full first: if one is damaged, an earlier one stays. Limits hold for each run in the folder
    (--max-bytes for all together). Exit code 1: one could not be deleted.
    """
    from trimtab.checkpoint import retention as pruning
    from trimtab.checkpoint.inspect import is_checkpoint, run_named, survey

    keep = pruning.retention(keep_last, keep_best, keep_every, max_bytes)
    if is_checkpoint(folder):
        fail(f"{folder} is one checkpoint; expected the folder that it is in: {folder.parent}")
    if run is not None and old_runs:
        fail(f"--run {run} and --old-runs contradict each other; give one of them")
    seen = survey(folder)
    named = None if run is None else run_named(run, [one.snapshot for one in seen], folder)
    chosen = pruning.plan(seen, keep, bad=bad, run=named, old_runs=old_runs)
    failed = [] if dry_run else pruning.carry_out(chosen)
    if as_json:
        gone = [one for one in chosen.delete if one not in [left for left, _ in failed]]
        emit(
            {
                "directory": str(folder),
                "dry_run": dry_run,
                "deleted": [_plain(one) for one in gone],
                "kept": [_plain(one) for one in chosen.keep],
                "damaged": [one.snapshot.path.name for one in chosen.damaged],
                "failed": [{"path": str(one.snapshot.path), "reason": reason} for one, reason in failed],
                "freed_bytes": sum(one.num_bytes for one in gone),
            }
        )
    else:
        _show_pruned(chosen, failed, folder, dry_run)
    return DIFFERENT if failed else OK


def _verified(seen: list[Seen], out: Console | None) -> list[tuple[Seen, list[Damage]]]:
    """Verify one after the other, and print each result at once: large ones take time."""
    from rich.text import Text

    from trimtab.checkpoint.format import container
    from trimtab.checkpoint.inspect import to_resume
    from trimtab.report.checkpoint_text import byte_size
    from trimtab.report.summary import count
    from trimtab.report.text import wrapped

    results = []
    for one in seen:
        damage = list(_named(one, container.damage_of(one.snapshot.path)))
        results.append((one, damage))
        if out is not None:
            label, colour = ("DAMAGED", "red") if damage else ("SOUND", "green")
            state = "" if one.damaged or one.doubtful else f"{one.snapshot.state}, "
            about = f" {one.snapshot.path.name}  {state}{byte_size(one.num_bytes)}"
            out.print(Text.assemble((f" {label:<7} ", f"bold reverse {colour}"), about), soft_wrap=True)
            for line in damage:
                out.print(wrapped(str(line), min(out.width, 100), "   - "))
    if out is not None and len(seen) > 1:
        sound = [one.snapshot for one, damage in results if not damage]
        takes = to_resume([one for one in sound if one.path.parent == seen[0].snapshot.path.parent])
        takes_text = "nothing here can be resumed from" if takes is None else f"resume takes step {takes.step}"
        out.print(f"{len(sound)} of {count(len(seen), 'checkpoint')} are sound; {takes_text}.")
    return results


def _named(one: Seen, damages: tuple[Damage, ...]) -> Iterator[Damage]:
    """The damage, with tensors of the optimizer by the names of their parameters."""
    from dataclasses import replace

    from trimtab.checkpoint.format import container
    from trimtab.checkpoint.inspect import tensor_names
    from trimtab.core.errors import CheckpointError

    try:
        sections = container.inspect(one.snapshot.path).sections.values()
    except CheckpointError:
        yield from damages
        return
    names = {section.file: tensor_names(section) for section in sections if section.file is not None}
    for damage in damages:
        what = damage.what
        for key, name in names.get(damage.file, {}).items():
            what = what.replace(f"tensor {key!r} ", f"tensor {name!r} ")
        yield replace(damage, what=what)


def _sections(path: Path) -> tuple[Path, Mapping[str, object], bool]:
    """The state at a path, and whether trimtab wrote it."""
    from trimtab.checkpoint.format import container
    from trimtab.checkpoint.format.foreign import load_foreign, sections_of_foreign
    from trimtab.checkpoint.inspect import find, is_foreign

    if is_foreign(path):
        return path, sections_of_foreign(load_foreign(path), path), False
    found = find(path)
    if container.inspect(found).ranks:
        from trimtab.checkpoint import shards

        return found, shards.read(found).sections, True
    return found, container.read(found).sections, True


def _show_pruned(chosen: Plan, failed: list[tuple[Seen, str]], folder: Path, dry_run: bool) -> None:
    from rich.text import Text

    from trimtab.report.checkpoint_text import byte_size
    from trimtab.report.summary import count
    from trimtab.report.text import wrapped

    out = console()
    width = min(out.width, 100)
    for one in chosen.damaged:
        text = f"{one.snapshot.path.name} is damaged and cannot be rolled back to (trimtab checkpoint verify)"
        out.print(wrapped(text, width, "! ", style="bold red"))
    reasons = {left.snapshot.path: reason for left, reason in failed}
    for one in chosen.delete:
        reason = reasons.get(one.snapshot.path)
        done = f"could not be deleted: {reason}" if reason else "would be deleted" if dry_run else "deleted"
        about = f"{one.snapshot.state}, {byte_size(one.num_bytes)}"
        out.print(Text(f"- {one.snapshot.path.relative_to(folder)}  {about}: {done}"), soft_wrap=True)
    freed = sum(one.num_bytes for one in chosen.delete if one.snapshot.path not in reasons)
    left = f"{count(len(chosen.keep) + len(failed), 'checkpoint')} {'would stay' if dry_run else 'stay'}"
    out.print(f"{byte_size(freed)} {'would be freed' if dry_run else 'freed'}; {left}.")


def _plain(one: Seen) -> dict[str, object]:
    """One checkpoint as flat data, with its size and the time it was written."""
    from trimtab.report.checkpoint_text import moment

    about = {name: value for name, value in _fields(one.snapshot).items() if name != "extra"}
    return about | {
        "created": moment(one.created),
        "num_bytes": one.num_bytes,
        "damaged": one.damaged,
        "doubtful": one.doubtful,
    }


def _fields(record: Snapshot | Sheet) -> dict[str, object]:
    from dataclasses import fields

    return {f.name: getattr(record, f.name) for f in fields(record)}

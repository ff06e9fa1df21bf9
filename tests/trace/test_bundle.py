"""Incident bundles: what is stored comes back, the script reproduces the value, damaged or hostile ones are refused."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.checkpoint import rng
from trimtab.checkpoint.directory import Disk
from trimtab.core.errors import CheckpointError, RecordError
from trimtab.trace import bundle
from trimtab.trace.bundle import Evidence
from trimtab.trace.origin import Operand, Origin
from trimtab.trace.reproduce import expression, op_named, step_source, storable

ORIGIN = Origin(
    cause="op",
    reason="log-of-zero",
    why="the logarithm of 0",
    op="aten.log.default",
    module="head",
    file='/home/me/"train".py',
    line=12,
    code="return torch.log(x)",
    samples=(3,),
    operands=(Operand(name="self", shape=(4, 2), dtype="float32", smallest=0.0, largest=1.0, num_zero=2),),
    remedy="add a small constant inside the log",
)


@dataclass
class Call:
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def log_of_zero() -> Call:
    values = torch.ones(4, 2)
    values[3] = 0.0
    return Call("aten.log.default", (values,))


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """As a person would who has torch and safetensors: without trimtab on the path."""
    code = (
        "import sys, runpy; sys.modules['trimtab'] = None; "
        f"sys.argv = [{str(folder / 'repro.py')!r}]; runpy.run_path({str(folder / 'repro.py')!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    call, batch = log_of_zero(), {"x": torch.arange(3), "names": ["a", "b"]}
    evidence = Evidence(failing=call, batch=batch, rng=rng.capture(), config={"clip": 1.0, "lag": math.inf})
    path = bundle.write(tmp_path, ORIGIN, evidence, step=7)
    assert path == tmp_path / "incidents" / "step-00000007"
    found = bundle.read(path)
    assert found.origin == ORIGIN
    assert (found.step, found.op, found.left_out) == (7, "aten.log.default", ())
    assert found.sections == ("batch", "operands", "rng")
    assert found.config == {"clip": 1.0, "lag": "inf"}
    assert found.versions["torch"] == torch.__version__.split("+")[0] or "torch" in found.versions
    again = bundle.run_again(found)
    assert again is not None
    assert (again.num_nan, again.num_inf, again.num_values) == (0, 2, 8)
    second = bundle.write(tmp_path, ORIGIN, evidence, step=7)
    assert bundle.incidents_of(tmp_path) == [path, second]


CALLS = [
    log_of_zero(),
    Call("aten.div.Tensor", (torch.zeros(3), torch.zeros(3))),
    Call("aten.mm.default", (torch.full((2, 3), 300.0).half(), torch.full((3, 2), 300.0).half())),
    Call("aten._softmax.default", (torch.full((2, 3), -math.inf), -1, False)),
    Call("aten._to_copy.default", (torch.full((2,), 1e6),), {"dtype": torch.float16}),
    Call("aten.add_.Scalar", (torch.ones(2), math.inf)),
    Call("aten._foreach_add_.Scalar", ([torch.ones(2), torch.ones(1)], math.nan)),
    Call("aten.cat.default", ([torch.ones(1), torch.full((1,), math.nan)],)),
    Call("aten.native_batch_norm.default", (torch.ones(2, 3), None, None, None, torch.full((3,), -1.0), False, 0.1, 0)),
]
CALLS[-1].args = (torch.ones(2, 3), None, None, torch.zeros(3), torch.full((3,), -1.0), False, 0.1, 1e-5)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.op)
def test_the_op_makes_the_same_value_again(tmp_path: Path, call: Call) -> None:
    path = bundle.write(tmp_path, ORIGIN, Evidence(failing=call), step=1)
    assert path is not None
    again = bundle.run_again(bundle.read(path))
    assert again is not None
    assert again.bad, again
    text = (path / "repro.py").read_text()
    assert len(text.splitlines()) < 50
    assert "trimtab" not in text.replace("of trimtab.", "")
    names: dict[str, object] = {"__file__": str(path / "repro.py"), "__name__": "repro"}
    with pytest.raises(SystemExit) as end:
        exec(compile(text, "repro.py", "exec"), names)
    assert end.value.code == 0
    assert names["bad"] == again.num_nan + again.num_inf


def test_the_script_runs_where_there_is_no_trimtab(tmp_path: Path) -> None:
    path = bundle.write(tmp_path, ORIGIN, Evidence(failing=log_of_zero()), step=1)
    assert path is not None
    done = run_script(path)
    assert (done.returncode, done.stdout) == (0, "aten.log.default: NaN or Inf values: 2\n"), done.stderr


def test_the_script_runs_the_whole_step_where_it_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "steps_of_mine.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\nmodel.weight.data.zero_()\n"
        "def step(batch):\n    loss = torch.log(model(batch['x']).square()).mean()\n"
        "    loss.backward()\n    return loss\n"
    )
    monkeypatch.syspath_prepend(str(project))
    module = importlib.import_module("steps_of_mine")
    state = {name: value.clone() for name, value in module.model.state_dict().items()}
    state["bias"].zero_()
    evidence = Evidence(
        failing=log_of_zero(),
        batch={"x": torch.ones(3, 2)},
        rng={"torch": torch.get_rng_state()},
        model=state,
        step_fn=module.step,
        root=module.model,
    )
    path = bundle.write(tmp_path, ORIGIN, evidence, step=2)
    assert path is not None
    assert bundle.read(path).source == "steps_of_mine:step"
    text = (path / "repro.py").read_text()
    assert len(text.splitlines()) < 50
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    assert "loss: -inf" in done.stdout


def test_a_step_that_only_this_process_has_is_not_imported() -> None:
    assert step_source(lambda batch: batch) is None
    assert step_source(None) is None
    found = step_source(log_of_zero)
    assert found is not None
    assert (found.module, found.function) == (__name__, "log_of_zero")
    assert (Path(found.folder) / "tests" / "trace").is_dir()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    evidence = Evidence(failing=log_of_zero(), batch=torch.zeros(1000, 1000), model={"w": torch.zeros(10)})
    path = bundle.write(tmp_path, ORIGIN, evidence, step=1, max_bytes=1000)
    assert path is not None
    found = bundle.read(path)
    assert found.sections == ("model", "operands")
    assert found.left_out == ("batch: 4.0 MB, and 968 bytes are left of the limit",)
    assert sum(file.stat().st_size for file in path.rglob("*")) < 60_000


def test_long_lists_of_numbers_are_left_out(tmp_path: Path) -> None:
    evidence = Evidence(failing=log_of_zero(), batch={"x": torch.ones(2), "ids": list(range(200_000))})
    path = bundle.write(tmp_path, ORIGIN, evidence, step=1)
    assert path is not None
    found = bundle.read(path)
    assert found.sections == ("operands",)
    assert "batch: 20.0 MB of text and numbers" in found.left_out[0]


def test_objects_that_are_not_data_are_named(tmp_path: Path) -> None:
    batch = {"x": torch.ones(2), "how": print}
    path = bundle.write(tmp_path, ORIGIN, Evidence(batch=batch), step=1)
    assert path is not None
    assert bundle.read(path).left_out == ("batch: batch.how (a builtin_function_or_method)",)


def test_without_operands_nothing_is_run(tmp_path: Path) -> None:
    path = bundle.write(tmp_path, ORIGIN, Evidence(), step=1)
    assert path is not None
    assert bundle.run_again(bundle.read(path)) is None
    assert run_script(path).returncode == 1


@pytest.mark.parametrize(
    ("cause", "evidence"),
    [
        ("input", Evidence(batch={"x": torch.tensor([1.0, math.nan]), "y": torch.ones(2)}, model={"w": torch.ones(1)})),
        ("parameter", Evidence(batch=torch.ones(2), model={"x": torch.tensor([-math.inf]), "y": torch.ones(2)})),
    ],
)
def test_where_no_op_is_to_blame_the_script_shows_the_bad_values(
    tmp_path: Path, cause: Any, evidence: Evidence
) -> None:
    path = bundle.write(tmp_path, replace(ORIGIN, cause=cause, subject="x"), evidence, step=1)
    assert path is not None
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("x: NaN or Inf values: 1\n")


def test_a_run_stores_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_INCIDENTS", 2)
    written = [bundle.write(tmp_path, ORIGIN, Evidence(), step=step) for step in range(3)]
    assert written[2] is None
    assert len(bundle.incidents_of(tmp_path)) == 2


def test_all_incidents_of_a_run_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_TOTAL_BYTES", 20_000)
    evidence = Evidence(failing=log_of_zero(), batch=torch.zeros(2500))
    found = [bundle.read(bundle.write(tmp_path, ORIGIN, evidence, step=step) or "") for step in range(4)]
    assert found[0].sections == ("batch", "operands")
    assert found[-1].sections in ((), ("operands",))
    assert "batch" in found[-1].left_out[-1]


def test_a_bundle_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """Whichever operation of the disk fails."""
    operations = 0
    evidence = Evidence(failing=log_of_zero(), batch=torch.ones(2))

    def gate_failing(number: int) -> Disk:
        def gate(operation: str, path: Path) -> int | None:
            nonlocal operations
            operations += 1
            if operations == number:
                raise OSError(28, "No space left on device", str(path))
            return None

        return Disk(gate)

    number = 0
    while operations >= number:
        number, operations = number + 1, 0
        home = tmp_path / str(number)
        home.mkdir()
        with contextlib.suppress(OSError):
            bundle.write(home, ORIGIN, evidence, step=1, disk=gate_failing(number))
        whole = bundle.incidents_of(home)
        assert len(whole) <= 1
        for path in whole:
            again = bundle.run_again(bundle.read(path))
            assert again is not None
            assert again.bad
    assert number > 20


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = bundle.write(tmp_path, ORIGIN, Evidence(failing=log_of_zero(), batch=torch.ones(2)), step=1)
    assert path is not None
    return path


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}', '{"format": 1}', "[" * 100_000, "\x00\xff"])
def test_a_torn_or_foreign_file_is_refused(written: Path, text: str) -> None:
    (written / "incident.json").write_text(text)
    with pytest.raises(RecordError, match=r"incident\.json"):
        bundle.read(written)


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


@pytest.mark.parametrize("value", [None, True, -1.5, "x\x1b[31m", [], {}, [[1]], {"a": None}, 10**400])
def test_any_value_at_any_place_is_refused_or_harmless(written: Path, value: object) -> None:
    whole = json.loads((written / "incident.json").read_text())
    places = [(whole, key) for key in whole] + [(whole["origin"], key) for key in whole["origin"]]
    places += [(whole["origin"]["operands"][0], key) for key in whole["origin"]["operands"][0]]
    for inside, key in places:
        before, inside[key] = inside[key], value
        (written / "incident.json").write_text(json.dumps(whole))
        inside[key] = before
        with contextlib.suppress(RecordError):  # any other error fails the test
            found = bundle.read(written)
            assert is_text(found.origin.sentence())
            bundle.run_again(found)


@pytest.mark.parametrize(
    "op",
    [
        "os.system",
        "aten.from_file.default",
        "aten.log",
        "aten.__class__.mro",
        "prims.log.default",
        "aten.nothing.x",
        "",
    ],
)
def test_only_ops_of_torch_are_run(op: str) -> None:
    with pytest.raises(RecordError):
        op_named(op)


def test_operands_that_were_changed_are_refused(written: Path) -> None:
    file = written / "data" / "operands.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(RecordError, match="operands"):
        bundle.run_again(bundle.read(written))
    file.unlink()
    with pytest.raises(RecordError, match="is missing"):
        bundle.run_again(bundle.read(written))


def test_operands_that_ask_for_too_much_memory_are_refused(tmp_path: Path) -> None:
    call = Call("aten.mm.default", (torch.ones(100_000, 1), torch.ones(1, 100_000)))
    path = bundle.write(tmp_path, ORIGIN, Evidence(failing=call), step=1)
    assert path is not None
    with pytest.raises(RecordError, match="bytes for its outputs"):
        bundle.run_again(bundle.read(path))


def test_a_call_that_fails_says_why(tmp_path: Path) -> None:
    path = bundle.write(tmp_path, ORIGIN, Evidence(failing=Call("aten.mm.default", (torch.ones(2),))), step=1)
    assert path is not None
    again = bundle.run_again(bundle.read(path))
    assert again is not None
    assert "mm" in again.error
    assert not again.bad


def test_text_of_the_verdict_stays_text_in_the_script(tmp_path: Path) -> None:
    nasty = replace(ORIGIN, module='"""\nimport os; os.abort()\n"""\\', cause="op")
    path = bundle.write(tmp_path, nasty, Evidence(failing=log_of_zero(), batch={'"]': torch.ones(1)}), step=1)
    assert path is not None
    assert run_script(path).returncode == 0


def test_a_failed_write_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("in the way")
    with pytest.raises((CheckpointError, OSError)):
        bundle.write(tmp_path, ORIGIN, Evidence(), step=1)


def test_expressions_make_what_was_stored() -> None:
    value = [1, (2.5, None, True), {"a": torch.float64, "b": torch.device("cuda", 0)}, "x'y", [], (), -math.inf]
    stored = storable(value, [])
    made = eval(expression(stored, "v", "t"), {"torch": torch, "t": {}})
    assert made == [1, (2.5, None, True), {"a": torch.float64, "b": torch.device("cpu")}, "x'y", [], (), -math.inf]
    tensors: dict[str, Tensor] = {"v.0": torch.ones(1)}
    assert eval(expression((torch.ones(1),), "v", "t"), {"t": tensors})[0] is tensors["v.0"]

"""The public names, what importing costs, and that documentation and catalogue are complete."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab
from trimtab.core.registry import advice_of, all_rules

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trimtab"


def test_the_list_of_public_names() -> None:
    assert trimtab.__all__ == [
        "ActivationMonitor",
        "AttachError",
        "CheckpointError",
        "Checkpointer",
        "Clip",
        "Config",
        "ConfigError",
        "Finding",
        "GradientDiagnostics",
        "GradientHealthMonitor",
        "Guard",
        "InputError",
        "RecordError",
        "Run",
        "Severity",
        "Trainer",
        "TrainingHealthMonitor",
        "TrainingStopped",
        "TrimtabError",
        "Verdict",
        "__version__",
        "log_histograms",
    ]
    assert len(trimtab.__all__) <= 25
    for name in trimtab.__all__:
        assert getattr(trimtab, name) is not None
    assert dir(trimtab) == sorted(trimtab.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trimtab.nonsense


def test_public_names_are_documented_and_typed() -> None:
    for name in trimtab.__all__:
        value = getattr(trimtab, name)
        if not inspect.isclass(value):
            continue
        assert value.__doc__, name
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if method.startswith("_") or not function.__module__.startswith("trimtab"):
                continue
            assert function.__doc__, f"{name}.{method}"
            hints = inspect.signature(function)
            assert hints.return_annotation is not inspect.Signature.empty, f"{name}.{method}"


def modules_with_examples() -> list[str]:
    """Every module of ours whose text holds an example."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8") and "kernels" not in path.name:
            found.append(
                ".".join(("trimtab", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
            )
    return found


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_run(module: str) -> None:
    __import__(module)
    result = doctest.testmod(sys.modules[module])
    assert result.attempted > 0
    assert result.failed == 0


def test_importing_trimtab_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, trimtab; print([m for m in ('torch', 'numpy', 'rich', 'typer') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_packages_are_there_when_they_are_asked_for() -> None:
    """`import trimtab` is enough for `trimtab.checkpoint.ResumableLoader`, in a fresh interpreter."""
    code = (
        "import sys, trimtab\n"
        "assert 'torch' not in sys.modules\n"
        "assert trimtab.checkpoint.ResumableLoader.__name__ == 'ResumableLoader'\n"
        "from trimtab.aliases import TABLE\n"
        "for name in trimtab._PACKAGES:\n"
        "    home = f'trimtab.{name}'\n"
        "    assert getattr(trimtab, name).__name__ == TABLE.get(home, home)\n"
        "try: trimtab.nonsense\n"
        "except AttributeError as error: assert 'nonsense' in str(error)\n"
        "else: raise SystemExit('an attribute that does not exist')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_pure_half_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import trimtab.core.pipeline, trimtab.rules, trimtab.record.reader, trimtab.record.recorder\n"
        "import trimtab.report.text, trimtab.report.replay, trimtab.cli.app\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_guard_needs_only_torch_numpy_and_safetensors() -> None:
    code = (
        "import sys\n"
        "for m in ('typer', 'rich', 'pydantic', 'jinja2'): sys.modules[m] = None\n"
        "import torch, trimtab\n"
        "model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with trimtab.Guard(model, optimizer, clip=1.0) as guard:\n"
        "    loss = model(torch.ones(1, 2)).sum(); loss.backward(); guard.step(loss)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def _calls(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"item", "cpu", "tolist", "bool"}:
                found.append(f"{path.name}: {ast.unparse(node)}")
    return found


def test_no_host_sync_hides_on_the_step_path() -> None:
    """Only sample/transfer.py may wait for a device."""
    guard = [SOURCE / "guard" / f"{name}.py" for name in ("protect", "guard", "lane")]
    step_path = [*SOURCE.glob("sample/**/*.py"), *guard]
    assert len(step_path) > 8
    # What these are made of is a setting, the name of a node, or a number that has already arrived.
    on_the_host = {
        "protect.py: bool(config.clip)",
        "lane.py: bool(config.clip)",
        "protect.py: bool(optimizer.state)",
        "answers.py: bool(shares)",  # of arrays, as all of answers.py
        "protect.py: bool(nonfinite)",
        "protect.py: bool(reject)",
        "protect.py: bool(told.bad_buffers.any())",  # of an array
        "forward.py: bool(node.name().startswith(JOINING))",
        "forward.py: bool(node.name().startswith(_TO_LOGITS))",
        "forward.py: bool(node.name().startswith(_HEADS))",
        "linear_chain.py: bool(node.name().startswith(_ENDS))",
        "observed.py: loss.item()",  # of a CPU tensor
        "batch.py: values.item(0)",  # of an array
        "batch.py: values.item(width)",
        "batch.py: values.item(step)",
        "ledger.py: values[:len(NUMBERS)].tolist()",  # what has arrived
        "sentinel.py: to_host(copies).tolist()",
        "sentinel.py: bool(again)",  # of an array: a tensor is kept as it is
        "sentinel.py: bool(came and (not left))",
        "layer_gradients.py: to_host(copy).tolist()",
        "layer_inputs.py: to_host(copy).tolist()",
        "layer_inputs.py: to_host(values).tolist()",  # of CPU tensors
    }
    assert {c for p in step_path for c in _calls(p)} <= on_the_host
    for path in step_path:
        if path.name != "transfer.py":
            found = re.findall(r"\bfloat\((?:parts|total|norm|reject|coef)\b[^)]*\)", path.read_text())
            assert set(found) <= ({"float(coef < 1.0)"} if path.name == "protect.py" else set()), path


def test_nothing_prints_and_nothing_swallows_errors_in_library_code() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "cli"):
            continue
        text = path.read_text()
        assert not re.search(r"^\s*print\(", text, re.MULTILINE), path
        assert not re.search(r"except( Exception| BaseException)?:\s*\n\s*pass\b", text), path


def test_every_rule_has_a_test_that_triggers_it_and_a_page() -> None:
    faults = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    tests = (ROOT / "tests" / "rules" / "test_each_rule.py").read_text()
    for rule in all_rules():
        assert f'"{rule.name}"' in faults, f"no test or fault names {rule.name}"
        assert f'"{rule.code}"' in tests, f"no test triggers {rule.code}"
        assert advice_of(rule)
        module = sys.modules[rule.__module__].__file__
        assert module is not None
        assert Path(module).stem == rule.name.replace("-", "_")
        assert sum(r.__module__ == rule.__module__ for r in all_rules()) == 1


def test_the_readme_holds_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    start = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt"
    assert f"{start} -e . && .venv/bin/trimtab demo" in text
    assert f'{start} -e ".[test]" && .venv/bin/python -m pytest -q' in text
    assert (ROOT / "constraints.txt").read_text() == "torch==2.13.0\n"

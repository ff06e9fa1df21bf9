"""The names of `trimtab.losses`: all there, documented, each with an example; importing them costs no torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from trimtab import losses

HEART = {"NWayLoss", "NWayOutput", "TooCostly", "nway_cost", "nway_logits", "nway_loss"}


def test_the_names() -> None:
    assert set(losses.__all__) >= HEART
    assert losses.__all__ == sorted(losses.__all__)
    assert dir(losses) == sorted(losses.__all__)
    for name in losses.__all__:
        value = getattr(losses, name)
        assert inspect.getdoc(value), name
        assert value.__module__.startswith(("trimtab.losses.", "trimtab.compat.")), name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = losses.nonsense


def test_the_main_names_have_an_example() -> None:
    for name in HEART:
        assert ">>> " in (inspect.getdoc(getattr(losses, name)) or ""), name


def test_importing_the_package_imports_no_torch_and_hardly_anything_of_ours() -> None:
    code = (
        "import sys, trimtab.losses; assert 'torch' not in sys.modules; trimtab.losses.nway_loss\n"
        "print(sorted(m for m in sys.modules if m.startswith('trimtab.') and not m.startswith('trimtab.losses')), "
        "'triton' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with_trimtab = ["trimtab.aliases", "trimtab.core", "trimtab.core.printable"]
    assert out.stdout.strip() == f"{with_trimtab} False"

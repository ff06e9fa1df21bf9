"""The namespaces of the integrations: there when they are asked for, and an install line where the package is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.matrix import sampled
from trimtab.aliases import NAMESPACES

PACKAGES = {
    "lightning": ("lightning", "pytorch_lightning"),
    "hf": ("transformers",),
    "accelerate": ("accelerate",),
    "ignite": ("ignite",),
    "fastai": ("fastai",),
    "keras": ("keras",),
    "composer": ("composer",),
}
FRAMEWORKS = sorted({name for names in PACKAGES.values() for name in names})


def test_importing_trimtab_imports_no_framework() -> None:
    code = f"import sys, trimtab; print([m for m in {['torch', *FRAMEWORKS]} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sampled(sorted(PACKAGES), "hf composer"))
def test_a_package_that_is_not_installed_is_named_with_its_install_line(name: str) -> None:
    code = (
        f"import sys\nfor name in {FRAMEWORKS}: sys.modules[name] = None\nimport trimtab\n"
        f"try: trimtab.{name}\nexcept ImportError as error:\n"
        "    assert isinstance(error, trimtab.TrimtabError)\n    print(error)\n"
        f"try: import trimtab.{name}\nexcept ImportError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = out.stdout.splitlines()
    assert first == second
    assert "is not installed; install it with: pip install" in first


def test_every_namespace_is_tried_here() -> None:
    assert {f"trimtab.{name}" for name in PACKAGES} == set(NAMESPACES)

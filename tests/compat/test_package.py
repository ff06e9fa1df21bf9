"""The package's own face: every name there is, found when asked for, without torch before that."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trimtab.compat import monitors as monitor


def test_every_name_is_found() -> None:
    for name in monitor.__all__:
        assert callable(getattr(monitor, name)), name
    assert dir(monitor) == sorted(monitor.__all__)
    assert set(monitor._HOME) == set(monitor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'snap'"):
        monitor.snap  # noqa: B018


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, trimtab.compat.monitors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

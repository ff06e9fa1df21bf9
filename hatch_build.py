"""Builds the compiled readings of a healthy step (src/trimtab/sample/measure/compiled.c) where there is a C compiler.

Without one trimtab is installed all the same and reads with NumPy and PyTorch: slower, with the same result.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "src/trimtab/sample/measure/compiled.c"
TARGET = "src/trimtab/sample/measure/compiled.abi3.so"


class CompiledReadings(BuildHookInterface):
    """Compiles one file into the package, for any CPython from 3.11 on."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it in place; a wheel then says for which machines it is."""
        if self.target_name != "wheel" or os.environ.get("TRIMTAB_NATIVE") == "0":
            return
        home = Path(self.root)
        problem = compiled(home / SOURCE, home / TARGET)
        if problem:
            self.app.display_warning(f"trimtab is installed without its compiled readings: {problem}")
            return
        build_data["artifacts"].append(TARGET)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"


def compiled(source: Path, target: Path) -> str:
    """Compile; returns what stood in the way, or nothing."""
    if sys.implementation.name != "cpython" or os.name != "posix":
        return f"not tried on {sys.implementation.name}, {os.name}"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"no compiler ({compiler[0]})"
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    new = target.with_name(f"{target.name}.{os.getpid()}")  # a process may have the old one open
    # Products that are fused with sums on one machine only would make results depend on the machine.
    flags = ["-O3", "-ffp-contract=off", "-fPIC", *shared, f"-I{sysconfig.get_paths()['include']}"]
    command = [*compiler, *flags, str(source), "-o", str(new)]
    try:
        done = subprocess.run([*command, "-lm"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        new.unlink(missing_ok=True)
        return done.stderr.strip()[-500:] or f"{compiler[0]} ended with {done.returncode}"
    new.replace(target)
    return ""

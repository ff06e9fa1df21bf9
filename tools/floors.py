"""The oldest releases that pyproject.toml admits, as far as the registry has them for this interpreter.

    python tools/floors.py                   one requirement per line, such as `torch==2.6.0`
    python tools/floors.py --beside torch    what an installed package needs, but for CUDA's libraries
    python tools/floors.py --wheel FILE      what of this package is not in a wheel of it

A release that has no wheel for the interpreter (numpy 1.26 for Python 3.13) gives way to the next one that has.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def declared() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and lowest versions of the dependencies."""
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]:
        found = re.fullmatch(r"([\w-]+)>=([\d.]+)", line)
        if found is None:
            raise SystemExit(f"{line!r} in pyproject.toml has no lowest version; expected NAME>=VERSION")
        yield found[1], version(found[2])


def version(text: str) -> tuple[int, ...]:
    """A release as numbers that can be compared.

    Example:
        >>> version("1.26") < version("1.26.0") < version("1.26.4") < version("2.0")
        True
    """
    return tuple(int(part) for part in text.split("."))


def offered(name: str) -> list[str]:
    """The final releases that the registry has a wheel of for this interpreter, oldest first."""
    # Asking for a version that does not exist makes pip list those that can be installed here.
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--only-binary=:all:",
        f"{name}==0.0.0",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    listed = re.search(r"from versions: ([^)]*)", said)
    if listed is None:
        raise SystemExit(f"the registry has no wheel of {name} for Python {sys.version.split()[0]}:\n{said}")
    return [one for one in listed[1].split(", ") if re.fullmatch(r"[\d.]+", one)]


def floors() -> Iterator[str]:
    """One requirement for each dependency: the oldest release that is both admitted and offered."""
    wanted = list(declared())
    with ThreadPoolExecutor(len(wanted)) as pool:
        releases = list(pool.map(offered, (name for name, _ in wanted)))
    for (name, lowest), found in zip(wanted, releases, strict=True):
        fit = [one for one in found if version(one) >= lowest]
        if not fit:
            raise SystemExit(f"the registry has no {name} from {'.'.join(map(str, lowest))} on for this interpreter")
        yield f"{name}=={min(fit, key=version)}"


def beside(name: str) -> Iterator[str]:
    """What an installed package asks for on this machine, but for what only a GPU needs."""
    from pip._vendor.packaging.requirements import Requirement

    for text in metadata.requires(name) or ():
        one = Requirement(text)
        if (one.marker is None or one.marker.evaluate({"extra": ""})) and not one.name.startswith(
            ("nvidia-", "triton")
        ):
            yield f"{one.name}{one.specifier}"


def left_out(wheel: Path) -> list[str]:
    """Files of the package that git knows and the wheel does not hold."""
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    held = set(zipfile.ZipFile(wheel).namelist())
    return [name for name in tracked.splitlines() if name.removeprefix("src/") not in held]


def main() -> int:
    """Print what was asked for."""
    if sys.argv[1:2] == ["--beside"]:
        sys.stdout.write("".join(f"{line}\n" for line in beside(sys.argv[2])))
        return 0
    if sys.argv[1:2] == ["--wheel"]:
        missing = left_out(Path(sys.argv[2]))
        sys.stdout.write("".join(f"not in {sys.argv[2]}: {name}\n" for name in missing))
        return int(bool(missing))
    sys.stdout.write("".join(f"{line}\n" for line in floors()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

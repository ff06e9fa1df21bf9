"""Which versions are at work, for whoever reads a record or a checkpoint later."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("trimtab", "torch", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """The versions of Python and of what this depends on, as far as they are installed.

    Example:
        >>> sorted(versions())[:2]
        ['numpy', 'python']
    """
    return dict(_installed())


@cache
def _installed() -> dict[str, str]:
    # Asked once: reading the files of four packages is two thirds of what a Guard takes to build.
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            if package == "trimtab":
                from trimtab import __version__

                found[package] = __version__
    return found

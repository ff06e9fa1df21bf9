"""The remedies by the kind of action they carry out. Adding one is one file and one name in this tuple."""

from __future__ import annotations

from trimtab.act.cut_lr import CutLR
from trimtab.act.skip import Skip
from trimtab.act.stop import Stop
from trimtab.core.types import Remedy

BUILTIN: dict[str, Remedy] = {remedy.kind: remedy for remedy in (CutLR(), Skip(), Stop())}

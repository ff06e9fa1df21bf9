"""The remedies by the kind of action they carry out. Adding one is one file and one name in this tuple."""

from __future__ import annotations

from trimtab.act.back_off_scaler import BackOffScaler
from trimtab.act.cut_lr import CutLR
from trimtab.act.raise_weight_decay import RaiseWeightDecay
from trimtab.act.rewind import Rewind
from trimtab.act.skip import Skip
from trimtab.act.skip_data import SkipData
from trimtab.act.stop import Stop
from trimtab.core.types import Remedy

_ALL: tuple[Remedy, ...] = (Rewind(), CutLR(), RaiseWeightDecay(), BackOffScaler(), Skip(), SkipData(), Stop())
BUILTIN: dict[str, Remedy] = {remedy.kind: remedy for remedy in _ALL}

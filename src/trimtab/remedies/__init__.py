"""The remedies by the kind of action they carry out. Adding one is one file and one name in this tuple."""

from __future__ import annotations

from trimtab.core.remedy import Remedy
from trimtab.remedies.back_off_scaler import BackOffScaler
from trimtab.remedies.cut_lr import CutLR
from trimtab.remedies.raise_weight_decay import RaiseWeightDecay
from trimtab.remedies.rewind import Rewind
from trimtab.remedies.skip import Skip, SkipData
from trimtab.remedies.stop import Stop

_ALL: tuple[Remedy, ...] = (Rewind(), CutLR(), RaiseWeightDecay(), BackOffScaler(), Skip(), SkipData(), Stop())
BUILTIN: dict[str, Remedy] = {remedy.kind: remedy for remedy in _ALL}

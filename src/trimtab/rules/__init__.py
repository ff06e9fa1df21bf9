"""The rules: one trouble per file. Adding one is one file and one name in this tuple."""

from trimtab.core.types import Rule
from trimtab.rules.exploding_gradient import ExplodingGradient
from trimtab.rules.loss_spike import LossSpike
from trimtab.rules.nonfinite_buffer import NonfiniteBuffer
from trimtab.rules.nonfinite_gradient import NonfiniteGradient
from trimtab.rules.nonfinite_loss import NonfiniteLoss
from trimtab.rules.nonfinite_weight import NonfiniteWeight

# In the order of cause and effect: findings of one step are listed first cause first.
BUILTIN: tuple[type[Rule], ...] = (
    NonfiniteWeight,
    NonfiniteLoss,
    NonfiniteGradient,
    NonfiniteBuffer,
    LossSpike,
    ExplodingGradient,
)

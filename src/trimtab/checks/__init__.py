"""Preflight: what `trimtab doctor` looks at before the first epoch. Adding a check is one file and one name here."""

from trimtab.checks.double_step import DoubleStep
from trimtab.checks.empty_batch import EmptyBatch
from trimtab.checks.eval_mode import EvalMode
from trimtab.checks.label_range import LabelRange
from trimtab.checks.learning_rate import LearningRate
from trimtab.checks.loader_exception import LoaderException
from trimtab.checks.loss_detached import LossDetached
from trimtab.checks.loss_ignores_input import LossIgnoresInput
from trimtab.checks.loss_not_scalar import LossNotScalar
from trimtab.checks.missing_gradient import MissingGradient
from trimtab.checks.no_grad import NoGrad
from trimtab.checks.nonfinite_input import NonfiniteInput
from trimtab.checks.nonfinite_loss import NonfiniteLoss
from trimtab.checks.not_learning import NotLearning
from trimtab.checks.optimizer_misses_parameters import OptimizerMissesParameters
from trimtab.checks.outcome import Check
from trimtab.checks.stale_gradient import StaleGradient
from trimtab.checks.stale_optimizer import StaleOptimizer
from trimtab.checks.step_exception import StepException
from trimtab.checks.weights_unchanged import WeightsUnchanged
from trimtab.checks.zero_gradient import ZeroGradient

# In the order of cause and effect: the first line that failed is the cause.
BUILTIN: tuple[type[Check], ...] = (
    LoaderException,
    EmptyBatch,
    NonfiniteInput,
    LabelRange,
    NoGrad,
    LossNotScalar,
    LossDetached,
    StaleOptimizer,
    OptimizerMissesParameters,
    StepException,
    EvalMode,
    NonfiniteLoss,
    MissingGradient,
    StaleGradient,
    DoubleStep,
    LossIgnoresInput,
    ZeroGradient,
    LearningRate,
    WeightsUnchanged,
    NotLearning,
)

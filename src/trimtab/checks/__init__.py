"""Preflight: what `trimtab doctor` looks at before the first epoch. Adding a check is one file and one name here."""

from trimtab.checks.accumulation_not_divided import AccumulationNotDivided
from trimtab.checks.autocast_inactive import AutocastInactive
from trimtab.checks.batchnorm_frozen import BatchnormFrozen
from trimtab.checks.checkpoint_round_trip import CheckpointRoundTrip
from trimtab.checks.chronic_clipping import ChronicClipping
from trimtab.checks.class_balance import ClassBalance
from trimtab.checks.clip_before_unscale import ClipBeforeUnscale
from trimtab.checks.clip_order import ClipOrder
from trimtab.checks.collapsed_output import CollapsedOutput
from trimtab.checks.constant_batch import ConstantBatch
from trimtab.checks.dead_units import DeadUnits
from trimtab.checks.device_placement import DevicePlacement
from trimtab.checks.double_step import DoubleStep
from trimtab.checks.dropout_inactive import DropoutInactive
from trimtab.checks.dtype_mismatch import DtypeMismatch
from trimtab.checks.duplicate_parameters import DuplicateParameters
from trimtab.checks.ema_not_moving import EmaNotMoving
from trimtab.checks.empty_batch import EmptyBatch
from trimtab.checks.eval_mode import EvalMode
from trimtab.checks.gradcheck import Gradcheck
from trimtab.checks.gradient_underflow import GradientUnderflow
from trimtab.checks.gradients_discarded import GradientsDiscarded
from trimtab.checks.graph_reused import GraphReused
from trimtab.checks.in_place_hazard import InPlaceHazard
from trimtab.checks.initial_loss import InitialLoss
from trimtab.checks.input_scale import InputScale
from trimtab.checks.label_range import LabelRange
from trimtab.checks.learning_rate import LearningRate
from trimtab.checks.loader_exception import LoaderException
from trimtab.checks.loader_settings import LoaderSettings
from trimtab.checks.loss_broadcast import LossBroadcast
from trimtab.checks.loss_detached import LossDetached
from trimtab.checks.loss_ignores_input import LossIgnoresInput
from trimtab.checks.loss_ignores_target import LossIgnoresTarget
from trimtab.checks.loss_input import LossInput
from trimtab.checks.loss_not_scalar import LossNotScalar
from trimtab.checks.loss_scale import LossScale
from trimtab.checks.loss_sign import LossSign
from trimtab.checks.memory_peak import MemoryPeak
from trimtab.checks.missing_gradient import MissingGradient
from trimtab.checks.needless_scaler import NeedlessScaler
from trimtab.checks.no_grad import NoGrad
from trimtab.checks.nonfinite_gradient import NonfiniteGradient
from trimtab.checks.nonfinite_input import NonfiniteInput
from trimtab.checks.nonfinite_loss import NonfiniteLoss
from trimtab.checks.nonfinite_weight import NonfiniteWeight
from trimtab.checks.not_learning import NotLearning
from trimtab.checks.not_reproducible import NotReproducible
from trimtab.checks.optimizer_misses_parameters import OptimizerMissesParameters
from trimtab.checks.optimizer_settings import OptimizerSettings
from trimtab.checks.optimizer_state_lost import OptimizerStateLost
from trimtab.checks.outcome import Check
from trimtab.checks.random_numbers_repeat import RandomNumbersRepeat
from trimtab.checks.repeated_batch import RepeatedBatch
from trimtab.checks.resume_differs import ResumeDiffers
from trimtab.checks.samples_mixed import SamplesMixed
from trimtab.checks.saturated_units import SaturatedUnits
from trimtab.checks.scaler_order import ScalerOrder
from trimtab.checks.scheduler_order import SchedulerOrder
from trimtab.checks.shape_mismatch import ShapeMismatch
from trimtab.checks.stale_gradient import StaleGradient
from trimtab.checks.stale_optimizer import StaleOptimizer
from trimtab.checks.step_exception import StepException
from trimtab.checks.symmetric_units import SymmetricUnits
from trimtab.checks.target_leak import TargetLeak
from trimtab.checks.targets_do_not_predict import TargetsDoNotPredict
from trimtab.checks.untied_weights import UntiedWeights
from trimtab.checks.weight_corrupted import WeightCorrupted
from trimtab.checks.weights_unchanged import WeightsUnchanged
from trimtab.checks.zero_gradient import ZeroGradient

# In the order of cause and effect: the first line that failed is the cause.
BUILTIN: tuple[type[Check], ...] = (
    LoaderException,
    EmptyBatch,
    NonfiniteInput,
    DevicePlacement,
    NonfiniteWeight,
    LabelRange,
    DtypeMismatch,
    ShapeMismatch,
    ConstantBatch,
    RepeatedBatch,
    NoGrad,
    InPlaceHazard,
    GraphReused,
    ScalerOrder,
    LossNotScalar,
    StaleOptimizer,
    LossDetached,
    DuplicateParameters,
    OptimizerMissesParameters,
    StepException,
    EvalMode,
    BatchnormFrozen,
    DropoutInactive,
    AutocastInactive,
    LossSign,
    LossScale,
    LossBroadcast,
    LossInput,
    NonfiniteGradient,
    NonfiniteLoss,
    UntiedWeights,
    GradientsDiscarded,
    DeadUnits,
    SaturatedUnits,
    SymmetricUnits,
    MissingGradient,
    WeightCorrupted,
    StaleGradient,
    DoubleStep,
    AccumulationNotDivided,
    ClipBeforeUnscale,
    ClipOrder,
    ChronicClipping,
    NeedlessScaler,
    GradientUnderflow,
    SchedulerOrder,
    OptimizerSettings,
    OptimizerStateLost,
    LossIgnoresInput,
    LossIgnoresTarget,
    ZeroGradient,
    SamplesMixed,
    TargetsDoNotPredict,
    TargetLeak,
    Gradcheck,
    LearningRate,
    WeightsUnchanged,
    CollapsedOutput,
    InitialLoss,
    NotLearning,
    EmaNotMoving,
    RandomNumbersRepeat,
    NotReproducible,
    CheckpointRoundTrip,
    ResumeDiffers,
    InputScale,
    ClassBalance,
    LoaderSettings,
    MemoryPeak,
)

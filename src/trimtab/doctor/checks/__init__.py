"""What `trimtab doctor` checks before the first epoch. Adding a check is one file and one name here."""

from trimtab.doctor.checklist import Check
from trimtab.doctor.checks.accumulation_not_divided import AccumulationNotDivided
from trimtab.doctor.checks.autocast_inactive import AutocastInactive
from trimtab.doctor.checks.batchnorm_frozen import BatchnormFrozen
from trimtab.doctor.checks.checkpoint_round_trip import CheckpointRoundTrip
from trimtab.doctor.checks.chronic_clipping import ChronicClipping
from trimtab.doctor.checks.class_balance import ClassBalance
from trimtab.doctor.checks.clip_before_unscale import ClipBeforeUnscale
from trimtab.doctor.checks.clip_order import ClipOrder
from trimtab.doctor.checks.collapsed_output import CollapsedOutput
from trimtab.doctor.checks.constant_batch import ConstantBatch
from trimtab.doctor.checks.dead_units import DeadUnits
from trimtab.doctor.checks.device_placement import DevicePlacement
from trimtab.doctor.checks.double_step import DoubleStep
from trimtab.doctor.checks.dropout_inactive import DropoutInactive
from trimtab.doctor.checks.dtype_mismatch import DtypeMismatch
from trimtab.doctor.checks.duplicate_parameters import DuplicateParameters
from trimtab.doctor.checks.ema_not_moving import EmaNotMoving
from trimtab.doctor.checks.empty_batch import EmptyBatch
from trimtab.doctor.checks.eval_mode import EvalMode
from trimtab.doctor.checks.gradcheck import Gradcheck
from trimtab.doctor.checks.gradient_underflow import GradientUnderflow
from trimtab.doctor.checks.gradients_discarded import GradientsDiscarded
from trimtab.doctor.checks.graph_reused import GraphReused
from trimtab.doctor.checks.in_place_hazard import InPlaceHazard
from trimtab.doctor.checks.initial_loss import InitialLoss
from trimtab.doctor.checks.input_scale import InputScale
from trimtab.doctor.checks.label_range import LabelRange
from trimtab.doctor.checks.learning_rate import LearningRate
from trimtab.doctor.checks.loader_exception import LoaderException
from trimtab.doctor.checks.loader_settings import LoaderSettings
from trimtab.doctor.checks.loss_broadcast import LossBroadcast
from trimtab.doctor.checks.loss_detached import LossDetached
from trimtab.doctor.checks.loss_ignores_input import LossIgnoresInput
from trimtab.doctor.checks.loss_ignores_target import LossIgnoresTarget
from trimtab.doctor.checks.loss_input import LossInput
from trimtab.doctor.checks.loss_not_scalar import LossNotScalar
from trimtab.doctor.checks.loss_scale import LossScale
from trimtab.doctor.checks.loss_sign import LossSign
from trimtab.doctor.checks.memory_peak import MemoryPeak
from trimtab.doctor.checks.missing_gradient import MissingGradient
from trimtab.doctor.checks.needless_scaler import NeedlessScaler
from trimtab.doctor.checks.no_grad import NoGrad
from trimtab.doctor.checks.nonfinite_gradient import NonfiniteGradient
from trimtab.doctor.checks.nonfinite_input import NonfiniteInput
from trimtab.doctor.checks.nonfinite_loss import NonfiniteLoss
from trimtab.doctor.checks.nonfinite_weight import NonfiniteWeight
from trimtab.doctor.checks.not_learning import NotLearning
from trimtab.doctor.checks.not_reproducible import NotReproducible
from trimtab.doctor.checks.optimizer_misses_parameters import OptimizerMissesParameters
from trimtab.doctor.checks.optimizer_settings import OptimizerSettings
from trimtab.doctor.checks.optimizer_state_lost import OptimizerStateLost
from trimtab.doctor.checks.random_numbers_repeat import RandomNumbersRepeat
from trimtab.doctor.checks.repeated_batch import RepeatedBatch
from trimtab.doctor.checks.resume_differs import ResumeDiffers
from trimtab.doctor.checks.samples_mixed import SamplesMixed
from trimtab.doctor.checks.saturated_units import SaturatedUnits
from trimtab.doctor.checks.scaler_order import ScalerOrder
from trimtab.doctor.checks.scheduler_order import SchedulerOrder
from trimtab.doctor.checks.shape_mismatch import ShapeMismatch
from trimtab.doctor.checks.stale_gradient import StaleGradient
from trimtab.doctor.checks.stale_optimizer import StaleOptimizer
from trimtab.doctor.checks.step_exception import StepException
from trimtab.doctor.checks.symmetric_units import SymmetricUnits
from trimtab.doctor.checks.target_leak import TargetLeak
from trimtab.doctor.checks.targets_do_not_predict import TargetsDoNotPredict
from trimtab.doctor.checks.untied_weights import UntiedWeights
from trimtab.doctor.checks.weight_corrupted import WeightCorrupted
from trimtab.doctor.checks.weights_unchanged import WeightsUnchanged
from trimtab.doctor.checks.zero_gradient import ZeroGradient

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

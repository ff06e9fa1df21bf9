"""The rules: one trouble per file. Adding one is one file and one name in this tuple."""

from trimtab.core.types import Rule
from trimtab.rules.accumulation_not_divided import AccumulationNotDivided
from trimtab.rules.activation_missing import ActivationMissing
from trimtab.rules.chronic_clipping import ChronicClipping
from trimtab.rules.clip_before_unscale import ClipBeforeUnscale
from trimtab.rules.collapsed_output import CollapsedOutput
from trimtab.rules.constant_batch import ConstantBatch
from trimtab.rules.data_replayed import DataReplayed
from trimtab.rules.dead_units import DeadUnits
from trimtab.rules.decay_too_high import DecayTooHigh
from trimtab.rules.diverging_loss import DivergingLoss
from trimtab.rules.double_backward import DoubleBackward
from trimtab.rules.double_step import DoubleStep
from trimtab.rules.dropout_too_high import DropoutTooHigh
from trimtab.rules.duplicated_data import DuplicatedData
from trimtab.rules.ema_not_moving import EmaNotMoving
from trimtab.rules.empty_batch import EmptyBatch
from trimtab.rules.eval_mode import EvalMode
from trimtab.rules.exploding_gradient import ExplodingGradient
from trimtab.rules.gradient_reversed import GradientReversed
from trimtab.rules.gradient_underflow import GradientUnderflow
from trimtab.rules.gradients_dropped import GradientsDropped
from trimtab.rules.identical_units import IdenticalUnits
from trimtab.rules.initial_weights import InitialWeights
from trimtab.rules.inputs_out_of_range import InputsOutOfRange
from trimtab.rules.judge_wins import JudgeWins
from trimtab.rules.label_range import LabelRange
from trimtab.rules.learning_rate import LearningRate
from trimtab.rules.logits_out_of_range import LogitsOutOfRange
from trimtab.rules.loss_broadcast import LossBroadcast
from trimtab.rules.loss_spike import LossSpike
from trimtab.rules.loss_unbounded import LossUnbounded
from trimtab.rules.missing_gradient import MissingGradient
from trimtab.rules.modality_collapse import ModalityCollapse
from trimtab.rules.needless_scaler import NeedlessScaler
from trimtab.rules.no_grad import NoGrad
from trimtab.rules.nonfinite_buffer import NonfiniteBuffer
from trimtab.rules.nonfinite_ema import NonfiniteEma
from trimtab.rules.nonfinite_gradient import NonfiniteGradient
from trimtab.rules.nonfinite_input import NonfiniteInput
from trimtab.rules.nonfinite_loss import NonfiniteLoss
from trimtab.rules.nonfinite_optimizer_state import NonfiniteOptimizerState
from trimtab.rules.nonfinite_validation import NonfiniteValidation
from trimtab.rules.nonfinite_weight import NonfiniteWeight
from trimtab.rules.not_learning import NotLearning
from trimtab.rules.optimizer_misses_parameters import OptimizerMissesParameters
from trimtab.rules.optimizer_settings import OptimizerSettings
from trimtab.rules.optimizer_state_lost import OptimizerStateLost
from trimtab.rules.oscillating_loss import OscillatingLoss
from trimtab.rules.outlier_batch import OutlierBatch
from trimtab.rules.overfitting import Overfitting
from trimtab.rules.rank_out_of_family import RankOutOfFamily
from trimtab.rules.repeated_batch import RepeatedBatch
from trimtab.rules.repeated_rows import RepeatedRows
from trimtab.rules.replicas_diverged import ReplicasDiverged
from trimtab.rules.representation_collapsed import RepresentationCollapsed
from trimtab.rules.saturated_units import SaturatedUnits
from trimtab.rules.scale_collapse import ScaleCollapse
from trimtab.rules.softmax_twice import SoftmaxTwice
from trimtab.rules.stale_gradient import StaleGradient
from trimtab.rules.stale_optimizer import StaleOptimizer
from trimtab.rules.step_exception import StepException
from trimtab.rules.straggler import Straggler
from trimtab.rules.targets_do_not_predict import TargetsDoNotPredict
from trimtab.rules.temperature_runaway import TemperatureRunaway
from trimtab.rules.untied_weights import UntiedWeights
from trimtab.rules.update_ratio import UpdateRatio
from trimtab.rules.updates_lost import UpdatesLost
from trimtab.rules.vanishing_gradient import VanishingGradient
from trimtab.rules.weight_corrupted import WeightCorrupted
from trimtab.rules.weight_jump import WeightJump
from trimtab.rules.weights_unchanged import WeightsUnchanged
from trimtab.rules.wrong_output_activation import WrongOutputActivation
from trimtab.rules.zero_gradient import ZeroGradient

# In the order of cause and effect: findings of one step are listed first cause first.
BUILTIN: tuple[type[Rule], ...] = (
    NonfiniteInput,
    EmptyBatch,
    LabelRange,
    OutlierBatch,
    InputsOutOfRange,
    ConstantBatch,
    RepeatedBatch,
    DataReplayed,
    DuplicatedData,
    RankOutOfFamily,
    ReplicasDiverged,
    NonfiniteOptimizerState,
    NonfiniteWeight,
    WeightCorrupted,
    OptimizerStateLost,
    UntiedWeights,
    IdenticalUnits,
    InitialWeights,
    StaleOptimizer,
    OptimizerMissesParameters,
    NoGrad,
    EvalMode,
    DropoutTooHigh,
    StaleGradient,
    GradientsDropped,
    GradientReversed,
    DoubleStep,
    DoubleBackward,
    AccumulationNotDivided,
    ClipBeforeUnscale,
    NeedlessScaler,
    GradientUnderflow,
    UpdatesLost,
    ScaleCollapse,
    LearningRate,
    OptimizerSettings,
    DecayTooHigh,
    ActivationMissing,
    SoftmaxTwice,
    LossBroadcast,
    JudgeWins,
    RepeatedRows,
    WrongOutputActivation,
    LogitsOutOfRange,
    NonfiniteLoss,
    NonfiniteGradient,
    NonfiniteBuffer,
    NonfiniteValidation,
    NonfiniteEma,
    MissingGradient,
    ZeroGradient,
    VanishingGradient,
    WeightsUnchanged,
    WeightJump,
    UpdateRatio,
    ExplodingGradient,
    LossSpike,
    DivergingLoss,
    LossUnbounded,
    OscillatingLoss,
    ChronicClipping,
    TemperatureRunaway,
    ModalityCollapse,
    DeadUnits,
    SaturatedUnits,
    RepresentationCollapsed,
    CollapsedOutput,
    NotLearning,
    TargetsDoNotPredict,
    Overfitting,
    EmaNotMoving,
    Straggler,
    StepException,
)

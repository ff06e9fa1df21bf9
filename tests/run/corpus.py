"""The scripts, how each is started, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to start one script. `nan_at` is the batch that can be made bad, None where the script has none.

    `finds` is the code of what there is to find in it even so, `guards` how many trainings are told of at the end.
    `own_process` says whether the program with trimtab, or "both" it and the one without, begin in an interpreter of
    their own: how a program begins and ends is what a fork of a process with PyTorch in it can only imitate. It counts
    while all is well: what a NaN does to a training is the same in a fork.
    """

    words: tuple[str, ...]
    nan_at: int | None = 20
    code: int = 0
    stdin: str = ""
    says: str = ""
    guards: int | None = 1
    finds: str = ""
    own_process: Literal["", "guarded", "both"] = ""

    @property
    def id(self) -> str:
        return "-".join(word.removesuffix(".py") for word in self.words)


CASES = [
    Case(words=("plain.py",), own_process="both"),
    Case(words=("with_argparse.py", "--epochs", "2", "--learning_rate", "0.003", "--mode", "train", "--quiet", "true")),
    Case(words=("trainer_class.py",)),
    Case(words=("amp_bf16.py",)),
    Case(words=("scaler_clip.py",)),
    Case(words=("scaler_accumulated.py",)),
    Case(words=("accumulation.py",)),
    Case(words=("lbfgs.py",)),
    Case(words=("adam_closure.py",)),
    Case(words=("two_optimizers.py",), guards=None),
    Case(words=("gan.py",), guards=2),
    Case(words=("alternating.py",), guards=None),
    Case(words=("own_optimizer.py",)),
    Case(words=("sam_wrapper.py",)),
    Case(words=("sam_closure.py",)),
    Case(words=("lookahead.py",)),
    Case(words=("compiled_before.py",)),
    Case(words=("compiled_after.py",)),
    Case(words=("compiled_step.py",)),
    Case(words=("compiled_optimizer.py",)),
    Case(words=("fused.py",), guards=4),
    Case(words=("loader_workers.py",)),
    Case(words=("in_thread.py",), guards=2),
    Case(words=("in_child.py",), guards=None),
    Case(words=("train_and_child.py",), guards=None),
    Case(words=("checkpoints.py",), guards=None, says="read (2, 1)"),
    Case(words=("averaged.py",)),
    Case(words=("two_stages.py",), guards=2),
    Case(words=("cross_validation.py",), guards=None),
    Case(words=("inner_loops.py",), guards=None),
    Case(words=("groups_added.py",), guards=None),
    Case(words=("tied_unused.py",), finds="GRAD005"),
    Case(words=("sparse.py",), guards=None),
    Case(words=("raw_tensors.py",)),
    Case(words=("complex_model.py",)),
    Case(words=("container.py",)),
    Case(words=("loose_parts.py",)),
    Case(words=("grad_by_hand.py",)),
    Case(words=("retained.py",)),
    Case(words=("functional.py",)),
    Case(words=("exporting.py",)),
    Case(words=("export_midway.py",)),
    Case(words=("endings.py", "code"), code=3),
    Case(words=("endings.py", "text"), code=1, says="the end, as text"),
    Case(words=("endings.py", "error"), code=1, says="ValueError: wrong value", own_process="guarded"),
    Case(words=("endings.py", "assertion"), code=1, says="AssertionError: not None"),
    Case(words=("endings.py", "_exit"), code=5, own_process="guarded"),
    Case(words=("endings.py", "interrupted"), code=-2, says="KeyboardInterrupt", own_process="guarded"),
    Case(words=("endings.py", "terminated"), code=55),
    Case(words=("endings.py", "caught"), code=130, says="interrupted; saving"),
    Case(words=("endings.py", "nested"), code=1, says="| TypeError: two"),
    Case(words=("endings.py", "hook"), code=1, says="my own hook: RuntimeError for the hook"),
    Case(
        words=("no_torch.py", "--mode", "x", "-q", "--", "y"), nan_at=None, stdin="a\nb", guards=0, own_process="both"
    ),
    Case(words=("never_trains.py",), nan_at=None, guards=0),
    Case(words=("builds_only.py",), nan_at=None, guards=0),
    Case(words=("stdin_settings.py",), stdin='{"name": "RMSprop", "lr": 0.003}\n12\n', says="width? "),
    Case(words=("logging_stdout.py",), says="of ours: False"),
    Case(words=("strict_warnings.py",)),
    Case(words=("wrong_order.py",), says="Detected call of `lr_scheduler.step()` before `optimizer.step()`"),
    Case(words=("moved_away.py",)),
    Case(words=("pickled_main.py",)),
    Case(words=("own_guard.py",), guards=None),
    Case(words=("tiny_steps.py",)),
    Case(words=("lazy.py",)),
    Case(words=("lazy_too_late.py",)),
    Case(words=("deep.py",)),
    Case(words=("-m", "bundle.train", "-m", "12"), says="bundle.train", own_process="guarded"),
    Case(words=("-m", "bundle"), says="bundle.train"),
    Case(words=("folder", "--x", "1"), says="['--x', '1'] 12", own_process="guarded"),
    Case(words=("transformer.py",)),
    Case(words=("step_in_backward.py",), guards=None),
    Case(words=("frozen_backbone.py",)),
    Case(words=("loose_norm.py",)),
    Case(words=("policy.py",)),
    Case(words=("parametrized.py",)),
    Case(words=("without_gc.py",)),
    Case(words=("distributed.py",)),
    Case(words=("spawned_training.py",), guards=2, nan_at=None, own_process="both"),  # with NaN: test_what_was_seen.py
    Case(words=("hogwild.py", "fork"), guards=2),
    Case(words=("hogwild.py", "spawn"), guards=2, nan_at=None, own_process="both"),
    Case(words=("spawned.py",), nan_at=None, says="finite True"),  # the same training as with loader_workers.py
    Case(words=("old_amp.py",), says="is deprecated"),
    Case(words=("wrapped_step.py",)),
    Case(words=("recurrent.py",)),
]

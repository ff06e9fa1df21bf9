"""The scripts, how each is started, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to start one script. `nan_at` is the batch that can be made bad, None where the script has none."""

    words: tuple[str, ...]
    nan_at: int | None = 20
    code: int = 0
    stdin: str = ""
    says: str = ""
    guards: int | None = 1
    own_process: bool = False

    @property
    def id(self) -> str:
        return "-".join(word.removesuffix(".py") for word in self.words)


CASES = [
    Case(words=("plain.py",), own_process=True),
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
    Case(words=("fused.py",), guards=4),
]

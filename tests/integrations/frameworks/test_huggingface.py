"""The Trainer of transformers, real ones, and those of TRL with LoRA."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trimtab
from tests.integrations.frameworks.harness import (
    BATCH,
    NAN_STEP,
    STEPS,
    Case,
    Net,
    Result,
    Sink,
    Witness,
    data,
    differences,
    equal,
    fresh,
    needs,
)

transformers = needs("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """What the Trainer expects: it returns its loss first."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net: Net = fresh()
        self.witness = Witness(self, case.accumulate)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": self.witness.loss(nn.functional.cross_entropy(logits.float(), labels)), "logits": logits}


class Norms(transformers.TrainerCallback):
    def __init__(self, witness: Witness) -> None:
        self.witness = witness

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.witness.step()


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, case: Case) -> None:
        self.x, self.y = data(case)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


class InOrder(transformers.Trainer):
    """Samples in a fixed order, as everywhere in these tests."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer_of(case: Case, folder: Path, callbacks: list[Any], **kwargs: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": case.accumulate,
        "max_grad_norm": case.clip or 0.0,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": case.precision == "bf16",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    model = Model(case)
    return InOrder(
        model=model,
        args=transformers.TrainingArguments(**{**settings, **kwargs}),
        train_dataset=Items(case),
        eval_dataset=Items(Case(steps=2)),
        callbacks=[*callbacks, Norms(model.witness)],
    )


def drive(case: Case, *, guarded: bool, folder: Path | None = None, **kwargs: Any) -> Result:
    sink = Sink()
    callback = trimtab.hf.GuardCallback(sinks=[sink], run_dir=False)
    with tempfile.TemporaryDirectory() as place:
        trainer = trainer_of(case, folder or Path(place), [callback] if guarded else [], **kwargs)
        trainer.train()
    guard = callback.guard
    return Result(
        model=trainer.model,
        optimizer=trainer.optimizer,
        witness=trainer.model.witness,
        sink=sink,
        findings=[f.code for f in callback.findings],
        state=callback.saved,
        rejected=guard.rejected if guard is not None else 0,
    )


def test_a_nan_is_not_hidden_in_the_log(tmp_path: Path) -> None:
    case = Case(nan=True, clip=1.0)
    trainer = trainer_of(case, tmp_path / "out", [trimtab.hf.GuardCallback(run_dir=False)])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [i for i, loss in enumerate(losses) if math.isnan(loss)] == [NAN_STEP]
    assert len(losses) == STEPS


def test_the_recorded_norm_is_the_logged_one(tmp_path: Path) -> None:
    case, sink = Case(clip=0.05), Sink()
    trainer = trainer_of(case, tmp_path / "out", [trimtab.hf.GuardCallback(sinks=[sink], run_dir=False)])
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [s.scalars["grad_norm"] for s in sink.train] == pytest.approx(logged, rel=1e-5)


def test_evaluations_are_seen(tmp_path: Path) -> None:
    case, sink = Case(), Sink()
    callback = trimtab.hf.GuardCallback(sinks=[sink], run_dir=False)
    trainer = trainer_of(case, tmp_path / "out", [callback], eval_strategy="steps", eval_steps=8)
    trainer.train()
    told = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [s.scalars["val_loss"] for s in sink.val] == pytest.approx(told)
    assert len(told) == 3
    assert callback.findings == []


def test_of_several_evaluation_sets_the_first_is_the_validation(tmp_path: Path) -> None:
    sink = Sink()
    callback = trimtab.hf.GuardCallback(sinks=[sink], run_dir=False)
    trainer = trainer_of(Case(), tmp_path / "out", [callback], eval_strategy="steps", eval_steps=8)
    trainer.eval_dataset = {"one": Items(Case(steps=2)), "two": Items(Case(steps=3))}
    trainer.train()
    told = [entry["eval_one_loss"] for entry in trainer.state.log_history if "eval_one_loss" in entry]
    assert [s.scalars["val_loss"] for s in sink.val] == pytest.approx(told)
    assert len(told) == 3


class Look(transformers.TrainerCallback):
    def __init__(self, other: Any) -> None:
        self.other, self.seen = other, dict[str, Any]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = self.other.saved


def test_a_resumed_training_goes_on_exactly(tmp_path: Path) -> None:
    case = Case(accumulate=2, clip=0.05)
    saving = {"save_strategy": "steps", "save_steps": 12, "save_only_model": False}
    whole = drive(case, guarded=True, folder=tmp_path / "out", **saving)
    sink = Sink()
    callback = trimtab.hf.GuardCallback(sinks=[sink], run_dir=False)
    look = Look(callback)
    trainer = trainer_of(case, tmp_path / "out", [callback, look], **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-12"))
    text = (tmp_path / "out" / "checkpoint-12" / "trainer_state.json").read_text()
    saved = transformers.TrainerState.load_from_json(
        str(tmp_path / "out" / "checkpoint-12" / "trainer_state.json")
    ).stateful_callbacks["GuardCallback"]["attributes"]["saved"]
    assert "GuardCallback" in text
    assert differences(look.seen, saved) == []
    assert [s.step for s in sink.train] == list(range(12, STEPS))
    resumed = Result(model=trainer.model, optimizer=trainer.optimizer, witness=trainer.model.witness, sink=sink)
    assert equal(whole, resumed)
    assert callback.findings == []


def test_a_remedy_that_stops_ends_the_training(tmp_path: Path) -> None:
    class Hopeless(Model):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return super().forward(x * math.nan, labels)

    case = Case(steps=200)
    callback = trimtab.hf.GuardCallback(mode="act", run_dir=False)
    trainer = trainer_of(case, tmp_path / "out", [callback])
    trainer.model = trainer.model_wrapped = Hopeless(case)
    trainer.train()
    assert trainer.state.global_step < 200
    assert callback.guard is not None
    assert callback.guard.closed


def test_mode_raise_raises(tmp_path: Path) -> None:
    trainer = trainer_of(Case(nan=True), tmp_path / "out", [trimtab.hf.GuardCallback(mode="raise", run_dir=False)])
    with pytest.raises(trimtab.TrainingStopped, match="NaN/Inf"):
        trainer.train()
    assert trainer.state.global_step == NAN_STEP


def test_two_limits_are_one_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(Case(clip=0.05), tmp_path / "out", [trimtab.hf.GuardCallback(clip=1.0, run_dir=False)]).train()
    told = [r.message for r in caplog.records if "both set" in r.message]
    assert told == ["Hugging Face Trainer: max_grad_norm=0.05 and clip=1.0 are both set: the smaller limit decides"]


def test_a_training_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(Items):
        def __getitem__(self, i: int) -> dict[str, Tensor]:
            found = super().__getitem__(i)
            return {"x": found["x"][:3], "labels": found["labels"]} if i >= 5 * BATCH else found

    callback = trimtab.hf.GuardCallback(run_dir=False)
    before = torch.nn.utils.clip_grad_norm_
    trainer = trainer_of(Case(), tmp_path / "out", [callback])
    trainer.train_dataset = Failing(Case())
    with pytest.raises(RuntimeError):
        trainer.train()
    assert callback.guard is not None
    assert callback.guard.closed
    assert [f.code for f in callback.findings] == ["STEP001"]
    assert torch.nn.utils.clip_grad_norm_ is before
    assert "training_step" not in vars(trainer)


# -- language models: TRL and PEFT -----------------------------------------------------------------------------------


def tiny_lm() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    tokenizers = needs("tokenizers")
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(60))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentences(num: int) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 60, (num,), generator=generator).tolist()
    return [" ".join(f"w{(start + i) % 60}" for i in range(10)) for start in starts]


def trl_arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }


def check_trl(trainer: Any, callback: Any, sink: Sink) -> None:
    trainer.train()
    assert callback.findings == []
    assert len(sink.train) == 12
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [s.scalars["grad_norm"] for s in sink.train] == pytest.approx([e["grad_norm"] for e in logs], rel=1e-5)
    assert [s.scalars["loss"] for s in sink.train] == pytest.approx([e["loss"] for e in logs], abs=2e-4, rel=1e-3)


def test_trl_sft_with_lora(tmp_path: Path) -> None:
    trl, peft, datasets = needs("trl"), needs("peft"), needs("datasets")
    sink = Sink()
    callback = trimtab.hf.GuardCallback(sinks=[sink], run_dir=False)
    trainer = trl.SFTTrainer(
        model=tiny_lm(),
        args=trl.SFTConfig(**trl_arguments(tmp_path / "out"), max_length=32),
        train_dataset=datasets.Dataset.from_dict({"text": sentences(128)}),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[callback],
    )
    check_trl(trainer, callback, sink)


def test_trl_dpo(tmp_path: Path) -> None:
    trl, datasets = needs("trl"), needs("datasets")
    sink, texts = Sink(), sentences(128)
    callback = trimtab.hf.GuardCallback(sinks=[sink], run_dir=False)
    pairs = {
        "prompt": [text[:11] for text in texts],
        "chosen": [text[11:] for text in texts],
        "rejected": [" ".join(reversed(text[11:].split())) for text in texts],
    }
    trainer = trl.DPOTrainer(
        model=tiny_lm(),
        ref_model=tiny_lm(),
        args=trl.DPOConfig(**trl_arguments(tmp_path / "out")),
        train_dataset=datasets.Dataset.from_dict(pairs),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    check_trl(trainer, callback, sink)

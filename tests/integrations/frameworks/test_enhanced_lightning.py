"""The mixin and the contrastive module that the source documents name, on six modalities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trimtab
from tests.integrations.frameworks.harness import Sink, needs, scaler
from trimtab.train.recipes.clip6.model import vector_tower
from trimtab.train.recipes.clip6.views import latent_views, make_loader

pl = needs("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")
FIT: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Plain(trimtab.lightning.EnhancedTrainingMixin, pl.LightningModule):
    def __init__(self, factor: float = 1.0, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.factor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), factor
        self.norms = list[float]()
        self.setup_gradient_monitoring(**settings)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.factor * self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)

        def note(*_: object) -> None:
            grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.cat(grads).norm()))

        optimizer.register_step_post_hook(note)
        return optimizer


def test_a25_every_step_is_clipped_once_unscaled_and_complete() -> None:
    """The original clipped scaled gradients, partial sums, and one step in ten."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    module = Plain(factor=100.0, gradient_clip_threshold=0.5)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler())]
    trainer = pl.Trainer(max_epochs=1, accumulate_grad_batches=2, plugins=plugins, **FIT)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(160, 4), batch_size=8))
    assert module.norms == pytest.approx([0.5] * 10, rel=1e-3)


def test_a25_what_was_not_clipped_is_logged_as_it_is() -> None:
    module = Plain(factor=1e-3)
    (1e-3 * module.net(torch.ones(2, 4)).square().mean()).backward()
    stats = module.check_and_log_gradients(0, apply_clipping=True, max_grad_norm=1.0)
    assert stats["grad_norm_after_clip"] == pytest.approx(stats["global_grad_norm"])
    assert module.get_activation_statistics() == {}


def test_a25_activations_on_request() -> None:
    module = Plain(enable_gradient_monitoring=False, enable_activation_monitoring=True)
    module.net(torch.randn(8, 4))
    assert any("net" in name for name in module.get_activation_statistics())
    with pytest.raises(trimtab.InputError, match="setup_gradient_monitoring"):
        module.check_and_log_gradients(0)


def six_towers(**settings: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    train, test = latent_views(0)
    towers = [vector_tower(view.shape[1], 32) for view in train]
    module = trimtab.lightning.EnhancedLightningCLIPModule(learning_rate=3e-3, encoders=towers, **settings)
    return module, train, test


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a28_six_modalities_learn_to_find_each_other(version: int) -> None:
    sink = Sink()
    module, train, test = six_towers(stable_loss_version=version, guard={"sinks": [sink], "run_dir": False})
    trainer = pl.Trainer(max_steps=120, **FIT)
    trainer.fit(module, make_loader(train, 64, 0), make_loader(test, 64))
    losses = [s.scalars["loss"] for s in sink.train]
    assert len(losses) == 120
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert len(sink.val) >= 1
    callback = next(cb for cb in trainer.callbacks if isinstance(cb, trimtab.lightning.GuardCallback))
    assert callback.findings == []


def test_a28_a_nan_in_one_modality_does_not_reach_the_weights() -> None:
    module, train, _ = six_towers(guard={"run_dir": False})
    train[3][70, 2] = math.nan
    trainer = pl.Trainer(max_steps=20, **FIT)
    trainer.fit(module, make_loader(train, 64))
    callback = next(cb for cb in trainer.callbacks if isinstance(cb, trimtab.lightning.GuardCallback))
    assert callback.guard.rejected >= 1
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())


def test_a28_an_unknown_version_is_refused() -> None:
    with pytest.raises(trimtab.InputError, match="0, 1, 2 or 3"):
        trimtab.lightning.EnhancedLightningCLIPModule(stable_loss_version=7)

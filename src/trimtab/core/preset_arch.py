"""D18: what is usually clipped to, by architecture, with the public source of each value."""

from __future__ import annotations

from typing import Any

from trimtab.core.preset_record import Preset


def _arch(name: str, clip: Any, title: str, source: str, *notes: str, **settings: Any) -> Preset:
    return Preset(name=f"arch-{name}", title=title, source=source, settings={"clip": clip, **settings}, notes=notes)


ARCHITECTURES = (
    _arch(
        "gpt",
        1.0,
        "Decoder-only language models",
        "LLaMA (Touvron et al. 2023, arXiv:2302.13971, section 2.3); github.com/karpathy/nanoGPT train.py, grad_clip",
    ),
    _arch(
        "bert",
        1.0,
        "Masked language models",
        "github.com/google-research/bert optimization.py, clip_by_global_norm",
    ),
    _arch(
        "transformer-xl",
        0.25,
        "Transformer-XL",
        "github.com/kimiyoung/transformer-xl pytorch/train.py, --clip",
    ),
    _arch(
        "lstm",
        0.25,
        "LSTM language models",
        "AWD-LSTM: github.com/salesforce/awd-lstm-lm main.py, --clip",
    ),
    _arch(
        "vit",
        1.0,
        "Vision transformers",
        "github.com/google-research/vision_transformer vit_jax/configs/common.py, grad_norm_clip",
    ),
    _arch(
        "swin",
        5.0,
        "Swin transformers",
        "github.com/microsoft/Swin-Transformer config.py, TRAIN.CLIP_GRAD",
    ),
    _arch(
        "detr",
        0.1,
        "Detection transformers",
        "github.com/facebookresearch/detr main.py, --clip_max_norm; the same in github.com/IDEA-Research/DINO",
    ),
    _arch(
        "resnet",
        None,
        "Residual networks with BatchNorm: not clipped",
        "github.com/pytorch/vision references/classification/train.py, --clip-grad-norm is None",
        "Normalised layers bound their own gradients; a guard still rejects what is not finite.",
    ),
    _arch(
        "nfnet",
        {"strategy": "agc", "ratio": 0.01, "eps": 1e-3},
        "Networks without normalisation layers: adaptive gradient clipping",
        "github.com/google-deepmind/deepmind-research nfnets/optim.py, SGD_AGC (Brock et al. 2021, arXiv:2102.06171)",
        "The published recipe leaves the classifier's last layer unclipped; agc here clips every parameter.",
        "Under agc most units are clipped in most steps, so the rule chronic-clipping (GRAD007) is off.",
        ignore=["GRAD007"],
    ),
    _arch(
        "diffusion",
        1.0,
        "Denoising diffusion models",
        "github.com/hojonathanho/diffusion scripts/run_cifar.py, grad_clip",
    ),
    _arch(
        "tacotron2",
        1.0,
        "Attention-based speech synthesis",
        "github.com/NVIDIA/tacotron2 hparams.py, grad_clip_thresh",
    ),
    _arch(
        "ppo",
        0.5,
        "Proximal policy optimisation",
        "github.com/openai/baselines baselines/ppo2/ppo2.py; github.com/DLR-RM/stable-baselines3 ppo.py, max_grad_norm",
    ),
    _arch(
        "dqn",
        10.0,
        "Deep Q-learning",
        "github.com/DLR-RM/stable-baselines3 stable_baselines3/dqn/dqn.py, max_grad_norm",
    ),
)
"""What the authors, or the most used implementation, clip to: a place to start, not a law."""

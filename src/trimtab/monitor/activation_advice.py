"""Which activation function to try where another one lets gradients vanish, explode, or units die."""

from __future__ import annotations

from trimtab.core.errors import InputError

_FAMILIES = {
    "transformer": ("transformer", "attention", "encoder", "decoder"),
    "conv": ("conv", "resnet", "unet"),
    "rnn": ("rnn", "lstm", "gru", "recurrent"),
}
_ADVICE: dict[str, dict[str, tuple[str, ...]]] = {
    "vanishing": {
        "transformer": ("GELU: smooth, and normalisation before each block keeps its inputs where it is steep",),
        "conv": ("ReLU or SiLU after BatchNorm: neither flattens for large inputs",),
        "rnn": ("keep tanh inside, but use LSTM or GRU: their gates carry the gradient past it",),
        "": (
            "GELU, SiLU or ReLU in place of Sigmoid and Tanh, whose slope is at most 0.25 and 1",
            "residual connections and normalisation, so that the gradient does not depend on every slope on its way",
            "Kaiming initialisation with ReLU-like functions, Xavier with tanh",
        ),
    },
    "exploding": {
        "transformer": ("GELU with normalisation before each block, and residual branches that start small",),
        "conv": ("ReLU6 or Hardswish, which are bounded above or nearly so, after BatchNorm",),
        "rnn": ("tanh or a gated cell instead of ReLU: unbounded units feed themselves",),
        "": (
            "a function that does not grow faster than its input: Tanh and Softsign are bounded, GELU and SiLU linear",
            "normalisation before the activation; no activation replaces clipping and a lower learning rate",
        ),
    },
    "dead_neurons": {
        "transformer": ("GELU: smooth, with a gradient below zero; what transformers are usually built with",),
        "conv": ("LeakyReLU(0.01) or SiLU after BatchNorm: a negative input still passes a gradient",),
        "rnn": ("tanh in the cell: ReLU units that fall silent do so for the whole sequence",),
        "": (
            "LeakyReLU, ELU, GELU, SiLU or Mish in place of ReLU: units can come back",
            "a lower learning rate and warm-up: one large step is what usually kills units",
        ),
    },
}


def get_activation_function_recommendations(layer_type: str, problem: str) -> list[str]:
    """Which activation functions to try for a kind of layer, the best first, and what else helps.

    `problem` is `vanishing`, `exploding` or `dead_neurons`; `layer_type` such as `linear`, `conv`, `transformer`,
    `attention`, `rnn` or the name of a module class: where nothing special is known, the advice is the general one.

    Example:
        >>> get_activation_function_recommendations("transformer", "dead_neurons")[0]
        'GELU: smooth, with a gradient below zero; what transformers are usually built with'
    """
    if problem not in _ADVICE:
        raise InputError(f"problem is {problem!r}; expected one of {', '.join(_ADVICE)}")
    kind = layer_type.lower()
    family = next((name for name, words in _FAMILIES.items() if any(word in kind for word in words)), None)
    special = () if family is None else _ADVICE[problem][family]
    return [*special, *_ADVICE[problem][""]]

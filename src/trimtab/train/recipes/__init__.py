"""The five systems of the source documents, one folder each; nothing is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import instead_of

if TYPE_CHECKING:
    from trimtab.train.recipe import Recipe

RECIPES: tuple[tuple[str, str], ...] = (
    ("clip6", "six modalities, emoji and their names in five languages, in one space by a stable N-way loss"),
    ("segment", "two-stage segmentation of camouflaged objects: a frozen backbone first, then everything"),
    ("charlm", "a transformer language model with warm-up, clipping and a line every 10 steps, on any text"),
    ("tabular", "an MLP on raw tables that corrects itself: NaN, outliers, rates too high, overfitting"),
    ("pairs", "two images and a question, answered First, Second or Similar, with swap consistency"),
)
"""Name and one line about each; the folder has the same name."""


def load_recipe(name: str) -> Recipe:
    """The recipe of that name; InputError with the known ones for any other.

    Example:
        >>> load_recipe("tabular").score
        'r2'
    """
    known = [one for one, _ in RECIPES]
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in known:
        raise InputError(f"there is no recipe {name!r}; {instead_of(wanted, known)}")
    recipe: Recipe = import_module(f"trimtab.train.recipes.{wanted.replace('-', '_')}").RECIPE
    return recipe

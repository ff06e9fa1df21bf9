"""Makes the data files of src/trimtab/data that are derived from other packages: emoji, textures, tables.

Run once by a maintainer, when a source has a new release worth having; the results are committed, and neither the
package nor its tests need any of this. Its needs stay out of the project's environment:

    apt-get install fonts-noto-color-emoji
    python3 -m venv /tmp/datavenv
    /tmp/datavenv/bin/pip install emoji==2.16.0 pillow==13.0.0 \\
        scikit-image==0.26.0 scikit-learn==1.9.1 statsmodels==0.15.0
    /tmp/datavenv/bin/python tools/make_data.py            # writes the files
    /tmp/datavenv/bin/python tools/make_data.py --check    # only says whether they are what would be written

Sources and licences are in src/trimtab/data/NOTICE.md: change it together with this file.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, features

DATA = Path(__file__).parent.parent / "src" / "trimtab" / "data"
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FONT_SIZE = 109  # the one size in which this font holds its bitmaps
CANVAS = 136  # the width of one glyph; the glyphs are 128 high
SIDE = 24
LANGUAGES = ("en", "es", "fr", "de", "it")
NO_FLAG = "\N{REGIONAL INDICATOR SYMBOL LETTER X}" * 2  # of no country: drawn as the flag with a question mark
SKIN_TONES = {chr(code) for code in range(0x1F3FB, 0x1F400)}
HELD_OUT_PERCENT = 15
TEXTURE_SIDE, PHOTOGRAPH_SIDE = 384, 192

log = logging.getLogger("make_data")
Arrays = dict[str, NDArray[Any]]


def main() -> int:
    """Write every file, or with --check compare every file with what would be written."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    check = parser.parse_args().check
    makers: dict[str, Callable[[], Arrays]] = {"emoji": make_emoji, "textures": make_textures, "tables": make_tables}
    same = True
    for name, make in makers.items():
        path = DATA / f"{name}.npz"
        arrays = make()
        if check:
            equal = is_same(path, arrays)
            log.info("%s: %s", path.name, "as it would be written" if equal else "DIFFERS")
            same = same and equal
        else:
            np.savez_compressed(path, allow_pickle=False, **arrays)
            log.info("%s: %d bytes", path.name, path.stat().st_size)
    return 0 if same else 1


def is_same(path: Path, arrays: Arrays) -> bool:
    """Whether the file holds exactly these arrays; bytes are not compared, they depend on the version of zlib."""
    with np.load(path, allow_pickle=False) as stored:
        return set(stored.files) == set(arrays) and all(
            stored[key].dtype == value.dtype and np.array_equal(stored[key], value) for key, value in arrays.items()
        )


def make_emoji() -> Arrays:
    """Every base emoji the font can draw, one per picture, in the order of their code points."""
    if not features.check("raqm"):
        raise SystemExit(
            "Pillow was built without raqm, and would draw joined emoji as several: use a wheel from PyPI."
        )
    unknown = draw(NO_FLAG)
    chosen: dict[bytes, tuple[str, list[str], NDArray[np.uint8]]] = {}
    # Where two look the same (the flags of Norway and of its islands), the older one stays, then the one with the
    # shorter name: the one people mean.
    for character, names in sorted(base_emoji(), key=lambda pair: (age(pair[0]), len(pair[1][0]), pair[0])):
        picture = draw(character)
        if picture is not None and not np.array_equal(picture, unknown):
            chosen.setdefault(picture.tobytes(), (character, names, picture))
    rows = sorted(chosen.values(), key=lambda row: row[0])
    log.info("emoji: %d with a picture of their own", len(rows))
    text = "\n".join("\t".join((character, *names)) for character, names, _ in rows)
    return {
        "images": np.stack([picture for *_, picture in rows]),
        "text": np.frombuffer(text.encode("utf-8"), dtype=np.uint8),
        "held_out": np.array([is_held_out(character) for character, *_ in rows]),
    }


def base_emoji() -> Iterator[tuple[str, list[str]]]:
    """Each fully qualified emoji without a skin tone that has a name in every language, with these names."""
    import emoji

    for language in LANGUAGES:
        emoji.config.load_language(language)
    for character, entry in emoji.EMOJI_DATA.items():
        complete = entry["status"] == emoji.STATUS["fully_qualified"] and all(key in entry for key in LANGUAGES)
        if complete and not SKIN_TONES & set(character):
            yield character, [plain(entry[language]) for language in LANGUAGES]


def plain(name: str) -> str:
    """A name as people write it.

    Example:
        >>> plain(":flor_de_hibisco:")
        'flor de hibisco'
    """
    return unicodedata.normalize("NFC", name.strip(":").replace("_", " ")).strip()


def age(character: str) -> float:
    """The version of the emoji standard that brought this one."""
    import emoji

    return float(emoji.EMOJI_DATA[character]["E"])


def draw(character: str) -> NDArray[np.uint8] | None:
    """The emoji on white, `[SIDE, SIDE, 3]`; None where the font has no glyph for it, or only one for each part."""
    font = ImageFont.truetype(FONT, FONT_SIZE, layout_engine=ImageFont.Layout.RAQM)
    if font.getlength(character) > CANVAS:
        return None
    canvas = Image.new("RGBA", (CANVAS, CANVAS), "white")
    ImageDraw.Draw(canvas).text((0, (CANVAS - 128) // 2), character, font=font, embedded_color=True)
    opaque = canvas.convert("RGB")
    if opaque.getextrema() == ((255, 255),) * 3:  # a missing glyph of this font is blank
        return None
    return np.asarray(opaque.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def is_held_out(character: str) -> bool:
    """A choice that depends on this emoji alone, so that no later release moves one from held-out to train."""
    return int(hashlib.sha256(character.encode("utf-8")).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def make_textures() -> Arrays:
    """Pictures whose notes in scikit-image say CC0 or public domain, cut square and made smaller."""
    from skimage import data

    textures = {name: getattr(data, name)() for name in ("brick", "grass", "gravel")}
    photographs = {name: getattr(data, name)() for name in ("camera", "chelsea", "coffee", "retina", "rocket")}
    photographs["hubble"] = data.hubble_deep_field()
    return {name: square(picture, TEXTURE_SIDE) for name, picture in textures.items()} | {
        name: square(picture, PHOTOGRAPH_SIDE) for name, picture in photographs.items()
    }


def square(picture: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The largest square in the middle of the picture, `side` pixels wide."""
    height, width = picture.shape[:2]
    edge = min(height, width)
    left, top = (width - edge) // 2, (height - edge) // 2
    box = (left, top, left + edge, top + edge)
    return np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS, box=box))


def make_tables() -> Arrays:
    """The raw tables, with the names of their columns, targets and classes."""
    from sklearn.datasets import load_breast_cancer, load_diabetes
    from statsmodels.datasets import randhie

    diabetes = load_diabetes(scaled=False)
    cancer = load_breast_cancer()
    visits = randhie.load_pandas().data
    facts = visits.drop(columns="mdvis")
    return {
        **table("diabetes", diabetes.data, diabetes.target.astype(np.float32), diabetes.feature_names, "progression"),
        **table(
            "breast-cancer",
            cancer.data,
            cancer.target.astype(np.uint8),
            cancer.feature_names,
            "diagnosis",
            cancer.target_names,
        ),
        **table("randhie", facts.to_numpy(), visits["mdvis"].to_numpy(np.float32), facts.columns, "mdvis"),
    }


def table(name: str, x: Any, y: NDArray[Any], columns: Any, target: str, classes: Any = ()) -> Arrays:
    """The arrays of one table under their keys; names as fixed-width text, which needs no pickle."""
    return {
        f"{name}.x": np.asarray(x, dtype=np.float32),
        f"{name}.y": y,
        f"{name}.columns": np.array([str(column) for column in columns]),
        f"{name}.target": np.array(target),
        f"{name}.classes": np.array([str(label) for label in classes], dtype=np.str_),
    }


if __name__ == "__main__":
    raise SystemExit(main())

"""The data that ships with the package: whole, aligned, small, free, and readable without a pickle."""

from __future__ import annotations

import hashlib
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest

import trimtab.data
from trimtab.core.errors import InputError
from trimtab.data import LANGUAGES, TABLES, load_digits, load_emoji, load_table, load_textures
from trimtab.data.datasets import read_arrays

FOLDER = Path(trimtab.data.__file__).parent
NOTICE = (FOLDER / "NOTICE.md").read_text(encoding="utf-8")
LIMITS = {"digits": 60_000, "emoji": 1_800_000, "textures": 1_000_000, "tables": 600_000}
SKIN_TONES = {chr(code) for code in range(0x1F3FB, 0x1F400)}


def section(name: str) -> str:
    """What NOTICE.md says about one file."""
    return NOTICE.split(f"\n## {name}.npz\n")[1].split("\n## ")[0]


def test_every_file_is_known_and_small() -> None:
    assert {path.stem for path in FOLDER.glob("*.npz")} == set(LIMITS)
    sizes = {name: (FOLDER / f"{name}.npz").stat().st_size for name in LIMITS}
    assert {name: size for name, size in sizes.items() if size > LIMITS[name]} == {}


@pytest.mark.parametrize("name", LIMITS)
def test_every_file_says_where_it_comes_from(name: str) -> None:
    text = section(name)
    for needed in ("What was changed", "https://"):
        assert needed in text, needed
    assert any(word in text for word in ("CC BY 4.0", "CC0", "public domain", "Apache License"))


def test_every_licence_that_must_travel_with_the_data_does() -> None:
    texts = {path.name for path in (FOLDER / "licenses").iterdir()}
    assert {name for name in texts if f"(licenses/{name})" not in NOTICE} == set()
    assert NOTICE.count("(licenses/") >= len(texts) == 4
    for name in texts:
        assert "Copyright" in (FOLDER / "licenses" / name).read_text(encoding="utf-8")


def test_every_picture_and_table_is_named_in_its_notice() -> None:
    assert [name for name in load_textures() if f"`{name}`" not in section("textures")] == []
    assert [name for name in TABLES if f"`{name}`" not in section("tables")] == []


@pytest.mark.parametrize("name", LIMITS)
def test_no_file_needs_a_pickle(name: str) -> None:
    with zipfile.ZipFile(FOLDER / f"{name}.npz") as archive:
        for entry in archive.namelist():
            with archive.open(entry) as file:
                np.lib.format.read_magic(file)
                _, _, dtype = np.lib.format.read_array_header_1_0(file)
            assert not dtype.hasobject, entry
    assert read_arrays(name)


def test_a_pickle_put_in_the_place_of_a_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "emoji.npz", images=np.array([{"a": 1}], dtype=object))
    monkeypatch.setattr("trimtab.data.datasets.files", lambda _: tmp_path)
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays("emoji")


def test_digits() -> None:
    x, y = load_digits()
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((1797, 64), np.uint8, (1797,), np.uint8)
    assert set(y.tolist()) == set(range(10))


def test_emoji_are_aligned() -> None:
    emoji = load_emoji()
    count = len(emoji.characters)
    assert 1_850 <= count <= 1_923
    assert f"{count:,} emoji" in section("emoji")
    assert (emoji.images.shape, emoji.images.dtype) == ((count, 24, 24, 3), np.uint8)
    assert (emoji.held_out.shape, emoji.held_out.dtype) == ((count,), np.bool_)
    assert tuple(emoji.names) == LANGUAGES
    assert {len(names) for names in emoji.names.values()} == {count}


@pytest.mark.parametrize(
    ("character", "names"),
    [
        ("🌺", ["hibiscus", "flor de hibisco", "hibiscus", "hibiskus", "ibisco"]),
        ("🇪🇸", ["Spain", "bandera españa", "drapeau espagne", "flagge spanien", "bandiera spagna"]),
        ("🥇", ["1st place medal", "medalla de oro", "médaille d’or", "goldmedaille", "medaglia d’oro"]),
    ],
)
def test_a_known_emoji_has_its_known_names(character: str, names: list[str]) -> None:
    emoji = load_emoji()
    i = emoji.characters.index(character)
    assert [emoji.names[language][i] for language in LANGUAGES] == names


def test_a_known_emoji_has_its_known_picture() -> None:
    """A picture moved by one row would still have the right shape: the colours say whose it is."""
    emoji = load_emoji()

    def middle(character: str) -> list[int]:
        picture = emoji.images[emoji.characters.index(character)].astype(int)
        return picture[9:15, 9:15].mean((0, 1)).round().astype(int).tolist()  # type: ignore[no-any-return]

    for character, strongest in (("🔴", 0), ("🟢", 1), ("🔵", 2)):
        assert int(np.argmax(middle(character))) == strongest, character
    assert max(middle("⚫")) < 100 < 200 < min(middle("⚪"))
    red, green, blue = middle("🟡")
    assert min(red, green) > blue + 80


def test_emoji_stand_upright_on_white() -> None:
    """A triangle with its point up has more ink below, and the corners of most pictures are bare ground."""
    emoji = load_emoji()
    triangle = emoji.images[emoji.characters.index("🔺")].astype(int)
    ink = (255 - triangle).sum(2)
    assert ink[:12].sum() < ink[12:].sum()
    corners = emoji.images[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert float(np.median(corners)) == 255


def test_no_emoji_comes_twice_nor_empty() -> None:
    emoji = load_emoji()
    count = len(emoji.characters)
    assert len(set(emoji.characters)) == count
    assert len({picture.tobytes() for picture in emoji.images}) == count
    assert emoji.images.reshape(count, -1).min(1).max() < 255
    for language in LANGUAGES:
        assert len(set(emoji.names[language])) == count, language


def test_the_flag_that_stands_for_an_unknown_one_is_not_taken_for_a_country() -> None:
    assert "🇨🇶" not in load_emoji().characters  # Sark: newer than the font, which draws a question mark


def test_emoji_have_no_skin_tones_and_clean_names() -> None:
    emoji = load_emoji()
    assert [character for character in emoji.characters if SKIN_TONES & set(character)] == []
    for names in emoji.names.values():
        for name in names:
            assert name
            assert name == unicodedata.normalize("NFC", name).strip()
            assert not {":", "_", "\t", "\n"} & set(name), name


def test_the_held_out_emoji_are_chosen_by_a_hash() -> None:
    emoji = load_emoji()
    expected = [int(hashlib.sha256(c.encode()).hexdigest()[:8], 16) % 100 < 15 for c in emoji.characters]
    assert emoji.held_out.tolist() == expected
    assert 0.12 < emoji.held_out.mean() < 0.18


def test_textures() -> None:
    textures = load_textures()
    for name in ("brick", "grass", "gravel"):
        assert textures[name].shape == (384, 384)
    for name in ("chelsea", "coffee", "hubble", "retina", "rocket"):
        assert textures[name].shape == (192, 192, 3)
    assert textures["camera"].shape == (192, 192)
    assert len(textures) == 9
    for name, picture in textures.items():
        assert picture.dtype == np.uint8
        assert picture.std() > 20, name  # a texture, not a plain ground


@pytest.mark.parametrize(("name", "rows", "columns"), [("diabetes", 442, 10), ("breast-cancer", 569, 30)])
def test_small_tables(name: str, rows: int, columns: int) -> None:
    table = load_table(name)
    assert (table.x.shape, table.x.dtype, table.y.shape) == ((rows, columns), np.float32, (rows,))
    assert len(set(table.columns)) == columns
    assert np.isfinite(table.x).all()


def test_tables_are_raw() -> None:
    diabetes, cancer, visits = (load_table(name) for name in TABLES)
    assert (diabetes.y.min(), diabetes.y.max(), diabetes.y.dtype) == (25, 346, np.float32)
    assert diabetes.x[0].tolist() == pytest.approx([59, 2, 32.1, 101, 157, 93.2, 38, 4, 4.8598, 87])
    assert cancer.x[0, :3].tolist() == pytest.approx([17.99, 10.38, 122.8])
    assert np.ptp(np.log10(cancer.x.max(0))) > 5
    assert (cancer.classes, np.bincount(cancer.y).tolist(), cancer.y.dtype) == (
        ("malignant", "benign"),
        [212, 357],
        np.uint8,
    )
    assert visits.x.shape == (20_190, 9)
    assert (visits.target, visits.columns[0], visits.y.max()) == ("mdvis", "lncoins", 77)
    assert visits.y.mean() == pytest.approx(2.860426, rel=1e-5)
    assert np.isfinite(visits.x).all()


def test_an_unknown_table_is_refused_with_the_choice() -> None:
    with pytest.raises(InputError, match=r"'iris'.*diabetes, breast-cancer, randhie"):
        load_table("iris")

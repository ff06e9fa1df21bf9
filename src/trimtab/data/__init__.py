"""The small data sets that ship with trimtab; where they come from is in NOTICE.md beside this file.

`tools/make_data.py` made the files; nothing is downloaded, and nothing but numpy is needed to read them.
"""

from __future__ import annotations

from trimtab.data.datasets import LANGUAGES, TABLES, Emoji, Table, load_digits, load_emoji, load_table, load_textures

__all__ = ["LANGUAGES", "TABLES", "Emoji", "Table", "load_digits", "load_emoji", "load_table", "load_textures"]

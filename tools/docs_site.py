"""Looks at the built site: nothing in it may be loaded from another place, and every page must be there.

python tools/docs_site.py build/site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docs_links import menu

LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=[\"']?(https?:)?//[^\"'>\s]+"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon|modulepreload|dns-prefetch))[^>]*\bhref=[\"']?(https?:)?//[^>]+",
    re.IGNORECASE,
)
IMPORTED = re.compile(r"@import\s+(?:url\()?[\"']?https?:|url\([\"']?https?:", re.IGNORECASE)


def site_complaints(site: Path) -> Iterator[str]:
    """What a page or style sheet would load from elsewhere, and pages of the menu that were not built."""
    for name in menu():
        if not (site / name).with_suffix(".html").is_file():
            yield f"{name}: not built"
    for page in sorted(site.rglob("*.html")):
        for match in LOADED.finditer(page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(site)}: loads {match[0][:120]}"
    for sheet in sorted(site.rglob("*.css")):
        for match in IMPORTED.finditer(sheet.read_text(encoding="utf-8")):
            yield f"{sheet.relative_to(site)}: loads {match[0][:120]}"


def main() -> int:
    """Complain about the site named on the command line."""
    site = Path(sys.argv[1])
    wrong = list(site_complaints(site))
    num = len(list(site.rglob("*.html")))
    sys.stdout.write("\n".join([*wrong, f"{num} pages in {site}, {len(wrong)} complaints\n"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

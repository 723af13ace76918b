"""`python -m evidence.words` prints the words of each page, and the links from the front page to some questions.

Guides and concepts have at most `LIMIT` words each and `TOTAL` in all. Pages that are generated, or that hold data or
tables to look things up in, are listed in `OTHER` and not limited.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
LIMIT, TOTAL = 1_200, 25_000
#: Pages that are no guides -> what they are.
OTHER = {
    "changelog": "history",
    "claims": "data",
    "conformance": "data",
    "contrasts": "data",
    "contributing": "for contributors",
    "converted": "tables of classes",
    "dense_scores": "data",
    "design": "for contributors",
    "encodings": "table of encodings",
    "extrapolation": "data",
    "gym": "data",
    "matrix": "table of combinations",
    "models": "table of models",
    "pretrained": "data",
    "recipe_sources": "tables of sources",
    "release": "for contributors",
    "results": "index of data",
    "timings": "data",
    "which": "data",
    "why_lape": "data",
}
#: What a reader looks for on the front page -> the page that answers it.
QUESTIONS = {
    "which encoding": "which",
    "resize my DINOv2": "sizes",
    "write my own": "extending",
    "cite": "cite",
}


def count(docs: Path = DOCS) -> dict[str, int]:
    """Return the words of each page, code and tables included."""
    return {path.stem: len(path.read_text(encoding="utf-8").split()) for path in sorted(docs.glob("*.md"))}


def clicks(target: str, docs: Path = DOCS) -> int | None:
    """Return the number of links in the text of pages from the front page to another one; None if there is no way."""
    reached, found = {"index"}, 0
    while target not in reached:
        texts = [(docs / f"{name}.md").read_text(encoding="utf-8") for name in reached]
        links = {
            name for text in texts for name in re.findall(r"\]\((\w+)\.md[#)]", text) if (docs / f"{name}.md").exists()
        }
        if links <= reached:
            return None
        reached, found = reached | links, found + 1
    return found


def main() -> None:
    """Print both."""
    words = count()
    for name, number in sorted(words.items(), key=lambda item: (item[0] in OTHER, -item[1])):
        print(f"{number:6,}  {name}{'  (' + OTHER[name] + ')' if name in OTHER else ''}")
    guides = [number for name, number in words.items() if name not in OTHER]
    print(f"{sum(guides):6,}  in {len(guides)} guides and concepts, of at most {TOTAL:,}; each of at most {LIMIT:,}")
    for question, name in QUESTIONS.items():
        print(f"{clicks(name):6}  clicks from the front page to: {question}")


if __name__ == "__main__":
    main()

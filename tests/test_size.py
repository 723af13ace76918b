"""The size of the project: lines per room, words per page, number of files. `python tests/test_size.py` prints them."""

import re
import textwrap
from collections import Counter
from pathlib import Path

TOP = Path(__file__).parents[1]
REMEDY = "shorten it, or raise the number here, in a commit whose message says what pays for it"
#: Folder: the most lines of Python in each of its rooms; a point stands for the files of the folder itself.
LINES = """
benchmarks: . 1820
evidence: . 4800
graticule: . 30, analysis 3260, backbones 4970, checkpoints 2200, dense 2150, encodings 5380, external 7140, hub 780,
  layers 1070, position 3430, registry 1170, surgery 2680, system 500, testing 3450
graticule/lab: . 760, commands 2600, data 3670, figures 1140, pages 870, recipes 1120, studies 1110, tasks 2080,
  training 3070
tests: . 3300, analysis 2470, backbones 3570, checkpoints 1550, dense 740, encodings 3600, external 4160, gpu 850, hub
  380, layers 650, parity 1450, position 1950, registry 720, surgery 2970, system 220, testing 2030
tests/lab: . 130, commands 1460, data 2740, figures 270, pages 360, recipes 470, studies 1640, tasks 1550, training
  1570
"""
#: The most words of the larger pages of docs; each other page has at most GUIDE.
WORDS = """
audit.md 1480, backbones.md 1440, conformance.md 1330, convert.md 1910, dense.md 1280, encodings.md 2230, extending.md
  1680, extrapolation.md 1500, papers.md 6620, pretrained.md 1950, results.md 2440, results/lape_place.md 2460,
  training.md 1280
"""
GUIDE, TOTAL, PAGES, SOURCES = 1_200, 38_290, 26, 292


def limits(table: str) -> dict[str, int]:
    """Return name -> number of a table."""
    pairs, folder = {}, ""
    for first, name, number in re.findall(r"(?:(\S+): )?(\S+)\s+(\d+)", table):
        folder = first or folder
        pairs[f"{folder}/{name}".strip("/")] = int(number)
    return pairs


def lines() -> Counter[str]:
    """Return the lines of each room."""
    counts: Counter[str] = Counter()
    for path in [path for name in ("src", "tests", "evidence", "benchmarks") for path in (TOP / name).rglob("*.py")]:
        folder, *rooms = path.relative_to(TOP).parent.parts
        if folder == "src":
            folder, *rooms = rooms
        if rooms[:1] == ["lab"]:
            folder, rooms = f"{folder}/lab", rooms[1:]
        room = rooms[0] if rooms and folder not in ("evidence", "benchmarks") else "."
        counts[f"{folder}/{room}"] += len(path.read_text(encoding="utf-8").splitlines())
    return counts


def words() -> dict[str, int]:
    """Return the words of each written page, code and tables included, without the conditions of sentences."""
    pages = [path.relative_to(TOP / "docs") for path in (TOP / "docs").rglob("*.md")]
    pages = [page for page in pages if page.parts[0] not in ("_build", "gallery", "api", "commands")]
    texts = {str(page): (TOP / "docs" / page).read_text(encoding="utf-8") for page in pages}
    return {page: len(re.sub("<!-- (holds|says): .*?-->", "", text).split()) for page, text in texts.items()}


def test_every_room_is_within_its_lines():
    counts, most = lines(), limits(LINES)
    assert counts.keys() == most.keys()
    assert {room: count for room, count in counts.items() if count > most[room]} == {}, REMEDY


def test_every_page_is_within_its_words():
    counts, most = words(), limits(WORDS)
    assert most.keys() <= counts.keys()
    assert {page: count for page, count in counts.items() if count > most.get(page, GUIDE)} == {}, REMEDY


def test_the_number_of_files_and_of_words_is_limited():
    counts = {"words": sum(words().values()), "pages": len(words()), "sources": len([*(TOP / "src").rglob("*.py")])}
    assert {name for name, most in zip(counts, (TOTAL, PAGES, SOURCES), strict=True) if counts[name] > most} == set(), (
        REMEDY
    )


def main() -> None:
    """Print both tables, rounded up to the next ten."""
    rows: dict[str, list[str]] = {}
    for name, count in sorted(lines().items()):
        folder, _, room = name.rpartition("/")
        rows.setdefault(folder, []).append(f"{room} {-(-count // 10) * 10}")
    pages = [f"{page} {-(-count // 10) * 10}" for page, count in sorted(words().items()) if count > GUIDE]
    for text in [*(f"{folder}: {', '.join(row)}" for folder, row in rows.items()), ", ".join(pages)]:
        print(textwrap.fill(text, 118, break_on_hyphens=False, subsequent_indent="  "))
    print(f"{sum(lines().values()):,} lines, {sum(words().values()):,} words in {len(words())} pages")


if __name__ == "__main__":
    main()

"""The code of the guides to surgery works as described."""

import re
from pathlib import Path

from graticule.external.convert.parts import CONVERSIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("convert.md", "deploy.md"))


def test_the_page_names_every_class_that_converts():
    timm, transformers = re.split(r"These classes convert:", PAGES[PAGES.index("| timm class |") :], maxsplit=1)
    known = {kind.__name__ for kind in CONVERSIONS if isinstance(kind, type)}
    assert {*re.findall(r"^\| `(\w+)` \|", timm, flags=re.MULTILINE)} == known
    words = re.findall(r"\b([A-Z][\w-]+(?: \d)?)", transformers.partition("\n\n#")[0])
    families = tuple(word.replace("-", "").replace(" ", "").lower() for word in words)
    classes = {kind.rpartition(".")[2] for kind in CONVERSIONS if isinstance(kind, str)}
    assert {name for name in classes if not name.lower().startswith(families)} == set()


def test_a_run_is_opened_as_the_page_says():
    (block,) = re.findall(r"```python load\n(.*?)```", PAGES, flags=re.DOTALL)
    opened = []

    class Load:
        load = staticmethod(lambda source, **options: opened.append((source, options)))

    exec(compile(block.replace("import graticule\n", ""), "docs", "exec"), {"graticule": Load})
    assert opened == [
        ("runs/digits", {}),
        ("runs/digits", {"checkpoint": "last"}),
        ("runs/digits/weights.safetensors", {}),
        ("published/digits", {}),
    ]

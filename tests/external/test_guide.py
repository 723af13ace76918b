"""The code of the guides to surgery works as described."""

import re
from pathlib import Path

from graticule.external.convert.parts import CONVERSIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("convert.md", "deploy.md"))


def test_the_table_of_conversions_has_all_classes():
    for library, known in (
        ("timm", {kind.__name__ for kind in CONVERSIONS if isinstance(kind, type)}),
        ("transformers", {kind.rpartition(".")[2] for kind in CONVERSIONS if isinstance(kind, str)}),
    ):
        (table,) = re.findall(rf"\| class of {library} \|.*?\n\n", PAGES, flags=re.DOTALL)
        rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) ", table, flags=re.MULTILINE)
        assert {name for row in rows for name in re.findall(r"\w+", row)} == known


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

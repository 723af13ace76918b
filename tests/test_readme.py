"""The code and links of README and docs are valid."""

import re
import tomllib
from pathlib import Path

import pytest
import timm

import graticule
from test_printed_commands import tiny

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
#: What it names of each paper: its title and authors, its name here, its recipes.
PAPERS = {
    "LaPE": ("Yu et al., ICCV 2023", 'joining="lape"', "digits_quick --joining lape", "deit_tiny_imagenet"),
    "CPVT": ("Conditional Positional Encodings", 'encoding="peg"', "digits_cpvt", "cpvt_tiny_imagenet"),
    "PosMLP": ("Parameterization of Cross-Token", 'encoding="ggqpe"', "digits_posmlp", "posmlp_tiny_imagenet"),
    "An Introduction to Transformers": ("Turner, 2023", "lm_tiny", "pydoc_quick", "docs/papers.md"),
}


def test_the_two_commands_and_the_papers_come_first():
    assert HEADINGS[:3] == ["Try it", "The five papers", "Your own images"]
    assert re.findall(r"^    (make \w+)", README, flags=re.MULTILINE) == ["make demo", "make test"]


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_has_its_names_and_commands_in_a_row(paper):
    (row,) = re.findall(rf"^\| \[{paper}\].*$", README, flags=re.MULTILINE)
    assert [part for part in PAPERS[paper] if part not in row] == []


def test_the_code_runs(tmp_path, monkeypatch):
    """With a small encoder of random weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timm, "create_model", tiny(timm.create_model))
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(code.replace("168", "56").replace("252", "84"), "README.md", "exec"), {})
    assert Path("dinov2.onnx").stat().st_size > 0


def test_it_is_short():
    text = re.sub("<!--.*?-->", "", README, flags=re.DOTALL)
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 900


def test_it_names_every_extra():
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [name for name in project["optional-dependencies"] if f"`{name}`" not in README] == ["dev"]


def test_the_table_of_joinings_names_every_one():
    page = (TOP / "docs" / "encodings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page.partition("## Joinings")[2].partition("\n## ")[0], flags=re.MULTILINE)
    assert rows == graticule.list_joinings()


def test_every_link_of_a_page_leads_to_a_file_and_a_heading_of_the_clone():
    """`make docs` tests the links of the site."""
    pages = (
        TOP / "README.md",
        TOP / "CONTRIBUTING.md",
        *(TOP / "docs").glob("*.md"),
        *(TOP / "docs/results").glob("*.md"),
    )
    texts = {path: re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S) for path in pages}
    headings = {path: re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE) for path, text in texts.items()}
    anchors = {
        path: {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings[path]} for path in pages
    }
    dead = []
    for path, text in texts.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not link.startswith("http") and (not target.exists() or (anchor and anchor not in anchors[target])):
                dead.append((path.name, link))
    assert dead == []

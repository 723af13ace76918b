"""Tests of the built site: every link, anchor and image exists, every image has a description, nothing is fetched."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).parents[1] / "_build" / "html"
PAGES = sorted(path for path in SITE.rglob("*.html") if "_modules" not in path.parts)
#: HTML tags that load a resource.
LOADS = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Collects the links, anchors and images of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.names, self.images, self.headings = [], [], set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if values.get("id"):
            self.names.add(values["id"])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in LOADS and values.get(LOADS[tag]) and values.get("rel") not in ("index", "search", "next", "prev"):
            self.loads.append(values[LOADS[tag]])
        if tag == "img":
            self.images.append(values)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))


@pytest.fixture(scope="module")
def pages():
    assert len(PAGES) > 60, "build the site first: make docs"
    return {path: Page(path) for path in PAGES}


def test_every_link_within_the_site_leads_somewhere(pages):
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            unnamed = target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].names
            if unnamed or not target.exists():
                dead.append((path.name, link))
    assert not dead


def test_every_image_script_and_style_is_a_file_of_the_site(pages):
    missing = [
        (path.name, source)
        for path, page in pages.items()
        for source in page.loads
        if not source.startswith("data:") and not (path.parent / unquote(urlsplit(source).path)).exists()
    ]
    assert not missing


def test_every_image_is_described(pages):
    bare = [
        (path.name, image.get("src"))
        for path, page in pages.items()
        for image in page.images
        if len(image.get("alt", "")) < 20 or image["alt"].endswith((".png", ".svg"))
    ]
    assert not bare


def test_headings_have_an_order(pages):
    for path, page in pages.items():
        if path.name in ("search.html", "genindex.html", "py-modindex.html"):
            continue
        assert page.headings.count(1) == 1, path.name
        skipped = [(a, b) for a, b in zip(page.headings, page.headings[1:], strict=False) if b > a + 1]
        assert not skipped, (path.name, skipped)


def test_every_encoding_and_command_has_its_place(pages):
    import graticule
    from graticule.lab.cli import COMMANDS

    for name in graticule.list_encodings():
        assert (SITE / "gallery" / f"{name}.html") in pages, name
    for name in COMMANDS:
        assert f"graticule-{name}" in pages[SITE / "commands" / "index.html"].names, name


def test_every_public_name_is_described(pages):
    import graticule

    names = pages[SITE / "api" / "graticule.html"].names
    assert [name for name in graticule.__all__ if f"graticule.{name}" not in names] == []

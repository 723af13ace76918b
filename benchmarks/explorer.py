"""Write the explorer's largest page and test it in a browser: file size, response time, correct values.

`python benchmarks/explorer.py` needs `pip install playwright` and a Chromium (CHROMIUM is its path; /usr/bin/chromium
by default). It writes a page of a ViT of 12 layers, 12 heads and 14 x 14 tokens with random weights, with and without
position, whose attention maps hardly compress, and a page of two small models at two sizes, one not square. It stops
with an error if a map in the page differs from the array that the analyses compute, at any token that the pointer or
the arrow keys choose, if the console reports an error, or if something is wider than the screen. It prints the size in
MB and the time from a move of the pointer to the next frame in ms, median and largest of 60. With AXE=axe.min.js (from
the npm package axe-core) it also checks accessibility. Screenshots are written to the folder argument, if given.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from playwright.sync_api import Page, sync_playwright

import graticule
from graticule.lab.pages.explorer import Explored, explored, write_explorer

SCREENS = [(1200, 900, "light"), (1200, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
NORM = ((0.5,) * 3, (0.25,) * 3)

#: Moves the pointer to 60 tokens, waits two frames until each is drawn, and returns the sorted times in ms.
TIME = """async ([left, top, width, height]) => {
  const times = [];
  for (let i = 0; i < 60; i++) {
    const [x, y] = [left + width * (0.5 + (i * 5) % 8) / 8, top + height * (0.5 + (i * 3) % 8) / 8];
    let element = document.elementFromPoint(x, y);
    while (element.shadowRoot) element = element.shadowRoot.elementFromPoint(x, y);
    const start = performance.now(), given = { clientX: x, clientY: y, bubbles: true, composed: true };
    element.dispatchEvent(new PointerEvent("pointermove", { ...given, pointerType: "mouse" }));
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b);
}"""
#: The frame of the first image in the window: left, top, width, height.
FRAME = """() => {
  const plot = Bokeh.documents.map(one => one.get_model_by_name("0-image")).find(one => one != null);
  const box = Bokeh.index.get_by_id ? Bokeh.index.get_by_id(plot.id) : Bokeh.index[plot.id];
  const at = box.el.getBoundingClientRect(), inner = box.frame.bbox;
  return [at.left + inner.left, at.top + inner.top, inner.width, inner.height];
}"""


def draw(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    """Draw the same smooth image at several sizes."""
    small = torch.randn(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    return [torch.nn.functional.interpolate(small, size, mode="bicubic") for size in sizes]


def largest() -> list[Explored]:
    """Return a ViT of 12 layers and 12 heads on 14 x 14 tokens."""
    torch.manual_seed(0)
    model = graticule.create_model("deit_base_patch16_224", embed_dim=192, num_heads=12, num_classes=0).eval()
    return [explored(model, draw((224, 224)), *NORM, "12 layers, 12 heads", "random weights")]


def small() -> list[Explored]:
    """Return two small models with tables, biases and rotations, at two sizes."""
    torch.manual_seed(0)
    found = []
    for name, encoding, joining in (("table and bias", "learnable+relative_bias", "lape"), ("rope", "rope", "default")):
        model = graticule.create_model(
            "vit_tiny_patch16_224",
            encoding=encoding,
            joining=joining,
            img_size=64,
            patch_size=8,
            embed_dim=48,
            depth=4,
            num_heads=3,
            num_classes=0,
        )
        found.append(explored(model.eval(), draw((64, 64), (48, 80)), *NORM, name))
    return found


def check_panels(page: Page, models: list[Explored], size: int) -> int:
    """Compare the maps that the panels show with the arrays; returns how many were compared."""
    panels: list[dict[str, Any]] = page.evaluate(
        "() => explorer.panels.map(p => ({number: p.number, kind: p.kind, layer: p.one.layer, head: p.head, "
        "token: p.found.token, shape: p.found.shape, values: Array.from(p.found.values)}))"
    )
    assert panels
    for panel in panels:
        (one,) = [
            one
            for one in models[panel["number"]].sizes[size].maps
            if (one.kind, one.layer) == (panel["kind"], panel["layer"])
        ]
        _, row, column = panel["token"]
        height, width = one.queries
        if one.by_displacement:
            table = one.values[panel["head"]]
            exact = np.array(
                [[table[row - i + height - 1, column - j + width - 1] for j in range(width)] for i in range(height)]
            )
            step = np.ptp(table)
        else:
            exact = one.values[panel["head"]][one.prefix + row * width + column].reshape(panel["shape"])
            step = np.ptp(exact)
        shown = np.array(panel["values"], float).reshape(exact.shape)
        assert np.abs(shown - exact).max() <= 0.0051 * step + 1e-7, (panel["kind"], panel["layer"], row, column)
    return len(panels)


def opened(page: Page, path: Path) -> list[str]:
    """Open a page; returns the list to which errors of its console are appended."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request", lambda one: errors.append(one.url) if not one.url.startswith(("file:", "data:", "blob:")) else None
    )
    page.goto(path.as_uri())
    page.wait_for_function("() => window.explorer && explorer.ready")
    page.wait_for_timeout(400)
    return errors


def frame(page: Page) -> None:
    """Wait until a change is drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def drive(page: Page, models: list[Explored]) -> int:
    """Choose tokens (by pointer and keys), layers, heads and sizes; returns how many maps were correct."""
    right = 0
    picture = page.locator("#plot-0-image")
    for size in range(len(models[0].sizes)):
        page.select_option("#size", str(size))
        frame(page)
        height, width = models[0].sizes[size].grids[0]
        for row, column in ((0, 0), (height - 1, width - 1), (2, 1)):
            page.evaluate("() => { explorer.state.held = false; }")
            picture.scroll_into_view_if_needed()
            left, top, across, down = page.evaluate(FRAME)
            x, y = left + (column + 0.5) * across / width, top + (row + 0.5) * down / height
            page.mouse.move(x, y)
            frame(page)
            assert page.input_value("#row") == str(row) and page.input_value("#column") == str(column), (
                f"the pointer over row {row}, column {column} chose {page.input_value('#row')}, "
                f"{page.input_value('#column')}"
            )
            right += check_panels(page, models, size)
        page.focus("#plot-0-image")
        for key, where in (("ArrowDown", (3, 1)), ("ArrowRight", (3, 2)), ("ArrowUp", (2, 2)), ("ArrowLeft", (2, 1))):
            page.keyboard.press(key)
            frame(page)
            assert (int(page.input_value("#row")), int(page.input_value("#column"))) == where, key
            right += check_panels(page, models, size)
        page.focus("#layer")
        page.keyboard.press("ArrowRight")
        page.select_option("#head", "1")
        frame(page)
        right += check_panels(page, models, size)
        page.keyboard.press("Home")
    return right


def check_screen(page: Page, axe: Path | None) -> list[str]:
    """Check that nothing is wider than the screen; returns the serious findings of axe-core."""
    wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"the page is {wide} pixels wider than the screen"
    if axe is None:
        return []
    page.add_script_tag(content=axe.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations.map(v => [v.impact, v.id, v.nodes.length])")
    return [f"{rule} ({impact}, {count})" for impact, rule, count in found if impact in ("serious", "critical")]


def main() -> None:
    """Print file sizes and times, and check the pages."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    axe = Path(os.environ["AXE"]) if "AXE" in os.environ else None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        for name, models in (("largest", largest()), ("small", small())):
            path = write_explorer(models, folder / f"{name}.html")
            print(f"{name}: {path.stat().st_size / 1e6:.1f} MB")
            for width, height, scheme in SCREENS:
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                errors = opened(page, path)
                right = drive(page, models)
                page.locator("#plot-0-image").scroll_into_view_if_needed()
                page.evaluate("() => { explorer.state.held = false; }")
                times = page.evaluate(TIME, page.evaluate(FRAME))
                findings = check_screen(page, axe)
                page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
                assert not errors, errors
                assert not findings, findings
                print(
                    f"  {width} x {height}, {scheme}: {right} correct maps, response in {times[30]:.0f} ms, at most "
                    f"{times[-1]:.0f} ms{', no serious finding of axe-core' if axe else ''}"
                )
                context.close()
        browser.close()


if __name__ == "__main__":
    main()

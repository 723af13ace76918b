"""Tables and images of docs/results/gym.md, rebuilt from docs/data/gym*.csv.

`python -m evidence.gym_page` writes the tables between the markers of the page, and the image.
"""

from __future__ import annotations

from pathlib import Path

from graticule.lab.figures.save import save_figure
from graticule.lab.gym.base import TASKS, task_rows
from graticule.lab.gym.profile import Profile, heat_map, read_profile
from graticule.lab.studies.tables import between, markdown
from graticule.system.files import write_text


def page_text(text: str, profile: Profile, places: Profile) -> str:
    """Return the text of a page with its tables rebuilt: the tasks, the ranks, and the scores of five places."""
    tables = {
        "tasks": lambda: markdown(task_rows()),
        "ranks": lambda: markdown(profile.ranks()),
        "places": places.markdown,
    }
    for name, table in tables.items():
        if f"<!-- {name}: begin" in text:
            text = between(text, name, table())
    return text


def kept_profile(docs: Path, name: str = "gym") -> Profile:
    """Read recorded scores of the page, with the tasks in the order of the registry."""
    profile = read_profile(docs / "data" / f"{name}.csv")
    return profile.select(tasks=[task for task in TASKS if task in profile.tasks])


def write_page(docs: Path) -> list[Path]:
    """Rebuild the page and its image; returns the paths."""
    profile, places = (kept_profile(docs, name) for name in ("gym", "gym_place"))
    page = docs / "results" / "gym.md"
    written = [write_text(page, page_text(page.read_text(encoding="utf-8"), profile, places))]
    if profile.rows:
        written.append(save_figure(heat_map(profile), docs / "figures" / "gym_profile.png"))
    return written


if __name__ == "__main__":
    print("wrote", *write_page(Path("docs")))

"""Tables and pictures of docs/gym.md and docs/results/gym.md, rebuilt from docs/data/gym*.csv.

`python -m evidence.gym_page` writes the tables between the markers of the pages, and the pictures.
"""

from __future__ import annotations

from pathlib import Path
from statistics import stdev

from scipy.stats import spearmanr

from graticule.lab.figures.save import save_figure
from graticule.lab.gym.base import TASKS, task_rows
from graticule.lab.gym.profile import Profile, heat_map, read_profile, task_sheet
from graticule.lab.studies.tables import between, markdown
from graticule.system.files import write_text

#: The choices of README's picture, if they were measured.
SHORT = (
    "encoding=none",
    "encoding=learnable",
    "encoding=learnable,joining=lape",
    "encoding=sinusoidal_2d",
    "encoding=peg",
    "encoding=relative_bias",
    "encoding=alibi",
    "encoding=rope",
)


def seed_rows(first: Profile, second: Profile) -> list[list[str]]:
    """Return a header and a row per task: how the scores of two seeds differ over the choices, at the trained size."""
    rows = [["task", "rank correlation", "s.d. of a training", "choices that differ by more than 20"]]
    for task in first.tasks:
        pairs = [
            (100 * first.mean(choice, task, side), 100 * second.mean(choice, task, side))
            for choice in first.choices
            for side in first.sides[:1]
        ]
        differences = [after - before for before, after in pairs]
        rank = float(spearmanr(*zip(*pairs, strict=True)).statistic)
        far = sum(abs(difference) > 20 for difference in differences)
        rows.append([task, f"{rank:.2f}", f"{stdev(differences) / 2**0.5:.1f}", f"{far} of {len(pairs)}"])
    return rows


def page_text(text: str, profile: Profile, second: Profile, places: Profile) -> str:
    """Return the text of a page with its tables rebuilt: the tasks, one seed, another one beside it, five."""
    tables = {
        "tasks": lambda: markdown(task_rows()),
        "profile": profile.markdown,
        "seeds": lambda: markdown(seed_rows(profile, second)),
        "places": places.markdown,
    }
    for name, table in tables.items():
        if f"<!-- {name}: begin" in text:
            text = between(text, name, table())
    return text


def kept_profile(docs: Path, name: str = "gym") -> Profile:
    """Read recorded scores of the page, with the tasks in the order of the registry."""
    profile = read_profile(docs / "data" / f"{name}.csv")
    return profile.chosen(tasks=[task for task in TASKS if task in profile.tasks])


def write_page(docs: Path) -> list[Path]:
    """Rebuild both pages and the pictures; returns the paths."""
    profile, second, places = (kept_profile(docs, name) for name in ("gym", "gym_second_seed", "gym_place"))
    pages = [docs / "gym.md", docs / "results" / "gym.md"]
    written = [write_text(page, page_text(page.read_text(encoding="utf-8"), profile, second, places)) for page in pages]
    written.append(save_figure(task_sheet(), docs / "figures" / "gym_tasks.png"))
    if profile.rows:
        short = [choice for choice in SHORT if choice in profile.choices]
        pictures = {"gym.png": profile.chosen(short)}
        if len(profile.choices) > len(short):
            pictures["gym_profile.png"] = profile
        written += [save_figure(heat_map(shown), docs / "figures" / name) for name, shown in pictures.items()]
    return written


if __name__ == "__main__":
    print("wrote", *write_page(Path("docs")))

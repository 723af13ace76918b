"""The names and commands of docs/dense.md are valid."""

import re
from pathlib import Path

from graticule.lab.data.registry import list_datasets
from graticule.lab.recipes.load import list_recipes
from graticule.lab.tasks.detection import DetectionRecipe
from graticule.lab.tasks.segmentation import SegmentationRecipe

PAGE = (Path(__file__).parents[4] / "docs" / "dense.md").read_text()


def test_the_data_sets_recipes_and_options_that_are_named_exist():
    table = set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Data")[2].partition("\n## ")[0], re.M))
    assert table <= set(list_datasets()) and len(table) == 7
    assert set(re.findall(r"graticule train ([a-z]\w+)", PAGE)) <= set(list_recipes())
    known = {name for kind in (DetectionRecipe, SegmentationRecipe) for name in kind.__dataclass_fields__}
    known |= {"sizes", "per_class", "threshold", "help", "help_all", "data"}
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", PAGE)}
    assert named <= known, named - known

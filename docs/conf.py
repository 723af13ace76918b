"""Configuration of the documentation site; `make docs` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import graticule

project = "graticule"
version = release = graticule.__version__
copyright = "the graticule maintainers"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "formulas",
    "generated",
    "accessible",
]
exclude_patterns = ["_build", "_ext", "my_methods.py"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# In a docstring, `name` is code, and a link if an object has that name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
html_math_renderer = "mathml"

html_theme = "furo"
html_title = "graticule"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# Black on white and white on black, so that code has enough contrast for everybody.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

"""Sphinx's settings of the book; `python -m book` writes its sources and calls Sphinx with this file."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from pygments.lexers.special import TextLexer

import jfa

project = "jfa"
author = "the authors of jfa"
copyright = "the authors of jfa; MIT licence"
version = release = jfa.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx.ext.mathjax"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "downloads"]  # notebooks to take away are no pages
highlight_language = "none"  # fences without a language hold shell commands, diagrams, reports

# Chapters come executed (book/execute.py): Sphinx only shows their outputs. A warning among these fails the build.
nb_execution_mode = "off"
nb_output_stderr = "remove-warn"
nb_merge_streams = True
nb_number_source_lines = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
suppress_warnings = ["mystnb.unknown_mime_type"]

default_role = "code"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "Returns:" holds sentences, not types
python_display_short_literal_types = True

html_theme = "furo"
html_title = "Jagged Flash Attention"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
# Summaries would be fetched page by page, which a browser refuses for files on disk; titles and links need no fetch.
html_show_search_summary = False

# One script with its glyphs as paths: no fonts and nothing else to load, so it works from a file.
mathjax_path = "tex-svg.js"
mathjax_options: dict = {}


def _copy_mathjax(app) -> None:
    """Put MathJax where Sphinx's static files go."""
    found = find_spec("mathjax")
    script = Path(found.submodule_search_locations[0], "static", "mathjax", "es5", "tex-svg.js")
    target = Path(app.outdir, "_static")
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(script, target / "tex-svg.js")


def setup(app) -> None:
    """Set up Sphinx, which calls this."""
    app.add_lexer("layers", TextLexer)  # a list in CONTRIBUTING.md that a test reads
    app.connect("builder-inited", _copy_mathjax)

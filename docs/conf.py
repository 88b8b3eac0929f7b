"""Configuration of the documentation site: the Markdown pages beside this file, and the API.

``python3 run docs`` builds it into ``build/docs``. The ``.rst`` pages hold what only a site needs:
navigation, the reference from docstrings, and the pages that stand at the root of the repository.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_extensions"))

import cme_dask  # noqa: E402

project = "cme_dask"
author = "cme_dask maintainers"
copyright = f"2026, {author}"
version = release = cme_dask.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "site_pages",
]
templates_path = ["_templates"]
exclude_patterns = ["_*"]
nitpicky = True
smartquotes_action = "qe"  # not dashes: options begin with two
html_math_renderer = "mathml"

# --- the Markdown pages, which are read on GitHub as well -----------------------------------------

myst_heading_anchors = 4
myst_links_external_new_tab = False
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

# --- the notebooks, which hold their outputs ------------------------------------------------------

nb_execution_mode = "off"
nb_merge_streams = True

# --- the reference --------------------------------------------------------------------------------

autosummary_generate = True
toc_object_entries_show_parents = "hide"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
numpydoc_xref_param_type = False

# --- the theme ------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = f"cme_dask {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "cme_dask"},
    "github_url": "https://github.com/cme-dask/cme-dask",
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"gallery": [], "project/changelog": [], "index": []}

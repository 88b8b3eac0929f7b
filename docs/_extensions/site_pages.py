"""What the site needs beyond extensions of others: formulas, links, members of classes."""

import re

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)


def formula(writer, node):
    """Write a formula as MathML, which browsers draw without scripts and fonts of a network."""
    block = isinstance(node, nodes.math_block)
    try:
        text = latex2mathml.tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        logger.warning("%s: %s", error, node.astext(), location=node)
        text = writer.encode(node.astext())
    writer.body.append(f'<div class="math">{text}</div>' if block else text)
    raise nodes.SkipNode


def links_to_the_root(app, docname, content):
    """Turn links to pages and notebooks outside of docs into those to their places in the site."""
    content[0] = re.sub(
        r"\]\(\.\./([A-Z]+)\.md", lambda link: f"](project/{link[1].lower()}.md", content[0]
    ).replace("](../notebooks/", "](notebooks/")


def skip_members_of_others(app, what, name, value, skip, options):
    """Leave out what classes inherit from other packages, which document it themselves."""
    function = getattr(value, "fget", getattr(value, "__func__", value))
    module = getattr(function, "__module__", None)
    if module is not None and module.partition(".")[0] != "cme_dask":
        return True
    return None


def find_by_its_end(app, env, node, target):
    """Resolve ``Sample.split`` as Python would in the file of the docstring, by a unique name."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    found = domain.find_obj(
        env, node.get("py:module"), node.get("py:class"), node["reftarget"], node["reftype"], 1
    )
    places = {(entry.docname, entry.node_id) for _, entry in found}
    if len(places) != 1:
        return None
    (docname, node_id) = places.pop()
    return make_refnode(app.builder, node["refdoc"], docname, node_id, target, node["reftarget"])


def without_markup(app, context, lines):
    """Escape the help of commands, which is plain text; an address in it is only an example."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith(("..", ":", "|")):
            lines[i] = re.sub(r"[*|]|(?<=\w):(?=//)", r"\\\g<0>", line)


def examples_as_code(app, context, lines):
    """Show the examples below the help of a command as commands, not as a paragraph."""
    examples = [line.removeprefix("| ") for line in lines if line.startswith("| ")]
    if examples and examples[0] == "Examples:":
        lines[:] = ["Examples::", "", *(f"   {line.strip()}" for line in examples[1:]), ""]


def setup(app):
    """Connect all of it to Sphinx."""
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("source-read", links_to_the_root)
    app.connect("autodoc-skip-member", skip_members_of_others)
    app.connect("missing-reference", find_by_its_end)
    app.connect("sphinx-click-process-description", without_markup)
    app.connect("sphinx-click-process-options", without_markup)
    app.connect("sphinx-click-process-epilog", examples_as_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Sphinx's configuration: a light and a dark theme, and nothing loaded from other hosts."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

from engine import __version__

project = "engine"
author = "the authors of engine"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4
smartquotes_action = "D"  # dashes; quotes stay as they are typed

default_role = "literal"  # a name of the API becomes a link, below
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_class_signature = "mixed"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"engine {release}"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

_FOOTNOTE = re.compile(r"\[(\d)\]_")
_REFERENCE = re.compile(r"^\.\. \[(\d)\] ")


class LinkedNames(SphinxPostTransform):
    """Links names of the API that stand in code type, such as ``LLM.generate``."""

    default_priority = 5  # before references are resolved

    def run(self, **kwargs: Any) -> None:
        objects = self.env.domains.python_domain.objects
        kinds = ("class", "exception")
        classes = {n.rpartition(".")[2]: o for n, o in objects.items() if o.objtype in kinds}
        for node in list(self.document.findall(nodes.literal)):
            name = node.astext().removesuffix("()")
            is_name = "." in name or name[:1].isupper()
            if not is_name or isinstance(node.parent, nodes.reference | nodes.title):
                continue
            found = objects.get(name) or objects.get(f"engine.{name}") or classes.get(name)
            if found is not None and found.docname != self.env.docname:
                copy = nodes.literal("", "", *node.children, classes=["xref"])
                node.replace_self(
                    make_refnode(
                        self.app.builder, self.env.docname, found.docname, found.node_id, copy
                    )
                )


def _without_footnotes(app: Any, what: str, name: str, of: Any, options: Any, lines: Any) -> None:
    """Show `[1]_` and its reference as text: a page has several docstrings, each with a first."""
    for number, line in enumerate(lines):
        lines[number] = _FOOTNOTE.sub(r"[\1]", _REFERENCE.sub(r"| [\1] ", line))


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _without_footnotes)
    app.add_post_transform(LinkedNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

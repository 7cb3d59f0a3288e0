"""Formulas of the site as MathML, which browsers draw without a script or a download."""

from __future__ import annotations

import html
import re
from typing import Any

import markdown
from latex2mathml.converter import convert
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

#: What `pymdownx.arithmatex` makes of `$...$` and of `$$...$$`.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)


class _ToMathML(Postprocessor):
    def run(self, text: str) -> str:
        text = INLINE.sub(lambda match: _made(match[1], "inline"), text)
        return BLOCK.sub(lambda match: _made(match[1], "block"), text)


def _made(tex: str, display: str) -> str:
    return convert(html.unescape(tex).strip(), display=display)


class MathML(Extension):
    """Follows `pymdownx.arithmatex` in its generic form."""

    def extendMarkdown(self, md: markdown.Markdown) -> None:  # noqa: N802
        # Last of all: the formulas are put aside until then.
        md.postprocessors.register(_ToMathML(md), "mathml", -10)


def makeExtension(**options: Any) -> MathML:  # noqa: N802
    return MathML(**options)

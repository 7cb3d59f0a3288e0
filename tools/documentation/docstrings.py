"""What the site makes of docstrings, before mkdocstrings renders them."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: Sections that are none of mkdocstrings's own.
SECTIONS = ("Call arguments", "Example", "Input shape", "Output shape", "Reference")


class Docstrings(griffe.Extension):
    """Turns sections into headings and examples into code blocks."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """Returns a docstring with what mkdocstrings would not understand in Markdown."""
    text = re.sub(
        r"^Args:\n +Same as (.+?), plus(.*):\n",
        r"Takes the arguments of \1, plus\2:\n\nArgs:\n",
        text,
        flags=re.M,
    )
    text = "\n".join(_with_headings(text.splitlines()))
    return re.sub(r"^>>> (?:.|\n)+?(?=\n\n|\Z)", r"```pycon\n\g<0>\n```", text, flags=re.M)


def _with_headings(lines: list[str]) -> list[str]:
    found: list[str] = []
    inside = False
    for line in lines:
        heading = re.fullmatch(rf"({'|'.join(SECTIONS)}):(.*)", line)
        if heading:
            inside = True
            found += [f"**{heading[1]}**", "", heading[2].strip()]
        elif inside and line.startswith("    "):
            found.append(re.sub(r"^(\w+): ", r"* `\1`: ", line[4:]))
        else:
            inside = inside and not line
            found.append(line)
    return found

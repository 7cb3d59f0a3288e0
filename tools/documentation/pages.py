"""Pages of the site, made from files whose links work in the repository."""

from __future__ import annotations

import functools
import pathlib
import posixpath
import re
import shutil

import keras

from tools.documentation import interface

ROOT = pathlib.Path(__file__).parents[2]
REPOSITORY = "https://github.com/nsl-keras/nsl_keras"
NOTEBOOKS = "examples/notebooks"

FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s]+)\)")
#: A link, a line of a heading, or a code span: the last alone may become a link.
SPAN = re.compile(r"\[[^\]]*\]\([^)]*\)|^#.*$|`(?P<code>[^`\n]+)`", re.M)


@functools.cache
def places() -> dict[str, str]:
    """Returns where the site has a file of the repository, by its path there."""
    files = [
        path.relative_to(ROOT).as_posix()
        for path in (*(ROOT / "docs").rglob("*.*"), *(ROOT / "results").rglob("*.*"))
        if path.suffix in (".md", ".png", ".gif")
    ]
    notebooks = (ROOT / NOTEBOOKS).glob("*.ipynb")
    return {
        **{file: file.removeprefix("docs/").replace("/README", "") for file in files},
        # docs/results.md has the place of the page of its folder.
        "results/README.md": "results/all.md",
        **{f"{NOTEBOOKS}/{path.name}": f"notebooks/{path.stem}.md" for path in notebooks},
    }


@functools.cache
def references() -> dict[str, str]:
    """Returns the API page of each name that a code span may hold."""
    found = {name: f"api/{name}.md" for name in interface.modules()}
    for name in interface.public_names():
        short = name.removeprefix("nsl_keras.")
        *_, bare = names = [name, short, short.rpartition(".")[2]]
        if bare[0].islower() or hasattr(keras.layers, bare):
            names.pop()
        found.update(dict.fromkeys(names, f"api/{short.replace('.', '/')}.md"))
    return found


def made(source: str, text: str) -> str:
    """Returns the page of the site: links lead to its pages, and code spans to the API.

    Args:
        source: The path of the file in the repository.
        text: Its Markdown.
    """
    parts = []
    end = 0
    for fence in [*FENCE.finditer(text), None]:
        prose = text[end : fence.start() if fence else None]
        prose = LINK.sub(lambda link: f"{link['text']}({_target(source, link)})", prose)
        prose = SPAN.sub(lambda span: _referring(source, span), prose)
        parts += [prose, fence[0] if fence else ""]
        end = fence.end() if fence else end
    return "".join(parts)


def in_repository(source: str, target: str) -> str | None:
    """Returns the path and anchor that a link leads to; `None` outside the repository."""
    own = re.fullmatch(rf"{REPOSITORY}/(?:blob|tree)/main/(.*)", target)
    if own is not None:
        return own[1]
    if re.match(r"\w+:", target):
        return None
    if target.startswith("#"):
        return source + target
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _target(source: str, link: re.Match[str]) -> str:
    path = in_repository(source, link["target"])
    if path is None or link["target"].startswith("#"):
        return link["target"]
    path, hash_sign, anchor = path.partition("#")
    if path in places():
        return _relative(source, places()[path]) + hash_sign + anchor
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{path}{hash_sign}{anchor}"


def _referring(source: str, span: re.Match[str]) -> str:
    name = (span["code"] or "").partition("(")[0]
    if name not in references():
        return span[0]
    return f"[{span[0]}]({_relative(source, references()[name])})"


def _relative(source: str, page: str) -> str:
    return posixpath.relpath(page, posixpath.dirname(places()[source]) or ".")


def write_pages(folder: pathlib.Path) -> None:
    """Writes the pages of docs/ and of the results, and copies the pictures."""
    for source, place in places().items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            path.write_text(made(source, (ROOT / source).read_text()))
        elif not source.endswith(".ipynb"):
            shutil.copy(ROOT / source, path)

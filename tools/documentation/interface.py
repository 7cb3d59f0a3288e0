"""API pages: one for every public name, and one for each module that lists its names."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import re
from types import ModuleType
from typing import Any

import nsl_keras

#: Of what `nsl_keras/__init__.py` imports, what is no module of public names.
PRIVATE = ("backend",)


@functools.cache
def modules() -> dict[str, ModuleType]:
    """Returns the public modules by name, as `nsl_keras/__init__.py` imports them."""
    tree = ast.parse(pathlib.Path(inspect.getfile(nsl_keras)).read_text())
    names = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "nsl_keras"
        for alias in node.names
    ]
    return {
        f"nsl_keras.{name}": getattr(nsl_keras, name)
        for name in sorted(names)
        if name not in PRIVATE
    }


def names_of(module: ModuleType) -> list[str]:
    """Returns the public names of a module, classes first.

    Those of a module without code are what it imports.
    """
    things = {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(thing)
    }
    own = [
        name
        for name, thing in things.items()
        if getattr(thing, "__module__", "") == module.__name__
    ]
    found = [*(set(getattr(module, "__all__", own or things)) & set(things))]
    return sorted(found, key=lambda name: (not inspect.isclass(vars(module)[name]), name))


def public_names() -> list[str]:
    """Returns every public name in full."""
    return [
        f"{module.__name__}.{name}"
        for module in (nsl_keras, *modules().values())
        for name in names_of(module)
    ]


def write_pages(folder: pathlib.Path) -> None:
    """Writes `index.md`, a page for each module, and a page for each name."""
    rows = [_row(f"`{name}`", f"{name}.md", module) for name, module in modules().items()]
    _write(folder / "index.md", _index("API", nsl_keras, rows))
    _write_names(folder, nsl_keras, "")
    for full_name, module in modules().items():
        name = full_name.removeprefix("nsl_keras.")
        rows = [
            _row(f"`{each}`", f"{name}/{each}.md", vars(module)[each])
            for each in names_of(module)
        ]
        _write(folder / f"{full_name}.md", _index(full_name, module, rows))
        _write_names(folder / name, module, f"{name}.")


def _index(title: str, module: ModuleType, rows: list[str]) -> str:
    if module is nsl_keras:
        rows = [
            *rows,
            *(
                _row(f"`{name}`", f"{name}.md", vars(module)[name])
                for name in names_of(module)
            ),
        ]
    listed = "\n".join(rows)
    return (
        f"# {title}\n\n{inspect.getdoc(module)}\n\n| name | what |\n|---|---|\n{listed}\n"
    )


def _row(name: str, link: str, thing: Any) -> str:
    first_line = (inspect.getdoc(thing) or "").splitlines()[0]
    return f"| [{name}]({link}) | {first_line.replace('|', chr(92) + '|')} |"


def _write_names(folder: pathlib.Path, module: ModuleType, prefix: str) -> None:
    for name in names_of(module):
        full_name = f"{module.__name__}.{name}"
        page = f"# {prefix}{name}\n\n{_signature(full_name, vars(module)[name])}"
        _write(folder / f"{name}.md", f"{page}::: {full_name}\n")


def _signature(full_name: str, thing: Any) -> str:
    """The call with all its defaults, as Python sees it: those of Keras included."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return ""
    parameters = [
        str(parameter.replace(annotation=inspect.Parameter.empty))
        for parameter in inspect.signature(thing).parameters.values()
    ]
    keyword_only = [
        parameter.kind is parameter.KEYWORD_ONLY
        for parameter in inspect.signature(thing).parameters.values()
    ]
    if True in keyword_only and not any(each.startswith("*") for each in parameters[:-1]):
        parameters.insert(keyword_only.index(True), "*")
    # The start of a printed function or class says where it lies in memory.
    listed = [
        re.sub(r"<(?:class|function) '?([\w.]+)[^>]*>", r"\1", each) for each in parameters
    ]
    call = f"{full_name}({', '.join(listed)})"
    if len(call) > 88:
        lines = "".join(f"    {each},\n" for each in listed)
        call = f"{full_name}(\n{lines})"
    return f"```python\n{call}\n```\n\n"


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

"""Prints the size of a folder by folder and file: `python -m tools.lines [folder]`.

Lines of logic are neither docstrings nor comments nor blank.
"""

import ast
import io
import pathlib
import sys
import tokenize
from collections import Counter

COLUMNS = ("lines", "logic", "docstrings", "raises")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(path: pathlib.Path) -> Counter[str]:
    """Counts the columns of one file."""
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    documented = [node for node in nodes if isinstance(node, DOCUMENTED)]
    docstrings = _lines(n.body[0] for n in documented if ast.get_docstring(n) is not None)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = (t for t in tokens if t.string.strip() and t.type != tokenize.COMMENT)
    code = {line for t in words for line in range(t.start[0], t.end[0] + 1)}
    raises = sum(isinstance(node, ast.Raise) for node in nodes)
    sizes = (len(text.splitlines()), len(code - docstrings), len(docstrings), raises)
    return Counter(dict(zip(COLUMNS, sizes, strict=True)))


def _lines(nodes) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


def main(folder: pathlib.Path) -> None:
    """Prints the files, then the folders, then the sum."""
    files = {path.relative_to(folder): count(path) for path in sorted(folder.rglob("*.py"))}
    folders: dict[str, Counter[str]] = {}
    for path, sizes in files.items():
        folder_name = f"{path.parts[0]}/" if len(path.parts) > 1 else "./"
        folders[folder_name] = folders.get(folder_name, Counter()) + sizes
    total = sum(folders.values(), Counter())
    print(f"{folder!s:44}", *(f"{name:>10}" for name in COLUMNS))
    for name, sizes in [*files.items(), *folders.items(), ("total", total)]:
        print(f"{name!s:44}", *(f"{sizes[column]:>10,}" for column in COLUMNS))


if __name__ == "__main__":
    main(pathlib.Path(*sys.argv[1:2] or ["nsl_keras"]))

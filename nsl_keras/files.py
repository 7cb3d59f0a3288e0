"""Local files: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator

from nsl_keras import validation


def local(path: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns the path in an argument, or raises unless it is of this machine."""
    # `pathlib` makes a local folder `gs:` of `gs://bucket`, with one slash.
    is_local = not re.match(r"\w\w+:/", os.fspath(path))
    demand = "on this machine: write there, and copy it"
    validation.require(is_local, name, demand, os.fspath(path))
    return pathlib.Path(path).expanduser()


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to write to, which then replaces the file or becomes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=path.parent) as folder:
        scratch = pathlib.Path(folder) / path.name
        yield scratch
        scratch.replace(path)

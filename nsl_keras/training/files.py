"""Writes files and folders under another name, then renames them: they appear at once."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator

#: Seconds after which a scratch folder belongs to a process that was killed.
_OLD = 24 * 60 * 60


def local(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path of this machine, or raises for a remote one."""
    # `pathlib` makes a local folder `gs:` of `gs://bucket`, with one slash.
    if re.match(r"\w\w+:/", os.fspath(path)):
        raise ValueError(
            "The folder must be on this machine: write there, and copy it. "
            f"Received: {os.fspath(path)!r}"
        )
    return pathlib.Path(path).expanduser()


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to write to, which then replaces the file or becomes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for scratch in path.parent.glob(".scratch-*"):
        with contextlib.suppress(FileNotFoundError):  # Another process removed it.
            if time.time() - scratch.stat().st_mtime > _OLD:
                shutil.rmtree(scratch, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=path.parent) as folder:
        scratch = pathlib.Path(folder) / path.name
        yield scratch
        scratch.replace(path)

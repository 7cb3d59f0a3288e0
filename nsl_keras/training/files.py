"""Atomic writes of files and folders.

A file or folder is written in a scratch folder beside it, flushed to the disk, and
renamed. The next process that writes there removes the scratch folders of killed processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import shutil
import socket
from collections.abc import Iterator

#: Names of the scratch folders in use by this process.
_in_use: set[str] = set()
_numbers = itertools.count()


def local_folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the argument `folder` as a path, or raises for remote and file paths."""
    # `pathlib` makes a local folder `gs:` of `gs://bucket`, with one slash.
    if re.match(r"\w\w+:/", os.fspath(path)) or str(path).endswith((".keras", ".h5")):
        raise ValueError(
            "`folder` must be a folder of this machine, neither remote (write to a local "
            "folder and copy it) nor a file (call `model.save`). "
            f"Received: folder={os.fspath(path)!r}"
        )
    return pathlib.Path(path).expanduser()


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a path to write to, which then replaces `path`."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_in(path.parent) as folder:
        scratch = folder / path.name
        yield scratch
        # Otherwise a machine that fails may keep the name and lose the content.
        for part in (*scratch.rglob("*"), scratch):
            _put_on_disk(part)
        scratch.replace(path)
        _put_on_disk(path.parent)


def require_room(folder: str | os.PathLike[str], size: int = 0) -> None:
    """Raises unless a folder can be written to, and its disk has room."""
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch_in(folder) as scratch:
            (scratch / "probe").write_bytes(b"probe")
            _put_on_disk(scratch / "probe")
    except OSError as error:
        raise OSError(
            error.errno,
            f"`{folder}` must be a folder that can be written to. "
            f"Received: {error.strerror or error}",
        ) from error
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(
            f"`{folder}` must have room for {size:,} bytes. Received: {free:,} bytes free"
        )


def clean(folder: pathlib.Path) -> None:
    """Removes the scratch folders of ended processes of this machine."""
    for path in folder.glob(".scratch-*"):
        match = re.fullmatch(r"\.scratch-(.+)-(\d+)-\d+", path.name)
        if match is None or match[1] != socket.gethostname():
            continue
        process = int(match[2])
        # This process may have the number of a killed one.
        in_use = path.name in _in_use if process == os.getpid() else _is_running(process)
        if not in_use:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def scratch_in(parent: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder, and removes it afterwards with everything left in it."""
    clean(parent)
    name = f".scratch-{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
    folder = parent / name
    _in_use.add(name)
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _in_use.discard(name)


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # Elsewhere the call below would end the process.
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _put_on_disk(path: pathlib.Path) -> None:
    if path.is_dir() and os.name != "posix":
        return  # Only POSIX opens folders.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

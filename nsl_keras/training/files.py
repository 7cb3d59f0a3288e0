"""Local files: written under another name, then renamed; and ONNX files, checked."""

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


def require_onnx(file: str | os.PathLike[str]) -> None:
    """Raises, and removes the file, if its operations are not all ONNX's."""
    import onnx

    try:
        onnx.checker.check_model(file, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        pathlib.Path(file).unlink()
        raise ValueError(
            '`format` must not be "onnx" for a head that adapts on a nested tape or in '
            "several steps: ONNX has no operations for its gradients. Received: "
            "format='onnx'"
        ) from error

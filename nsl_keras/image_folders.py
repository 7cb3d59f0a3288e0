"""Images from files: folders with one sub-folder a class, or lists of paths."""

from __future__ import annotations

import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Literal

import keras
import numpy as np

from nsl_keras import validation

_ENDINGS = (
    ".bmp",
    ".gif",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
#: How many names an error or a warning spells out.
_NAMES_IN_MESSAGES = 10


def load_image_folder(
    folder: str | os.PathLike[str],
    image_size: int | tuple[int, int] | None = None,
    color: Literal["rgb", "grayscale"] = "rgb",
    nested: bool = False,
    unreadable: Literal["error", "skip"] = "error",
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Reads a folder of images with one sub-folder a class.

    Images are the files whose names end like one (.png, .jpg, .jpeg, .bmp, .gif, .ppm,
    .pgm, .tif, .tiff, .webp, in small letters or capitals); other files are passed over,
    and so is what begins with a dot. Classes and files come in the order of their names.

    Args:
        folder: Path of the folder.
        image_size: int or `(height, width)` that all images are resized to (bilinear,
            antialiased, without regard to their proportions); `None` leaves them as they
            are, and they must be of one size.
        color: `"rgb"` (3 channels) or `"grayscale"` (1 channel).
        nested: bool. `False`: a class is a direct sub-folder, with all images anywhere
            below it. `True`: a class is any folder that holds images, as Omniglot's
            `alphabet/letter/`, and its name is the path from `folder`.
        unreadable: `"error"`, or `"skip"` to leave out images that cannot be read, with a
            warning that counts and names them.

    Returns:
        `(images, labels, class_names)`: a uint8 array `(n, height, width, channels)`, an
        int64 array `(n,)`, and the name of each class.

    Raises:
        ValueError: If the folder is none or has no classes, a class has no image (that
            can be read), images cannot be read (named and counted), or their sizes differ.
        ImportError: If Pillow is missing.

    Example:

    >>> import pathlib, tempfile, keras, numpy as np
    >>> from nsl_keras import image_folders
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("cat", "dog"):
    ...         pathlib.Path(folder, name).mkdir()
    ...         keras.utils.save_img(f"{folder}/{name}/1.png", np.ones((8, 8, 3)))
    ...     images, labels, names = image_folders.load_image_folder(folder, image_size=4)
    >>> images.shape, labels.tolist(), names
    ((2, 4, 4, 3), [0, 1], ['cat', 'dog'])
    """
    files = _nested_files(folder) if nested else _files_by_class(folder)
    paths = [path for each in files.values() for path in each]
    labels = np.repeat(np.arange(len(files)), [len(each) for each in files.values()])
    images, kept = load_images(paths, image_size, color, unreadable)
    names = list(files)
    labels = labels[kept]
    absent = np.setdiff1d(np.arange(len(names)), labels)
    _require_images(folder, [names[number] for number in absent])
    return images, labels.astype("int64"), names


def load_images(
    paths: Sequence[str | os.PathLike[str]],
    image_size: int | tuple[int, int] | None = None,
    color: Literal["rgb", "grayscale"] = "rgb",
    unreadable: Literal["error", "skip"] = "error",
) -> tuple[np.ndarray, np.ndarray]:
    """Reads image files, for sets that name their classes in a list.

    Args:
        paths: Paths of the files.
        image_size: As of `load_image_folder`.
        color: As of `load_image_folder`.
        unreadable: As of `load_image_folder`.

    Returns:
        `(images, kept)`: a uint8 array `(n, height, width, channels)` in the order of
        `paths`, and an int64 array `(n,)` of the indices of the paths it comes from: all
        of them unless unreadable files were skipped.

    Raises:
        ValueError: If there is no path, files cannot be read (named and counted; with
            `unreadable="skip"` if none can), or their sizes differ.
        ImportError: If Pillow is missing.

    Example:

    >>> import tempfile, keras, numpy as np
    >>> from nsl_keras import image_folders
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     keras.utils.save_img(f"{folder}/1.png", np.ones((8, 8, 3)))
    ...     images, kept = image_folders.load_images([f"{folder}/1.png"], color="grayscale")
    >>> images.shape, kept.tolist()
    ((1, 8, 8, 1), [0])
    """
    size = (
        None
        if image_size is None
        else validation.positive_integers(image_size, 2, "image_size")
    )
    validation.one_of(color, ("rgb", "grayscale"), "color")
    validation.one_of(unreadable, ("error", "skip"), "unreadable")
    if not paths:
        raise ValueError("`paths` must name an image at least. Received: no paths")
    images: np.ndarray | None = None
    kept: list[int] = []
    failed: list[str] = []
    for index, path in enumerate(paths):
        image = _read(path, size, color)
        if image is None:
            failed.append(str(path))
            continue
        if images is None:
            images = np.empty((len(paths), *image.shape), "uint8")
        if image.shape != images.shape[1:]:
            raise ValueError(
                "`image_size` must be given for images of different sizes. Received: "
                f"image_size=None for {paths[kept[0]]} of shape {images.shape[1:]} and "
                f"{path} of shape {image.shape}"
            )
        images[len(kept)] = image
        kept.append(index)
    what = f"{len(failed)} of {len(paths)} images cannot be read: {_listed(failed)}"
    if images is None or (failed and unreadable == "error"):
        raise ValueError(
            "Images must be readable, with at most 8 bits a channel "
            f'(`unreadable="skip"` leaves others out). Received: {what}'
        )
    if failed:
        warnings.warn(f"Left out: {what}", stacklevel=2)
    return images[: len(kept)], np.array(kept)


def _read(
    path: str | os.PathLike[str], size: tuple[int, ...] | None, color: str
) -> np.ndarray | None:
    """Returns an image of shape `(height, width, channels)`; `None` if unreadable."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            'Reading images needs Pillow: `pip install "nsl_keras[images]"`.'
        ) from error
    try:
        # Pillow would cut 16 bits down to white, silently.
        with Image.open(path) as file:
            if file.mode.startswith(("I", "F")):
                return None
        image = keras.utils.load_img(
            pathlib.Path(path), color_mode=color, target_size=size, interpolation="bilinear"
        )
        array = np.asarray(image)
    # What Pillow raises on broken files depends on the format.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return array[..., None] if array.ndim == 2 else array


def _files_by_class(folder: str | os.PathLike[str]) -> dict[str, list[str]]:
    classes = [path for path in _entries(folder) if path.is_dir()]
    if not classes:
        raise ValueError(
            "`folder` must hold a sub-folder for each class. "
            f"Received: folder={str(folder)!r}, which has none"
        )
    files = {
        path.name: [file for below in _folders(path) for file in _images(below)]
        for path in classes
    }
    _require_images(folder, [name for name, its in files.items() if not its])
    if all(len(_folders_of_images(path)) > 1 for path in classes):
        warnings.warn(
            f"Each sub-folder of {str(folder)!r} counts as one class, though all of them "
            f"hold several folders of images: {_listed(list(files))}. Were they the parts "
            "of a data set, give one of them; for classes that lie deeper, nested=True.",
            stacklevel=4,
        )
    return files


def _folders_of_images(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders that images of a class lie in; the class's own counts for them all."""
    if _images(folder):
        return [folder]
    return [below for below in _folders(folder) if _images(below)]


def _nested_files(folder: str | os.PathLike[str]) -> dict[str, list[str]]:
    root = pathlib.Path(folder)
    below = {path: _images(path) for path in _folders(root) if path != root}
    files = {
        path.relative_to(root).as_posix(): images
        for path, images in below.items()
        if images
    }
    if not files:
        raise ValueError(
            "`folder` must hold folders of images. "
            f"Received: folder={str(folder)!r}, which has none"
        )
    _require_images(
        folder,
        [
            path.relative_to(root).as_posix()
            for path, images in below.items()
            if not images and not any(each.is_dir() for each in _entries(path))
        ],
    )
    return files


def _entries(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(f"`folder` must be a folder. Received: folder={str(folder)!r}")
    return sorted(each for each in path.iterdir() if not each.name.startswith("."))


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folder and all below it."""
    below = [each for each in _entries(folder) if each.is_dir()]
    return [folder] + [path for each in below for path in _folders(each)]


def _images(folder: pathlib.Path) -> list[str]:
    return [str(path) for path in _entries(folder) if path.suffix.lower() in _ENDINGS]


def _require_images(folder: str | os.PathLike[str], empty: Sequence[str]) -> None:
    if empty:
        raise ValueError(
            "Every class must have an image that can be read. Received: "
            f"folder={str(folder)!r} with {len(empty)} classes without: {_listed(empty)}"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_IN_MESSAGES
    return ", ".join(names[:_NAMES_IN_MESSAGES]) + (f" and {more} more" if more > 0 else "")

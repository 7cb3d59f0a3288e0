"""Images from files: folders with one sub-folder a class, and the sets that come so.

    cinic10        {train,valid,test}/<class>/*.png
    mnist_m        {train,test}/<digit>/*.png
    pacs           {art_painting,cartoon,photo,sketch}/<class>/*.jpg
    tiny_imagenet  train/<class>/images/*.JPEG, val/images/*.JPEG, val/val_annotations.txt

The parts are those of the Meta-Neighborhoods paper (Appendix A.1) where they can be. It
makes all images 32 x 32, and trains on all domains of PACS at once. Its test part of PACS
has "10K" of the 9991 images beside "9K/1K" for training and validation, so that it must
hold training images; here a fifth of the images is for the test alone. Tiny-ImageNet's test
images have no labels in public: as usual, val/ is the test part. Validation parts that a
set lacks are drawn from training, in equal shares of every class and domain.
"""

import pathlib
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

#: Images (uint8) and class numbers.
Part = tuple[np.ndarray, np.ndarray]
#: Training, validation and test, and the names of the classes.
Parts = tuple[Part, Part, Part, list[str]]


def load_image_folder(
    folder: pathlib.Path, image_size: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Reads a folder of images with one sub-folder a class, at any depth below it.

    They are resized (bilinear, without regard to their proportions). Returns uint8 images
    of three channels, class numbers, and names of the classes, in the order of names.
    """
    files = {
        path.name: sorted(
            each for each in path.rglob("[!.]*") if each.suffix.lower() in ENDINGS
        )
        for path in sorted(folder.glob("[!.]*"))
        if path.is_dir()
    }
    if not files or not all(files.values()):
        raise ValueError(
            "`data_dir` must hold a sub-folder of images for each class. Received: "
            f"{str(folder)!r} with {[name for name in files if not files[name]]} empty"
        )
    labels = np.repeat(np.arange(len(files)), [len(paths) for paths in files.values()])
    images = load_images([path for paths in files.values() for path in paths], image_size)
    return images, labels, list(files)


def load_images(paths: Sequence[pathlib.Path], image_size: int) -> np.ndarray:
    images = np.empty((len(paths), image_size, image_size, 3), "uint8")
    options = {"target_size": (image_size, image_size), "interpolation": "bilinear"}
    for index, path in enumerate(paths):
        images[index] = np.asarray(keras.utils.load_img(path, **options))
    return images


def read(dataset: str, data_dir: str | None, image_size: int = 32) -> Parts:
    """Reads a set from its folder; the training images come in mixed order."""
    if data_dir is None:
        raise ValueError(
            f"`data_dir` must be the folder of {dataset}'s images, laid out as "
            "experiments/common/image_folders.py says. Received: data_dir=None"
        )
    folder = pathlib.Path(data_dir).expanduser()
    (images, labels), validation, test, names = READERS[dataset](folder, image_size)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order], labels[order]), validation, test, names


def _cinic10(folder: pathlib.Path, image_size: int) -> Parts:
    parts, names = _class_folders(folder, ("train", "valid", "test"), image_size)
    return *parts, names


def _tiny_imagenet(folder: pathlib.Path, image_size: int) -> Parts:
    (train,), names = _class_folders(folder, ("train",), image_size)
    lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
    listed = [line.split()[:2] for line in lines if line.strip()]
    images = load_images([folder / "val/images" / name for name, _ in listed], image_size)
    test = images, np.array([names.index(label) for _, label in listed])
    return *_held_out(*train, 1 / 10), test, names


def _mnist_m(folder: pathlib.Path, image_size: int) -> Parts:
    (train, test), names = _class_folders(folder, ("train", "test"), image_size)
    # The paper's 5K of 60K.
    return *_held_out(*train, 1 / 12), test, names


def _pacs(folder: pathlib.Path, image_size: int) -> Parts:
    domains, names = _class_folders(folder, DOMAINS, image_size)
    apart = [_held_out(*part, 1 / 5) for part in domains]
    split = [_held_out(*rest, 1 / 10) for rest, _ in apart]
    train, validation = (_together(each) for each in zip(*split, strict=True))
    return train, validation, _together(held for _, held in apart), names


READERS: dict[str, Callable[[pathlib.Path, int], Parts]] = {
    "cinic10": _cinic10,
    "mnist_m": _mnist_m,
    "pacs": _pacs,
    "tiny_imagenet": _tiny_imagenet,
}


def _class_folders(
    folder: pathlib.Path, parts: tuple[str, ...], image_size: int
) -> tuple[list[Part], list[str]]:
    read = [load_image_folder(folder / part, image_size) for part in parts]
    first = read[0][2]
    for part, (_, _, names) in zip(parts, read, strict=True):
        if names != first:
            raise ValueError(
                "`data_dir` must have the same classes in all its parts. Received: "
                f"{sorted({*names} ^ {*first})} in one of {parts[0]} and {part} alone"
            )
    return [(images, labels) for images, labels, _ in read], first


def _held_out(images: np.ndarray, labels: np.ndarray, share: float) -> tuple[Part, Part]:
    """Returns the rest, and a share of every class, always the same."""
    generator = np.random.default_rng(0)
    held = np.zeros(len(labels), bool)
    for each in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == each))
        held[members[: round(share * len(members))]] = True
    return (images[~held], labels[~held]), (images[held], labels[held])


def _together(parts: Iterable[Part]) -> Part:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)

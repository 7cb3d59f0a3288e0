"""Image sets: scikit-learn's digits, tfds' prepared ones, folders."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import keras
import numpy as np

from experiments.common import image_folders, runs

PARTS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Split:
    """Images in [0, 1], of shape `(n, height, width, channels)`, and their classes."""

    images: np.ndarray
    labels: np.ndarray

    def take(self, count: int | None) -> Self:
        return Split(self.images[:count], self.labels[:count])


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Training, validation and test images. Choices are made on validation alone."""

    train: Split
    validation: Split
    test: Split
    class_names: list[str] = dataclasses.field(default_factory=list)
    #: A digest of the file of images, if they came from one.
    fingerprint: str | None = None

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train.images.shape[1:]

    def changed(self, change: Callable[[Split], Split], **others: Any) -> Self:
        parts = {part: change(getattr(self, part)) for part in PARTS}
        return dataclasses.replace(self, **parts, **others)

    def resized(self, size: int) -> Self:
        return self.changed(lambda s: Split(resized_images(s.images, size), s.labels))

    @property
    def standardized(self) -> Self:
        """The same data with channels of mean 0 and deviation 1 in the training images."""
        mean = self.train.images.mean((0, 1, 2))
        deviation = self.train.images.std((0, 1, 2))
        return self.changed(lambda s: Split((s.images - mean) / deviation, s.labels))

    @property
    def counts(self) -> dict[str, int]:
        return {f"{part}_examples": len(getattr(self, part).images) for part in PARTS}


def load(
    dataset: str,
    data_dir: str | None = None,
    train_examples: int | None = None,
    image_size: int = 32,
) -> ImageData:
    """Loads an image set by its name. Nothing is downloaded.

    `"digits"` ships with scikit-learn; `data_dir` is the folder of a set of
    `image_folders.READERS`, whose images get the `image_size`; of any other set it is that
    of tensorflow-datasets' prepared copies.
    """
    if dataset in image_folders.READERS:
        *parts, names = image_folders.read(dataset, data_dir, image_size)
        train, validation, test = (_scaled(Split(*part)) for part in parts)
        return ImageData(train.take(train_examples), validation, test, names)
    if dataset == "digits":
        return _digits(train_examples)
    return _prepared(dataset, data_dir, train_examples)


def _scaled(split: Split) -> Split:
    images = np.divide(split.images, 255, dtype="float32")
    return Split(images, split.labels.astype("int64"))


def _digits(train_examples: int | None) -> ImageData:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    def held_out(split: Split, count: int) -> list[Split]:
        own = {"test_size": count, "stratify": split.labels, "random_state": 0}
        rest, held, *labels = train_test_split(split.images, split.labels, **own)
        return [Split(rest, labels[0]), Split(held, labels[1])]

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    rest, test = held_out(Split(images, digits.target), 540)
    train, validation = held_out(rest, 257)
    names = [str(name) for name in digits.target_names]
    return ImageData(train.take(train_examples), validation, test, names)


def prepared_builder(dataset: str, data_dir: str | None) -> Any:
    import tensorflow_datasets as tfds

    folder = pathlib.Path(data_dir or "~/tensorflow_datasets").expanduser()
    versions = sorted((folder / dataset).glob("*/dataset_info.json"))
    if not versions:
        raise ValueError(
            f"`data_dir` must hold a prepared copy of {dataset!r}. Get it, where there is "
            'a network, with `python -c "import tensorflow_datasets as tfds; '
            f"tfds.load('{dataset}', data_dir='{folder}')\"`. "
            f"Received: data_dir={str(folder)!r}"
        )
    # Reading the folder itself asks no server, unlike a load by name.
    return tfds.builder_from_directory(str(versions[-1].parent))


def read_prepared(builder: Any, split: str, channels: int | None = None) -> Split:
    """The first channels of the images, as they are prepared, and the labels of a split."""
    import tensorflow_datasets as tfds

    examples = list(tfds.as_numpy(builder.as_dataset(split=split)))
    images = np.stack([example["image"][..., :channels] for example in examples])
    return Split(images, np.array([example["label"] for example in examples], "int64"))


def _prepared(dataset: str, data_dir: str | None, train_examples: int | None) -> ImageData:
    builder = prepared_builder(dataset, data_dir)
    # The last tenth of the training images is the validation part, always the same.
    total = builder.info.splits["train"].num_examples
    rest = total - total // 10
    count = rest if train_examples is None else min(train_examples, rest)
    parts = (f"train[:{count}]", f"train[{rest}:]", "test")
    names = list(builder.info.features["label"].names)
    return ImageData(*(_scaled(read_prepared(builder, part)) for part in parts), names)


def read_file(path: str) -> ImageData:
    """Reads images, as they are, and labels from an .npz file; needs NumPy alone.

    It holds `train_images`, `train_labels`, `validation_images`, and so on; images are
    uint8, of shape `(n, height, width, channels)`. It may have `class_names` too.
    """
    with np.load(pathlib.Path(path).expanduser()) as archive:
        arrays = dict(archive)
    wanted = [f"{part}_{kind}" for part in PARTS for kind in ("images", "labels")]
    missing = [key for key in wanted if key not in arrays]
    if missing:
        raise ValueError(
            f"`data_file` must hold {', '.join(wanted)}. Received: {path} without "
            f"{', '.join(missing)}"
        )
    parts = [Split(arrays[f"{part}_images"], arrays[f"{part}_labels"]) for part in PARTS]
    for each in (split.images for split in parts):
        if each.dtype != np.uint8 or each.ndim != 4:
            raise ValueError(
                "`data_file` must hold uint8 images of shape (n, height, width, channels). "
                f"Received: {path} with images of {each.dtype} and shape {each.shape}"
            )
    names = [str(name) for name in arrays.get("class_names", ())]
    return ImageData(*parts, names, fingerprint(arrays))


def fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        digest.update(f"{key} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:12]


def save_file(data: ImageData, path: str) -> None:
    """Writes such a file; images that are not uint8 yet are in [0, 1]."""
    arrays = {"class_names": np.array(data.class_names)} if data.class_names else {}
    for part in PARTS:
        split = getattr(data, part)
        images = split.images
        if images.dtype != np.uint8:
            # What resized images are beyond it by rounding is cut off.
            images = np.round(255 * images.clip(0, 1)).astype("uint8")
        arrays |= {f"{part}_images": images, f"{part}_labels": split.labels}
    place = pathlib.Path(path).expanduser()
    with runs.replacing(place) as scratch, scratch.open("wb") as file:
        np.savez_compressed(file, **arrays)  # To a name, NumPy would add an ending.


def load_file(path: str, train_examples: int | None = None) -> ImageData:
    """Loads a file as of `read_file`; without names, its classes have numbers."""
    found = read_file(path).changed(_scaled)
    classes = 1 + max(int(split.labels.max()) for split in (found.train, found.test))
    names = found.class_names or list(map(str, range(classes)))
    train = found.train.take(train_examples)
    return dataclasses.replace(found, train=train, class_names=names)


def resized_images(images: np.ndarray, size: int) -> np.ndarray:
    """Images of `size` by `size` pixels (bilinear, antialiased), as float32."""
    options = {"antialias": True, "data_format": "channels_last"}
    found = [
        keras.ops.image.resize(part.astype("float32"), (size, size), **options)
        for part in np.array_split(images, max(1, len(images) // 1000))
    ]
    return np.concatenate([keras.ops.convert_to_numpy(part) for part in found])


def without_validation(data: ImageData) -> ImageData:
    train = Split(
        np.concatenate([data.train.images, data.validation.images]),
        np.concatenate([data.train.labels, data.validation.labels]),
    )
    return dataclasses.replace(data, train=train, validation=data.validation.take(0))

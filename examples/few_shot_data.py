"""Images for few-shot learning: classes for training, for validation and for the test."""

from __future__ import annotations

import dataclasses
import pathlib

import keras
import numpy as np

from examples import image_data
from nsl_keras import few_shot, image_folders

_PARTS = ("train", "validation", "test")
#: Omniglot's training classes that are kept for validation, and the usual image size.
OMNIGLOT_VALIDATION_CLASSES = 100
OMNIGLOT_SIZE = 28


@dataclasses.dataclass(frozen=True)
class Part:
    """Images, uint8 of shape `(n, height, width, channels)`, and their classes."""

    images: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class FewShotData:
    """Images of training, validation and test classes."""

    train: Part
    validation: Part
    test: Part

    def __post_init__(self) -> None:
        few_shot.disjoint(**{name: getattr(self, name).labels for name in _PARTS})

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train.images.shape[1:]

    @property
    def counts(self) -> dict[str, int]:
        return {
            f"{name}_{kind}": int(count)
            for name in _PARTS
            for kind, count in (
                ("images", len(getattr(self, name).labels)),
                ("classes", len(np.unique(getattr(self, name).labels))),
            )
        }


def load(
    dataset: str,
    data_dir: str | None = None,
    data_file: str | None = None,
    image_size: int = 84,
) -> FewShotData:
    """Loads `"omniglot"`, an .npz file, or a folder of images.

    Args:
        dataset: `"omniglot"`, or any name for what `data_file` or `data_dir` hold.
        data_dir: For Omniglot, the folder of tensorflow-datasets' prepared copies. Else a
            folder with `train`, `validation` (or `val`) and `test`, each with one
            sub-folder a class, as Mini-ImageNet comes.
        data_file: An .npz file with `train_images`, `train_labels`, and the same for
            `validation` and `test`; images are uint8.
        image_size: Pixels that images from a folder are resized to.

    Raises:
        ValueError: If an array or a folder is missing, or classes overlap.
    """
    if data_file is not None:
        return _from_file(data_file)
    if dataset == "omniglot":
        return _omniglot(data_dir)
    if data_dir is None:
        raise ValueError(
            "`data_file` or `data_dir` must say where the images are. "
            f"Received: dataset={dataset!r} without either"
        )
    return _from_folder(pathlib.Path(data_dir).expanduser(), image_size)


def save(data: FewShotData, path: str) -> None:
    """Writes the images to an .npz file, which needs NumPy alone to be read."""
    arrays = {}
    for name in _PARTS:
        arrays[f"{name}_images"] = getattr(data, name).images
        arrays[f"{name}_labels"] = getattr(data, name).labels
    np.savez_compressed(pathlib.Path(path).expanduser(), **arrays)


def _from_file(path: str) -> FewShotData:
    with np.load(pathlib.Path(path).expanduser()) as archive:
        wanted = [f"{name}_{kind}" for name in _PARTS for kind in ("images", "labels")]
        missing = [key for key in wanted if key not in archive]
        if missing:
            raise ValueError(
                f"`data_file` must hold {', '.join(wanted)}. Received: {path} without "
                f"{', '.join(missing)}"
            )
        return FewShotData(
            *(Part(archive[f"{name}_images"], archive[f"{name}_labels"]) for name in _PARTS)
        )


def _from_folder(folder: pathlib.Path, image_size: int) -> FewShotData:
    validation = folder / "validation"
    folders = (
        folder / "train",
        validation if validation.exists() else folder / "val",
        folder / "test",
    )
    parts = []
    for each in folders:
        images, labels, names = image_folders.load_image_folder(each, image_size)
        parts.append(Part(images, np.array(names)[labels]))
    return FewShotData(*parts)


def _omniglot(data_dir: str | None) -> FewShotData:
    """Letters as bright strokes on black; turned ones are classes too, in training."""
    import tensorflow_datasets as tfds

    builder = image_data.prepared_builder("omniglot", data_dir)

    def read(split: str) -> Part:
        images, labels = [], []
        for example in tfds.as_numpy(builder.as_dataset(split=split)):
            images.append(example["image"][..., :1])
            labels.append(example["label"])
        order = np.argsort(labels, kind="stable")
        return Part(_inverted_and_resized(np.stack(images)[order]), np.array(labels)[order])

    train, test = read("train"), read("test")
    kept = np.unique(train.labels)
    for_training, for_validation = few_shot.split_classes(
        kept, (len(kept) - OMNIGLOT_VALIDATION_CLASSES, OMNIGLOT_VALIDATION_CLASSES)
    )
    images, labels = few_shot.rotated_classes(
        *few_shot.select_classes(train.images, train.labels, for_training)
    )
    # Apart from all of the data set's own classes.
    labels = labels + 1 + max(train.labels.max(), test.labels.max())
    return FewShotData(
        Part(images, labels),
        Part(*few_shot.select_classes(train.images, train.labels, for_validation)),
        test,
    )


def _inverted_and_resized(images: np.ndarray) -> np.ndarray:
    sizes = (OMNIGLOT_SIZE, OMNIGLOT_SIZE)
    parts = [
        keras.ops.convert_to_numpy(
            keras.ops.image.resize(
                255 - part.astype("float32"),
                sizes,
                antialias=True,
                data_format="channels_last",
            )
        )
        for part in np.array_split(images, max(1, len(images) // 2000))
    ]
    return np.clip(np.round(np.concatenate(parts)), 0, 255).astype("uint8")

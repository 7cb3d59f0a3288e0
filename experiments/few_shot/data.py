"""Images for few-shot learning: classes for training, for validation and for the test."""

import dataclasses
import itertools
import pathlib

import numpy as np

from experiments.common import data as common, image_folders
from experiments.common.data import PARTS, ImageData, Split
from nsl_keras import few_shot

#: Omniglot's training classes that are kept for validation, and the usual image sizes.
OMNIGLOT_VALIDATION_CLASSES = 100
OMNIGLOT_SIZE, FOLDER_SIZE = 28, 84


@dataclasses.dataclass(frozen=True)
class FewShotData(ImageData):
    """Images, kept as uint8, of training, validation and test classes."""

    def __post_init__(self) -> None:
        classes = {name: np.unique(getattr(self, name).labels) for name in PARTS}
        for one, other in itertools.combinations(PARTS, 2):
            shared = np.intersect1d(classes[one], classes[other])
            if len(shared):
                raise ValueError(
                    f"`{one}` and `{other}` must have no class in common. "
                    f"Received: {shared.tolist()} in both"
                )

    @property
    def counts(self) -> dict[str, int]:
        labels = {name: getattr(self, name).labels for name in PARTS}
        classes = {f"{name}_classes": len({*labels[name].tolist()}) for name in PARTS}
        return {f"{name}_images": len(labels[name]) for name in PARTS} | classes


def load(
    dataset: str, data_dir: str | None = None, data_file: str | None = None
) -> FewShotData:
    """Loads `"omniglot"`, an .npz file as of `read_file`, or a folder of images.

    Of a file whose parts have the same classes, each part keeps some: six, two and two of
    ten. A folder holds `train`, `validation` (or `val`) and `test`, each with one
    sub-folder a class, as Mini-ImageNet comes.
    """
    if data_file is not None:
        return FewShotData(**vars(_apart(common.read_file(data_file))))
    if dataset == "omniglot":
        return _omniglot(data_dir)
    if data_dir is None:
        raise ValueError(
            "`data_dir` must be a folder with train, validation (or val) and test, each "
            "with one sub-folder of images a class, or `data_file` an .npz file of them. "
            f"Received: dataset={dataset!r} without either"
        )
    return _from_folder(pathlib.Path(data_dir).expanduser())


def _apart(found: ImageData) -> ImageData:
    parts = [getattr(found, part) for part in PARTS]
    first, *others = (set(split.labels.tolist()) for split in parts)
    if any(each != first for each in others):
        return found
    kept = few_shot.split_classes(found.train.labels, (0.6, 0.2, 0.2))
    chosen = [
        Split(*few_shot.select_classes(split.images, split.labels, own))
        for split, own in zip(parts, kept, strict=True)
    ]
    return dataclasses.replace(found, **dict(zip(PARTS, chosen, strict=True)))


def _from_folder(folder: pathlib.Path) -> FewShotData:
    validation = "validation" if (folder / "validation").exists() else "val"
    parts = []
    for place in (folder / name for name in ("train", validation, "test")):
        images, labels, names = image_folders.load_image_folder(place, FOLDER_SIZE)
        parts.append(Split(images, np.array(names)[labels]))
    return FewShotData(*parts)


def resized(split: Split, size: int) -> Split:
    images = common.resized_images(split.images, size)
    return Split(np.clip(np.round(images), 0, 255).astype("uint8"), split.labels)


def rotated_classes(
    images: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Adds square images turned by 90, 180 and 270 degrees, anticlockwise, as new classes.

    The usual augmentation of Omniglot's training classes (Santoro et al., 2016). With C
    classes, the i-th in sorted order becomes `i`, `i + C`, `i + 2 C` and `i + 3 C`.
    """
    classes, numbers = np.unique(labels, return_inverse=True)
    turns = range(4)
    return (
        np.concatenate([np.rot90(images, turn, axes=(1, 2)) for turn in turns]),
        np.concatenate([numbers + turn * len(classes) for turn in turns]),
    )


def _omniglot(data_dir: str | None) -> FewShotData:
    """Letters as bright strokes on black; turned ones are classes too, in training."""
    builder = common.prepared_builder("omniglot", data_dir)

    def read(split: str) -> Split:
        found = common.read_prepared(builder, split, channels=1)
        order = np.argsort(found.labels, kind="stable")
        strokes = Split(255 - found.images[order], found.labels[order])
        return resized(strokes, OMNIGLOT_SIZE)

    train, test = read("train"), read("test")
    kept = np.unique(train.labels)
    for_training, for_validation = few_shot.split_classes(
        kept, (len(kept) - OMNIGLOT_VALIDATION_CLASSES, OMNIGLOT_VALIDATION_CLASSES)
    )
    images, labels = rotated_classes(
        *few_shot.select_classes(train.images, train.labels, for_training)
    )
    # Apart from all of the data set's own classes.
    labels = labels + 1 + max(train.labels.max(), test.labels.max())
    return FewShotData(
        Split(images, labels),
        Split(*few_shot.select_classes(train.images, train.labels, for_validation)),
        test,
    )

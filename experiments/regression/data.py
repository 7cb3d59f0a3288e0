"""Regression data for the example: scikit-learn's diabetes, UCI files, or your own."""

import pathlib
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_diabetes


class RegressionData(NamedTuple):
    """Inputs of shape `(n, features)` and targets of shape `(n, outputs)`."""

    name: str
    x: np.ndarray
    y: np.ndarray


#: The data sets of Table 2, as the UCI Machine Learning Repository names their files:
#: columns of the targets, columns left out, and lines above the table.
UCI_FILES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], int]] = {
    "music": ("YearPredictionMSD.txt", (0,), (), 0),
    "toms": ("TomsHardware.data", (-1,), (), 0),
    # The first column numbers the patients.
    "cte": ("slice_localization_data.csv", (-1,), (0,), 1),
    "super": ("train.csv", (-1,), (), 1),
    "gom": ("default_plus_chromatic_features_1059_tracks.txt", (-2, -1), (), 0),
}
DATASETS = ("diabetes", *UCI_FILES)


def load(
    dataset: str, data_dir: str | None = None, data_file: str | None = None
) -> RegressionData:
    """Loads diabetes (ships with scikit-learn), a UCI file as unpacked, or an .npz file.

    That has arrays `x` and `y`, is taken instead of `dataset`, and gives the name.
    """
    if data_file is not None:
        path = _file("data_file", data_file)
        # A file need not be the data set that has its name.
        name = f"{path.stem}_file" if path.stem in DATASETS else path.stem
        archive = np.load(path)
        x, y = archive["x"].astype("float64"), archive["y"].astype("float64")
        data = RegressionData(name, x, y.reshape(len(x), -1))
    elif dataset == "diabetes":
        x, y = load_diabetes(return_X_y=True, scaled=False)
        data = RegressionData(dataset, x, y[:, None])
    else:
        data = _uci(dataset, data_dir)
    if not (np.isfinite(data.x).all() and np.isfinite(data.y).all()):
        raise ValueError(f"`data_file` must hold finite numbers. Received: {data.name}")
    return data


def _file(argument: str, *path: str) -> pathlib.Path:
    found = pathlib.Path(*path).expanduser()
    if not found.is_file():
        raise ValueError(
            f"`{argument}` must lead to a file (nothing is downloaded; UCI's are at "
            f"https://archive.ics.uci.edu). Received: {found}, which does not exist"
        )
    return found


def _uci(dataset: str, data_dir: str | None) -> RegressionData:
    name, targets, left_out, header_lines = UCI_FILES[dataset]
    path = _file("data_dir", data_dir or ".", name)
    table = np.genfromtxt(path, delimiter=",", skip_header=header_lines, ndmin=2)
    columns = range(table.shape[1])
    outputs = [columns[target] for target in targets]
    inputs = [each for each in columns if each not in (*outputs, *left_out)]
    return RegressionData(dataset, table[:, inputs], table[:, outputs])


class Part(NamedTuple):
    """Normalized inputs and targets of one part of the data."""

    x: np.ndarray
    y: np.ndarray


class Fold(NamedTuple):
    train: Part
    validation: Part
    test: Part


def folds(
    data: RegressionData, count: int, validation_share: float, seed: int
) -> list[Fold]:
    """Splits the data for cross-validation.

    Each fold's test part is one of `count` equal shares; of the rest, `validation_share`
    is the validation part. Inputs and targets get zero means and unit variances over the
    training part, each column by itself; columns that are constant there become zero.
    """
    order = np.random.default_rng(seed).permutation(len(data.x))
    shares = np.array_split(order, count)
    found = []
    for number, test in enumerate(shares):
        rest = np.concatenate([s for i, s in enumerate(shares) if i != number])
        held_out = round(validation_share * len(rest))
        parts = [rest[held_out:], rest[:held_out], test]
        columns = [_normalized(each, parts[0]) for each in (data.x, data.y)]
        found.append(Fold(*(Part(columns[0][rows], columns[1][rows]) for rows in parts)))
    return found


def _normalized(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    mean, deviation = table[rows].mean(axis=0), table[rows].std(axis=0)
    constant = deviation <= 1e-12 * np.maximum(1, np.abs(mean))
    scaled = np.where(constant, 0, (table - mean) / np.where(constant, 1, deviation))
    return scaled.astype("float32")

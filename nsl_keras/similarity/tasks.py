"""One file for each task of a shared network: what the task trained."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import files, nesting, validation
from nsl_keras.similarity.with_similarity import forms_in

#: Arguments of a similarity that do not change what a trained `M` computes.
_OF_TRAINING = ("initializer", "regularizer", "constraint")


def save_task(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Writes the trained weights of a model to a file, without the frozen ones.

    The file contains the trainable weights in float32, the moving statistics of trainable
    batch norms, the temperature of a `few_shot.ClassLogits`, the kinds of `M`, and a
    checksum of the frozen weights. For a network of
    100 MB it takes a few kilobytes if only `M` and a classifier are trained.

    Args:
        model: A built model, for example from `nsl_keras.convert.add_similarity`.
        path: A local path. An existing file is replaced.

    Raises:
        ValueError: If the model is not built or has no trainable weights.

    Example:

    >>> import tempfile
    >>> import nsl_keras
    >>> network = nsl_keras.backbones.convnet4((16, 16, 3))
    >>> photos, scans = (nsl_keras.convert.add_similarity(network) for _ in range(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nsl_keras.convert.save_task(photos, f"{folder}/photos.task")
    ...     nsl_keras.convert.load_task(scans, f"{folder}/photos.task")
    """
    trained, frozen = _trained_and_frozen(model, "save_task")
    validation.require(trained, "model", "one with trainable weights", model.name)
    header = {"description": _description(model, trained), "network": _checksum(frozen)}
    values = [ops.convert_to_numpy(ops.cast(each, "float32")) for each in trained]
    with files.replacing(files.local(path, "path")) as scratch, open(scratch, "wb") as file:
        np.savez_compressed(file, json.dumps(header), *values)


def load_task(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Gives a model the trained weights that `save_task` wrote.

    Args:
        model: A built model that was converted in the same way from the same network.
        path: A file of `save_task`.

    Raises:
        ValueError: If the frozen weights, the kinds of `M` or the trainable weights are not
            those of the saved model, or if the file is not one of `save_task`. The model
            does not change then.

    Example:

    >>> import tempfile
    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4((16, 16, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nsl_keras.convert.save_task(model, f"{folder}/all.task")  # No weight is frozen.
    ...     nsl_keras.convert.load_task(model, f"{folder}/all.task")
    """
    trained, frozen = _trained_and_frozen(model, "load_task")
    try:
        with open(files.local(path, "path"), "rb") as stream, np.load(stream) as file:
            first, *values = (file[f"arr_{number}"] for number in range(len(file.files)))
        header = json.loads(str(first))
        saved, network = header["description"], header["network"]
        validation.require(len(values) == len(saved["weights"]), "path", "whole", path)
    except FileNotFoundError:
        raise
    except Exception as error:  # A truncated or foreign file may raise any kind.
        raise ValueError(
            f"`path` must be a whole file that `save_task` wrote. Received: path={path!r}"
        ) from error
    own = _description(model, trained)
    for part, demand in (
        ("similarities", "have the similarities, with the kinds and block sizes,"),
        ("weights", "train the weights"),
    ):
        for one, other in itertools.zip_longest(saved[part], own[part]):
            if (one and one[1:]) != (other and other[1:]):
                raise ValueError(
                    f"`model` must {demand} of the task in {os.fspath(path)!r}: convert "
                    "and freeze it as the model that was saved. Received: model "
                    f"{model.name!r} with {_words(other)}, where the task has {_words(one)}"
                )
    demand = f"one with the frozen weights that the task in {os.fspath(path)!r} builds on"
    validation.require(network == _checksum(frozen), "model", demand, model.name)
    paths = [each.path for each in trained]
    by_path = {row[0]: value for row, value in zip(saved["weights"], values, strict=True)}
    # Otherwise names contain counters, as "dense_1", and the order of weights decides.
    if sorted(by_path) == sorted(paths):
        values = [by_path[path] for path in paths]
    for variable, value in zip(trained, values, strict=True):
        variable.assign(value)


def _trained_and_frozen(model: keras.Model, what: str) -> tuple[list[Any], list[Any]]:
    """Returns the weights that training changes, and all other weights."""
    validation.require_built(model, what)
    with_state = [
        each
        for each in nesting.sublayers(model)
        if hasattr(each, "only_scales")  # With a temperature, which `calibrate` fits.
        or (isinstance(each, keras.layers.BatchNormalization) and each.trainable)
    ]
    changed = {id(each) for part in with_state for each in part.non_trainable_weights}
    changed |= set(map(id, model.trainable_weights))
    trained = [each for each in model.weights if id(each) in changed]
    return trained, [each for each in model.weights if id(each) not in changed]


def _description(model: keras.Model, trained: list[Any]) -> dict[str, Any]:
    """Returns similarities and trained weights as lists of rows that begin with a path."""
    similarities = []
    for form in forms_in(model):
        config = form.similarity.get_config()
        kept = {name: each for name, each in config.items() if name not in _OF_TRAINING}
        kind = type(form.similarity).__name__, type(form.predictor).__name__
        recipe: Any = None
        if form.predictor is not None and not isinstance(form.predictor, keras.Layer):
            recipe = form.predictor.get_config()
        similarities.append([form.path, *kind, kept, form.taps, recipe])
    weights = [[each.path, list(each.shape)] for each in trained]
    described: dict[str, Any] = json.loads(
        json.dumps({"similarities": similarities, "weights": weights}, default=str)
    )
    return described


def _words(row: Any) -> str:
    """Returns a row of the description for a message."""
    if row is None:
        return "no further one"
    path, kind, *of_similarity = row
    if not of_similarity:
        return f"{path!r} of shape {kind}"
    _, options, size, recipe = of_similarity
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    predictor = "" if recipe is None else f" and the predictor {recipe}"
    return f"{kind}({arguments}) of size {size} in {path.rpartition('/')[0]!r}{predictor}"


def _checksum(weights: list[Any]) -> str:
    """Returns a number of the values of weights, in any order."""
    digests = []
    for each in weights:
        value = ops.convert_to_numpy(each)
        digest = hashlib.sha256(str((value.shape, str(value.dtype))).encode())
        digest.update(value.tobytes())
        digests.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()

"""SavedModels in the layout that serving systems read: `folder/version/`.

Served models need neither `nsl_keras` nor Keras, and take any batch size.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.few_shot.episodic_learner import EpisodicLearner
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel


def save_model(
    model: keras.Model,
    folder: str | pathlib.Path,
    version: int = 1,
    input_shape: tuple[int | None, ...] | None = None,
    signatures: Mapping[str, Callable[[Any], Any]] | None = None,
) -> pathlib.Path:
    """Writes a model as a TensorFlow SavedModel with named signatures.

    `serving_default` (also named `serve`) predicts. A `MetaNeighborhoodModel` has
    `unadapted` besides, its predictions before adaptation. Signatures check nothing:
    the outputs of an example with a non-finite input mean nothing, and those of the other
    examples in its batch are what they are without it.

    Args:
        model: A built Keras model with one input and one output.
        folder: Folder of the model's versions; it is made if missing.
        version: int of at least 1, the subfolder written.
        input_shape: Shape of the inputs without the batch axis; `None` takes it from
            the model.
        signatures: Further signatures by name, each a function of one batch of inputs.

    Returns:
        The path written, `folder/version`.

    Raises:
        ValueError: If that path exists already (nothing is overwritten), the model is
            not built or a few-shot learner, or its input shape is unknown.

    Example:

    >>> import pathlib, tempfile
    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
    >>> model.build((None, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = nsl_keras.export.save_model(model, folder, input_shape=(8,))
    ...     (path / "saved_model.pb").exists(), path.name
    (True, '1')
    """
    version = validation.positive_integer(version, "version")
    path = pathlib.Path(folder) / str(version)
    if path.exists():
        raise ValueError(
            f"`folder` must not hold version {version} yet: {path} exists, and nothing "
            f"is overwritten. Received: folder={str(folder)!r}, version={version}"
        )
    if not model.built:
        raise ValueError(
            f"`model` must be built before export. Received: unbuilt {model.name!r}"
        )
    if isinstance(model, EpisodicLearner):
        raise ValueError(
            "`model` must have one input. A few-shot learner has three, and its own "
            "`export(folder)` serves them, after a call on episodes. "
            f"Received: {model.name!r} of type {type(model).__name__!r}"
        )
    specification = keras.InputSpec(
        shape=(None, *_input_shape(model, input_shape)),
        dtype=keras.backend.floatx(),
    )
    archive = keras.export.ExportArchive()
    archive.track(model)
    endpoints: dict[str, Callable[[Any], Any]] = {
        "serve": lambda inputs: model(inputs, training=False)
    }
    if isinstance(model, MetaNeighborhoodModel):
        endpoints["unadapted"] = lambda inputs: model(inputs, training=False, adapt=False)
    for name, function in {**endpoints, **(signatures or {})}.items():
        archive.add_endpoint(name, function, input_signature=[specification])
    archive.write_out(str(path), verbose=False)
    return path


def _input_shape(
    model: keras.Model, given: tuple[int | None, ...] | None
) -> tuple[int | None, ...]:
    if given is not None:
        return tuple(given)
    source = model.backbone if isinstance(model, MetaNeighborhoodModel) else model
    shape = getattr(source, "input_shape", None)
    if not isinstance(shape, tuple) or not shape or isinstance(shape[0], tuple):
        raise ValueError(
            "`input_shape` must be given for a model whose input shape is not recorded. "
            f"Received: input_shape={given}, model={model.name!r}"
        )
    return shape[1:]

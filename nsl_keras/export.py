"""SavedModels in the layout that model servers read: `folder/version/`."""

from __future__ import annotations

import inspect
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import rewiring, validation
from nsl_keras.backend import at_any_batch_size, require_shapes
from nsl_keras.few_shot.episodic_learner import EpisodicLearner
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.similarity.folding import fold
from nsl_keras.training import files

__all__ = ["save_model"]

#: A function of a batch of inputs, in the form that the model takes.
Function = Callable[[Any], Any]

#: The number of examples that the written model is compared on.
_DRAWN = 3

_INPUTS_OF_EPISODES = ("support_images", "support_labels", "query_images")


def save_model(
    model: keras.Model,
    folder: str | pathlib.Path,
    version: int | None = None,
    signatures: Mapping[str, Function] | None = None,
    preprocessing: Function | None = None,
    examples: Any = None,
    k: int = 5,
) -> pathlib.Path:
    """Writes a model as a TensorFlow SavedModel with named signatures.

    | signature | outputs |
    |---|---|
    | `serve`, also named `serving_default` | the predictions |
    | `unadapted` | the predictions before adaptation |
    | `features` | the features, of shape `(batch, features)` |
    | `neighbors` | `entries`, `weights`, `values`, `output_changes`, `classes` |

    Only a `MetaNeighborhoodModel` has the last three. `entries` are the numbers of the `k`
    dictionary entries of largest effect, `classes` (of classifiers) their classes, both of
    shape `(batch, k)`; for the others see `MetaNeighborhoodModel.neighbors`.

    A single input is named `inputs`. Several have the names of the model's inputs or, for
    dict inputs, the keys; the method `serve` of the loaded model, and
    `keras.layers.TFSMLayer`, take them in the model's structure. A few-shot learner takes
    `support_images`, `support_labels` (int32) and `query_images`. On TensorFlow the set
    sizes may vary. A single output is named `output_0`; several in a dict have their keys.

    The SavedModel needs neither nsl_keras nor Keras, and takes any batch size, including 0
    unless it was written under JAX. A request with wrong shapes fails, but where the model
    takes images of any size, those that are too small for it get meaningless outputs:
    TensorFlow's convolutions accept them. An example with a NaN or an infinity gets NaN
    outputs (-1 where they are integers) and does not affect the others.

    Static similarities are folded where `nsl_keras.convert.fold` can. The version is
    written to a hidden folder, compared with the model, and then renamed, so that readers
    see all of it or nothing.

    Args:
        model: A built Keras model with any structure of inputs, or a few-shot learner.
        folder: Local folder of the model's versions; it is made if missing.
        version: int of at least 1, the subfolder to write; `None` for the next one.
        signatures: Further signatures by name, each a function from a batch of the model's
            inputs to tensors whose first axis is the batch. They replace those above that
            have the same name.
        preprocessing: Keras model, layer or other function that returns the model's
            inputs. It becomes part of every signature.
        examples: Batch of inputs on which the written model is compared with `model`;
            `None` draws random numbers. Needed for subclassed models, and with a
            `preprocessing` that is not a functional model.
        k: int, the number of `neighbors`; of a smaller dictionary, all entries.

    Returns:
        The path written, `folder/version`.

    Raises:
        ValueError: If the folder is remote, the version exists, the model is not built, or
            `examples` are needed.
        RuntimeError: If the written model's predictions differ or are not finite. For a
            stochastic model only shapes are compared.

    Example:

    >>> import tempfile
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
    >>> model.build((None, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nsl_keras.export.save_model(model, folder).name
    '1'
    """
    path = files.local_folder(folder)
    if version is None:
        taken = [int(each.name) for each in path.glob("*") if each.name.isdecimal()]
        version = max(taken, default=0) + 1
    path = path / str(validation.positive_integer(version, "version"))
    if path.exists():
        raise ValueError(
            f"`folder` must not hold version {version} yet: nothing is overwritten. "
            f"Received: folder={str(folder)!r}, version={version}"
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`model` must be a Keras model; of a `few_shot.Finetuner`, what its `adapt` "
            f"returns. Received: model={model!r}"
        )
    validation.built(model, "save_model")
    inputs = _inputs_of(model, preprocessing, examples)
    specs = tree.flatten(inputs)

    def prepare(tensors: Sequence[Any]) -> Any:
        batch = tree.pack_sequence_as(inputs, tensors)
        return batch if preprocessing is None else preprocessing(batch)

    archive = keras.export.ExportArchive()
    signatures, served = dict(signatures or {}), _folded(model)
    for name, function in {**_signatures_of(served, k), **signatures}.items():
        # The archive finds the variables that each function uses, but no vocabularies.
        serve = _guarded(function, prepare, specs)
        archive.add_endpoint(name, serve, input_signature=[inputs])
    arrays = _draw(model, specs) if examples is None else tree.flatten(examples)
    batch = [
        ops.convert_to_tensor(array, dtype=spec.dtype)
        for array, spec in zip(arrays, specs, strict=True)
    ]
    predict = signatures.get("serve", lambda given: model(given, training=False))
    expected = [tree.flatten(predict(prepare(batch))) for _ in range(2)]
    for layer in _layers_of(served, preprocessing, *signatures.values()):
        if hasattr(layer, "lookup_table"):
            archive.track(layer.lookup_table)
    with files.replacing(path) as scratch:
        archive.write_out(str(scratch), verbose=False)
        _compare(scratch, inputs, batch, expected, _relative_tolerance(model))
    return path


def _inputs_of(model: keras.Model, preprocessing: Any, examples: Any) -> Any:
    """Returns the inputs of the signatures: a structure of `keras.InputSpec` with names."""
    source: Any = model.backbone if isinstance(model, MetaNeighborhoodModel) else model
    source = preprocessing or source
    recorded = None
    if preprocessing is None:
        recorded = (model.get_build_config() or {}).get("input_shape")
    if rewiring.is_graph(source) and source.built:
        tensors = source.inputs[0] if isinstance(source, keras.Sequential) else source.input
        found = tree.map_structure(
            lambda each: _spec(each.shape, each.dtype, each.name), tensors
        )
    elif examples is not None:
        found = tree.map_structure(lambda each: _spec(each.shape, each.dtype), examples)
    elif recorded is not None:
        found = tree.map_shape_structure(_spec, recorded)
    else:
        raise ValueError(
            "`examples` must be given where the shapes of the inputs are not recorded. "
            f"Received: examples=None, model={model.name!r}"
        )
    specs = tree.flatten(found)
    names = [spec.name or f"inputs_{number}" for number, spec in enumerate(specs)]
    if isinstance(found, dict):
        names = sorted(found)
    elif isinstance(model, EpisodicLearner):
        names = list(_INPUTS_OF_EPISODES)
        if model.classifies:
            specs[1].dtype = "int32"
        if keras.backend.backend() == "tensorflow":
            for spec in specs:  # Any number of images.
                spec.shape = (None, None, *spec.shape[2:])
    elif len(specs) == 1:
        names = ["inputs"]
    for spec, name in zip(specs, names, strict=True):
        spec.name = name
    return found


def _spec(shape: Any, dtype: Any = None, name: str | None = None) -> keras.InputSpec:
    """Returns an input of any batch size; the shape has a batch axis."""
    is_text = getattr(dtype, "kind", "") in ("U", "S", "O")
    dtype = "string" if is_text else keras.backend.standardize_dtype(dtype)
    if dtype == "float64":  # NumPy's default.
        dtype = keras.config.floatx()
    return keras.InputSpec(shape=(None, *shape[1:]), dtype=dtype, name=name)


def _draw(model: keras.Model, specs: Sequence[keras.InputSpec]) -> list[np.ndarray]:
    """Returns random inputs."""
    random = np.random.default_rng(0)
    drawn = []
    for spec in specs:
        shape = (_DRAWN, *spec.shape[1:])
        if isinstance(model, EpisodicLearner):
            shape = (_DRAWN, shape[1] or 2 * (model.ways or 1), *shape[2:])
        if None in shape or spec.dtype == "string":
            raise ValueError(
                "`examples` must be given for inputs of unknown sizes, or of strings. "
                f"Received: input {spec.name!r} of shape {spec.shape} and dtype "
                f"{spec.dtype}"
            )
        is_class = isinstance(model, EpisodicLearner) and model.classifies
        if is_class and spec.name == "support_labels":
            drawn.append(np.broadcast_to(np.arange(shape[1]) % model.ways, shape))
        elif keras.backend.is_float_dtype(spec.dtype):
            drawn.append(random.normal(size=shape))
        else:
            drawn.append(random.integers(2, size=shape))
    return drawn


def _folded(model: keras.Model) -> keras.Model:
    """Returns an equivalent plain model if there is one, else the model."""
    parts = rewiring.sublayers(model)
    if not any(type(part).__module__.startswith("nsl_keras.") for part in parts):
        return model
    try:
        with warnings.catch_warnings(action="ignore"):  # Of a class that is not kept.
            return fold(model)
    except ValueError:
        return model


def _layers_of(*functions: Any) -> Iterator[keras.layers.Layer]:
    """Yields layers, the layers that functions refer to, and those inside both."""
    found = list(functions)
    for function in filter(inspect.isfunction, functions):
        variables = inspect.getclosurevars(function)
        found += [*variables.nonlocals.values(), *variables.globals.values()]
    for each in found:
        if isinstance(each, keras.layers.Layer):
            yield from (each, *rewiring.sublayers(each))


def _signatures_of(model: keras.Model, k: int) -> dict[str, Function]:
    """Returns the built-in signatures of a model."""
    if not isinstance(model, MetaNeighborhoodModel):
        return {"serve": lambda inputs: model(inputs, training=False)}

    def neighbors(inputs: Any) -> dict[str, Any]:
        features = model.features(inputs, training=False)
        found = model.neighborhood.neighbors(features, min(k, model.num_neighbors))
        outputs = {**found._asdict(), "entries": found.indices}
        del outputs["indices"]
        if model.task == "classification":
            outputs["classes"] = ops.argmax(found.values, axis=-1)
        return outputs

    return {
        "serve": lambda inputs: model(inputs, training=False),
        "unadapted": lambda inputs: model(inputs, training=False, adapt=False),
        "features": lambda inputs: model.features(inputs, training=False),
        "neighbors": neighbors,
    }


def _guarded(
    function: Function, prepare: Function, specs: Sequence[keras.InputSpec]
) -> Callable[..., Any]:
    """Returns a function of inputs that refuses wrong shapes."""

    def serve(inputs: Any) -> Any:
        checked = require_shapes(tree.flatten(inputs), [spec.shape for spec in specs])
        return at_any_batch_size(lambda batch: function(prepare(batch)), checked)

    return serve


def _relative_tolerance(model: keras.Model) -> float:
    """Returns how much two runs may differ: compiled half precision rounds differently."""
    layers = (model, *rewiring.sublayers(model))
    is_half = any(each.compute_dtype in ("float16", "bfloat16") for each in layers)
    return 0.05 if is_half else 1e-4


def _compare(
    folder: pathlib.Path,
    inputs: Any,
    batch: Sequence[Any],
    expected: Sequence[Sequence[Any]],
    relative_tolerance: float,
) -> None:
    """Raises unless the written model answers, with the expected predictions.

    Two predictions of the model are expected: if they differ, the model is random, and
    only shapes can be compared.
    """
    import tensorflow as tf  # Under JAX too, SavedModels are TensorFlow's.

    loaded = tf.saved_model.load(str(folder))
    given = [tf.constant(ops.convert_to_numpy(each)) for each in batch]
    names = [spec.name for spec in tree.flatten(inputs)]
    for signature in loaded.signatures.values():
        signature(**dict(zip(names, given, strict=True)))
    received = tree.flatten(loaded.serve(tree.pack_sequence_as(inputs, given)))
    for tensors in zip(*expected, received, strict=True):
        one, again, two = map(ops.convert_to_numpy, tensors)
        if one.shape != two.shape:
            raise RuntimeError(
                "The written model must return the shapes that the model returns for the "
                f"same batch, {one.shape}. Received: {two.shape}"
            )
        if one.dtype.kind in "OSU":  # Strings are equal or not.
            one, again, two = (each == one for each in (one, again, two))
        one, again, two = (each.astype("float64") for each in (one, again, two))
        if not np.isfinite(one).all():
            raise RuntimeError(
                "The predictions of `model` for `examples` must be finite; give examples "
                "within the bounds of its inputs. Received: NaN or infinite predictions"
            )
        tolerance = relative_tolerance * max(1e-3, np.abs(one).max(initial=0.0))
        close = {"rtol": 0, "atol": tolerance}
        if np.allclose(one, again, **close) and not np.allclose(one, two, **close):
            raise RuntimeError(
                "The written model must predict what the model predicts. Received: outputs "
                f"that differ by {np.abs(one - two).max():.2g}, more than {tolerance:.2g}"
            )

"""SavedModels for model servers."""

from __future__ import annotations

import contextlib
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import files, graphs, nesting, validation
from nsl_keras.backend import require_shapes
from nsl_keras.few_shot.class_logits import named_classes
from nsl_keras.few_shot.episodic_learner import EpisodicLearner
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.similarity.folding import fold
from nsl_keras.training import data

__all__ = ["save_model"]

#: A function of a batch of inputs, in the form that the model takes.
Function = Callable[[Any], Any]


def save_model(
    model: keras.Model,
    filepath: str | pathlib.Path,
    signatures: Mapping[str, Function] | None = None,
    preprocessing: Function | None = None,
    examples: Any = None,
    k: int = 5,
) -> None:
    """Writes a model as a TensorFlow SavedModel with named signatures.

    | signature | outputs |
    |---|---|
    | `serve`, also named `serving_default` | the predictions |
    | `classify` | `class`, the name of the class, and `probabilities` |
    | `unadapted` | the predictions before adaptation |
    | `features` | the features, of shape `(batch, features)` |
    | `neighbors` | `entries`, `classes`, `weights`, `values`, `before` and `after` |

    `classify` needs TensorFlow and a model that ends in `few_shot.ClassLogits`, as `adapt`
    returns. Only a `MetaNeighborhoodModel` gets the last three signatures. `entries` are
    the `indices` of `MetaNeighborhoodModel.neighbors`, which explains the other outputs,
    and `classes` the classes of a classifier's entries.

    A single input is named `inputs`. Several inputs keep their names or, in a dict, their
    keys: `{"both": [a, b]}` becomes `both_0` and `both_1`, and an underscore replaces all
    that is no letter or digit. The method `serve` of the loaded model, and
    `keras.layers.TFSMLayer`, take the model's structure. A few-shot learner takes
    `support_images`, `support_labels` (int32) and `query_images`; on TensorFlow the set
    sizes may vary. A single output is named `output_0`; outputs in a dict keep their keys.

    The SavedModel needs neither nsl_keras nor Keras, and takes any batch size above 0. A
    request with wrong shapes fails, but a model of images of any size gives images that are
    too small for it meaningless outputs. Inputs are not checked for NaN.

    Static similarities are folded if `nsl_keras.convert.fold` can. The SavedModel is
    compared with the model and then renamed into place, so readers never see a part of it.

    Args:
        model: A built Keras model with any structure of inputs, or a few-shot learner.
            Instead of a `few_shot.Finetuner`, pass what its `adapt` returns.
        filepath: Local folder to write, which must not exist yet. Servers read
            `name/version`, for example `"digits/1"`.
        signatures: Further signatures by name, or replacements of those above, each a
            function from a batch of the model's inputs to tensors whose first axis is the
            batch. One that looks up words must be a Keras model or layer, so that its
            vocabulary is written too.
        preprocessing: Keras model, layer or other function that returns the model's inputs.
            It becomes part of every signature; for words see `signatures`. For bytes of any
            size pass a model of `keras.Input((None, None, 3), dtype="uint8")`. It must cast
            them to float32 before `keras.layers.Resizing`, which rounds bytes, but not in
            a graph. A layer or function takes the size and dtype of `examples`.
        examples: Batch of inputs on which the SavedModel is compared with `model`; `None`
            draws random numbers. Required unless the inputs go to a functional model, have
            known sizes, and contain no text.
        k: int, the number of `neighbors`.

    Raises:
        ValueError: If `filepath` is remote or exists, the model is not built, two inputs
            share a name, `examples` are needed, ragged or invalid, or `k` exceeds the
            dictionary.
        RuntimeError: If the predictions of the SavedModel differ from the model's by more
            than rounding, or the noise of a random model, explains.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
    >>> x = np.ones((2, 8), "float32")
    >>> model.build(x.shape)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nsl_keras.export.save_model(model, f"{folder}/1", examples=x)
    ...     served = tf.saved_model.load(f"{folder}/1")
    >>> served.serve(x).shape
    TensorShape([2, 3])
    """
    path = files.local(filepath, "filepath")
    demand = "a folder that does not exist yet; for a Keras file call `model.save`"
    fits = not path.exists() and path.suffix not in (".keras", ".h5")
    validation.require(fits, "filepath", demand, str(filepath))
    demand = "a Keras model; of a `few_shot.Finetuner`, pass what its `adapt` returns"
    validation.require(isinstance(model, keras.layers.Layer), "model", demand, model)
    validation.require_built(model, "export.save_model")
    dense = examples is None or data.is_in_memory(examples)
    demand = "a batch of dense arrays, in the structure of the inputs"
    validation.require(dense, "examples", demand, type(examples))
    examples = None if examples is None else data.gather(examples)[0]
    inputs = _inputs_of(model, preprocessing, examples)
    served, further = model, dict(signatures or {})
    with contextlib.suppress(ValueError), warnings.catch_warnings(action="ignore"):
        # Without a plain equivalent, the model itself is written.
        served = model if isinstance(model, EpisodicLearner) else fold(model)
    last = (getattr(model, "layers", None) or [model])[-1]
    names = getattr(model, "class_names", getattr(last, "class_names", None))
    functions = _signatures_of(served, k, names) | further

    def guarded(function: Function) -> Function:
        def serve(batch: Any) -> Any:
            # Wrong shapes may end a server's process.
            batch = require_shapes(batch, inputs)
            return function(batch if preprocessing is None else preprocessing(batch))

        return serve

    if examples is None:
        draw = np.random.default_rng(0).random
        examples = tree.map_structure(lambda spec: draw((3, *spec.shape[1:])), inputs)
    batch = tree.map_structure(
        lambda array, spec: ops.convert_to_tensor(array, spec.dtype), examples, inputs
    )
    expected_shapes = [spec.shape for spec in tree.flatten(inputs)]
    shapes = [tuple(each.shape) for each in tree.flatten(batch)]
    fit = all(map(validation.fits, shapes, expected_shapes))
    demand = f"of the shapes {expected_shapes}; or pass `preprocessing`"
    validation.require(fit, "examples", demand, shapes)
    predict = guarded(further.get("serve", lambda given: model(given, training=False)))
    expected = predict(batch), predict(batch)
    archive = keras.export.ExportArchive()
    for name, function in functions.items():
        archive.add_endpoint(name, guarded(function), input_signature=[inputs])
    for part in (served, preprocessing, *functions.values()):
        for table in _tables_in(part):
            archive.track(table)
    # Compiled, half precision rounds differently.
    tolerance = 0.05 if model.compute_dtype.endswith("16") else 1e-4
    with contextlib.ExitStack() as contexts:
        scratch = contexts.enter_context(files.replacing(path))
        if isinstance(served, MetaNeighborhoodModel):
            contexts.enter_context(served.neighborhood.constants.used())
        archive.write_out(str(scratch), verbose=False)  # It traces the functions.
        _compare(scratch, batch, expected, tolerance)


def _inputs_of(model: keras.Model, preprocessing: Any, examples: Any) -> Any:
    """Returns the inputs of the signatures: a structure of `keras.InputSpec` with names."""
    source: Any = model.backbone if isinstance(model, MetaNeighborhoodModel) else model
    source = preprocessing or source
    known, tensors = False, examples
    if graphs.is_graph(source) and source.built:
        tensors, _ = graphs.symbols_of(source)
        symbols = tree.flatten(tensors)
        known = all(None not in x.shape[1:] and x.dtype != "string" for x in symbols)
    demand = (
        "given, unless the inputs go to a functional model, have known sizes, and contain "
        "no text"
    )
    validation.require(known or examples is not None, "examples", demand, examples)
    inputs = tree.map_structure(_spec, tensors)
    specs, names = tree.flatten(inputs), []
    for path, spec in tree.flatten_with_path(inputs):
        place = "_".join(map(str, path))
        names.append(place if isinstance(inputs, dict) else spec.name or f"inputs_{place}")
    if isinstance(model, EpisodicLearner):
        names = ["support_images", "support_labels", "query_images"]
        if model.classifies:
            specs[1].dtype = "int32"
        if keras.backend.backend() == "tensorflow":
            for spec in specs:  # Any number of images.
                spec.shape = (None, None, *spec.shape[2:])
    elif len(specs) == 1 and not isinstance(inputs, dict):
        names = ["inputs"]
    for spec, name in zip(specs, names, strict=True):
        spec.name = re.sub(r"\W", "_", name)  # As arguments of a function.
    unique = len({spec.name for spec in specs}) == len(specs)
    demand = "named differently, by letters, digits and underscores alone"
    validation.require(unique, "inputs", demand, names)
    return inputs


def _tables_in(part: Any) -> Iterator[Any]:
    """Yields the lookup tables in a layer: an archive of Keras finds variables alone."""
    import tensorflow as tf

    kind = tf.saved_model.experimental.TrackableResource
    if isinstance(part, keras.layers.Layer):
        yield from (each for each in nesting.values_in(part) if isinstance(each, kind))


def _spec(tensor: Any) -> keras.InputSpec:
    """Returns the input of an array or symbol, for any batch size."""
    is_text = getattr(tensor.dtype, "kind", "") in ("U", "S", "O")
    dtype = "string" if is_text else keras.backend.standardize_dtype(tensor.dtype)
    dtype = keras.config.floatx() if dtype == "float64" else dtype  # NumPy's default.
    name = getattr(tensor, "name", None)
    return keras.InputSpec(shape=(None, *tensor.shape[1:]), dtype=dtype, name=name)


def _signatures_of(model: Any, k: int, names: Any) -> dict[str, Function]:
    functions: dict[str, Function] = {"serve": lambda x: model(x, training=False)}

    def classify(inputs: Any) -> dict[str, Any]:
        import tensorflow as tf

        return named_classes(model(inputs, training=False), names, tf.gather)

    def neighbors(inputs: Any) -> dict[str, Any]:
        found = model.neighbors_of_batch(inputs, k)._asdict()
        found["entries"] = found.pop("indices")
        del found["output_changes"]
        if model.task == "classification":
            found["classes"] = ops.argmax(found["values"], axis=-1)
        return found

    if names and keras.backend.backend() == "tensorflow":
        functions["classify"] = classify
    if isinstance(model, MetaNeighborhoodModel):
        functions |= {
            "unadapted": lambda x: model(x, training=False, adapt=False),
            "features": lambda x: model.features(x, training=False),
            "neighbors": neighbors,
        }
    return functions


def _compare(folder: pathlib.Path, batch: Any, expected: Any, tolerance: float) -> None:
    """Raises unless the SavedModel predicts what the model has predicted, twice."""
    import tensorflow as tf  # Under JAX too, SavedModels are TensorFlow's.

    loaded = tf.saved_model.load(str(folder))
    received = loaded.serve(tree.map_structure(ops.convert_to_numpy, batch))
    for tensors in zip(*map(tree.flatten, (*expected, received)), strict=True):
        one, again, two = map(ops.convert_to_numpy, tensors)
        if one.dtype.kind in "OSU":
            continue  # Strings.
        noise = np.abs(one - again).max(initial=0)  # Of a random model.
        bound = 10 * noise + tolerance * np.abs(one).max(initial=1e-3)
        if one.shape != two.shape or not np.all(np.abs(one - two) <= bound):
            raise RuntimeError(
                "The SavedModel must predict what the model predicts for `examples`; "
                "`preprocessing` and `signatures` must compute in a graph what they "
                f"compute eagerly. Received: {two} instead of {one}"
            )

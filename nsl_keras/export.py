"""SavedModels in the layout that serving systems read: `folder/version/`.

Served models need neither `nsl_keras` nor Keras, and take any batch size. A reader sees
a version whole or not at all.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import logging
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import at_any_batch_size, require_shapes
from nsl_keras.few_shot.episodic_learner import EpisodicLearner
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.similarity.folding import fold
from nsl_keras.similarity.recurrent import similarities_of
from nsl_keras.training import files
from nsl_keras.training.checks import finite_examples, mark_non_finite

#: A function of a batch of inputs, in the form that the model takes.
Function = Callable[[Any], Any]

#: Number of examples on which the written model is compared.
_DRAWN = 3

_INPUTS_OF_EPISODES = ("support_images", "support_labels", "query_images")


def save_model(
    model: keras.Model,
    folder: str | pathlib.Path,
    version: int = 1,
    input_shape: Any = None,
    signatures: Mapping[str, Function] | None = None,
    preprocessing: Function | None = None,
    examples: Any = None,
    k: int | None = None,
) -> pathlib.Path:
    """Writes a model as a TensorFlow SavedModel with named signatures.

    | signature | outputs |
    |---|---|
    | `serving_default`, also named `serve` | what the model predicts |
    | `unadapted` | the predictions before adaptation |
    | `features` | the features, of shape `(batch, features)` |
    | `neighbors` | `entries`, `weights`, `values` and `classes` of the `k` dictionary
      entries of largest attention: their numbers and attention, of shape `(batch, k)`;
      their class probabilities, or a regression's targets, of shape `(batch, k,
      outputs)`; and, in classification, their most probable classes |

    All but the first are those of a `MetaNeighborhoodModel`. A single input is named
    `inputs`; several have the names of the model's, or their keys. Those of a few-shot
    learner are `support_images`, `support_labels` (int32) and `query_images`. A single
    output is named `output_0`; several in a dict have their keys.

    Inputs of another rank or size, and inputs whose batch sizes differ, are an error of
    that request. An example with a NaN or an infinity gets NaN outputs (-1 where they
    are integers), and the other examples of its batch what they get without it. A batch
    may be empty; of a model that was written under JAX it may not.

    Static similarities are folded first, where `nsl_keras.convert.fold` can. The version
    is written aside, loaded, compared with the model, and moved to its place in one step:
    a killed export leaves the folder as it was, but for a hidden folder that the next one
    removes.

    Args:
        model: A built Keras model with any structure of inputs, or a few-shot learner.
        folder: Folder of the model's versions; it is made if missing.
        version: int of at least 1, the subfolder written.
        input_shape: Shape of the inputs without the batch axis, or a list or dict of
            shapes; `None` takes it from the model, or from the preprocessing.
        signatures: Further signatures by name, each a function from a batch of inputs,
            as the model takes it, to tensors whose first axis is the batch. They replace
            those above that have the same name; what replaces `serving_default` has
            both of its names, and is what the written model is compared with.
        preprocessing: Function of the inputs, such as a Keras layer or model, whose
            outputs are the model's inputs. It becomes part of every signature.
        examples: Batch of inputs on which the written model is compared with `model`;
            `None` draws normal numbers.
        k: int, the number of `neighbors`; `None` is 5, or all where there are fewer.

    Returns:
        The path written, `folder/version`.

    Raises:
        ValueError: If that path exists already (nothing is overwritten), the model is no
            Keras model, is not built or has weights that are not finite, its input shape
            is unknown, `examples` are not such inputs, `k` is larger than the
            dictionary or given without one, or `signatures` hold one under two names.
        ImportError: If TensorFlow is not installed.
        RuntimeError: If the written model does not predict what `model` predicts, or that
            is not finite.

    Example:

    >>> import pathlib, tempfile
    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
    >>> model.build((None, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = nsl_keras.export.save_model(model, folder)
    ...     (path / "saved_model.pb").exists(), path.name
    (True, '1')
    """
    _require_tensorflow()
    version = validation.positive_integer(version, "version")
    path = pathlib.Path(folder) / str(version)
    if path.exists():
        raise _taken(path)
    _require_exportable(model)
    inputs = _Inputs(_specify(model, preprocessing, input_shape))
    drawn = _draw(model, inputs) if examples is None else _checked(examples, inputs)
    prepare = preprocessing or (lambda given: given)
    further = dict(signatures or {})
    if "serving_default" in further:
        if "serve" in further:
            raise ValueError(
                "`signatures` must not hold both `serve` and `serving_default`, which are "
                f"names of one. Received: signatures={list(further)}"
            )
        further["serve"] = further.pop("serving_default")
    served = {**_predictions_of(model, k), **further}
    predict = further.get("serve", lambda given: model(given, training=False))
    archive = keras.export.ExportArchive()
    for name, function in served.items():
        # It finds the variables that are used: those that are not, need not be served.
        archive.add_endpoint(
            name,
            _signature(function, prepare, inputs),
            input_signature=inputs.specifications,
        )
    with files.replacing(path) as scratch:
        archive.write_out(str(scratch), verbose=False)
        batch = inputs.tensors(drawn)
        given = {
            each.name: tensor
            for each, tensor in zip(inputs.specifications, batch, strict=True)
        }
        expected = predict(prepare(inputs.pack(batch)))
        _compare(scratch, given, expected, _relative_tolerance(model, expected))
        if path.exists():  # Another process was faster.
            raise _taken(path)
    return path


def _require_tensorflow() -> None:
    try:
        import tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(
            "`save_model` writes TensorFlow's SavedModel, and needs TensorFlow on either "
            'backend: pip install "nsl_keras[tensorflow-cpu]".'
        ) from error


def _taken(path: pathlib.Path) -> ValueError:
    return ValueError(
        f"`folder` must not hold version {path.name} yet: {path} exists, and nothing is "
        f"overwritten. Received: folder={str(path.parent)!r}, version={path.name}"
    )


def _require_exportable(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a Keras model. Received: model={model!r} of type "
            f"{type(model).__name__!r}"
        )
    if not model.built:
        raise ValueError(
            f"`model` must be built before export. Received: unbuilt {model.name!r}"
        )
    for weight in model.weights:
        if not keras.backend.is_float_dtype(weight.dtype):
            continue
        if not np.all(np.isfinite(ops.convert_to_numpy(ops.cast(weight, "float32")))):
            raise ValueError(
                "`model` must have finite weights. Received: NaN or infinite entries in "
                f"{weight.path!r}"
            )


# What goes in.


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What a model takes.

    Attributes:
        structure: A `keras.InputSpec`, or a list or dict of them, each with a name.
    """

    structure: Any

    @property
    def specifications(self) -> list[keras.InputSpec]:
        """The inputs one by one."""
        return keras.tree.flatten(self.structure)

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Tensors, one by one, in the form that the model takes."""
        return keras.tree.pack_sequence_as(self.structure, list(tensors))

    def tensors(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays as tensors of the inputs' dtypes."""
        return [
            ops.convert_to_tensor(array, dtype=each.dtype)
            for array, each in zip(arrays, self.specifications, strict=True)
        ]


def _specify(model: keras.Model, preprocessing: Any, input_shape: Any) -> Any:
    """What a model takes, as a structure of specifications with names."""
    known = _known_inputs(model, preprocessing)
    structure = known if input_shape is None else _of_shapes(input_shape)
    if structure is None:
        raise ValueError(
            "`input_shape` must be given for a model whose input shape is not recorded. "
            f"Received: input_shape={input_shape}, model={model.name!r}"
        )
    found = keras.tree.flatten(structure)
    declared = keras.tree.flatten(known) if known is not None else []
    if len(declared) == len(found):
        for each, like in zip(found, declared, strict=True):
            each.dtype, each.name = like.dtype, like.name
    if isinstance(structure, dict):
        for key, each in structure.items():
            if isinstance(each, keras.InputSpec):
                each.name = key
    elif len(found) == 1:
        found[0].name = "inputs"
    elif isinstance(model, EpisodicLearner):
        for each, name in zip(found, _INPUTS_OF_EPISODES, strict=True):
            each.name = name
            each.dtype = "int32" if name == "support_labels" else each.dtype
    for number, each in enumerate(found):
        each.name = each.name or f"inputs_{number}"
    return structure


def _known_inputs(model: keras.Model, preprocessing: Any) -> Any:
    """What functional models declare, or what the model was built for; else `None`."""
    declaring = model.backbone if isinstance(model, MetaNeighborhoodModel) else model
    each: Any
    for each in (preprocessing, declaring):
        if rewiring.is_graph(each) and hasattr(each, "inputs"):
            tensors = each.inputs[0] if isinstance(each, keras.Sequential) else each.input
            return keras.tree.map_structure(
                lambda tensor: _specification(tensor.shape, tensor.dtype, tensor.name),
                tensors,
            )
    shape = (model.get_build_config() or {}).get("input_shape")
    return shape if shape is None else _of_shapes(shape, with_batch=True)


def _specification(
    shape: Sequence[int | None], dtype: str | None = None, name: str | None = None
) -> keras.InputSpec:
    """An input of any batch size; the shape has a batch axis."""
    return keras.InputSpec(
        shape=(None, *shape[1:]), dtype=dtype or keras.config.floatx(), name=name
    )


def _of_shapes(shapes: Any, with_batch: bool = False) -> Any:
    """Specifications of inputs of these shapes."""
    if isinstance(shapes, Mapping):
        return {key: _of_shapes(each, with_batch) for key, each in shapes.items()}
    if all(each is None or isinstance(each, (int, np.integer)) for each in shapes):
        return _specification(shapes if with_batch else (None, *shapes))
    return [_of_shapes(each, with_batch) for each in shapes]


def _checked(examples: Any, inputs: _Inputs) -> list[Any]:
    """Examples one by one, if they are inputs of the model."""
    arrays = keras.tree.flatten(examples)
    names = [each.name for each in inputs.specifications]
    if len(arrays) != len(names):
        raise ValueError(
            f"`examples` must be arrays for the inputs {', '.join(names)}. "
            f"Received: {len(arrays)} arrays"
        )
    for array, name in zip(arrays, names, strict=True):
        validation.finite(array, f"examples: {name}")
    return arrays


def _draw(model: keras.Model, inputs: _Inputs) -> list[np.ndarray]:
    """Random examples."""
    random = np.random.default_rng(0)
    drawn = []
    for each in inputs.specifications:
        shape = (_DRAWN, *each.shape[1:])
        if None in shape or each.dtype == "string":
            raise ValueError(
                "`examples` must be given for a model with inputs of unknown sizes, or of "
                f"strings. Received: input {each.name!r} of shape {tuple(each.shape)} and "
                f"dtype {each.dtype}"
            )
        if isinstance(model, EpisodicLearner) and each.name == "support_labels":
            drawn.append(np.broadcast_to(np.arange(shape[1]) % model.ways, shape))
        elif keras.backend.is_float_dtype(each.dtype):
            drawn.append(random.normal(size=shape))
        else:
            drawn.append(random.integers(2, size=shape))
    return drawn


# What is served.


def _predictions_of(model: keras.Model, k: int | None) -> dict[str, Function]:
    """The signatures that a model has by itself."""
    if not isinstance(model, MetaNeighborhoodModel):
        if k is not None:
            raise ValueError(
                "`k` must be None for a model without a dictionary. "
                f"Received: k={k}, model={model.name!r}"
            )
        plain = _folded(model)
        return {"serve": lambda inputs: plain(inputs, training=False)}
    neighborhood, backbone = model.neighborhood, _folded(model.backbone)
    if k is None:
        k = min(5, model.num_neighbors)

    def features(inputs: Any) -> Any:
        return inputs if backbone is None else backbone(inputs, training=False)

    def neighbors(inputs: Any) -> dict[str, Any]:
        nearest = neighborhood.nearest(features(inputs), k)
        found = {
            "entries": nearest.indices,
            "weights": nearest.weights,
            "values": nearest.values,
        }
        if model.task == "classification":
            found["classes"] = ops.argmax(nearest.values, axis=-1)
        return found

    return {
        "serve": lambda inputs: neighborhood(features(inputs)),
        "unadapted": lambda inputs: neighborhood(features(inputs), adapt=False),
        "features": features,
        "neighbors": neighbors,
    }


def _folded(model: Any) -> Any:
    """A plain model that computes the same, where there is one; else the model."""
    if not rewiring.is_graph(model) or not any(
        map(similarities_of, rewiring.layers(model))
    ):
        return model
    try:
        return fold(model)
    except ValueError as error:
        logging.info("%s is exported as it is: %s", model.name, error)
        return model


def _signature(
    function: Function, prepare: Function, inputs: _Inputs
) -> Callable[..., Any]:
    """A function of flat tensors that answers good examples and marks the others."""

    def serve(*tensors: Any) -> Any:
        checked = require_shapes(tensors, [each.shape for each in inputs.specifications])
        finite = finite_examples(checked)
        outputs = at_any_batch_size(
            lambda batch: function(prepare(inputs.pack(batch))), _without(checked, finite)
        )
        return mark_non_finite(outputs, finite)

    return serve


def _without(tensors: Sequence[Any], finite: Any) -> list[Any]:
    """Tensors with zeros in place of what is no number, which a cast might not stand."""
    if finite is None:
        return list(tensors)

    def cleared(tensor: Any) -> Any:
        if not keras.backend.is_float_dtype(tensor.dtype):
            return tensor
        keep = ops.reshape(finite, (-1, *(1 for _ in tensor.shape[1:])))
        return ops.where(keep, tensor, ops.zeros_like(tensor))

    return [cleared(tensor) for tensor in tensors]


# What is written.


def _relative_tolerance(model: keras.Model, outputs: Any) -> float:
    """How far two runs of a model may be apart: compiled, half precision rounds less."""
    dtypes = {each.compute_dtype for each in (model, *rewiring.sublayers(model))}
    dtypes |= {
        keras.backend.standardize_dtype(each.dtype) for each in keras.tree.flatten(outputs)
    }
    return 0.05 if dtypes & {"float16", "bfloat16"} else 1e-4


def _compare(
    folder: pathlib.Path,
    inputs: Mapping[str, Any],
    expected: Any,
    relative_tolerance: float,
) -> None:
    """Raises unless the written model answers, and predicts what is expected."""
    import tensorflow as tf  # Under JAX too, SavedModels are TensorFlow's.

    loaded = tf.saved_model.load(str(folder))
    given = {name: tf.constant(ops.convert_to_numpy(each)) for name, each in inputs.items()}
    for signature in loaded.signatures.values():
        signature(**given)
    received = loaded.serve(*given.values())
    pairs = zip(keras.tree.flatten(expected), keras.tree.flatten(received), strict=True)
    for number, pair in enumerate(pairs):
        one, two = (
            np.asarray(ops.convert_to_numpy(each)).astype("float64") for each in pair
        )
        if not np.isfinite(one).all():
            raise RuntimeError(
                "The predictions of `model` for `examples` must be finite; for an input "
                f"with bounds give examples within them. Received: output {number} with "
                "NaN or infinite entries"
            )
        tolerance = relative_tolerance * max(1e-3, np.abs(one).max(initial=0.0))
        difference = float(np.max(np.abs(one - two), initial=0.0))
        if one.shape != two.shape or not difference <= tolerance:
            raise RuntimeError(
                f"The written model must predict what the model predicts. Received: output "
                f"{number} of shapes {one.shape} and {two.shape}, which differs by "
                f"{difference:.2g}, more than {tolerance:.2g}"
            )

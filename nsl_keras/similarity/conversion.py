"""Neural similarities into plain models, and out of them again.

`add_similarity` starts where a trained network is: its outputs stay what they were until
the similarities are trained. `fold` ends with a plain Keras model that computes the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import keras
import numpy as np
from absl import logging
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.similarity import matrices
from nsl_keras.similarity.convolution import (
    NeuralSimilarityConv1D,
    NeuralSimilarityConv2D,
    NeuralSimilarityConv3D,
)
from nsl_keras.similarity.depthwise import NeuralSimilarityDepthwiseConv2D
from nsl_keras.similarity.neural_similarity import NeuralSimilarity
from nsl_keras.similarity.predictors import (
    KINDS,
    SharedSimilarityPredictor,
    SimilarityPredictor,
)
from nsl_keras.similarity.recurrent import SimilarityCell
from nsl_keras.similarity.shift import shifted
from nsl_keras.similarity.similarity_window import SimilarityWindow

Layer: TypeAlias = keras.layers.Layer

#: By exact type: of a class derived from these nobody knows what it computes.
_CONVERTIBLE: dict[type[Layer], type[SimilarityWindow]] = {
    keras.layers.Conv1D: NeuralSimilarityConv1D,
    keras.layers.Conv2D: NeuralSimilarityConv2D,
    keras.layers.Conv3D: NeuralSimilarityConv3D,
    keras.layers.DepthwiseConv2D: NeuralSimilarityDepthwiseConv2D,
}


def add_similarity(
    model: keras.Model,
    similarity: Any = "diagonal",
    predictor: Any = None,
    layers: Collection[str] | Callable[[Layer], bool] | None = None,
    freeze_backbone: bool = True,
    similarity_regularizer: Any = None,
    similarity_constraint: Any = None,
    learn_shape: bool = False,
    shape_threshold: float = 0.5,
) -> keras.Model:
    """Returns a new model whose convolutions have a neural similarity.

    The new model has the weights of `model` and, before training, its outputs: every `M`
    starts at the identity. Converted are `Conv1D`, `Conv2D`, `Conv3D` and
    `DepthwiseConv2D`, also in nested models and inside `TimeDistributed`; layers of other
    types, derived ones such as `Conv2DTranspose` included, are copied as they are. Names,
    dtype policies, regularizers and shared layers stay. `model` itself stays as it is, and
    shares no weights with the new model, which is not compiled.

    `fold` is the way back, and `summary` shows what was converted.

    Args:
        model: A built functional or Sequential model. A model of a class derived from
            these comes back as a plain functional or Sequential model.
        similarity: As for `nsl_keras.layers.NeuralSimilarityConv2D`. With `"sparse"` and
            fewer non-zero entries than taps the outputs change, which is warned about.
        predictor: `None` for static similarities. For dynamic ones:

            * `"sphere"`, `"full_sphere"` or `"cnn"`: each layer gets a predictor of its
              own, whose last kernel starts at zero;
            * a `nsl_keras.predictors.SharedSimilarityPredictor`: one for all layers, whose
              kernels must have the same number of taps;
            * a function that takes a layer and returns its predictor.

            The last two start at the model's outputs if their last kernel does start at
            zero (`output_kernel_initializer="zeros"`); otherwise this is warned about.
        layers: Which convolutions to convert: a collection of names; a function that
            takes a layer and returns whether to; or `None` for all that have more than one
            tap. 1x1 convolutions, whose `M` is a single number, are converted only if they
            are chosen. Grouped convolutions take no predictor: with one, they are not
            convertible.
        freeze_backbone: bool, whether the similarities and predictors alone are trained.
            Everything else is frozen then, the classifier too, and batch norms run in
            inference mode. To train the classifier besides, set `trainable` of its layers.
            To finetune the whole network later, set `trainable` of the model to `False`
            and then to `True`: TensorFlow passes over a value that is set already.
        similarity_regularizer: Regularizer of the static similarities' parameters.
        similarity_constraint: Constraint on the static similarities' parameters.
        learn_shape: bool, whether to learn the kernels' shapes too.
        shape_threshold: float in [0, 1), as for the layers.

    Returns:
        A `keras.Model`, Sequential if `model` is.

    Raises:
        ValueError: If `model` is subclassed, contains a subclassed model with
            convolutions, is not built, or has neural similarities already; if `layers`
            names a layer that is not convertible, or nothing is left to convert; if
            `predictor` or another argument does not suit the layers.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> plain = keras.Sequential([
    ...     keras.Input((16, 16, 3)),
    ...     keras.layers.Conv2D(8, 3, activation="relu", name="first"),
    ...     keras.layers.GlobalAveragePooling2D(),
    ...     keras.layers.Dense(5),
    ... ])
    >>> model = nsl_keras.convert.add_similarity(plain)
    >>> images = keras.random.normal((2, 16, 16, 3), seed=0)
    >>> bool(keras.ops.all(model(images) == plain(images)))
    True
    >>> [(variable.name, tuple(variable.shape)) for variable in model.trainable_variables]
    [('similarity', (9,))]

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 4, "Training from
        pretrained models": load the weights, add static or dynamic similarities, train
        these with the backbone fixed; optionally finetune the whole network.
    """
    similarity = matrices.get(similarity)
    found = rewiring.layers(model)
    _refuse_converted(model, found)
    _refuse_subclassed(found)
    chosen = _chosen(found, layers, grouped=predictor is None)
    predictor_of = _predictors(predictor, similarity, chosen)
    _warn_of_few_nonzeros(similarity, chosen)

    pairs: list[tuple[Layer, SimilarityWindow]] = []

    def replace(layer: Layer) -> list[Layer] | None:
        if not any(layer is each for each in chosen):
            return None
        new_layer = _CONVERTIBLE[type(layer)].from_config(
            {
                **layer.get_config(),
                # What was not trained in a frozen layer is its kernel, not its similarity.
                "trainable": True,
                "similarity": similarity,
                "similarity_regularizer": similarity_regularizer,
                "similarity_constraint": similarity_constraint,
                "predictor": predictor_of(layer),
                "learn_shape": learn_shape,
                "shape_threshold": shape_threshold,
                "kernel_trainable": layer.trainable and not freeze_backbone,
            }
        )
        pairs.append((layer, new_layer))
        return [new_layer]

    new_model = rewiring.rebuild(model, replace)
    for layer, new_layer in pairs:
        new_layer.kernel.assign(ops.convert_to_numpy(layer.kernel))
        if new_layer.bias is not None:
            new_layer.bias.assign(ops.convert_to_numpy(layer.bias))
    if freeze_backbone:
        for each in rewiring.layers(new_model):
            if not isinstance(each, NeuralSimilarity):
                each.trainable = False
    logging.info(
        "Neural similarities (%s, %s) were added to %d layers of %r: %s",
        type(similarity).__name__,
        "static" if predictor is None else "dynamic",
        len(chosen),
        model.name,
        _names(chosen),
    )
    return new_model


def fold(model: keras.Model) -> keras.Model:
    """Returns a plain Keras model that computes what a model with static similarities does.

    Each layer with a neural similarity becomes the Keras layer that it generalises, with
    the equivalent kernel `W^[u,c,o] = sum_t W[t,c,o] M[t,u]`; recurrent cells inside
    `keras.layers.RNN` and `keras.layers.Bidirectional` become Keras's own cells. Graph and
    names stay, and there is nothing to compute that the plain network would not.

    `"sparse"` with `nonzeros=1` is one spatial shift and a 1x1 convolution, and becomes
    that: zero padding and cropping, where there is something to shift, and a convolution
    with one tap in place of `T`. Where the shift depends on an image size that is not known
    (`padding="same"` with strides), it stays a convolution with the full kernel.

    Args:
        model: A built functional or Sequential model. It stays as it is, and shares no
            weights with the new one, which is not compiled.

    Returns:
        A `keras.Model` without layers of this package; Keras alone loads its file.

    Raises:
        ValueError: If `model` is subclassed or not built, if a similarity is dynamic, or
            if there are other layers of this package; the message names them.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = keras.Sequential([
    ...     keras.Input((16, 16, 3)),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(8, 3, similarity="unconstrained"),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(
    ...         8, 3, similarity=nsl_keras.similarities.Sparse(nonzeros=1)),
    ... ])
    >>> plain = nsl_keras.convert.fold(model)
    >>> [(type(layer).__name__, layer.kernel_size) for layer in plain.layers
    ...  if hasattr(layer, "kernel_size")]
    [('Conv2D', (3, 3)), ('Conv2D', (1, 1))]
    >>> images = keras.random.normal((2, 16, 16, 3), seed=0)
    >>> bool(keras.ops.max(keras.ops.abs(plain(images) - model(images))) < 1e-5)
    True

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 4, "Training and
        inference" (the equivalent weights are computed in advance), and Section 3.4,
        "Sparsity regularization" (a shift and a 1x1 convolution).
    """
    calls = rewiring.calls(model)
    found = rewiring.layers(model)
    _refuse_dynamic(found)
    _refuse_unfoldable(found)
    recurrent: list[tuple[Layer, list[np.ndarray]]] = []

    def replace(layer: Layer) -> list[Layer] | None:
        if isinstance(layer, SimilarityWindow):
            shapes = {call.input_shapes[0] for call in calls if call.layer is layer}
            return shifted(layer, shapes) or [layer.fold()]
        if isinstance(layer, NeuralSimilarity):
            return [layer.fold()]
        if _cells(layer):
            new_layer, weights = _folded_recurrent(layer)
            recurrent.append((new_layer, weights))
            return [new_layer]
        return None

    new_model = rewiring.rebuild(model, replace)
    for new_layer, weights in recurrent:
        new_layer.set_weights(weights)
    return new_model


def similarities_of(layer: Layer) -> list[NeuralSimilarity]:
    """Returns a layer if it has a similarity, or the similarities of its cells."""
    if isinstance(layer, NeuralSimilarity):
        return [layer]
    return [
        each for each in rewiring.sublayers(layer) if isinstance(each, NeuralSimilarity)
    ]


def is_foldable(layer: Layer) -> bool:
    """Whether `fold` can make a plain layer of this one."""
    parts = similarities_of(layer)
    return (
        bool(parts)
        and all(part.predictor is None for part in parts)
        and (_is_ours(layer) or bool(_cells(layer)))
    )


def _names(layers: Iterable[Layer]) -> str:
    return ", ".join(repr(layer.name) for layer in layers)


def _is_ours(layer: Layer) -> bool:
    return type(layer).__module__.partition(".")[0] == "nsl_keras"


# What may be converted.


def _refuse_converted(model: keras.Model, found: list[Layer]) -> None:
    converted = [layer for layer in found if similarities_of(layer)]
    if converted:
        raise ValueError(
            "`model` must have no neural similarities yet; choose all layers at once, or "
            f"`fold` it first. Received: model {model.name!r}, with similarities in "
            f"{_names(converted)}"
        )


def _refuse_subclassed(found: list[Layer]) -> None:
    for layer in found:
        if not isinstance(layer, keras.Model):
            continue
        inside = [each for each in rewiring.sublayers(layer) if type(each) in _CONVERTIBLE]
        if inside:
            raise ValueError(
                "`model` must be functional or Sequential, and so must the models in it "
                "that have convolutions. Received: the subclassed model "
                f"{layer.name!r} of type {type(layer).__name__!r}, with {_names(inside)}"
            )


def _chosen(
    found: list[Layer],
    layers: Collection[str] | Callable[[Layer], bool] | None,
    grouped: bool,
) -> list[Layer]:
    """Returns the layers to convert, in their order."""
    convolutions = [layer for layer in found if type(layer) in _CONVERTIBLE]
    convertible = [
        layer for layer in convolutions if grouped or getattr(layer, "groups", 1) == 1
    ]
    left_out = [layer for layer in convolutions if not any(layer is c for c in convertible)]
    with_taps = [layer for layer in convertible if math.prod(layer.kernel_size) > 1]
    because = (
        f" (grouped convolutions take no predictor: {_names(left_out)})" if left_out else ""
    )
    if layers is None:
        chosen = with_taps
        if chosen and left_out:
            logging.warning("Left as they are%s", because)
    elif callable(layers):
        chosen = [layer for layer in convertible if layers(layer)]
    elif isinstance(layers, (list, tuple, set, frozenset)) and all(
        isinstance(name, str) for name in layers
    ):
        unknown = sorted(set(layers) - {layer.name for layer in convertible})
        if unknown:
            raise ValueError(
                f"`layers` must name convertible layers: {_names(convertible)}{because}. "
                f"Received: {', '.join(map(repr, unknown))}"
            )
        chosen = [layer for layer in convertible if layer.name in layers]
    else:
        raise ValueError(
            "`layers` must be None, a list of names, or a function of a layer. "
            f"Received: layers={layers!r}"
        )
    if not chosen:
        raise ValueError(
            "`layers` must choose at least one layer; convertible are "
            f"{_names(with_taps) or 'none'}{because}. Received: layers={layers!r}"
        )
    return chosen


def _predictors(
    predictor: Any, similarity: matrices.Similarity, chosen: list[Layer]
) -> Callable[[Layer], Layer | None]:
    """Returns the function that gives each layer its predictor."""
    if predictor is None:
        return lambda layer: None
    if isinstance(predictor, str):
        validation.one_of(predictor, KINDS, "predictor")
        return lambda layer: _own_predictor(layer, predictor, similarity)
    if isinstance(predictor, SharedSimilarityPredictor):
        _refuse_other_taps(predictor, chosen)
        _warn_of_predictors([predictor])
        return lambda layer: predictor
    if isinstance(predictor, keras.layers.Layer) or not callable(predictor):
        raise ValueError(
            "`predictor` must be None, 'sphere', 'full_sphere', 'cnn', a "
            "`SharedSimilarityPredictor`, or a function that returns a layer's predictor; "
            f"another layer cannot serve several. Received: predictor={predictor!r}"
        )
    made = {id(layer): predictor(layer) for layer in chosen}
    _warn_of_predictors(made.values())
    return lambda layer: made[id(layer)]


def _own_predictor(
    layer: Layer, kind: str, similarity: matrices.Similarity
) -> SimilarityPredictor:
    return SimilarityPredictor(
        layer.kernel_size,
        kind=kind,
        similarity=similarity,
        strides=layer.strides,
        padding=layer.padding,
        data_format=layer.data_format,
        dilation_rate=layer.dilation_rate,
        # With it the predictor starts at zero, behind a batch norm too.
        output_kernel_initializer="zeros",
        kernel_regularizer=getattr(
            layer, "kernel_regularizer", getattr(layer, "depthwise_regularizer", None)
        ),
        dtype=layer.dtype_policy,
        name="predictor",
    )


def _refuse_other_taps(predictor: SharedSimilarityPredictor, chosen: list[Layer]) -> None:
    taps = math.prod(predictor.kernel_size)
    others = [layer for layer in chosen if math.prod(layer.kernel_size) != taps]
    if others:
        raise ValueError(
            f"A shared `predictor` serves kernels of as many taps as its own, {taps}; "
            f"choose such layers with `layers`. Received: {_names(others)}"
        )


def _warn_of_predictors(predictors: Iterable[Any]) -> None:
    for predictor in predictors:
        initializer = getattr(predictor, "output_kernel_initializer", None)
        if initializer is None or isinstance(initializer, keras.initializers.Zeros):
            continue
        warnings.warn(
            f"The predictor {predictor.name!r} does not start at zero, so that the outputs "
            'of the model change. With `output_kernel_initializer="zeros"` they do not.',
            stacklevel=4,
        )


def _warn_of_few_nonzeros(similarity: matrices.Similarity, chosen: list[Layer]) -> None:
    if not isinstance(similarity, matrices.Sparse) or similarity.nonzeros is None:
        return
    changed = [
        layer for layer in chosen if math.prod(layer.kernel_size) > similarity.nonzeros
    ]
    if changed:
        warnings.warn(
            f"A sparse similarity with nonzeros={similarity.nonzeros} cannot hold the "
            "identity of kernels with more taps, so that the outputs of the model change. "
            f"It drops taps of {_names(changed)}.",
            stacklevel=3,
        )


# What may be folded.


def _refuse_dynamic(found: list[Layer]) -> None:
    dynamic = [
        layer
        for layer in found
        if any(part.predictor is not None for part in similarities_of(layer))
    ]
    if dynamic:
        raise ValueError(
            "`model` must have static similarities alone: where `M` is predicted from the "
            f"input there is no equivalent kernel. Received: {_names(dynamic)} with a "
            "predictor"
        )


def _refuse_unfoldable(found: list[Layer]) -> None:
    foreign = [
        f"{layer.name!r} ({type(layer).__name__})"
        for layer in found
        if not is_foldable(layer)
        for each in [layer, *rewiring.sublayers(layer)]
        if any(base.__module__.startswith("nsl_keras.") for base in type(each).__mro__)
    ]
    if foreign:
        raise ValueError(
            "`model` must have no layers of nsl_keras that no plain Keras layer equals. "
            f"Received: {', '.join(dict.fromkeys(foreign))}"
        )


def _cells(layer: Layer) -> list[SimilarityCell]:
    """Returns the cells with a similarity in `keras.layers.RNN` or `Bidirectional`."""
    if type(layer) not in (keras.layers.RNN, keras.layers.Bidirectional):
        return []
    return [each for each in rewiring.sublayers(layer) if isinstance(each, SimilarityCell)]


def _folded_recurrent(layer: Layer) -> tuple[Layer, list[np.ndarray]]:
    """Returns a recurrent layer with plain cells, and the weights to give it once built."""
    if isinstance(layer, keras.layers.Bidirectional):
        forward, forward_weights = _folded_recurrent(layer.forward_layer)
        backward, backward_weights = _folded_recurrent(layer.backward_layer)
        both = keras.layers.Bidirectional(
            forward,
            merge_mode=layer.merge_mode,
            backward_layer=backward,
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
            name=layer.name,
        )
        return both, forward_weights + backward_weights
    if isinstance(layer.cell, keras.layers.StackedRNNCells):
        cells = [_folded_cell(cell) for cell in layer.cell.cells]
        cell = keras.layers.StackedRNNCells([cell for cell, _ in cells])
        weights = [weight for _, weights in cells for weight in weights]
    else:
        cell, weights = _folded_cell(layer.cell)
    config = {k: v for k, v in layer.get_config().items() if k != "cell"}
    return keras.layers.RNN(cell, **config), weights


def _folded_cell(cell: Layer) -> tuple[Layer, list[np.ndarray]]:
    plain = cell.fold() if isinstance(cell, SimilarityCell) else cell
    return type(plain).from_config(plain.get_config()), plain.get_weights()

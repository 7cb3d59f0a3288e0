"""Neural similarities into plain models, and out of them again.

`add_similarity` starts where a trained network is: its outputs stay what they were until
the similarities are trained. `fold` ends with a plain Keras model that computes the same.
"""

from __future__ import annotations

import collections
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import keras
import numpy as np
from absl import logging
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.similarity import matrices, predictor_cost, predictors, separable
from nsl_keras.similarity.comparison import NeuralSimilarity
from nsl_keras.similarity.convolution import (
    NeuralSimilarityConv1D,
    NeuralSimilarityConv2D,
    NeuralSimilarityConv3D,
    NeuralSimilarityDepthwiseConv2D,
)
from nsl_keras.similarity.predictors import SharedSimilarityPredictor
from nsl_keras.similarity.recurrent import (
    SimilarityCell,
    cells_of,
    is_foldable,
    similarities_of,
)

Layer: TypeAlias = keras.layers.Layer
Shape: TypeAlias = tuple[int | None, ...]

#: Layers of just these types are converted. A class derived from one of them may compute
#: something else.
_CONVERTIBLE: dict[type[Layer], type[NeuralSimilarity]] = {
    keras.layers.Conv1D: NeuralSimilarityConv1D,
    keras.layers.Conv2D: NeuralSimilarityConv2D,
    keras.layers.Conv3D: NeuralSimilarityConv3D,
    keras.layers.DepthwiseConv2D: NeuralSimilarityDepthwiseConv2D,
    # Of a separable convolution the depthwise part, which becomes a layer of its own.
    keras.layers.SeparableConv2D: NeuralSimilarityDepthwiseConv2D,
}

#: The `stacklevel` of a warning in `add_similarity` that names the line which called it:
#: `reaching_backbones` stands between.
_CALLER = 3


@rewiring.reaching_backbones
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
    verbose: Any = "auto",
) -> keras.Model:
    """Returns a new model whose convolutions have a neural similarity.

    The new model has the weights of `model` and, before training, its outputs: every `M`
    starts at the identity. Converted are `Conv1D`, `Conv2D`, `Conv3D`, `DepthwiseConv2D`
    and the depthwise part of `SeparableConv2D`, also in nested models and inside
    `TimeDistributed`; layers of other types, derived ones such as `Conv2DTranspose`
    included, are copied as they are. Names, dtype policies, regularizers and shared layers
    stay; a `SeparableConv2D` becomes two layers, the depthwise part with a name that ends
    in `_depthwise`, then the 1x1 convolution with the layer's own. `model` itself stays as
    it is, and shares no weights with the new model, which is not compiled.

    `fold` is the way back, and `summary` shows what was converted. A predictor that costs
    more than the convolution it serves is named in a logged warning.

    Args:
        model: A built functional or Sequential model. A model of a class derived from
            these comes back as a plain functional or Sequential model. A
            `MetaNeighborhoodModel` comes back as one, with such a backbone converted.
        similarity: As for `nsl_keras.layers.NeuralSimilarityConv2D`. With `"sparse"` and
            fewer non-zero entries than taps the outputs change, which is warned about.
        predictor: `None` for static similarities. For dynamic ones:

            * `"sphere"`, `"full_sphere"`, `"cnn"`, or a
              `nsl_keras.predictors.SimilarityPredictor`: each layer makes its own network;
            * a `nsl_keras.predictors.SharedSimilarityPredictor`: one for all layers, whose
              kernels must have the same number of taps;
            * a function that takes a layer and returns its predictor.

            Where a predictor does not start at zero, as with `start="published"`, the
            outputs of the model change, which is warned about: each predicts once for an
            image of noise.
        layers: Which convolutions to convert: a collection of names; a function that
            takes a layer and returns whether to; or `None` for all that have more than one
            tap. 1x1 convolutions, whose `M` is a single number, are converted only if they
            are chosen. Grouped convolutions take no predictor: with one, they are not
            convertible.
        freeze_backbone: bool, whether the similarities and predictors alone are trained.
            Everything else is frozen then, the classifier too, and batch norms run in
            inference mode (of a `MetaNeighborhoodModel` the backbone alone is frozen, and
            head and dictionary are trained). To train the classifier besides, set
            `trainable` of its layers. To finetune the whole network later, set `trainable`
            of the model to `False` and then to `True`: TensorFlow passes over a value that
            is set already.
        similarity_regularizer: Regularizer of the static similarities' parameters.
        similarity_constraint: Constraint on the static similarities' parameters.
        learn_shape: bool, whether to learn the kernels' shapes too.
        shape_threshold: float in [0, 1), as for the layers.
        verbose: 0 for silence, 1 for a progress bar over layers, 2 for a line at the end;
            `"auto"` for a bar where it takes longer than two seconds.

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
    validation.boolean(freeze_backbone, "freeze_backbone")
    found = rewiring.layers(model)
    _refuse_converted(model, found)
    _refuse_subclassed(found)
    chosen = _choose(found, layers, similarity, dynamic=predictor is not None)
    _warn_of_few_nonzeros(similarity, chosen)
    new_layers: list[NeuralSimilarity] = []
    places: dict[int, list[Layer]] = {}
    names = {layer.name for layer in found}
    made = _make_predictors(predictor, chosen)
    for layer, its_predictor in zip(chosen, made, strict=True):
        config, pointwise = layer.get_config(), []
        if isinstance(layer, keras.layers.SeparableConv2D):
            name = rewiring.unused_name(f"{layer.name}_depthwise", names)
            config = separable.depthwise_config(layer, name)
            pointwise = [separable.pointwise_convolution(layer)]
        config |= {
            # What was not trained in a frozen layer is its kernel, not its similarity.
            "trainable": True,
            "similarity": similarity,
            "similarity_regularizer": similarity_regularizer,
            "similarity_constraint": similarity_constraint,
            "predictor": its_predictor,
            "learn_shape": learn_shape,
            "shape_threshold": shape_threshold,
            "kernel_trainable": layer.trainable and not freeze_backbone,
        }
        try:
            new_layer = _CONVERTIBLE[type(layer)].from_config(config)
        except TypeError as error:
            # Keras puts one, with all of the config, around what the constructor says.
            if isinstance(error.__context__, ValueError):
                raise error.__context__ from None
            raise
        new_layers.append(new_layer)
        places[id(layer)] = [new_layer, *pointwise]
    new_model = rewiring.rebuild(model, lambda layer: places.get(id(layer)), verbose)
    for layer, new_layer in zip(chosen, new_layers, strict=True):
        is_separable = isinstance(layer, keras.layers.SeparableConv2D)
        kernel = layer.depthwise_kernel if is_separable else layer.kernel
        _set_weights(new_layer, kernel, layer)
    _warn_of_start(new_layers)
    if freeze_backbone:
        for each in rewiring.layers(new_model):
            if not isinstance(each, NeuralSimilarity):
                for part in (each, *rewiring.sublayers(each)):
                    part.trainable = False
    if predictor is not None:
        _warn_of_costly(new_layers)
    logging.info(
        "Neural similarities (%s, %s) were added to %d layers of %r: %s",
        type(similarity).__name__,
        "static" if predictor is None else "dynamic",
        len(chosen),
        model.name,
        _names(chosen),
    )
    return new_model


@rewiring.reaching_backbones
def fold(model: keras.Model, verbose: Any = "auto") -> keras.Model:
    """Returns a plain Keras model that computes what a model with static similarities does.

    Each layer with a neural similarity becomes the Keras layer that it generalizes, with
    the equivalent kernel `W^[u,c,o] = sum_t W[t,c,o] M[t,u]`; recurrent cells inside
    `keras.layers.RNN` and `keras.layers.Bidirectional` become Keras's own cells,
    `nsl_keras.layers.BatchNormalization` becomes `keras.layers.BatchNormalization`, and
    `nsl_keras.layers.CosineDense` a normalization to unit length with a
    `keras.layers.Dense`. Graph and names stay, and there is nothing to compute that the
    plain network would not.

    `"sparse"` with `nonzeros=1` is one spatial shift and a 1x1 convolution, and becomes
    that: zero padding and cropping, where there is something to shift, and a convolution
    with one tap in place of `T`. Where the shift depends on an image size that is not known
    (`padding="same"` with strides), it stays a convolution with the full kernel. What
    `add_similarity` made of a `SeparableConv2D` stays two layers, both of Keras's own.
    Before a convolution of integers, which Keras's own do not take, stands a cast.

    Each layer comes back with its own `trainable` flag: what `add_similarity` froze is
    frozen here too, and the layers that had a similarity are trained, with kernel and bias.
    To go on with the whole network, set `trainable` of the folded model to `False` and then
    to `True`.

    Args:
        model: A built functional or Sequential model, or a `MetaNeighborhoodModel` with
            such a backbone, which comes back as one with the backbone folded. It stays as
            it is, and shares no weights with the new one, which is not compiled.
        verbose: 0 for silence, 1 for a progress bar over layers, 2 for a line at the end;
            `"auto"` for a bar where it takes longer than two seconds.

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
    input_shapes: dict[int, list[Shape]] = collections.defaultdict(list)
    takes_integers: set[int] = set()
    # A nested model is made for its own inputs too, whose sizes may not be known.
    nested = [
        each
        for each in rewiring.sublayers(model)
        if rewiring.is_graph(each) and hasattr(each, "inputs")
    ]
    for call in itertools.chain.from_iterable(map(rewiring.calls, [model, *nested])):
        input_shapes[id(call.layer)] += call.input_shapes[:1]
        if not all(map(keras.backend.is_float_dtype, call.input_dtypes[:1])):
            takes_integers.add(id(call.layer))
    found = rewiring.layers(model)
    names = {layer.name for layer in found}
    _refuse_dynamic(found)
    _refuse_unfoldable(found)

    def replace(layer: Layer) -> list[Layer] | None:
        if cells_of(layer):
            return [_fold_recurrent(layer, input_shapes[id(layer)][0])]
        if isinstance(layer, NeuralSimilarity):
            shift = _as_shift(layer, input_shapes[id(layer)], names)
            cast = _casts(layer, names) if id(layer) in takes_integers else []
            return [*cast, *(shift or [layer.fold()])]
        if not _folds_itself(layer):
            return None
        folded = layer.fold()
        if isinstance(folded, keras.Model):
            _refuse_several_ranks(layer, input_shapes[id(layer)])
        return [folded]

    return rewiring.rebuild(model, replace, verbose)


def _names(layers: Iterable[Layer]) -> str:
    return ", ".join(repr(layer.name) for layer in layers)


def _set_weights(new_layer: Layer, kernel: Any, source: Layer) -> None:
    # Copies: on JAX two layers would share a buffer, which a training step donates.
    kernel = ops.convert_to_numpy(kernel)
    new_layer.kernel.assign(kernel.reshape(new_layer.kernel.shape))
    if new_layer.use_bias:
        new_layer.bias.assign(ops.convert_to_numpy(source.bias))
    rewiring.copy_activations(source, new_layer)


# Adding similarities.


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


def _choose(
    found: list[Layer],
    layers: Collection[str] | Callable[[Layer], bool] | None,
    similarity: matrices.Similarity,
    dynamic: bool,
) -> list[Layer]:
    """Returns the layers to convert, in their order."""
    convolutions = [layer for layer in found if type(layer) in _CONVERTIBLE]
    unsuited = {
        "grouped convolutions take no predictor": [
            layer for layer in convolutions if dynamic and getattr(layer, "groups", 1) > 1
        ],
        "a depthwise convolution takes no matrix over channels": [
            layer
            for layer in convolutions
            if not similarity.shared_by_channels and hasattr(layer, "depth_multiplier")
        ],
    }
    left = [layer for group in unsuited.values() for layer in group]
    convertible = [layer for layer in convolutions if layer not in left]
    with_taps = [layer for layer in convertible if _taps(layer) > 1]
    reasons = [f"{why}: {_names(group)}" for why, group in unsuited.items() if group]
    note = f" ({'; '.join(reasons)})" if reasons else ""
    if layers is None:
        chosen = with_taps
        if chosen and left:
            logging.warning("Left as they are%s", note)
    elif callable(layers):
        chosen = [layer for layer in convertible if layers(layer)]
    elif (
        isinstance(layers, Collection)
        and not isinstance(layers, str)
        and all(isinstance(name, str) for name in layers)
    ):
        unknown = sorted(set(layers) - {layer.name for layer in convertible})
        if unknown:
            raise ValueError(
                f"`layers` must name convertible layers: {_names(convertible)}{note}. "
                f"Received: {', '.join(map(repr, unknown))}"
            )
        chosen = [layer for layer in convertible if layer.name in layers]
    else:
        raise ValueError(
            "`layers` must be None, a list of names, or a function of a layer. "
            f"Received: layers={layers!r}"
        )
    for layer in chosen:
        if getattr(layer, "lora_enabled", False) or layer.quantization_mode:
            raise ValueError(
                "`layers` must choose layers without LoRA and quantization, which are made "
                f"for the plain product with the kernel. Received: layer {layer.name!r}"
            )
    if not chosen and layers is None:
        raise ValueError(
            "`model` must hold a convolution of more than one tap to convert: Conv1D, "
            f"Conv2D, Conv3D, DepthwiseConv2D or SeparableConv2D. Received: none{note}"
        )
    if not chosen:
        raise ValueError(
            "`layers` must choose at least one layer; convertible are "
            f"{_names(with_taps) or 'none'}{note}. Received: layers={layers!r}"
        )
    return chosen


def _taps(layer: Layer) -> int:
    return math.prod(layer.kernel_size)


def _make_predictors(predictor: Any, chosen: list[Layer]) -> list[Any]:
    """Returns what predicts the `M` of each layer, or `None`."""
    if isinstance(predictor, SharedSimilarityPredictor):
        others = [layer for layer in chosen if _taps(layer) != _taps(chosen[0])]
        if others:
            raise ValueError(
                "A shared `predictor` must be given to kernels of as many taps as the "
                f"first, {_taps(chosen[0])}; choose such layers with `layers`. "
                f"Received: {_names(others)}"
            )
    elif isinstance(predictor, keras.layers.Layer):
        raise ValueError(
            "`predictor` must be None, a name, a `SimilarityPredictor`, a "
            "`SharedSimilarityPredictor`, or a function that returns a layer's predictor. "
            f"Received: predictor={predictor!r}"
        )
    if callable(predictor) and not isinstance(predictor, keras.layers.Layer):
        return [predictors.get(predictor(layer)) for layer in chosen]
    return [predictors.get(predictor)] * len(chosen)


def _warn_of_start(layers: Iterable[Any]) -> None:
    # Measured, since a kind or a predictor of one's own may end in anything.
    moved = [each for each in layers if not _at_zero(each)]
    if moved:
        warnings.warn(
            f"The predictors of {_names(moved)} do not start at zero, so that the outputs "
            'of the model change. A `SimilarityPredictor` with `start="identity"` does, '
            "if its kind ends in `parts.output(...)`.",
            stacklevel=_CALLER + 1,
        )


def _at_zero(layer: Any) -> bool:
    """Whether a layer's predictor predicts zero for an image of noise."""
    if layer.predictor is None:
        return True
    _, *sizes = layer.get_build_config()["input_shape"]
    geometry = zip(layer.kernel_size, layer.strides, layer.dilation_rate, strict=True)
    first = 0 if layer.data_format == "channels_last" else 1
    for axis, (taps, stride, dilation) in enumerate(geometry, start=first):
        # Where a size is not known, one that gives some positions.
        sizes[axis] = sizes[axis] or (taps - 1) * dilation + stride + 1
    noise = np.random.default_rng(0).normal(size=(1, *sizes))
    inputs = ops.convert_to_tensor(noise, dtype=layer.compute_dtype)
    try:
        with keras.StatelessScope():  # A predictor of one's own may assign to its weights.
            prediction = layer.comparison.network(inputs, training=False)
    except Exception:
        # A model may be made where it cannot run, for example one that is channels-first
        # on a CPU: nothing is known of it there.
        return True
    return bool(ops.all(ops.equal(prediction, 0)))


def _warn_of_costly(layers: Iterable[Any]) -> None:
    costly = predictor_cost.name_costly(
        {each.name: predictor_cost.cost_ratio(each) for each in layers}
    )
    if costly is not None:
        logging.warning(costly)


def _warn_of_few_nonzeros(similarity: matrices.Similarity, chosen: list[Layer]) -> None:
    if not isinstance(similarity, matrices.Sparse) or similarity.nonzeros is None:
        return
    changed = [layer for layer in chosen if _taps(layer) > similarity.nonzeros]
    if changed:
        warnings.warn(
            f"A sparse similarity with nonzeros={similarity.nonzeros} cannot hold the "
            "identity of kernels with more taps, so that the outputs of the model change. "
            f"It drops taps of {_names(changed)}.",
            stacklevel=_CALLER + 1,
        )


# Folding.


def folds(found: list[Layer]) -> bool:
    """Whether `fold` takes a model of these layers."""
    return not (_dynamic(found) or _unfoldable(found))


def _dynamic(found: list[Layer]) -> list[Layer]:
    return [
        layer
        for layer in found
        if any(part.predictor is not None for part in similarities_of(layer))
    ]


def _refuse_dynamic(found: list[Layer]) -> None:
    dynamic = _dynamic(found)
    if dynamic:
        raise ValueError(
            "`model` must have static similarities alone: where `M` is predicted from the "
            f"input there is no equivalent kernel. Received: {_names(dynamic)} with a "
            "predictor"
        )


def _unfoldable(found: list[Layer]) -> list[Layer]:
    """Returns the layers of this package, or that hold such, that are not folded."""
    return [
        layer
        for layer in found
        if not (is_foldable(layer) or _folds_itself(layer))
        and any(map(_is_ours, [layer, *rewiring.sublayers(layer)]))
    ]


def _refuse_unfoldable(found: list[Layer]) -> None:
    others = [f"{each.name!r} ({type(each).__name__})" for each in _unfoldable(found)]
    if others:
        raise ValueError(
            "`model` must have no layers of nsl_keras but those with a static similarity, "
            "batch norms and cosine classifiers: no plain Keras layer computes what the "
            "others do. "
            f"Received: {', '.join(others)}"
        )


def _folds_itself(layer: Layer) -> bool:
    """Whether a layer has no similarity and is of a class of this package that folds."""
    ours = type(layer).__module__.startswith("nsl_keras.")
    return ours and hasattr(layer, "fold") and not similarities_of(layer)


def _is_ours(layer: Layer) -> bool:
    """Whether a layer is of a class of this package, or of one derived from it."""
    bases = type(layer).__mro__
    return any(base.__module__.startswith("nsl_keras.") for base in bases)


def _casts(layer: NeuralSimilarity, names: set[str]) -> list[Layer]:
    """Returns what stands before a plain layer of integers, which Keras's do not cast."""
    if not hasattr(layer, "kernel_size"):
        return []
    name = rewiring.unused_name(f"{layer.name}_cast", names)
    return [keras.layers.Rescaling(1.0, name=name, dtype=layer.dtype_policy)]


def _refuse_several_ranks(layer: Layer, input_shapes: Collection[Shape]) -> None:
    """Raises for a layer that becomes a model, which takes inputs of one rank."""
    ranks = sorted(set(map(len, input_shapes)))
    if len(ranks) > 1:
        raise ValueError(
            "`model` must call a layer that becomes several on inputs of one rank alone. "
            f"Received: layer {layer.name!r} of type {type(layer).__name__!r}, called on "
            f"inputs of ranks {ranks}"
        )


def _fold_recurrent(layer: Layer, input_shape: Shape) -> Layer:
    """Returns a recurrent layer with plain cells in place of those with a similarity."""
    if not similarities_of(layer):  # One side of a `Bidirectional`, of any class.
        folded = type(layer).from_config(layer.get_config())
        weights = layer.get_weights()
    elif isinstance(layer, keras.layers.Bidirectional):
        sides = [
            _fold_recurrent(side, input_shape)
            for side in (layer.forward_layer, layer.backward_layer)
        ]
        folded = keras.layers.Bidirectional(
            sides[0],
            merge_mode=layer.merge_mode,
            backward_layer=sides[1],
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
            name=layer.name,
        )
        weights = [weight for side in sides for weight in side.get_weights()]
    else:
        is_stack = isinstance(layer.cell, keras.layers.StackedRNNCells)
        plain = [
            cell.fold() if isinstance(cell, SimilarityCell) else cell
            for cell in (layer.cell.cells if is_stack else [layer.cell])
        ]
        cells = [type(cell).from_config(cell.get_config()) for cell in plain]
        config = {k: v for k, v in layer.get_config().items() if k != "cell"}
        folded = keras.layers.RNN(cells if is_stack else cells[0], **config)
        weights = [weight for cell in plain for weight in cell.get_weights()]
    folded.build(input_shape)
    folded.set_weights(weights)
    return folded


# Folding a sparse similarity with one entry, which is a spatial shift. With `M[t, u]` the
# one entry, output position `p` reads the input at `p * stride + u * dilation - padding`
# alone, and multiplies with `W[t] M[t, u]`.


def _as_shift(
    layer: NeuralSimilarity, input_shapes: Collection[Shape], names: set[str]
) -> list[Layer] | None:
    """Returns zero padding, cropping and a convolution with one tap, each where needed.

    Args:
        layer: A static layer, built.
        input_shapes: The shapes of the inputs that it is called on.
        names: Names that the model's layers have.

    Returns:
        The layers to call one after the other; `None` if the layer is no convolution with
        one entry in `M`, or if the shift would depend on sizes that are not known, or that
        differ.
    """
    if not hasattr(layer, "kernel_size"):
        return None
    if not isinstance(layer.similarity, matrices.Sparse) or layer.similarity.nonzeros != 1:
        return None
    matrix = np.abs(ops.convert_to_numpy(layer.similarity_matrix))
    _, read = np.unravel_index(np.argmax(matrix), matrix.shape)
    tap = tuple(int(each) for each in np.unravel_index(read, layer.kernel_size))
    channels_last = layer.data_format == "channels_last"
    shifts = {
        tuple(
            _shift(layer, axis, tap[axis], size)
            for axis, size in enumerate(shape[1:-1] if channels_last else shape[2:])
        )
        for shape in input_shapes
    }
    if len(shifts) != 1:
        return None
    known = [each for each in shifts.pop() if each is not None]
    if len(known) < layer.rank:
        return None
    # The padding first: then there is always enough to crop.
    padding: Any = tuple((max(before, 0), max(after, 0)) for before, after in known)
    cropping: Any = tuple((max(-before, 0), max(-after, 0)) for before, after in known)
    options = {"dtype": layer.dtype_policy, "data_format": layer.data_format}
    if layer.rank == 1:
        if not channels_last and np.any(cropping):
            return None  # `Cropping1D` is for channels-last sequences alone.
        padding, cropping = padding[0], cropping[0]
        if channels_last:
            del options["data_format"]
    chain = []
    zero_padding, crop = _PADDING_AND_CROPPING[layer.rank]
    if np.any(padding):
        name = rewiring.unused_name(f"{layer.name}_padding", names)
        chain.append(zero_padding(padding, name=name, **options))
    if np.any(cropping):
        name = rewiring.unused_name(f"{layer.name}_cropping", names)
        chain.append(crop(cropping, name=name, **options))
    return [*chain, _with_one_tap(layer, tap)]


_PADDING_AND_CROPPING = {
    1: (keras.layers.ZeroPadding1D, keras.layers.Cropping1D),
    2: (keras.layers.ZeroPadding2D, keras.layers.Cropping2D),
    3: (keras.layers.ZeroPadding3D, keras.layers.Cropping3D),
}


def _shift(layer: Any, axis: int, tap: int, size: int | None) -> tuple[int, int] | None:
    """Returns the zeros to put before and after an axis; to crop, where negative."""
    stride, dilation = layer.strides[axis], layer.dilation_rate[axis]
    offset, reach = tap * dilation, (layer.kernel_size[axis] - 1) * dilation
    if layer.padding == "valid":
        return -offset, offset - reach
    if layer.padding == "causal":
        return reach - offset, offset - reach
    if stride == 1:
        return reach // 2 - offset, offset - reach // 2
    if size is None:
        return None
    # "same": as many outputs as there are steps in the input, centred.
    last = (-(-size // stride) - 1) * stride
    start = offset - max(last + reach + 1 - size, 0) // 2
    # Any size between these gives as many outputs: the one that changes least.
    new_size = min(max(size - start, last + 1), last + stride)
    return -start, start + new_size - size


def _with_one_tap(layer: Any, tap: tuple[int, ...]) -> Layer:
    """Returns the plain layer with the equivalent kernel's one tap that is not zero."""
    ones = (1,) * layer.rank
    folded = layer.fold()
    geometry = {"kernel_size": ones, "padding": "valid", "dilation_rate": ones}
    plain = type(folded).from_config({**folded.get_config(), **geometry})
    shape: list[int | None] = [None] * (layer.rank + 2)
    shape[layer.channel_axis] = layer.input_spec.axes[layer.channel_axis]
    plain.build(tuple(shape))
    _set_weights(plain, ops.convert_to_numpy(folded.kernel)[tap], folded)
    return plain

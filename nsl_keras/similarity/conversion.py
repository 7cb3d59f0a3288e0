"""Adds neural similarities to plain models: `add_similarity`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection
from typing import Any

import keras

from nsl_keras import graphs, nesting, similarities, validation
from nsl_keras.backend import variable_scope
from nsl_keras.copying import copied
from nsl_keras.nesting import Layer, parts_of
from nsl_keras.similarity import convolution, dense, einsum, predictors, transposed
from nsl_keras.similarity.neural_similarity import NeuralSimilarity

#: The layer with a similarity for each Keras layer. Only layers of exactly these types are
#: converted, because derived classes may compute something else.
WITH_SIMILARITY: dict[type[Layer], Any] = {
    kind.plain: kind
    for kind in (
        convolution.NeuralSimilarityConv1D,
        convolution.NeuralSimilarityConv2D,
        transposed.NeuralSimilarityConv2DTranspose,
        convolution.NeuralSimilarityConv3D,
        dense.NeuralSimilarityDense,
        convolution.NeuralSimilarityDepthwiseConv2D,
        einsum.NeuralSimilarityEinsumDense,
        convolution.NeuralSimilaritySeparableConv2D,
    )
}


def add_similarity(
    model: keras.Model,
    similarity: Any = "diagonal",
    predictor: Any = None,
    layers: Collection[str] | str | Callable[[Layer], bool] | None = None,
    block_size: int | None = None,
    freeze_backbone: bool = True,
    train_classifier: bool = False,
    inplace: bool = False,
) -> keras.Model:
    """Returns an uncompiled model with a neural similarity `M` in its layers.

    The new model has the weights of `model` and, before training, its outputs, because
    every `M` starts at the identity, unless you choose another start: an `initializer`,
    fewer `nonzeros` than taps, a custom predictor, or `start="published"`.

    `Conv1D`, `Conv2D`, `Conv3D`, `Conv2DTranspose`, `DepthwiseConv2D`, `SeparableConv2D`
    (its depthwise kernel), `Dense` and `EinsumDense` can be converted at any depth: in
    nested models, and in layers that hold layers, such as
    `keras.layers.MultiHeadAttention`. All else stays as it is, derived classes too.

    Args:
        model: A built model that Keras can save, or with `inplace` any built model. In a
            `MetaNeighborhoodModel`, the backbone is converted.
        similarity: As in `nsl_keras.layers.NeuralSimilarityConv2D`.
        predictor: As in `nsl_keras.layers.NeuralSimilarityConv2D`. A
            `SharedSimilarityPredictor`, of which the model gets a new one of the same
            arguments, needs kernels of the same size; other recipes make one network per
            layer.
        layers: Which layers to convert: a collection of names or paths of layers, or of
            layers that contain them; a regular expression to search for in the path of a
            layer, for example `"attention.*query"`; or a function from a layer to a bool.
            `None` converts the convolutions whose kernel has more than one tap (position);
            with a `block_size`, or if no convolution has overlapping windows, the `Dense`
            and `EinsumDense` layers except the last of a functional or Sequential model.
        block_size: int or `None`, for `Dense`, `EinsumDense` and 1x1 convolutions; see
            `nsl_keras.layers.NeuralSimilarityDense`. `None` is one block of all features,
            at most 1,024 unless the similarity is diagonal.
        freeze_backbone: bool. `True` trains only the new similarities and predictors (and
            the head and dictionary of a `MetaNeighborhoodModel`), and batch norms run in
            inference mode; `nsl_keras.convert.unfreeze` unfreezes the model. `False`
            freezes nothing.
        train_classifier: bool, whether the classifier, the last layer with trainable
            weights, stays trainable when `freeze_backbone` freezes all others.
        inplace: bool, whether to change `model` itself and return it, as Keras's
            `enable_lora` does, which keeps its class, preprocessor and `generate`. Compile
            it again. Otherwise the two models share no weights.

    A `.keras` file cannot contain a similarity inside a layer whose config does not know
    it, such as the layers of attention: `fold` the model before you save it, or keep the
    trained weights with `nsl_keras.convert.save_task`.

    Raises:
        ValueError: If `model` is not built, if `layers` chooses none or names a layer that
            cannot be converted, or if an argument does not fit a layer.

    Example:

    >>> import nsl_keras
    >>> plain = nsl_keras.backbones.convnet4((16, 16, 3))
    >>> model = nsl_keras.convert.add_similarity(plain)
    >>> {variable.name for variable in model.trainable_variables}
    {'similarity'}

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 4. On features, with
        `"orthogonal"`, this is Orthogonal Finetuning (Qiu et al., NeurIPS 2023).
    """
    similarity, predictor = similarities.get(similarity), predictors.get(predictor)
    if hasattr(predictor, "shared_network"):  # Perhaps in use, or an error follows.
        predictor = predictor.from_config(predictor.get_config())
    validation.boolean(freeze_backbone, "freeze_backbone")
    validation.boolean(train_classifier, "train_classifier")
    validation.boolean(inplace, "inplace")
    fits = graphs.root_of(model) is model or not train_classifier
    demand = "False: a MetaNeighborhoodModel trains its head and dictionary anyway"
    validation.require(fits, "train_classifier", demand, train_classifier)
    model = model if inplace else copied(model)
    root = graphs.root_of(model)
    found = [*nesting.sublayers(root)]
    chosen = _choose(root, found, similarity, predictor, layers, block_size)
    sizes = [_block_size(each, predictor, block_size) for each in chosen]
    fits = block_size is None or any(each is not None for each in sizes)
    demand = "None: no chosen layer is dense, or a convolution of kernel size 1"
    validation.require(fits, "block_size", demand, block_size)
    saved = graphs.layers(root, graphs.saves_layers)
    are_unsaved = [each not in saved for each in chosen]
    fits = not any(are_unsaved) or not isinstance(predictor, keras.layers.Layer)
    demand = "None or a recipe for layers that other layers hold"
    validation.require(fits, "predictor", demand, predictor)
    trained = [graphs.classifier_of(root)] if train_classifier else []
    flags = [(each, each.trainable) for each in (root, *found, *root.variables)]
    kept = {id(part) for each in trained for part in (*parts_of(each), *each.variables)}
    if freeze_backbone:
        for part in (root, *found):
            part.trainable = False
        nesting.set_flags(pair for pair in flags if id(pair[0]) in kept)
    try:
        with variable_scope(root):
            for layer, is_unsaved, size in zip(chosen, are_unsaved, sizes, strict=True):
                kind, trains_kernel = WITH_SIMILARITY[type(layer)], layer.trainable
                kind.turn(layer, is_unsaved, trains_kernel, similarity, predictor, size)
    except Exception:
        for layer in chosen:
            if isinstance(layer, NeuralSimilarity):
                layer.become_plain()
        nesting.set_flags(flags)
        raise
    for layer in chosen:
        layer.trainable = True  # If it was frozen, only its kernel stays frozen.
    nesting.unfreeze_containers(root, [*chosen, *trained])
    nesting.forget_functions(model)
    return model


def _choose(
    model: Any,
    found: list[Any],
    similarity: Any,
    predictor: Any,
    layers: Any,
    block_size: int | None,
) -> list[Any]:
    ours = [each for each in found if _is_ours(each) and not graphs.is_graph(each)]
    inside = {id(part) for each in ours for part in nesting.sublayers(each)}
    suited = [
        layer
        for layer in found
        if type(layer) in WITH_SIMILARITY
        and layer.built
        and id(layer) not in inside
        and _suits(layer, similarity, predictor)
    ]
    if layers is None:
        chosen = [each for each in suited if _taps(each) > 1 and block_size is None]
        if not any(map(_overlaps, chosen)):  # As the patches of a vision transformer.
            end = graphs.ending(model)[0] if graphs.is_graph(model) else None
            dense = [each for each in suited if not hasattr(each, "kernel_size")]
            chosen = [each for each in dense if each is not end] or chosen
    elif isinstance(layers, str):
        chosen = [each for each in suited if re.search(layers, each.path)]
    elif callable(layers):
        chosen = [each for each in suited if layers(each)]
    else:
        of_names = [
            [each for each in suited if f"/{name}/" in f"/{each.path}/"] for name in layers
        ]
        named = [*itertools.chain(*of_names)] if all(of_names) else []
        chosen = [each for each in suited if each in named]
    if not chosen:
        paths = sorted(layer.path for layer in suited)
        raise ValueError(
            "`layers` must choose one or more layers of the types "
            f"{', '.join(each.__name__ for each in WITH_SIMILARITY)} that the similarity "
            f"suits, without one yet: {', '.join(map(repr, paths)) or 'there are none'}. "
            f"Received: layers={layers!r}, and model {model.name!r}"
        )
    return chosen


def _is_ours(layer: Any) -> bool:
    """Whether a layer's class is, or derives from, a class of this package."""
    return any(base.__module__.startswith("nsl_keras.") for base in type(layer).__mro__)


def _taps(layer: Any) -> int:
    return math.prod(getattr(layer, "kernel_size", ()))


def _overlaps(layer: Any) -> bool:
    """Whether the kernel of a convolution reads parts of the input more than once."""
    pairs = zip(layer.strides, layer.kernel_size, strict=True)
    return any(stride < size for stride, size in pairs)


def _block_size(layer: Any, predictor: Any, block_size: int | None) -> int | None:
    """Returns the argument `block_size` of a layer, `None` unless it reads features."""
    if not hasattr(layer, "kernel_size"):
        return block_size
    is_dense = WITH_SIMILARITY[type(layer)].filter_axes == (-1,) and _taps(layer) == 1
    if not is_dense or predictor is not None:
        return None
    return layer.kernel.shape[-2] if block_size is None else block_size


def _suits(layer: Any, similarity: similarities.Similarity, predictor: Any) -> bool:
    if isinstance(layer, keras.layers.EinsumDense):
        try:
            einsum.contracted_axes(layer.equation)
        except ValueError:
            return False
    is_static = WITH_SIMILARITY[type(layer)].dynamic_form is None
    if predictor is not None and (is_static or getattr(layer, "groups", 1) > 1):
        return False
    takes_full = _taps(layer) > 1 and not hasattr(layer, "depth_multiplier")
    return similarity.shared_by_channels or takes_full

"""Every public layer, in the configurations that go through `check_layer`.

Also similarities without the package, and the formula of layers with one kernel.
"""

import functools

import keras
import numpy as np
import numpy_reference
from helpers import as_numpy, normal, randomize
from keras import ops
from layer_harness import LayerCase

from nsl_keras import layers, predictors, similarities
from nsl_keras.key_metrics import Euclidean

IMAGE, SEQUENCE, BOX = (9, 8, 4), (9, 4), (5, 4, 3, 2)
partial = functools.partial


def convolution(**arguments):
    return partial(
        layers.NeuralSimilarityConv2D, **{"filters": 6, "kernel_size": 3, **arguments}
    )


def with_predictor(make_predictor, layer, **arguments):
    """A layer and its predictor, both made anew."""

    def make(**options):
        return layer(predictor=make_predictor(), **arguments, **options)

    return make


def shared(**arguments):
    return partial(
        predictors.SharedSimilarityPredictor,
        predictors.SimilarityPredictor(width=8, **arguments),
        adapted_filters=5,
    )


def head(name, trainable, inner_loop, dictionary=None, **arguments):
    """A head that is made anew with each layer; gradients need no dropout here."""

    def make(**options):
        neighbors = layers.NeighborDictionary(
            12, seed=1, **(dictionary or {}), dtype=options.get("dtype")
        )
        inner = layers.CosineDense(3)
        # Half precision on the tape is refused, so the head states its own dtype.
        if inner_loop == "tape":
            hidden = keras.layers.Dense(5, "tanh", dtype="float32")
            inner = keras.Sequential([hidden, keras.layers.Dense(3, dtype="float32")])
        return layers.MetaNeighborhoodHead(
            inner, neighbors, inner_loop=inner_loop, **arguments, **options
        )

    name = f"meta_neighborhood_head_{name}"
    return LayerCase(name, make, (7,), trainable, full_precision=True)


def film(**options):
    if options.pop("data_format", None) == "channels_first":
        options["axis"] = 1
    return layers.InstanceFiLM(5, **options)


def dense(name, shape, trainable, non_trainable=0, **arguments):
    make = partial(layers.NeuralSimilarityDense, 5, **arguments)
    return LayerCase(f"dense_{name}", make, shape, trainable, non_trainable)


def recurrent(name, trainable, kind, **arguments):
    """A recurrent layer, or Keras's around a cell that is made anew with it."""

    def around_cell(**options):
        return keras.layers.RNN(kind(5, **arguments), return_sequences=True, **options)

    is_layer = issubclass(kind, keras.layers.RNN)
    make = partial(kind, 5, **arguments) if is_layer else around_cell
    return LayerCase(name, make, (3, 6), trainable)


def spatial(name, make, trainable, non_trainable=0, shape=IMAGE, unknown_sizes=True):
    """A layer on images, of either data format."""
    first = {"data_format": "channels_first"}
    return LayerCase(name, make, shape, trainable, non_trainable, first, unknown_sizes)


def conv2d(name, trainable, non_trainable=0, unknown_sizes=True, **arguments):
    name, make = f"conv2d_{name}", convolution(**arguments)
    return spatial(name, make, trainable, non_trainable, IMAGE, unknown_sizes)


SAME, UNCONSTRAINED = {"padding": "same"}, {"similarity": "unconstrained"}
IN_BLOCKS = predictors.SimilarityPredictor(downsampling=3, residual=False)
SPARSE = similarities.Sparse(5, learn_shape=True, regularizer="l1")
SHAPED = similarities.Diagonal(learn_shape=True)
FULL = similarities.Full(shared_by="filter")
TRANSPOSED = layers.NeuralSimilarityConv2DTranspose
DEPTHWISE = partial(layers.NeuralSimilarityDepthwiseConv2D, depth_multiplier=2)
SEPARABLE = partial(layers.NeuralSimilaritySeparableConv2D, 6, (2, 3))
CONV1D, CONV3D = layers.NeuralSimilarityConv1D, layers.NeuralSimilarityConv3D
CONVOLUTIONS = [
    conv2d("static_diagonal", 3, **SAME, activation="relu"),
    conv2d("static_groups", 3, **UNCONSTRAINED, **SAME, groups=2, strides=2),
    conv2d("static_sparse_learned_shape", 4, similarity=SPARSE),
    conv2d("static_full", 3, similarity=FULL, groups=2, **SAME, unknown_sizes=False),
    conv2d("sphere_diagonal", 8, 6, predictor="sphere", strides=2, **SAME),
    conv2d("in_blocks", 5, **UNCONSTRAINED, predictor=IN_BLOCKS, kernel_size=(2, 3)),
    spatial(
        "conv2d_shared",
        with_predictor(shared(), convolution(strides=2, similarity=SHAPED)),
        6,
    ),
    spatial(
        "conv2d_transpose_static",
        partial(TRANSPOSED, 6, 4, 2, **SAME, output_padding=1, **UNCONSTRAINED),
        3,
    ),
    spatial(
        "conv1d_static_causal",
        partial(
            CONV1D, 6, 3, 1, "causal", dilation_rate=2, similarity="positive_semidefinite"
        ),
        3,
        shape=SEQUENCE,
    ),
    spatial(
        "conv3d_static", partial(CONV3D, 6, 2, **SAME, similarity="symmetric"), 3, shape=BOX
    ),
    spatial(
        "depthwise_sphere",
        partial(DEPTHWISE, (2, 3), similarity="symmetric", predictor="sphere"),
        4,
    ),
    spatial("separable_sphere", partial(SEPARABLE, predictor="sphere"), 9, 6),
]

OTHER_IMAGES = [
    spatial(
        "sphere_conv2d",
        partial(layers.SphereConv2D, 6, (3, 2), 2, groups=2, response="learnable_sigmoid"),
        2,
        unknown_sizes=False,
    ),
    spatial("instance_film", film, 4),
    LayerCase(
        "batch_normalization", layers.BatchNormalization, IMAGE, 2, 3, unknown_sizes=True
    ),
    *(
        spatial(
            f"global_{similarity}",
            partial(layers.GlobalNeuralSimilarity2D, similarity=similarity),
            trainable,
            unknown_sizes=similarity != "diagonal",
        )
        for similarity, trainable in (
            ("diagonal", 1),
            ("predicted_mask", 2),
            ("softmax_attention", 4),
        )
    ),
]

VECTORS_AND_SEQUENCES = [
    LayerCase(
        "sphere_dense",
        partial(layers.SphereDense, 5, "tanh", use_bias=True, response="learnable_sigmoid"),
        (4, 7),
        3,
    ),
    dense("static_blocks", (2, 12), 3, similarity="unconstrained", block_size=3),
    LayerCase(
        "einsum_static",
        partial(
            layers.NeuralSimilarityEinsumDense,
            *("btnh,nhd->btd", (5, 3)),
            bias_axes="d",
            similarity="orthogonal",
            block_size=2,
        ),
        (5, 2, 2),
        3,
    ),
    dense("dynamic_sphere", (12,), 8, 6, activation="tanh", predictor="sphere"),
    dense(
        *("dynamic_cnn_blocks", (2, 12), 6, 3),
        use_bias=False,
        similarity=similarities.Symmetric(learn_shape=True),
        block_size=4,
        predictor="cnn",
    ),
    recurrent(
        "simple_rnn_static", 5, layers.NeuralSimilaritySimpleRNNCell, similarity="symmetric"
    ),
    recurrent(
        *("lstm_dynamic_cnn_dropout", 7, layers.NeuralSimilarityLSTMCell),
        similarity="unconstrained",
        predictor="cnn",
        dropout=0.2,
        recurrent_dropout=0.2,
        seed=1,
    ),
    recurrent(
        *("gru_layer_static", 4, layers.NeuralSimilarityGRU),
        similarity="unconstrained",
        use_bias=False,
    ),
]

GIVEN = [[0.5, 0.5], [0.0, 1.0], [0.8, 0.2], [1.0, 0.0]]
EUCLIDEAN = {"metric": "euclidean", "temperature": 5.0}
NEIGHBORHOODS = [
    LayerCase("cosine_dense", partial(layers.CosineDense, 5), (7,), 2),
    LayerCase(
        # The values take no part in attention.
        "neighbor_dictionary",
        partial(layers.NeighborDictionary, 4, fixed_values=GIVEN, seed=1, dropout=0.25),
        (7,),
        1,
    ),
    LayerCase(
        "neighbor_dictionary_distance",
        partial(
            layers.NeighborDictionary,
            *(12, 3),
            metric=Euclidean(squared=False),
            learn_temperature=True,
            fixed_values=True,
        ),
        (7,),
        2,
    ),
    head("dual", 5, "dual", inner_steps=2, learning_rate_form="diagonal"),
    head("tape", 7, "tape", {**EUCLIDEAN, "dropout_scope": "batch"}),
    head("regression", 5, "dual", EUCLIDEAN, task="regression"),
]

CASES = [*CONVOLUTIONS, *OTHER_IMAGES, *VECTORS_AND_SEQUENCES, *NEIGHBORHOODS]


# Similarities without the package.

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
# Every row of the table of similarities, the sparse one with several counts.
SIMILARITIES = {
    "diagonal": similarities.Diagonal(),
    "unconstrained": similarities.Unconstrained(),
    "symmetric": similarities.Symmetric(),
    "positive_semidefinite": similarities.PositiveSemidefinite(),
    "orthogonal": similarities.Orthogonal(),
    "sparse": similarities.Sparse(),
    "sparse_of_3": similarities.Sparse(3),
    "full": similarities.Full(),
}


def with_arguments(similarity, **arguments):
    """A similarity, by name or as an object, with further arguments."""
    similarity = similarities.get(SIMILARITIES.get(similarity, similarity))
    serialized = map(keras.saving.serialize_keras_object, arguments.values())
    config = {**similarity.get_config(), **dict(zip(arguments, serialized, strict=True))}
    return type(similarity).from_config(config)


def to_matrix(similarity, parameters):
    """`M` of a similarity's parameters with any leading axes, without the package."""
    parameters = np.asarray(ops.convert_to_numpy(parameters), "float64")
    kind = type(similarity).__name__
    if kind in ("Unconstrained", "Full"):
        return parameters
    if kind == "Diagonal":
        return parameters[..., None] * np.eye(parameters.shape[-1])
    if kind == "Symmetric":
        return (parameters + np.swapaxes(parameters, -1, -2)) / 2
    if kind == "PositiveSemidefinite":
        size = next(t for t in range(99) if t * (t + 1) // 2 == parameters.shape[-1])
        factor = np.zeros((*parameters.shape[:-1], size, size))
        factor[(..., *np.tril_indices(size))] = parameters
        return factor @ np.swapaxes(factor, -1, -2)
    if kind == "Orthogonal":
        size = next(t for t in range(99) if t * (t - 1) // 2 == parameters.shape[-1])
        skew = np.zeros((*parameters.shape[:-1], size, size))
        rows, columns = np.tril_indices(size, -1)
        skew[..., rows, columns], skew[..., columns, rows] = parameters, -parameters
        return (np.eye(size) + skew) @ np.linalg.inv(np.eye(size) - skew)
    assert kind == "Sparse"
    largest = np.argsort(-np.abs(parameters), axis=None)
    kept = largest[: similarity.nonzeros or len(parameters)]
    matrix = np.zeros_like(parameters)
    matrix.flat[kept] = parameters.flat[kept]
    return matrix


def identity_parameters(similarity, taps):
    """The parameters of the identity, without the package."""
    if type(similarity).__name__ == "Diagonal":
        return np.ones(taps)
    if type(similarity).__name__ == "PositiveSemidefinite":
        return np.eye(taps)[np.tril_indices(taps)]
    if type(similarity).__name__ == "Orthogonal":
        return np.zeros(taps * (taps - 1) // 2)
    return np.eye(taps)


def static_matrix(layer):
    """The `M` of a layer; several are stacked."""
    parameters = layer.bilinear_form.similarity_parameters
    if layer.similarity.shared_by == "layer":
        return to_matrix(layer.similarity, parameters)
    return np.stack([to_matrix(layer.similarity, each) for each in as_numpy(parameters)])


# Layers with one kernel, and the formula.

# More filters than any width: where they are equal, Keras's own convolutions add the bias
# along the width with channels first on TensorFlow (3.15).
KERNELS = {
    "conv1d": (layers.NeuralSimilarityConv1D, {"filters": 12}, (2, 11, 4)),
    "conv2d": (layers.NeuralSimilarityConv2D, {"filters": 12}, (2, 9, 11, 4)),
    "conv3d": (layers.NeuralSimilarityConv3D, {"filters": 12}, (2, 5, 7, 4, 4)),
    "depthwise": (
        *(layers.NeuralSimilarityDepthwiseConv2D, {"depth_multiplier": 3}),
        (2, 9, 11, 4),
    ),
    "separable": (
        layers.NeuralSimilaritySeparableConv2D,
        {"filters": 12, "depth_multiplier": 3},
        (2, 9, 11, 4),
    ),
    "transposed": (layers.NeuralSimilarityConv2DTranspose, {"filters": 12}, (2, 5, 6, 4)),
    "dense": (layers.NeuralSimilarityDense, {"units": 5}, (2, 3, 12)),
}


def cut(name, options):
    """Options of a layer, tuples cut to its number of axes, with 3 taps along each."""
    _, own, shape = KERNELS[name]
    size = {} if name == "dense" else {"kernel_size": 3}
    return {
        key: value[: len(shape) - 2] if isinstance(value, tuple) else value
        for key, value in {**own, **size, **options}.items()
    }


def built(name, **options):
    """A layer with random weights, and inputs of its dtype."""
    kind, _, shape = KERNELS[name]
    layer = kind(**cut(name, options))
    inputs = normal(*shape, seed=5, dtype="float64")
    if getattr(layer, "data_format", "channels_last") == "channels_first":
        inputs = np.moveaxis(inputs, -1, 1)
    layer.build(inputs.shape)
    return randomize(layer), ops.convert_to_tensor(inputs, layer.compute_dtype)


def by_formula(layer, inputs, matrices):
    """The outputs with one `M` for each position or vector, channels last."""
    taps, kernel = layer.bilinear_form.taps, as_numpy(layer.kernel)
    if isinstance(layer, keras.layers.Dense):  # Blocks of features are its channels.
        at = np.reshape(inputs, (*inputs.shape[:-1], -1, taps)).swapaxes(-1, -2)
        kernel = kernel.reshape(-1, taps, layer.units).swapaxes(0, 1)
    else:
        geometry = layer.kernel_size, layer.strides, layer.padding, layer.dilation_rate
        at = numpy_reference.patches(inputs, *geometry)
        kernel = kernel.reshape(taps, *kernel.shape[-2:])
    depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
    formula = "tcm,...tu,...uc->...cm" if depthwise else "tco,...tu,...uc->...o"
    outputs = np.einsum(formula, kernel, matrices, at, optimize=True)
    return outputs.reshape(*at.shape[:-2], -1) + as_numpy(layer.bias)


def predicted_matrix(layer, inputs):
    """`M`, channels last, from what the predictor itself returns."""
    *leading, features = inputs.shape
    on_vectors = isinstance(layer, keras.layers.Dense)
    seen = ops.reshape(inputs, (-1, features)) if on_vectors else inputs
    prediction = as_numpy(layer.bilinear_form.network(seen)).astype("float64")
    if on_vectors:
        prediction = prediction.reshape(*leading, -1)
    elif prediction.ndim == 2:
        prediction = prediction.reshape(len(prediction), *[1] * (len(leading) - 1), -1)
    identity = identity_parameters(layer.similarity, layer.bilinear_form.taps)
    prediction = prediction.reshape(*prediction.shape[:-1], *identity.shape)
    matrix = to_matrix(layer.similarity, identity + prediction)
    # A prediction that hardly varies would not show where it belongs.
    assert np.std(matrix, axis=tuple(range(len(leading)))).max() > 0.01
    return matrix


def channels_last(outputs, data_format):
    outputs = ops.convert_to_numpy(outputs)
    return np.moveaxis(outputs, 1, -1) if data_format == "channels_first" else outputs

"""The convolutions with a neural similarity as one family, for the tests of similarity/."""

import dataclasses
import functools

import keras
import numpy as np
import numpy_reference
from helpers import assert_close as assert_close
from helpers import assert_equal as assert_equal
from helpers import randomize as randomize
from helpers import values as values
from keras import ops

from nsl_keras import layers, similarities

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
# More filters than any width: where they are equal, Keras's own convolutions add the bias
# along the width with channels first on TensorFlow (3.15).
CHANNELS, FILTERS = 4, 12
SIZES = {1: (11,), 2: (9, 11), 3: (5, 7, 4)}
INPUTS = {
    rank: np.random.default_rng(5).normal(size=(2, *sizes, CHANNELS))
    for rank, sizes in SIZES.items()
}

# What each layer is tried with; tuples are cut to its number of axes.
GEOMETRIES = [
    {"kernel_size": 1, "padding": "same", "strides": 2},
    {"kernel_size": (2, 3, 2), "padding": "same"},
    {"kernel_size": (4, 2, 3), "padding": "same", "strides": 2},
    {"kernel_size": (2, 3, 2), "strides": (3, 1, 2)},
    {"kernel_size": (3, 2, 1), "dilation_rate": 2},
    {"kernel_size": (2, 3, 2), "padding": "same", "dilation_rate": (3, 1, 2)},
    {"kernel_size": (2, 3, 2), "padding": "same", "strides": 2, "groups": 2},
    {"kernel_size": (12, 1, 1), "padding": "same", "strides": 2},  # Above the image.
    {"kernel_size": 4, "padding": "causal", "dilation_rate": 2},
    {"kernel_size": 4, "padding": "causal", "strides": 2},
]

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
DYNAMIC_SIMILARITIES = [name for name, each in SIMILARITIES.items() if not each.static_only]


@dataclasses.dataclass(frozen=True)
class Member:
    """A layer of the family, and the Keras layer that it generalizes."""

    layer: type[keras.layers.Layer]
    plain: type[keras.layers.Layer]
    rank: int

    @property
    def depthwise(self):
        return self.plain is keras.layers.DepthwiseConv2D

    @property
    def inputs(self):
        return INPUTS[self.rank]

    def options(self, **options):
        """The arguments of a layer: those given, tuples cut, and the number of filters."""
        filters = (
            {"depth_multiplier": FILTERS // CHANNELS}
            if self.depthwise
            else {"filters": FILTERS}
        )
        cut = {
            name: value[: self.rank] if isinstance(value, tuple) else value
            for name, value in options.items()
        }
        return {**filters, **cut}

    def make(self, **options):
        return self.layer(**self.options(**options))

    def make_built(self, **options):
        """A layer with random weights; 3 taps along each axis unless told otherwise."""
        layer = self.make(**{"kernel_size": 3, **options})
        layer.build(np.shape(self.tensor(data_format=layer.data_format)))
        randomize(layer)
        return layer

    def geometries(self, dynamic=False, groups=True):
        """Yields the geometries that the layer, and Keras on a CPU, can do.

        Groups are slow: on TensorFlow Keras compiles such a convolution in every call, as
        it does volumes with channels first.
        """
        for geometry in GEOMETRIES:
            strides = geometry.get("strides", 1)
            if geometry.get("padding") == "causal" and self.rank > 1:
                continue
            if "groups" in geometry and (self.depthwise or dynamic or not groups):
                continue
            # TensorFlow's depthwise convolutions want equal strides.
            if self.depthwise and isinstance(strides, tuple) and not dynamic:
                continue
            yield geometry

    def similarities(self):
        return {
            name: similarity
            for name, similarity in SIMILARITIES.items()
            if similarity.shared_by_channels or not self.depthwise
        }

    def tensor(self, dtype="float32", data_format="channels_last"):
        inputs = self.inputs
        if data_format == "channels_first":
            inputs = np.moveaxis(inputs, -1, 1)
        return ops.convert_to_tensor(inputs, dtype=dtype)

    def expected(self, layer, matrix):
        """The outputs of a layer by the formula, with `M` as given, channels last."""
        patches = _patches(
            self.rank, layer.kernel_size, layer.strides, layer.padding, layer.dilation_rate
        )
        kernel = ops.convert_to_numpy(layer.kernel)
        bias = 0.0 if layer.bias is None else ops.convert_to_numpy(layer.bias)
        if self.depthwise:
            convolve, groups = numpy_reference.depthwise_similarity_convolution, ()
        elif layer.similarity.shared_by_channels:
            convolve, groups = numpy_reference.similarity_convolution, (layer.groups,)
        else:
            convolve, groups = numpy_reference.full_similarity_convolution, (layer.groups,)
        return convolve(patches, kernel, matrix, bias, *groups)


FAMILY = {
    "conv1d": Member(layers.NeuralSimilarityConv1D, keras.layers.Conv1D, 1),
    "conv2d": Member(layers.NeuralSimilarityConv2D, keras.layers.Conv2D, 2),
    "conv3d": Member(layers.NeuralSimilarityConv3D, keras.layers.Conv3D, 3),
    "depthwise_conv2d": Member(
        layers.NeuralSimilarityDepthwiseConv2D, keras.layers.DepthwiseConv2D, 2
    ),
}
# Every similarity in two dimensions; of each form of parameters one in the others.
LAYERS_AND_SIMILARITIES = [
    (name, similarity)
    for name in FAMILY
    for similarity in FAMILY[name].similarities()
    if name == "conv2d"
    or similarity in ("diagonal", "unconstrained", "sparse_of_3", "full")
]


def with_arguments(similarity, **arguments):
    """A similarity, by name or as an object, with further arguments."""
    similarity = similarities.get(SIMILARITIES.get(similarity, similarity))
    serialized = map(keras.saving.serialize_keras_object, arguments.values())
    config = {**similarity.get_config(), **dict(zip(arguments, serialized, strict=True))}
    return type(similarity).from_config(config)


@functools.cache
def _patches(rank, *geometry):
    return numpy_reference.patches(INPUTS[rank], *geometry)


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
        taps = next(t for t in range(99) if t * (t + 1) // 2 == parameters.shape[-1])
        factor = np.zeros((*parameters.shape[:-1], taps, taps))
        entries = iter(range(parameters.shape[-1]))
        for row in range(taps):
            for column in range(row + 1):
                factor[..., row, column] = parameters[..., next(entries)]
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
    return to_matrix(layer.similarity, layer.bilinear_form.similarity_parameters)


def predicted_matrix(layer, inputs):
    """`M`, channels last, from what the predictor itself returns."""
    prediction = ops.convert_to_numpy(layer.bilinear_form.network(inputs)).astype("float64")
    if prediction.ndim == 2:
        prediction = prediction.reshape(len(prediction), *[1] * layer.rank, -1)
    identity = identity_parameters(layer.similarity, layer.bilinear_form.taps)
    prediction = prediction.reshape(*prediction.shape[:-1], *identity.shape)
    matrix = to_matrix(layer.similarity, identity + prediction)
    # A prediction that hardly varies would not show where it belongs.
    assert np.std(matrix, axis=tuple(range(layer.rank + 1))).max() > 0.01
    return matrix


def channels_last(outputs, data_format):
    outputs = ops.convert_to_numpy(outputs)
    return np.moveaxis(outputs, 1, -1) if data_format == "channels_first" else outputs

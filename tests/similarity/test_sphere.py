"""Hyperspherical layers, against each other and the authors' numbers."""

import functools

import keras
import numpy as np
import numpy_reference
import pytest
from golden_files import DTYPES, Golden, gradients
from helpers import assert_close, assert_equal, randomize, second_derivatives
from keras import ops

from nsl_keras import layers
from nsl_keras.layers import SphereConv2D, SphereDense
from nsl_keras.similarity.global_similarity import SIMILARITIES, STATIC
from nsl_keras.similarity.sphere import NORMALIZE, RESPONSES, SphereConv1D, SphereConv3D

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
IMAGES = np.random.default_rng(6).normal(size=(2, 7, 6, 4))
IMAGES[:, :3, :3] = 0  # Whole patches of zeros, where the epsilon decides.

PREDICTED = [each for each in SIMILARITIES if each not in STATIC]
#: Kinds of convolutions on images of as many axes, with 2x3x1 taps, and geometries.
GEOMETRIES = [
    (SphereConv2D, {"padding": "same"}),
    (SphereConv2D, {"strides": 2, "padding": "same"}),
    (SphereConv2D, {"strides": (1, 3)}),
    (SphereConv1D, {"dilation_rate": 2}),
    (SphereConv3D, {"strides": (1, 2, 1)}),
]


def make_layer(kind=SphereConv2D, **options):
    return kind(
        **{
            "filters": 6,
            "kernel_size": (2, 3),
            "kernel_initializer": keras.initializers.RandomNormal(stddev=0.4, seed=1),
            "bias_initializer": keras.initializers.RandomNormal(stddev=0.4, seed=2),
            **options,
        }
    )


@pytest.mark.parametrize(("kind", "geometry"), GEOMETRIES, ids=str)
def test_a_convolution_is_the_dense_layer_on_patches(kind, geometry):
    views = {SphereConv1D: IMAGES[:, :, 0], SphereConv3D: IMAGES[..., None, :]}
    images = views.get(kind, IMAGES)
    size, dtype = (2, 3, 1)[: images.ndim - 2], DTYPES[0]
    options = [{"normalize": each} for each in NORMALIZE]
    options += [{"response": each, "use_bias": True} for each in RESPONSES]
    for each in options:
        layer = make_layer(kind, kernel_size=size, dtype=dtype, **each, **geometry)
        layer.build(images.shape)
        patches = numpy_reference.patches(
            images, size, layer.strides, layer.padding, layer.dilation_rate
        )
        rows = patches.reshape(*patches.shape[:-2], -1)
        dense = SphereDense(6, dtype=dtype, **each)
        dense.build(rows.shape)
        if layer.curvature is not None:
            layer.curvature.assign([-0.7, 0.0, 0.01, 0.3, 0.7, 4.0])
        for ours, theirs in zip(layer.weights, dense.weights, strict=True):
            theirs.assign(ops.reshape(ours, theirs.shape))
        outputs = layer(images)
        assert layer.compute_output_shape(images.shape) == outputs.shape
        assert_close(outputs, dense(rows), TOLERANCES[dtype], each)


@pytest.mark.parametrize("normalize", ["input", "kernel"])
def test_a_normalized_product(normalize):
    options = {"normalize": normalize, "activation": "softplus", "use_bias": True}
    layer, vectors = SphereDense(6, **options), IMAGES[:, 0, 4].astype("float32")
    layer.build(vectors.shape)
    kernel, bias = randomize(layer).get_weights()
    expected = vectors @ kernel
    if normalize == "kernel":
        expected /= np.sqrt(np.sum(kernel**2, axis=0) + 1e-4)
    else:
        expected /= np.sqrt(np.sum(vectors**2, axis=-1, keepdims=True) + 1e-4)
    assert_close(layer(vectors), np.log1p(np.exp(expected + bias)))


def test_groups_are_convolutions_of_their_own():
    layer = make_layer(groups=2, response="linear")
    layer.build(IMAGES.shape)
    outputs = []
    for number, images in enumerate(np.split(IMAGES, 2, axis=-1)):
        of_group = make_layer(filters=3, response="linear")
        of_group.build(images.shape)
        of_group.kernel.assign(layer.kernel[..., 3 * number : 3 * number + 3])
        outputs.append(of_group(images))
    assert_close(layer(IMAGES), np.concatenate(outputs, axis=-1), 1e-5)


@pytest.mark.jax
@pytest.mark.parametrize(
    ("file", "output", "options"),
    [
        ("nsl_sphereconv", "x_only", {"normalize": "input"}),
        ("nsl_sphereconv", "x_and_w", {}),
        *(
            ("nsl_gns_conv", each.replace("learnable", "lr"), {"response": each})
            for each in RESPONSES
        ),
    ],
    ids=str,
)
def test_authors_numbers(file, output, options):
    golden, dtype = Golden(file), DTYPES[0]
    filters = golden["w.W"].shape[-1]
    layer = SphereConv2D(filters, 3, padding="same", **options, dtype=dtype)
    layer.build(golden["in.x"].shape)
    layer.kernel.assign(golden["w.W"])
    variables = {"W": layer.kernel}
    if layer.curvature is not None:
        np.testing.assert_allclose(ops.convert_to_numpy(layer.curvature), 0.7, rtol=1e-6)
        layer.curvature.assign(golden["w.k_value_lr"])
        variables["k_value_lr"] = layer.curvature
    x = ops.convert_to_tensor(golden["in.x"], dtype=dtype)
    golden.check(f"out64.{output}", layer(x), dtype)
    cotangent = ops.cast(golden["ct.y"], dtype)
    found = gradients(
        lambda x: ops.sum(layer(x) * cotangent), [x], list(variables.values())
    )
    for name, gradient in zip(("x", *variables), found, strict=True):
        golden.check(f"grad64.{output}.{name}", gradient, dtype)


DYNAMIC = functools.partial(layers.NeuralSimilarityConv2D, 3, 3, padding="same")


@pytest.mark.parametrize("value", [0.0, 0.7])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(SphereConv2D, 6, (2, 3), response="linear"),
        functools.partial(SphereConv2D, 6, (2, 3), response="learnable_sigmoid"),
        *(functools.partial(DYNAMIC, predictor=kind) for kind in ("full_sphere", "cnn")),
        *(functools.partial(layers.GlobalNeuralSimilarity2D, each) for each in PREDICTED),
    ],
)
def test_second_derivatives_at_constant_inputs_are_finite(make, value):
    layer = make()
    images = value * ops.ones((2, 5, 4, 3))
    layer.build(images.shape)
    if isinstance(layer, layers.GlobalNeuralSimilarity2D):
        randomize(layer, 0.5)  # It starts with zeros.
    outputs = ops.convert_to_numpy(layer(images, training=True))
    assert np.all(np.isfinite(outputs))
    # The authors' rounded 2 / pi leaves 4e-7.
    assert np.any(np.abs(outputs) > 1e-6) == (value != 0)

    def scalar(images):
        outputs = layer(images, training=True)
        return ops.sum(outputs + ops.square(outputs))

    for gradient in second_derivatives(scalar, [images], layer.trainable_variables):
        assert np.all(np.isfinite(ops.convert_to_numpy(gradient)))


@pytest.mark.parametrize("response", RESPONSES)
def test_where_patch_and_kernel_are_parallel(response):
    layer = make_layer(response=response, kernel_size=2, filters=3)
    layer.build((1, 2, 2, 4))
    layer.kernel.assign(100 * layer.kernel)  # So that the epsilon does not matter.
    # As many patches as filters, each the kernel of one: a cosine of 1, or just above;
    # and their negatives.
    parallel = np.moveaxis(ops.convert_to_numpy(layer.kernel), -1, 0)
    images = ops.convert_to_tensor(np.concatenate([parallel, -parallel]))
    outputs = ops.convert_to_numpy(layer(images))
    values = np.array([outputs[i, 0, 0, i % 3] for i in range(6)])
    np.testing.assert_allclose(values, np.repeat([1, -1], 3), atol=4e-3)

    for derivatives in (gradients, second_derivatives):
        found = derivatives(
            lambda x: ops.sum(layer(x)), [images], layer.trainable_variables
        )
        for gradient in found:
            assert np.all(np.isfinite(ops.convert_to_numpy(gradient)))


def test_extreme_curvatures_are_finite():
    layer, exact = (
        make_layer(response="learnable_sigmoid", dtype=dtype)
        for dtype in ("float32", "float64")
    )
    for each in (layer, exact):
        each.build(IMAGES.shape)
        each.curvature.assign(np.repeat([0.0, 1e-4, 50.0], 2))
    exact.kernel.assign(layer.kernel)
    images = ops.convert_to_tensor(IMAGES, dtype="float32")
    np.testing.assert_allclose(layer(images), exact(IMAGES), atol=2e-5)
    for gradient in gradients(
        lambda images: ops.sum(layer(images)), [images], layer.trainable_variables
    ):
        assert np.all(np.isfinite(ops.convert_to_numpy(gradient)))


@pytest.mark.parametrize("normalize", ["input", "both"])
@pytest.mark.parametrize("layer", [SphereConv2D, SphereDense])
def test_products_and_norms_beyond_half_precision(layer, normalize):
    # Normalized kernels may be above the largest float16 too.
    entries = keras.initializers.Constant(1e5 if normalize == "both" else 1)
    options = {"normalize": normalize, "kernel_initializer": entries}
    arguments = (4, 3) if layer is SphereConv2D else (4,)
    images = np.random.default_rng(0).integers(1, 256, (2, 3, 3, 64)).astype("float32")
    if normalize == "input":
        # Of the squares alone the sum is above the largest float16, 65504.
        images[..., 8:] = 0
    if layer is SphereDense:
        images = images.reshape(2, -1)
    expected = layer(*arguments, **options)(images)
    assert float(ops.max(expected)) > 0.8
    found = layer(*arguments, dtype="mixed_float16", **options)(images)
    np.testing.assert_allclose(ops.cast(found, "float32"), expected, rtol=1e-2)


def test_integer_and_sparse_inputs():
    layer, inputs = SphereDense(5), np.arange(12).reshape(3, 4)
    assert_equal(layer(inputs), layer(inputs.astype("float32")))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        sparse = tf.sparse.from_dense(inputs.astype("float32"))
        assert_close(layer(sparse), layer(inputs), 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "all"}, r"`normalize` must be one of 'both', .*normalize='all'"),
        ({"response": "relu"}, r"`response` must be one of 'cosine', .*response='relu'"),
        (
            {"response": "sigmoid", "normalize": "input"},
            r"`normalize` must be 'both' with response='sigmoid'.*normalize='input'",
        ),
    ],
)
def test_errors(options, message):
    for kind, *size in ((SphereDense, 5), (SphereConv2D, 5, 3)):
        with pytest.raises(ValueError, match=message):
            kind(*size, **options)

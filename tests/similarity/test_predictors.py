"""Predictors: recipes, the networks that layers make of them, their start, and sharing."""

import keras
import numpy as np
import pytest
from helpers import (
    as_numpy,
    assert_close,
    assert_equal,
    gradients,
    randomize,
    refusing,
    reloaded,
    stacked,
)
from keras import ops
from layer_cases import built as built_kernel, channels_last

from nsl_keras import predictors
from nsl_keras.layers import (
    BatchNormalization,
    NeuralSimilarityConv1D,
    NeuralSimilarityConv2D,
    NeuralSimilarityDense,
    NeuralSimilarityDepthwiseConv2D,
    NeuralSimilarityGRUCell,
    SphereConv2D,
    SphereDense,
)
from nsl_keras.predictors import SharedSimilarityPredictor, SimilarityPredictor
from nsl_keras.similarity.predictors import FloatDense

PUBLISHED = SimilarityPredictor(start="published")
DNS, UNS = "diagonal", "unconstrained"
# kind, similarity: outputs, which layers normalize by norms or by batch.
ARCHITECTURES = [
    ("sphere", "diagonal", 9, "input", True, None, True),
    ("sphere", "unconstrained", 81, "input", False, None, False),
    ("full_sphere", "diagonal", 9, "both", True, "both", True),
    ("full_sphere", "unconstrained", 81, "both", True, "both", True),
    ("cnn", "diagonal", 9, None, True, None, True),
    ("cnn", "symmetric", 81, None, False, None, True),
]


def images_after_relu(height=7, width=6, channels=5, data_format="channels_last"):
    rng = np.random.default_rng(3)
    images = rng.normal(size=(2, height, width, channels)).clip(0).astype("float32")
    return np.moveaxis(images, -1, 1) if data_format == "channels_first" else images


def built(layer, shape):
    layer.build(shape)
    return layer


def network_of(predictor, filters=6, shape=(None, 7, 6, 5), **options):
    """The network that a convolution makes of a recipe."""
    layer = NeuralSimilarityConv2D(filters, 3, predictor=predictor, **options)
    return built(layer, shape).bilinear_form.network


def names_of(network):
    return [layer.name for layer in network.layers]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_architecture(architecture):
    kind, similarity, outputs, *normalized = architecture
    norms = {"momentum": 0.8, "epsilon": 0.01}
    options = {
        "similarity": similarity,
        "predictor": SimilarityPredictor(kind, width=7, batch_normalization=norms),
    }
    expected = ["hidden", "hidden_normalization", "relu", "output", "output_normalization"]
    if not normalized[1]:
        expected.remove("hidden_normalization")
    if not normalized[3]:
        expected.remove("output_normalization")
    for layer, plain, sphere in (
        (NeuralSimilarityConv2D(4, 3, **options), keras.layers.Conv2D, SphereConv2D),
        (NeuralSimilarityDense(4, block_size=9, **options), FloatDense, SphereDense),
    ):
        network = built(layer, (None, 7, 6, 18)).bilinear_form.network
        assert names_of(network) == expected
        for name, width, by_angle in (
            ("hidden", 7, normalized[0]),
            ("output", outputs, normalized[2]),
        ):
            part = network.get_layer(name)
            assert type(part) is (sphere if by_angle else plain)
            assert getattr(part, "normalize", None) == by_angle
            assert part.bias is None
            assert part.kernel.shape[-1] == width
        for part in network.layers:
            if isinstance(part, BatchNormalization):
                assert (part.momentum, part.epsilon) == (0.8, 0.01)
    for wanted in (True, False):
        asked = SimilarityPredictor(kind, batch_normalization=wanted, start="published")
        found = names_of(network_of(asked, similarity=similarity))
        assert [name.endswith("_normalization") for name in found].count(True) == 2 * wanted


def test_geometry_is_that_of_the_layer():
    options = {"strides": (2, 1), "data_format": "channels_first", "predictor": "cnn"}
    layer = NeuralSimilarityConv2D(
        6, (2, 3), padding="same", dtype="mixed_bfloat16", **options
    )
    network = built(layer, (None, 5, 7, 6)).bilinear_form.network
    hidden, output = network.get_layer("hidden"), network.get_layer("output")
    assert (hidden.kernel_size, hidden.strides, hidden.padding) == ((2, 3), (2, 1), "same")
    assert (output.kernel_size, output.strides, output.padding) == ((2, 3), (1, 1), "same")
    assert hidden.data_format == output.data_format == "channels_first"
    assert {each.dtype_policy.name for each in network.layers} == {"mixed_bfloat16"}
    network = network_of(SimilarityPredictor("cnn", output_kernel_size=1), dilation_rate=2)
    assert network.get_layer("hidden").dilation_rate == (2, 2)
    assert network.get_layer("output").kernel_size == (1, 1)
    causal = NeuralSimilarityConv1D(6, 3, padding="causal", predictor="cnn")
    network = built(causal, (None, 7, 5)).bilinear_form.network
    assert network.get_layer("output").padding == "causal"


@pytest.mark.parametrize(
    ("filters", "similarity", "width"),
    [(4, DNS, 8), (40, UNS, 20), (200, DNS, 64), (300, UNS, 128)],
)
def test_width_follows_the_layer(filters, similarity, width):
    options = {"similarity": similarity, "predictor": "sphere"}
    convolution = NeuralSimilarityConv2D(filters, 3, **options)
    dense = NeuralSimilarityDense(filters, block_size=2, **options)
    for layer in (convolution, dense):
        network = built(layer, (None, 7, 7, 4)).bilinear_form.network
        assert network.get_layer("hidden").kernel.shape[-1] == width
    published = network_of(PUBLISHED, filters, similarity=similarity)
    authors = 64 if similarity == "diagonal" else 128
    assert published.get_layer("hidden").filters == authors


def test_depthwise_layers_have_a_bottleneck():
    """On wide maps the predictor is no larger than twice the layer; the authors' is."""
    options = {"strides": 2, "dilation_rate": 1, "padding": "valid"}

    def made(predictor):
        layer = NeuralSimilarityDepthwiseConv2D(3, predictor=predictor, **options)
        return built(layer, (None, 9, 9, 240))

    layer = made("sphere")
    hidden, output = map(layer.bilinear_form.network.get_layer, ("hidden", "output"))
    assert (hidden.kernel_size, hidden.strides, hidden.filters) == ((1, 1), (1, 1), 8)
    assert (output.kernel_size, output.strides, output.padding) == ((3, 3), (2, 2), "valid")
    assert layer.bilinear_form.count_params() < 2 * 9 * 240
    published = made(PUBLISHED).bilinear_form.network.get_layer("hidden")
    assert (published.kernel_size, published.filters) == ((3, 3), 64)


def test_kernels_are_regularized_as_the_layers():
    shared = SharedSimilarityPredictor()
    for predictor, expected in ("sphere", [True] * 2), (shared, [True, False, False]):
        weights = network_of(predictor, kernel_regularizer="l2").weights
        found = [bool(each.regularizer) for each in weights if each.name == "kernel"]
        assert found == expected


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("conv1d", SharedSimilarityPredictor, {"padding": "causal", "strides": 2}),
        ("conv2d", predictors.get, {"padding": "same", "strides": (1, 2)}),
        ("conv2d", SharedSimilarityPredictor, {"data_format": "channels_first"}),
        ("depthwise", predictors.get, {"padding": "same", "depth_multiplier": 2}),
    ],
    ids=["causal", "strided", "channels_first", "depthwise"],
)
def test_positions_of_a_block_share_a_prediction(name, kind, options):
    block = 3
    predictor = kind(SimilarityPredictor(width=4, downsampling=block))
    layer, inputs = built_kernel(name, kernel_size=2, predictor=predictor, **options)
    coarse = channels_last(layer.bilinear_form.network(inputs), layer.data_format)
    matrices = as_numpy(layer.predicted_matrices(inputs))
    *positions, _, _ = matrices.shape[1:]
    for axis, size in enumerate(positions, start=1):
        numbers = np.arange(size) // block
        assert coarse.shape[axis] == numbers[-1] + 1 > 1
        coarse = np.take(coarse, numbers, axis)
    assert_close(np.diagonal(matrices, axis1=-2, axis2=-1), 1 + coarse, 1e-6)


def test_a_pooled_prediction_is_the_mean_over_positions_or_blocks():
    for data_format in ("channels_last", "channels_first"):
        inputs = images_after_relu(9, 8, data_format=data_format)
        for block in (1, 2):
            everywhere, pooled = (
                network_of(
                    SimilarityPredictor(width=4, downsampling=block, pooled=pooled),
                    shape=inputs.shape,
                    data_format=data_format,
                )
                for pooled in (False, True)
            )
            randomize(everywhere)
            pooled.set_weights(everywhere.get_weights())
            expected = channels_last(everywhere(inputs), data_format).mean(axis=(1, 2))
            assert_close(pooled(inputs), expected, 1e-5)


def difference_from_plain(layer, inputs, training):
    """The largest difference from the plain layer with the same kernel and bias."""
    outputs = layer(inputs, training=training)
    names = ("units",) if hasattr(layer, "units") else ("filters", "kernel_size")
    plain = layer.plain(**{name: getattr(layer, name) for name in names})
    plain.build(inputs.shape)
    plain.kernel.assign(layer.kernel)
    return float(ops.max(ops.abs(outputs - plain(inputs))))


@pytest.mark.parametrize(
    ("kind", "similarity", "norms", "residual"),
    [
        ("sphere", "diagonal", None, True),
        ("sphere", "unconstrained", False, False),
        ("full_sphere", "unconstrained", None, False),
        ("cnn", "positive_semidefinite", None, False),
    ],
)
def test_a_dynamic_layer_starts_as_its_plain_twin_and_is_alive(
    kind, similarity, norms, residual
):
    recipe = SimilarityPredictor(kind, batch_normalization=norms, residual=residual)
    inputs = images_after_relu(5, 5, 6)
    options = {"similarity": similarity, "predictor": recipe}
    for layer in (
        NeuralSimilarityConv2D(4, 3, **options),
        NeuralSimilarityDense(5, block_size=3, **options),
    ):
        for training in (False, True):
            assert difference_from_plain(layer, inputs, training) <= 1e-5
        network = layer.bilinear_form.network
        # A step moves what was zero, and then the gradient reaches the hidden kernel.
        for variable in network.trainable_variables:
            if not as_numpy(variable).any():
                variable.assign_add(0.1 * np.ones(variable.shape))
        kernel = network.get_layer("hidden").kernel
        _, gradient = gradients(
            lambda x, layer=layer: ops.sum(ops.sin(layer(x, training=True))),
            [ops.convert_to_tensor(inputs)],
            [kernel],
        )
        assert np.abs(as_numpy(gradient)).max() > 1e-8


def test_predictions_without_the_identity():
    """`M(x)` is the output itself, which starts at the identity."""
    images = images_after_relu(data_format="channels_first")
    recipe = SimilarityPredictor(width=4, downsampling=1, residual=False)
    for predictor in (recipe, SharedSimilarityPredictor(recipe, 3)):
        options = {"predictor": predictor, "data_format": "channels_first"}
        layer = NeuralSimilarityConv2D(6, 3, similarity="unconstrained", **options)
        layer.build(images.shape)
        matrices = as_numpy(layer.predicted_matrices(images))
        expected = np.broadcast_to(np.eye(9), matrices.shape)
        np.testing.assert_allclose(matrices, expected, atol=1e-6)
        randomize(layer)
        prediction = channels_last(layer.bilinear_form.network(images), "channels_first")
        found = as_numpy(layer.predicted_matrices(images))
        assert_close(found, prediction.reshape(found.shape), 1e-6)


def test_initializers():
    network = network_of(PUBLISHED, shape=(None, 16, 16, 32))
    for name, fan_in, scale in (("hidden", 9 * 32, 0.1), ("output", 9 * 64, 0.001)):
        deviation = as_numpy(network.get_layer(name).kernel).std()
        np.testing.assert_allclose(deviation, scale * np.sqrt(2 / fan_in), rtol=0.05)


def test_moving_statistics_are_unbiased_unless_published():
    images = images_after_relu()
    for predictor, replaced in (("sphere", True), (PUBLISHED, False)):
        layer = NeuralSimilarityConv2D(4, 3, predictor=predictor)
        layer(images, training=True)
        norm = layer.bilinear_form.network.get_layer("hidden_normalization")
        assert (as_numpy(norm.moving_variance).max() < 0.9) == replaced


@keras.saving.register_keras_serializable("tests")
def deep(recipe, context):
    middle = keras.layers.Conv2D(5, 1, activation="gelu")
    return [*recipe.hidden(context, "input", True), middle, *recipe.output(context)]


def test_a_custom_kind(tmp_path):
    recipe = SimilarityPredictor(deep, width=6)
    layers = [
        NeuralSimilarityConv2D(4, 3, strides=2, predictor=recipe),
        NeuralSimilarityConv2D(4, 3, predictor=SharedSimilarityPredictor(recipe)),
    ]
    images = images_after_relu(9, 8, 3)
    start = NeuralSimilarityConv2D(4, 3, predictor=recipe)
    assert difference_from_plain(start, images, training=False) < 1e-5
    model = keras.Sequential([keras.Input((9, 8, 3)), *layers])
    assert layers[0].bilinear_form.network.layers[2].activation is keras.activations.gelu
    randomize(model)
    loaded = reloaded(model, tmp_path)
    assert loaded.layers[0].predictor.get_config() == recipe.get_config()
    assert_equal(loaded(images), model(images))


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({}, True),
        ({"similarity": "symmetric", "predictor": "cnn"}, True),
        ({"predictor": SharedSimilarityPredictor(), "dilation_rate": 2}, True),
        ({"similarity": "diagonal"}, False),
        ({"dilation_rate": 2}, False),
        ({"predictor": PUBLISHED}, False),
        ({"predictor": SimilarityPredictor(deep)}, False),
    ],
)
def test_matrices_are_predicted_for_blocks_by_default(options, blocks):
    options = {"similarity": "unconstrained", "predictor": "sphere"} | options
    layer = NeuralSimilarityConv2D(4, 3, padding="same", **options)
    layer.build((2, 7, 8, 3))
    shape = layer.bilinear_form.network.compute_output_shape((2, 7, 8, 3))
    assert shape[1:3] == ((4, 4) if blocks else (7, 8))
    assert layer.predicted_matrices(images_after_relu(7, 8, 3)).shape[1:3] == (7, 8)


def test_shared_predictor_is_one_network_with_adaptations():
    shared = SharedSimilarityPredictor(SimilarityPredictor(width=7), adapted_filters=5)
    options = {"kernel_size": 3, "padding": "same", "predictor": shared}
    model = stacked(
        (12, 10, 3),
        NeuralSimilarityConv2D(6, **options),
        NeuralSimilarityConv2D(8, strides=2, **options),
        NeuralSimilarityConv2D(8, **options),
    )
    assert all(layer.predictor is shared for layer in model.layers)
    for layer, channels in zip(model.layers, (3, 6, 8), strict=True):
        adaptation, network = layer.bilinear_form.network.layers
        assert network is shared
        assert tuple(adaptation.kernel.shape) == (3, 3, channels, 5)
        assert (adaptation.strides, adaptation.padding) == (layer.strides, layer.padding)
    assert tuple(shared.shared_network.get_layer("hidden").kernel.shape) == (3, 3, 5, 7)
    assert shared.shared_network.get_layer("hidden").strides == (1, 1)
    # Kernels and biases, adaptations, and once the two kernels.
    assert len(model.trainable_variables) == 3 * 2 + 3 + 2
    assert not model.non_trainable_variables


def test_a_shared_predictor_comes_apart_in_no_clone():
    def stack(predictors):
        parts = [NeuralSimilarityConv2D(4, 3, predictor=each) for each in predictors]
        return keras.Sequential([keras.Input((9, 9, 3)), *parts])

    model = stack([SharedSimilarityPredictor()] * 2)
    copies = keras.models.clone_model, lambda model: model.from_config(model.get_config())
    for copy in copies:
        with pytest.raises((TypeError, ValueError), match="predictor='one of 2 layers'"):
            copy(model)
    nested = keras.Sequential([NeuralSimilarityConv2D(9, 3)])  # With an `M` of its own.
    alone = stack([SharedSimilarityPredictor(), "sphere", nested])
    clone = keras.models.clone_model(alone)
    assert [each.shape for each in clone.weights] == [each.shape for each in alone.weights]


def test_a_model_may_return_predictions_too(tmp_path):
    predictor, inputs = keras.layers.Conv2D(9, 3), keras.Input((9, 8, 3))
    outputs = NeuralSimilarityConv2D(4, 3, predictor=predictor)(inputs)
    loaded = reloaded(keras.Model(inputs, [outputs, predictor(inputs)]), tmp_path)
    assert len(loaded(images_after_relu(9, 8, 3))) == 2


def test_a_frozen_predictor_stays_frozen():
    shared = SharedSimilarityPredictor(trainable=False)
    layer = NeuralSimilarityConv2D(4, 3, predictor=shared)
    names = [each.path for each in built(layer, (None, 7, 6, 5)).trainable_variables]
    assert [name.rpartition("/")[2] for name in names] == ["kernel", "bias", "kernel"]
    assert "adaptation" in names[-1]
    layer = NeuralSimilarityConv2D(4, 3, predictor="sphere")
    layer.bilinear_form.trainable = False
    assert len(built(layer, (None, 7, 6, 5)).trainable_variables) == 2


def test_a_shared_predictor_of_unequal_layers_loads(tmp_path):
    """A file builds layers by their depth in the graph: here the other one first."""
    recipe = SimilarityPredictor("cnn", width=7, pooled=True)
    shared = SharedSimilarityPredictor(recipe, adapted_filters=3)
    first, second = keras.Input((9, 8, 2)), keras.Input((9, 8, 2))
    wide = NeuralSimilarityConv2D(40, 3, predictor=shared, kernel_regularizer="l2")(first)
    narrow = NeuralSimilarityConv2D(16, 3, predictor=shared)(second)
    apart = NeuralSimilarityConv2D(8, 3, predictor=SharedSimilarityPredictor())(second)
    pooled = keras.layers.GlobalAveragePooling2D()
    outputs = [pooled(wide), pooled(keras.layers.MaxPooling2D()(narrow)), pooled(apart)]
    model = keras.Model([first, second], outputs)
    kernels = [
        layer.bilinear_form.network.layers[0].kernel
        for layer in model.layers
        if getattr(layer, "predictor", None) is shared
    ]
    assert np.abs(kernels[0] - kernels[1]).min() > 0  # Adaptations start apart.
    randomize(model)
    loaded = reloaded(model, tmp_path)
    found = {id(each.predictor) for each in loaded.layers if hasattr(each, "predictor")}
    assert len(found) == 2
    assert len(loaded.losses) == len(model.losses) == 2  # A kernel and its adaptation.
    images = [images_after_relu(9, 8, 2)] * 2
    for received, expected in zip(loaded(images), model(images), strict=True):
        assert_equal(received, expected)


def recipe_of(**options):
    return lambda: SimilarityPredictor(**options)


def dense_with(predictor):
    return lambda: NeuralSimilarityDense(4, predictor=predictor).build((None, 9))


WITH_NORMS = SimilarityPredictor(batch_normalization=True)


test_errors = refusing(
    (recipe_of(kind="mlp"), r"`kind` must be one of .*kind='mlp'"),
    (recipe_of(pooled="no"), r"`pooled` must be .*'no'"),
    (recipe_of(batch_normalization="no"), r"`batch_normalization` must be .*'no'"),
    (recipe_of(width=0), r"`width` must be .*width=0"),
    (recipe_of(output_kernel_size=0), "`output_kernel_size` must be a positive integer"),
    (dense_with(SimilarityPredictor(pooled=True)), "without `pooled` and `output_kern"),
    (dense_with(SimilarityPredictor(downsampling=2)), "without `downsampling`, except in"),
    (
        dense_with(SharedSimilarityPredictor()),
        "`predictor` must be given to convolutions if it is shared",
    ),
    (
        dense_with(SimilarityPredictor("full_sphere", batch_normalization=False)),
        "`predictor` must be with `start='published'` or a batch norm",
    ),
    (
        lambda: SharedSimilarityPredictor(keras.layers.Conv2D(9, 3)),
        r"`predictor` must be a `SimilarityPredictor` or a name of its kind",
    ),
    (
        lambda: NeuralSimilarityGRUCell(4, predictor=WITH_NORMS),
        r"`batch_normalization` must be None or False in a recurrent cell.*=True",
    ),
)

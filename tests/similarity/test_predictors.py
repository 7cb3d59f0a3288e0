"""Predictors of the similarity: their layers, positions, start, and whom they serve."""

import keras
import numpy as np
import pytest
from keras import ops
from similarity_layers import FAMILY, assert_close, assert_equal, randomize

from nsl_keras import predictors, similarities
from nsl_keras.layers import (
    BatchNormalization,
    NeuralSimilarityConv1D,
    NeuralSimilarityConv2D,
    NeuralSimilarityDense,
    NeuralSimilarityDepthwiseConv2D,
    SphereConv2D,
    SphereDense,
)
from nsl_keras.predictors import (
    DenseSimilarityPredictor,
    SharedSimilarityPredictor,
    SimilarityPredictor,
)

CHANNELS = 5

# kind, similarity: hidden width, outputs, which layers normalize by norms or by batch.
ARCHITECTURES = [
    ("sphere", "diagonal", 64, 9, "input", True, None, True),
    ("sphere", "unconstrained", 128, 81, "input", False, None, False),
    ("sphere", "positive_semidefinite", 128, 45, "input", False, None, False),
    ("full_sphere", "diagonal", 64, 9, "both", True, "both", True),
    ("full_sphere", "unconstrained", 128, 81, "both", True, "both", True),
    ("cnn", "diagonal", 64, 9, None, True, None, True),
    ("mlp", "symmetric", 128, 81, None, False, None, True),
]


def images_after_relu(height=7, width=6, channels=CHANNELS):
    rng = np.random.default_rng(3)
    return np.maximum(rng.normal(size=(2, height, width, channels)), 0).astype("float32")


def array(tensor):
    return np.array(ops.convert_to_numpy(tensor))


@pytest.mark.parametrize("dense", [False, True], ids=["convolutions", "dense"])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_architecture(architecture, dense):
    """The layers one after the other, of random weights, give the prediction."""
    kind, similarity, width, outputs, *normalized = architecture
    options = {"kind": kind, "similarity": similarity, "momentum": 0.8, "epsilon": 0.01}
    if dense:
        predictor = DenseSimilarityPredictor(9, **options)
        inputs = images_after_relu(7, 6, 18)
    else:
        predictor = SimilarityPredictor(3, padding="same", **options)
        inputs = images_after_relu()
    predictor.build(inputs.shape)
    randomize(predictor)
    expected, parameters = inputs, 0
    for place, filters, norms, batch_normalized in (
        ("hidden", width, *normalized[:2]),
        ("output", outputs, *normalized[2:]),
    ):
        layer = getattr(predictor, f"{place}_{'dense' if dense else 'convolution'}")
        if norms is None:
            plain = keras.layers.Dense if dense else keras.layers.Conv2D
            assert type(layer) is plain
        else:
            assert type(layer) is (SphereDense if dense else SphereConv2D)
            assert layer.normalize == norms
        assert layer.bias is None
        assert layer.kernel.shape[-1] == filters
        parameters += layer.count_params()
        expected = layer(expected)
        normalization = getattr(predictor, f"{place}_normalization", None)
        assert (normalization is not None) == batch_normalized
        if batch_normalized:
            assert (normalization.momentum, normalization.epsilon) == (0.8, 0.01)
            parameters += 4 * filters + 1  # The one is the number of steps.
            expected = normalization(expected)
        if place == "hidden":
            expected = array(expected)
            assert expected.min() < 0 < expected.max()
            expected = np.maximum(expected, 0)
    assert predictor.count_params() == parameters
    assert predictor.outputs == outputs
    assert_close(predictor(inputs), array(expected), 1e-5)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "cnn"])
def test_batch_normalization_can_be_asked_for(kind, wanted):
    predictor = SimilarityPredictor(
        2, kind, "unconstrained", hidden_filters=3, batch_normalization=wanted
    )
    predictor.build((None, 7, 6, CHANNELS))
    for normalization in (predictor.hidden_normalization, predictor.output_normalization):
        assert (normalization is not None) == wanted
    assert predictor.hidden_convolution.filters == 3


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["full_sphere", "cnn"])
def test_layers_have_the_axes_of_the_kernel(kind, rank):
    predictor = SimilarityPredictor(
        (2, 3, 1)[:rank], kind, padding="same", hidden_filters=4
    )
    outputs = predictor(ops.ones((2, 5, 4, 6)[: rank + 1] + (CHANNELS,)))
    assert tuple(outputs.shape) == (2, 5, 4, 6)[: rank + 1] + ((2, 6, 6)[rank - 1],)
    with pytest.raises(ValueError, match=rf"must have rank {rank + 2}"):
        SimilarityPredictor((2, 3, 1)[:rank], kind).build((None,) + (5,) * (rank + 2))


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("rank", [1, 2])
def test_pooled_prediction_is_the_mean_over_positions(rank, data_format):
    member = FAMILY[f"conv{rank}d"]
    inputs = member.tensor(data_format=data_format)
    options = {
        "kernel_size": (2, 3)[:rank],
        "similarity": "symmetric",
        "padding": "same",
        "strides": 2,
        "hidden_filters": 4,
        "data_format": data_format,
    }
    everywhere = SimilarityPredictor(**options)
    pooled = SimilarityPredictor(pooled=True, **options)
    for each in (everywhere, pooled):
        each.build(inputs.shape)
        randomize(each)
    first = data_format == "channels_first"
    axes = tuple(range(2, rank + 2)) if first else tuple(range(1, rank + 1))
    expected = np.mean(array(everywhere(inputs)), axis=axes)
    assert_close(pooled(inputs), expected, 1e-5)
    assert tuple(pooled.compute_output_shape(inputs.shape)) == expected.shape
    assert np.max(np.std(expected, axis=0)) > 0.01
    assert SimilarityPredictor.from_config(pooled.get_config()).pooled is True


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sphere", {"padding": "valid"}),
        ("sphere", {"padding": "same", "strides": 2, "data_format": "channels_first"}),
        ("full_sphere", {"padding": "valid", "strides": (3, 1)}),
        ("cnn", {"padding": "same", "dilation_rate": (2, 1)}),
    ],
    ids=str,
)
def test_positions_are_those_of_the_convolution(kind, options):
    images = images_after_relu()
    first = options.get("data_format") == "channels_first"
    if first:
        images = np.moveaxis(images, -1, 1)
    plain = keras.layers.Conv2D(6, (2, 3), **options)
    expected = plain.compute_output_shape(images.shape)
    predictor = SimilarityPredictor((2, 3), kind, hidden_filters=4, **options)
    assert tuple(predictor(images).shape) == expected
    assert tuple(predictor.compute_output_shape(images.shape)) == expected


def test_prediction_at_a_position_sees_the_patch_of_that_position():
    """With stride 3 and one output tap, a pixel moves the predictions over it alone."""
    predictor = SimilarityPredictor(
        1,
        "cnn",
        strides=3,
        start="published",
        hidden_kernel_initializer="ones",
        output_kernel_initializer="ones",
    )
    images = np.zeros((1, 7, 7, 1), "float32")
    images[0, 3, 6] = 1
    outputs = array(predictor(images))
    assert outputs.shape == (1, 3, 3, 1)
    assert np.argwhere(outputs[0, :, :, 0] != 0).tolist() == [[1, 2]]


# One prediction for a block of positions.


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("conv1d", {"padding": "causal", "strides": 2}),
        ("conv2d", {"padding": "valid"}),
        ("conv2d", {"padding": "same", "strides": (1, 2)}),
        ("conv2d", {"padding": "valid", "data_format": "channels_first"}),
        ("conv3d", {"padding": "same", "similarity": "symmetric"}),
        ("depthwise_conv2d", {"padding": "same", "depth_multiplier": 2}),
    ],
    ids=str,
)
def test_positions_of_a_block_share_a_prediction(name, options, shared):
    """What is predicted with so many times the strides, at every position of a block."""
    member, block = FAMILY[name], 3
    inputs = member.tensor(data_format=options.get("data_format"))
    kind = SharedSimilarityPredictor if shared else SimilarityPredictor
    predictor = kind(hidden_filters=4, downsampling=block)
    layer = member.make_built(kernel_size=2, predictor=predictor, **options)
    positions = layer.compute_output_shape(inputs.shape)
    seen = layer.adaptation(inputs) if shared else inputs
    coarse = SimilarityPredictor(
        layer.kernel_size,
        similarity=layer.similarity,
        hidden_filters=4,
        batch_normalization=False if shared else None,
        padding=predictor.padding,
        data_format=predictor.data_format,
        strides=[block * stride for stride in predictor.strides or (1,) * layer.rank],
    )
    coarse.build(seen.shape)
    coarse.set_weights(predictor.get_weights())
    expected, outputs = array(coarse(seen)), array(predictor(seen))
    first = 2 if layer.data_format == "channels_first" else 1
    for axis in range(first, first + layer.rank):
        numbers = np.arange(positions[axis]) // block
        assert expected.shape[axis] == numbers[-1] + 1 > 1
        expected = np.take(expected, numbers, axis)
    assert_equal(outputs, expected)
    assert tuple(predictor.compute_output_shape(seen.shape)) == outputs.shape
    unknown = predictor.compute_output_shape((None,) * (layer.rank + 2))
    assert set(unknown) == {None, predictor.outputs}


def test_blocks_that_fit_are_whole():
    predictor = SimilarityPredictor(3, padding="same", hidden_filters=4, downsampling=2)
    images = images_after_relu(8, 6)
    predictor.build(images.shape)
    randomize(predictor)
    blocks = array(predictor(images)).reshape(2, 4, 2, 3, 2, 9)
    assert_equal(blocks, np.broadcast_to(blocks[:, :, :1, :, :1], blocks.shape))
    assert np.std(blocks[:, :, 0, :, 0], axis=(1, 2)).max() > 0.01


def test_a_pooled_prediction_is_the_mean_over_blocks():
    images = images_after_relu()
    options = {"kernel_size": 3, "hidden_filters": 4, "strides": 2}
    pooled = SimilarityPredictor(pooled=True, downsampling=2, **options)
    coarse = SimilarityPredictor(**{**options, "strides": 4})
    for each in (pooled, coarse):
        each.build(images.shape)
        randomize(each)
    assert_close(pooled(images), np.mean(array(coarse(images)), axis=(1, 2)), 1e-5)
    assert tuple(pooled.compute_output_shape(images.shape)) == (2, 9)


def test_blocks_in_networks_of_ones_own():
    """Kinds that use `hidden` follow blocks; others are refused."""

    @predictors.register("blind_to_blocks")
    def blind_to_blocks(predictor):
        return [keras.layers.Conv2D(predictor.outputs, 3, padding="same", name="only")]

    predictor = SimilarityPredictor(kind="blind_to_blocks", downsampling=2)
    layer = NeuralSimilarityConv2D(4, 3, padding="same", predictor=predictor)
    message = r"`kind` must predict at 5 places along axis 1 .*, which predicts at 9"
    with pytest.raises(ValueError, match=message):
        layer.build((None, 7, 6, CHANNELS))
    predictor = SimilarityPredictor(3, "blind_to_blocks", padding="same", downsampling=2)
    for size in (None, 1):
        with pytest.raises(ValueError, match="`kind` must predict at"):
            predictor.build((None, size, size, CHANNELS))

    @predictors.register("fits_whole_blocks")
    def fits_whole_blocks(predictor):
        smaller = keras.layers.AveragePooling2D(2, name="smaller")
        return [smaller, keras.layers.Conv2D(predictor.outputs, 1, name="only")]

    predictor = SimilarityPredictor(3, "fits_whole_blocks", padding="same", downsampling=2)
    with pytest.raises(ValueError, match=r"at 5 places .*, which predicts at 4"):
        predictor.build((None, 8, 8, CHANNELS))


def test_blocks_and_holes():
    predictor = SimilarityPredictor(downsampling=2)
    layer = NeuralSimilarityConv2D(4, 3, dilation_rate=2, predictor=predictor)
    message = r"`downsampling` must be 1 where .*downsampling=2, dilation_rate=\(2, 2\)"
    with pytest.raises(ValueError, match=f"{message} in layer '{layer.name}'"):
        layer.build((None, 7, 6, CHANNELS))
    NeuralSimilarityConv2D(4, 3, predictor=predictor).build((None, 7, 6, CHANNELS))
    with pytest.raises(ValueError, match=message):
        SimilarityPredictor(3, dilation_rate=2, downsampling=2).build((None, 9, 9, 1))


# The start.


def difference_from_plain(layer, inputs, training):
    """The largest difference from the plain layer with the same kernel and bias."""
    outputs = layer(inputs, training=training)
    options = (
        {"units": layer.units}
        if hasattr(layer, "units")
        else {"filters": layer.filters, "kernel_size": layer.kernel_size}
    )
    plain = layer.plain(**options)
    plain.build(inputs.shape)
    plain.kernel.assign(layer.kernel)
    return float(ops.max(ops.abs(outputs - plain(inputs))))


@pytest.mark.parametrize("batch_normalization", [None, False])
@pytest.mark.parametrize(
    "similarity", ["diagonal", "unconstrained", "symmetric", "positive_semidefinite"]
)
@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "cnn"])
def test_a_dynamic_layer_starts_as_its_plain_twin_and_is_alive(
    kind, similarity, batch_normalization
):
    options = {"kind": kind, "batch_normalization": batch_normalization}
    inputs = images_after_relu(8, 8, 6)
    layers = [
        NeuralSimilarityConv2D(
            4, 3, similarity=similarity, predictor=SimilarityPredictor(**options)
        ),
        NeuralSimilarityDense(
            5,
            block_size=3,
            similarity=similarity,
            predictor=DenseSimilarityPredictor(**options),
        ),
    ]
    for layer in layers:
        for training in (False, True):
            assert difference_from_plain(layer, inputs, training) <= 1e-5
    hidden = [
        next(each for each in layer.predictor.weights if each.name == "kernel")
        for layer in layers
    ]
    before = [array(kernel) for kernel in hidden]
    # Both in one model: it is compiled once.
    start = keras.Input(inputs.shape[1:])
    model = keras.Model(start, [layer(start) for layer in layers])
    model.compile(keras.optimizers.Adam(1e-3), ["mse", "mse"])
    targets = [
        np.random.default_rng(0).normal(size=shape[1:]) for shape in model.output_shape
    ]
    targets = [np.stack([each, -each]) for each in targets]
    model.fit(inputs, targets, epochs=20, verbose=0)
    for kernel, old in zip(hidden, before, strict=True):
        assert np.linalg.norm(array(kernel) - old) >= 1e-3 * np.linalg.norm(old)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_scale_of_zeros_stands_after_angles_without_batch_norm(rank, data_format):
    predictor = SimilarityPredictor(
        (2, 1, 2)[:rank],
        "full_sphere",
        hidden_filters=4,
        batch_normalization=False,
        data_format=data_format,
    )
    axes = (5, 4, 6)[:rank]
    shape = (2, *axes, 3) if data_format == "channels_last" else (2, 3, *axes)
    outputs = array(predictor(ops.ones(shape)))
    assert outputs.shape == predictor.compute_output_shape(shape)
    assert not outputs.any()
    scale = predictor.output_scale.scale
    scale.assign(np.reshape(1.0 + np.arange(predictor.outputs), scale.shape))
    expected = predictor.output_convolution(
        ops.relu(predictor.hidden_convolution(ops.ones(shape)))
    )
    axis = 1 if data_format == "channels_first" else -1
    expected = np.moveaxis(array(expected), axis, -1) * (1 + np.arange(predictor.outputs))
    assert_close(ops.moveaxis(predictor(ops.ones(shape)), axis, -1), expected, 1e-6)


@pytest.mark.parametrize(
    ("kind", "similarity", "least", "most"),
    [
        ("sphere", "diagonal", 0, 0.02),
        ("sphere", "unconstrained", 0, 1e-4),
        ("cnn", "diagonal", 0, 0.05),
        # Its output is normalized twice: the authors' code starts at 0.155.
        ("full_sphere", "diagonal", 0.05, 0.3),
    ],
)
def test_the_published_start_is_near_zero(kind, similarity, least, most):
    predictor = SimilarityPredictor(3, kind, similarity, padding="same", start="published")
    outputs = array(predictor(images_after_relu(16, 16, 32), training=True))
    assert least < outputs.std() < most
    assert abs(outputs.mean()) < most


def test_fixed_momentum():
    predictor = SimilarityPredictor(3, momentum=0.9, momentum_warmup=False)
    images = images_after_relu()
    predictor.build(images.shape)
    predictor(images, training=True)
    norm = predictor.hidden_normalization
    assert array(norm.moving_variance).min() >= 0.9


@pytest.mark.parametrize(
    ("kind", "similarity"),
    [("sphere", "diagonal"), ("full_sphere", "diagonal"), ("cnn", "unconstrained")],
)
def test_inference_follows_training_from_the_first_epoch(kind, similarity):
    rng = np.random.default_rng(0)
    labels = np.arange(1536) % 4
    images = rng.normal(size=(1536, 10, 10, 3)).astype("float32")
    for label in range(4):
        row, column = divmod(label, 2)
        images[labels == label, 5 * row : 5 * row + 5, 5 * column : 5 * column + 5] += 0.5
    keras.utils.set_random_seed(0)
    layers = [keras.Input((10, 10, 3))]
    for _ in range(3):
        layers += [
            NeuralSimilarityConv2D(8, 3, similarity=similarity, predictor=kind),
            BatchNormalization(),
            keras.layers.ReLU(),
        ]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    history = model.fit(images, labels, batch_size=16, epochs=1, verbose=0).history
    assert history["loss"][0] < 1.5 * np.log(4)
    accuracies = []
    for training in (True, False):
        with keras.StatelessScope():
            outputs = array(model(ops.convert_to_tensor(images), training=training))
        accuracies.append(np.mean(outputs.argmax(axis=1) == labels))
    assert accuracies[0] > 0.6  # It has learned something.
    assert accuracies[1] >= accuracies[0] - 0.03


# The width.


@pytest.mark.parametrize(
    ("filters", "similarity", "width"),
    [
        (3, "diagonal", 8),
        (40, "diagonal", 20),
        (40, "unconstrained", 20),
        (200, "diagonal", 64),
        (300, "unconstrained", 128),
    ],
)
def test_the_width_follows_the_layer(filters, similarity, width):
    shape = (None, 7, 7, 4)
    layer = NeuralSimilarityConv2D(filters, 3, similarity=similarity, predictor="sphere")
    layer.build(shape)
    assert layer.predictor.hidden_filters == width
    dense = NeuralSimilarityDense(
        filters, block_size=2, similarity=similarity, predictor="sphere"
    )
    dense.build(shape)
    assert dense.predictor.hidden_units == width


def test_the_width_follows_all_filters_of_a_depthwise_layer():
    layer = NeuralSimilarityDepthwiseConv2D(3, depth_multiplier=2, predictor="sphere")
    layer.build((None, 7, 7, 15))
    assert layer.predictor.hidden_filters == 15


def test_files_from_before_keep_width_and_start():
    config = SimilarityPredictor(3, similarity="unconstrained").get_config()
    for name in ("start", "momentum_warmup"):
        del config[name]
    predictor = SimilarityPredictor.from_config(config)
    assert (predictor.hidden_filters, predictor.start) == (128, "published")


def test_kernel_initializers():
    predictor = SimilarityPredictor(
        3, hidden_kernel_initializer="ones", output_kernel_initializer="zeros"
    )
    predictor.build((None, 7, 6, CHANNELS))
    assert np.all(array(predictor.hidden_convolution.kernel) == 1)
    assert np.all(array(predictor.output_convolution.kernel) == 0)
    convolutions = SimilarityPredictor(3, padding="same")
    convolutions.build((None, 16, 16, 32))
    dense = DenseSimilarityPredictor(similarity="unconstrained", start="published")
    dense.build((None, 200))
    for layer, fan_in, scale in (
        (convolutions.hidden_convolution, 9 * 32, 0.1),
        (convolutions.output_convolution, 9 * 64, 0.001),
        (dense.hidden_dense, 200, 0.1),
        (dense.output_dense, 128, 0.001),
    ):
        deviation = array(layer.kernel).std()
        np.testing.assert_allclose(deviation, scale * np.sqrt(2 / fan_in), rtol=0.05)


def test_kernel_regularizer_adds_a_loss_for_either_kernel():
    predictor = SimilarityPredictor(3, kernel_regularizer=keras.regularizers.L2(0.5))
    predictor.build((None, 7, 6, CHANNELS))
    kernels = (predictor.hidden_convolution.kernel, predictor.output_convolution.kernel)
    expected = [0.5 * np.sum(array(kernel).astype("float64") ** 2) for kernel in kernels]
    losses = [float(array(loss)) for loss in predictor.losses]
    np.testing.assert_allclose(sorted(losses), sorted(expected), rtol=1e-4)


def test_batch_norms_follow_the_mode():
    layer = NeuralSimilarityConv2D(
        4, 3, padding="same", predictor=SimilarityPredictor(momentum=0.5)
    )
    images = ops.convert_to_tensor(images_after_relu())
    layer.build(images.shape)
    variance = layer.predictor.hidden_normalization.moving_variance
    start = array(variance)
    layer(images, training=False)
    np.testing.assert_array_equal(array(variance), start)
    layer(images, training=True)
    assert np.all(array(variance) < start)


# What is taken from the layer served.


def test_predictor_has_the_geometry_of_the_layer_that_it_serves():
    wide = SimilarityPredictor(kind="full_sphere", hidden_filters=7, momentum=0.7)
    layer = NeuralSimilarityConv2D(
        6,
        (2, 3),
        strides=(2, 1),
        padding="same",
        data_format="channels_first",
        similarity="unconstrained",
        predictor=wide,
        dtype="mixed_bfloat16",
    )
    layer.build((None, CHANNELS, 7, 6))
    assert layer.predictor is wide
    assert type(wide.similarity) is similarities.Unconstrained
    assert (wide.kernel_size, wide.strides, wide.padding) == ((2, 3), (2, 1), "same")
    assert wide.dtype_policy.name == "mixed_bfloat16"
    assert wide.output_convolution.dtype_policy.name == "mixed_bfloat16"
    assert wide.hidden_convolution.filters == 7
    assert wide.output_normalization.momentum == 0.7
    again = NeuralSimilarityConv2D.from_config(layer.get_config())
    assert again.predictor.get_config() == wide.get_config()
    dilated = NeuralSimilarityConv2D(6, 3, dilation_rate=2, predictor="sphere")
    dilated.build((None, 7, 6, CHANNELS))
    assert dilated.predictor.hidden_convolution.dilation_rate == (2, 2)
    assert dilated.predictor.output_convolution.dilation_rate == (1, 1)
    causal = NeuralSimilarityConv1D(6, 3, padding="causal", predictor="cnn")
    causal.build((None, 7, CHANNELS))
    assert causal.predictor.output_convolution.padding == "causal"
    dense = NeuralSimilarityDense(
        4, block_size=3, similarity="symmetric", predictor=DenseSimilarityPredictor()
    )
    dense.build((None, 12))
    assert (dense.predictor.block_size, dense.predictor.outputs) == (3, 9)


def test_predictor_keeps_a_dtype_that_is_given():
    predictor = SimilarityPredictor(dtype="float32")
    layer = NeuralSimilarityConv2D(6, 3, predictor=predictor, dtype="mixed_bfloat16")
    layer.build((None, 7, 6, CHANNELS))
    assert predictor.output_convolution.dtype_policy.name == "float32"


def test_own_similarity_decides_width_and_outputs():
    class Pair(similarities.Unconstrained):
        predictor_filters = 5
        predictor_batch_normalization = True

        def parameter_shape(self, taps):
            return (taps, 2)

    predictor = SimilarityPredictor((2, 3), similarity=Pair())
    predictor.build((None, 7, 6, CHANNELS))
    assert predictor.hidden_convolution.filters == 5
    assert predictor.outputs == 12
    assert predictor.hidden_normalization is not None


# Names.


def test_a_kind_of_ones_own(tmp_path):
    @predictors.register("test_deep")
    def deep(predictor):
        same = {"padding": "same", "data_format": predictor.data_format}
        return [
            *predictor.hidden("input", batch_normalized=True),
            keras.layers.Conv2D(5, 1, activation="gelu", name="middle", **same),
            *predictor.output(),
        ]

    shared = SharedSimilarityPredictor(kind="test_deep", adapted_filters=3)
    model = keras.Sequential(
        [
            keras.Input((9, 8, 3)),
            NeuralSimilarityConv2D(4, 3, strides=2, predictor="test_deep"),
            NeuralSimilarityConv2D(4, 3, similarity="symmetric", predictor=shared),
        ]
    )
    assert model.layers[0].predictor.middle.activation is keras.activations.gelu
    assert model.layers[0].predictor.hidden_normalization is not None
    randomize(model)
    model.save(tmp_path / "deep.keras")
    loaded = keras.saving.load_model(tmp_path / "deep.keras")
    images = images_after_relu(9, 8, 3)
    assert_equal(loaded(images), model(images))
    with pytest.raises(ValueError, match=r"`name` must not be .*name='sphere'"):
        predictors.register("sphere")(deep)


def test_a_kind_with_layers_that_keras_names(tmp_path):
    @predictors.register("test_unnamed")
    def unnamed(predictor):
        middle = keras.layers.Conv2D(5, 1, activation="relu")
        return [*predictor.hidden(), middle, *predictor.output()]

    layer = NeuralSimilarityConv2D(4, 3, predictor="test_unnamed")
    model = keras.Sequential([keras.Input((9, 8, 3)), layer])
    randomize(model)
    model.save(tmp_path / "unnamed.keras")
    loaded = keras.saving.load_model(tmp_path / "unnamed.keras")
    images = images_after_relu(9, 8, 3)
    assert_equal(loaded(images), model(images))


@pytest.mark.parametrize("name", ["similarity", "outputs", "call", "variables"])
def test_layers_of_a_kind_named_like_attributes(name):
    @predictors.register(f"test_{name}")
    def taken(predictor):
        middle = keras.layers.Conv2D(5, 1, name=name)
        return [*predictor.hidden(), middle, *predictor.output()]

    layer = NeuralSimilarityConv2D(4, 3, predictor=f"test_{name}")
    with pytest.raises(ValueError, match=f"`kind` 'test_{name}' must name .*layers {name}"):
        layer.build((None, 9, 8, 3))


def test_get():
    predictor = predictors.get("cnn", hidden_filters=3, name="own")
    assert predictor.name == "own"
    assert type(predictor) is SimilarityPredictor
    assert (predictor.kind, predictor.hidden_filters) == ("cnn", 3)
    assert predictors.get(predictor) is predictor
    assert predictors.get(None) is None
    config = keras.saving.serialize_keras_object(predictor)
    assert predictors.get(config).get_config() == predictor.get_config()


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "other"}, r"`kind` must be one of 'sphere', .*kind='other'"),
        ({"kind": np.ones(3)}, r"`kind` must be one of .*kind=array"),
        ({"kernel_size": 3.0}, r"`kernel_size` must be .*kernel_size=3.0"),
        ({"kernel_size": (3,) * 4}, r"`kernel_size` must be .*=\(3, 3, 3, 3\)"),
        ({"kernel_size": None, "strides": 2}, r"`strides` and .* must be None where"),
        ({"kernel_size": (3,), "strides": (1, 1)}, r"`strides` must be .*\(1, 1\)"),
        ({"dilation_rate": "2"}, r"`dilation_rate` must be .*dilation_rate='2'"),
        ({"padding": "full"}, r"`padding` must be one of 'valid', .*'full'"),
        ({"data_format": "NHWC"}, r"`data_format` must be one of .*'NHWC'"),
        ({"similarity": "full"}, r"`similarity` must be one that can be .*'Full'"),
        ({"downsampling": 0}, r"`downsampling` must be .*downsampling=0"),
        ({"hidden_filters": 0}, r"`hidden_filters` must be .*hidden_filters=0"),
        ({"batch_normalization": "no"}, r"`batch_normalization` must be one of None"),
        ({"momentum": 1.0}, r"`momentum` must be a number in \[0, 1\).*momentum=1.0"),
        ({"epsilon": 0}, r"`epsilon` must be a finite number above zero.*epsilon=0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        SimilarityPredictor(**{"kernel_size": 3, **options})


def test_a_predictor_serves_one_layer():
    predictor = SimilarityPredictor()
    first = NeuralSimilarityConv2D(4, 3, predictor=predictor, name="first")
    first.build((None, 8, 8, 4))
    second = NeuralSimilarityConv2D(4, 3, predictor=predictor)
    with pytest.raises(ValueError, match=r"one `SharedSimilarityPredictor`.*'first'"):
        second.build((None, 8, 8, 4))


def test_a_layer_of_ones_own_serves_one_layer():
    predictor = keras.layers.Conv2D(9, 3, padding="same", name="own")
    first = NeuralSimilarityConv2D(4, 3, padding="same", predictor=predictor, name="first")
    first.build((None, 8, 8, 4))
    second = NeuralSimilarityConv2D(4, 3, padding="same", predictor=predictor)
    with pytest.raises(ValueError, match=r"`predictor` must serve one layer.*'first'"):
        second.build((None, 8, 8, 4))
    predictor = keras.layers.Conv2D(9, 3, padding="same")
    refused = NeuralSimilarityConv2D(4, 3, predictor=predictor)
    with pytest.raises(ValueError, match="`predictor` must map the input shape"):
        refused.build((None, 8, 8, 4))
    NeuralSimilarityConv2D(4, 3, padding="same", predictor=predictor).build((None, 8, 8, 4))


def test_a_kind_takes_hidden_and_output_once():
    @predictors.register("test_twice")
    def twice(predictor):
        return [*predictor.hidden(), *predictor.hidden(), *predictor.output()]

    layer = NeuralSimilarityConv2D(16, 3, predictor="test_twice")
    with pytest.raises(ValueError, match=r"`kind` 'test_twice' must return layers with"):
        layer.build((None, 8, 8, 8))


def test_a_predictor_that_is_refused_may_serve_another_layer():
    predictor = SimilarityPredictor(3, padding="same")
    before = predictor.get_config()
    refused = NeuralSimilarityConv2D(4, 3, strides=2, predictor=predictor)
    with pytest.raises(ValueError, match="`predictor` must have padding='valid'"):
        refused.build((None, 8, 8, 4))
    assert predictor.get_config() == before
    layer = NeuralSimilarityConv2D(4, 3, padding="same", predictor=predictor)
    layer.build((None, 8, 8, 4))
    assert (predictor.padding, predictor.strides) == ("same", (1, 1))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (NeuralSimilarityConv2D(4, 3, predictor=DenseSimilarityPredictor()), (8, 8, 3)),
        (NeuralSimilarityDense(4, predictor=SimilarityPredictor()), (9,)),
        (NeuralSimilarityDense(4, predictor=SharedSimilarityPredictor(3)), (9,)),
    ],
)
def test_a_predictor_of_another_kind_of_layer(layer, shape):
    with pytest.raises(ValueError, match="`predictor` must be a `SimilarityPredictor` in"):
        layer.build((None, *shape))


def test_errors_at_build():
    with pytest.raises(ValueError, match="`kernel_size` must be given to a predictor"):
        SimilarityPredictor().build((None, 7, 6, CHANNELS))
    with pytest.raises(ValueError, match="last axis of the input must be known"):
        DenseSimilarityPredictor().build((None, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1.5}, "`block_size`"),
        ({"similarity": "sparse"}, "`similarity` must be one that can be predicted"),
        ({"hidden_units": 0}, "`hidden_units`"),
    ],
)
def test_errors_of_dense_predictors(options, message):
    with pytest.raises(ValueError, match=message):
        DenseSimilarityPredictor(**options)


# One predictor for several layers.


def shared_model(shared, widths=((6, 1), (8, 2), (8, 1)), channels=3, **options):
    layers = [
        NeuralSimilarityConv2D(
            filters, 3, strides=strides, padding="same", predictor=shared, **options
        )
        for filters, strides in widths
    ]
    return keras.Sequential([keras.Input((12, 10, channels)), *layers])


def count(variables):
    return sum(int(np.prod(variable.shape)) for variable in variables)


def test_shared_predictor_is_one_network_with_adaptations():
    shared = SharedSimilarityPredictor(adapted_filters=5, hidden_filters=7)
    model = shared_model(shared)
    assert all(layer.predictor is shared for layer in model.layers)
    assert len({id(layer.adaptation) for layer in model.layers}) == 3
    for layer, channels in zip(model.layers, (3, 6, 8), strict=True):
        assert type(layer.adaptation) is keras.layers.Conv2D
        assert tuple(layer.adaptation.kernel.shape) == (3, 3, channels, 5)
        assert layer.adaptation.strides == layer.strides
        assert layer.adaptation.padding == layer.padding
        assert layer.adaptation.bias is None
    assert tuple(shared.hidden_convolution.kernel.shape) == (3, 3, 5, 7)
    assert shared.hidden_convolution.strides == (1, 1)
    # Kernels and biases, adaptations, and once the two kernels.
    assert len(model.trainable_variables) == 3 * 2 + 3 + 2
    assert not model.non_trainable_variables
    assert model.count_params() == count(model.variables)


def test_shared_predictor_predicts_from_the_adapted_input():
    shared = SharedSimilarityPredictor(adapted_filters=5, hidden_filters=7)
    layer = FAMILY["conv2d"].make_built(
        strides=2, padding="same", predictor=shared, use_bias=False
    )
    inputs = FAMILY["conv2d"].tensor()
    prediction = array(shared(layer.adaptation(inputs)))
    assert prediction.shape == (2, 5, 6, 9)
    matrix = (1 + prediction)[..., None] * np.eye(9)
    assert_close(layer(inputs), FAMILY["conv2d"].expected(layer, matrix), 1e-5)


def test_shared_predictor_stays_shared_in_a_file(tmp_path):
    shared = SharedSimilarityPredictor(
        3, "cnn", adapted_filters=5, hidden_filters=7, pooled=True
    )
    apart = SharedSimilarityPredictor(hidden_filters=7)
    model = shared_model(shared, similarity="symmetric")
    model.add(NeuralSimilarityConv2D(4, 3, predictor=apart))
    randomize(model)
    model.save(tmp_path / "shared.keras")
    loaded = keras.saving.load_model(tmp_path / "shared.keras")
    first, second, third, other = (layer.predictor for layer in loaded.layers)
    assert first is second is third
    assert first is not other
    assert type(first) is SharedSimilarityPredictor
    assert first.get_config() == shared.get_config()
    assert loaded.count_params() == model.count_params()
    images = images_after_relu(12, 10, 3)
    assert_equal(loaded(images), model(images))


def test_sharing_saves_half_of_the_predictors_of_cnn9():
    """Section 7.1: "saves nearly half of the parameters used in the disjoint one"."""
    widths = [(32, 1)] * 3 + [(64, 1)] * 3 + [(128, 1)] * 3

    def predictor_parameters(make):
        layers = [
            NeuralSimilarityConv2D(
                filters, 3, strides=strides, padding="same", predictor=make()
            )
            for filters, strides in widths
        ]
        model = keras.Sequential([keras.Input((12, 10, 32)), *layers])
        own = [v for layer in model.layers for v in (layer.kernel, layer.bias)]
        return count(model.trainable_variables) - count(own)

    disjoint = predictor_parameters(lambda: SimilarityPredictor(hidden_filters=64))
    one = SharedSimilarityPredictor(hidden_filters=64)
    shared = predictor_parameters(lambda: one)
    inputs = 3 * 32 + 32 + 2 * 64 + 64 + 2 * 128
    normalizations = 2 * (64 + 9)  # Shared predictors have none.
    assert disjoint == 9 * inputs * 64 + 9 * (9 * 64 * 9 + normalizations)
    assert shared == 9 * inputs * 32 + 9 * 32 * 64 + 9 * 64 * 9
    assert 0.45 < shared / disjoint < 0.55


def test_shared_predictors_of_files_from_before():
    for kind, similarity, normalized in (
        ("sphere", "diagonal", True),
        ("sphere", "symmetric", False),
        ("full_sphere", "unconstrained", True),
    ):
        shared = SharedSimilarityPredictor(3, kind, similarity)
        assert shared.batch_normalization is None
        config = shared.get_config()
        del config["start"], config["momentum_warmup"]
        again = SharedSimilarityPredictor.from_config(config)
        assert again.batch_normalization is normalized
    config |= {"kind": "cnn"}
    with pytest.raises(ValueError, match=r"does not load.*Received: kind='cnn'"):
        SharedSimilarityPredictor.from_config(config)


def test_shared_predictor_serves_layers_of_several_kinds():
    shared = SharedSimilarityPredictor(similarity="unconstrained")
    images = images_after_relu(12, 10, 4)
    for name in ("conv2d", "depthwise_conv2d"):
        for options in ({"strides": 2}, {"dilation_rate": 2}, {"padding": "same"}):
            layer = FAMILY[name].make(
                kernel_size=(2, 3),
                similarity="unconstrained",
                predictor=shared,
                **options,
            )
            shape = layer(images).shape
            assert layer.compute_output_shape(images.shape) == tuple(shape)
    # Another kernel with as many taps.
    assert NeuralSimilarityConv2D(2, (3, 2), similarity="unconstrained", predictor=shared)(
        images
    ).shape == (2, 10, 9, 2)


def test_shared_predictor_in_causal_layers():
    shared = SharedSimilarityPredictor()
    layer = NeuralSimilarityConv1D(4, 3, padding="causal", predictor=shared)
    layer.build((None, 9, 4))
    assert layer.adaptation.padding == "causal"
    assert shared.output_convolution.padding == "causal"


def test_regularizer_and_initializer_of_the_adaptations():
    shared = SharedSimilarityPredictor(
        kernel_regularizer=keras.regularizers.L2(0.5), adaptation_initializer="ones"
    )
    layer = NeuralSimilarityConv2D(4, 3, predictor=shared)
    layer.build((None, 9, 8, 4))
    assert_equal(layer.adaptation.kernel, np.ones((3, 3, 4, 32)))
    kernels = [layer.adaptation.kernel, shared.hidden_convolution.kernel]
    kernels.append(shared.output_convolution.kernel)
    expected = sum(0.5 * np.sum(array(each) ** 2) for each in kernels)
    assert_close(sum(layer.losses), expected, 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "valid"}, r"`padding` must be 'same' or 'causal'.*padding='valid'"),
        ({"strides": 2}, r"`strides` belongs to the layers that share .*strides=2"),
        ({"dilation_rate": 2}, r"`dilation_rate` belongs to the layers .*rate=2"),
        ({"adapted_filters": 0}, r"`adapted_filters` must be .*adapted_filters=0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_errors_of_shared_predictors(options, message):
    with pytest.raises(ValueError, match=message):
        SharedSimilarityPredictor(**{"kernel_size": 3, **options})


def test_error_of_a_shared_predictor_of_other_axes():
    message = r"`predictor` must have a kernel of 1 axes here.*kernel_size=\(3, 3\)"
    layer = NeuralSimilarityConv1D(4, 3, predictor=SharedSimilarityPredictor(3))
    with pytest.raises(ValueError, match=message):
        layer.build((None, 9, 4))

"""Predictors of the similarity: their layers, positions and start."""

import keras
import numpy as np
import pytest
from keras import ops
from similarity_layers import FAMILY, assert_close, assert_equal, randomize

from nsl_keras import similarities
from nsl_keras.layers import (
    NeuralSimilarityConv1D,
    NeuralSimilarityConv2D,
    SphereConv2D,
)
from nsl_keras.predictors import SharedSimilarityPredictor, SimilarityPredictor

CHANNELS = 5

# kind, similarity: hidden filters, outputs, which layers normalise by norms or by batch.
ARCHITECTURES = [
    ("sphere", "diagonal", 64, 9, "input", True, None, True),
    ("sphere", "unconstrained", 128, 81, "input", False, None, False),
    ("full_sphere", "diagonal", 64, 9, "both", True, "both", True),
    ("full_sphere", "unconstrained", 128, 81, "both", True, "both", True),
    ("sphere", "symmetric", 128, 81, "input", False, None, False),
    ("sphere", "positive_semidefinite", 128, 45, "input", False, None, False),
    ("cnn", "diagonal", 64, 9, None, True, None, True),
    ("cnn", "unconstrained", 128, 81, None, False, None, True),
]


def images_after_relu(height=7, width=6, channels=CHANNELS):
    rng = np.random.default_rng(3)
    return np.maximum(rng.normal(size=(2, height, width, channels)), 0).astype("float32")


def check_convolution(layer, normalize, filters):
    assert layer.filters == filters
    assert layer.kernel_size == (3, 3)
    assert layer.bias is None
    if normalize is None:
        assert type(layer) is keras.layers.Conv2D
    else:
        assert type(layer) is SphereConv2D
        assert layer.normalize == normalize


@pytest.mark.parametrize(
    (
        "kind",
        "similarity",
        "hidden",
        "outputs",
        "hidden_norm",
        "hidden_batch_norm",
        "output_norm",
        "output_batch_norm",
    ),
    ARCHITECTURES,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_architecture(
    kind,
    similarity,
    hidden,
    outputs,
    hidden_norm,
    hidden_batch_norm,
    output_norm,
    output_batch_norm,
):
    predictor = SimilarityPredictor(
        3, kind=kind, similarity=similarity, momentum=0.8, epsilon=0.01
    )
    predictor.build((None, 7, 6, CHANNELS))
    check_convolution(predictor.hidden_convolution, hidden_norm, hidden)
    check_convolution(predictor.output_convolution, output_norm, outputs)
    parameters = 9 * CHANNELS * hidden + 9 * hidden * outputs
    for layer, there, filters in (
        (predictor.hidden_normalization, hidden_batch_norm, hidden),
        (predictor.output_normalization, output_batch_norm, outputs),
    ):
        assert (layer is not None) == there
        if there:
            assert (layer.momentum, layer.epsilon) == (0.8, 0.01)
            parameters += 2 * filters
    trainable = sum(np.prod(v.shape) for v in predictor.trainable_variables)
    assert trainable == parameters


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "cnn"])
def test_layers_have_the_axes_of_the_kernel(kind, rank):
    predictor = SimilarityPredictor(
        (2, 3, 1)[:rank], kind, padding="same", hidden_filters=4
    )
    outputs = predictor(ops.ones((2, 5, 4, 6)[: rank + 1] + (CHANNELS,)))
    assert tuple(outputs.shape) == (2, 5, 4, 6)[: rank + 1] + ((2, 6, 6)[rank - 1],)
    sphere = type(predictor.hidden_convolution).__name__
    assert sphere == (f"Conv{rank}D" if kind == "cnn" else f"SphereConv{rank}D")
    output = type(predictor.output_convolution).__name__
    assert output == (f"SphereConv{rank}D" if kind == "full_sphere" else f"Conv{rank}D")
    with pytest.raises(ValueError, match=rf"must have rank {rank + 2}"):
        SimilarityPredictor((2, 3, 1)[:rank], kind).build((None,) + (5,) * (rank + 2))


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pooled_prediction_is_the_mean_over_positions(rank, data_format):
    member = FAMILY[f"conv{rank}d"]
    inputs = member.tensor(data_format=data_format)
    options = {
        "kernel_size": (2, 3, 1)[:rank],
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
    expected = np.mean(ops.convert_to_numpy(everywhere(inputs)), axis=axes)
    assert_close(pooled(inputs), expected, 1e-5)
    assert tuple(pooled.compute_output_shape(inputs.shape)) == expected.shape
    assert np.max(np.std(expected, axis=0)) > 0.01
    again = SimilarityPredictor.from_config(pooled.get_config())
    assert again.pooled is True


def test_padding_of_the_output_is_causal_where_that_of_the_input_is():
    predictor = SimilarityPredictor((3,), padding="causal", dilation_rate=2)
    assert predictor.hidden_convolution.padding == "causal"
    assert predictor.output_convolution.padding == "causal"
    assert SimilarityPredictor((3,)).output_convolution.padding == "same"


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "cnn"])
def test_hidden_filters_override_the_width(kind, similarity):
    predictor = SimilarityPredictor(3, kind, similarity, hidden_filters=7)
    predictor.build((None, 7, 6, CHANNELS))
    assert predictor.hidden_filters == 7
    assert tuple(predictor.hidden_convolution.kernel.shape) == (3, 3, CHANNELS, 7)
    assert predictor.output_convolution.kernel.shape[-2] == 7


def test_layers_run_in_the_order_of_the_paper():
    """The call against the layers one after the other, with random weights."""
    predictor = SimilarityPredictor(3, "sphere", "diagonal", padding="same")
    images = ops.convert_to_tensor(images_after_relu())
    predictor.build(images.shape)
    rng = np.random.default_rng(4)
    for variable in predictor.variables:
        value = 0.5 * rng.normal(size=variable.shape)
        # Variances are positive.
        variable.assign(np.abs(value) + 0.1 if "variance" in variable.path else value)
    hidden = predictor.hidden_normalization(predictor.hidden_convolution(images))
    hidden = ops.convert_to_numpy(hidden)
    assert hidden.min() < 0 < hidden.max()
    hidden = np.maximum(hidden, 0)
    expected = predictor.output_normalization(predictor.output_convolution(hidden))
    np.testing.assert_allclose(
        ops.convert_to_numpy(predictor(images)), ops.convert_to_numpy(expected), atol=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sphere", {"padding": "same"}),
        ("sphere", {"padding": "valid"}),
        ("sphere", {"padding": "same", "strides": 2}),
        ("sphere", {"padding": "same", "strides": 2, "data_format": "channels_first"}),
        ("full_sphere", {"padding": "valid", "strides": (3, 1)}),
        ("full_sphere", {"padding": "same", "dilation_rate": (2, 1)}),
        ("cnn", {"padding": "valid", "dilation_rate": 2}),
        ("cnn", {"padding": "same", "strides": 2, "data_format": "channels_first"}),
    ],
    ids=str,
)
def test_positions_are_those_of_the_convolution(kind, options):
    images = images_after_relu()
    first = options.get("data_format") == "channels_first"
    if first:
        images = np.moveaxis(images, -1, 1)
    plain = keras.layers.Conv2D(6, (2, 3), **options)
    expected = list(plain.compute_output_shape(images.shape))
    expected[1 if first else -1] = 6
    predictor = SimilarityPredictor((2, 3), kind, hidden_filters=4, **options)
    assert list(predictor(images).shape) == expected
    assert list(predictor.compute_output_shape(images.shape)) == expected


def test_prediction_at_a_position_sees_the_patch_of_that_position():
    """With stride 3 and one output tap, a pixel moves the predictions over it alone."""
    predictor = SimilarityPredictor(
        1,
        "cnn",
        strides=3,
        hidden_kernel_initializer="ones",
        output_kernel_initializer="ones",
    )
    images = np.zeros((1, 7, 7, 1), "float32")
    images[0, 3, 6] = 1
    outputs = ops.convert_to_numpy(predictor(images))
    assert outputs.shape == (1, 3, 3, 1)
    assert np.argwhere(outputs[0, :, :, 0] != 0).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("kind", "similarity", "bound"),
    [
        ("sphere", "diagonal", 0.02),
        ("sphere", "unconstrained", 1e-4),
        ("cnn", "diagonal", 0.05),
    ],
)
def test_prediction_starts_near_zero(kind, similarity, bound):
    """`M` starts close to the identity, in training mode too."""
    predictor = SimilarityPredictor(3, kind, similarity, padding="same")
    outputs = ops.convert_to_numpy(predictor(images_after_relu(16, 16, 32), training=True))
    assert 0 < outputs.std() < bound
    assert abs(outputs.mean()) < bound


def test_full_sphere_prediction_starts_bounded():
    # Its output is normalised twice: the authors' code starts at a deviation of 0.155.
    predictor = SimilarityPredictor(3, "full_sphere", padding="same")
    outputs = ops.convert_to_numpy(predictor(images_after_relu(16, 16, 32), training=True))
    assert 0.05 < outputs.std() < 0.3


def test_kernel_initializers():
    predictor = SimilarityPredictor(
        3, hidden_kernel_initializer="ones", output_kernel_initializer="zeros"
    )
    predictor.build((None, 7, 6, CHANNELS))
    assert np.all(ops.convert_to_numpy(predictor.hidden_convolution.kernel) == 1)
    assert np.all(ops.convert_to_numpy(predictor.output_convolution.kernel) == 0)
    default = SimilarityPredictor(3, padding="same")
    default.build((None, 16, 16, 32))
    for layer, fan_in, scale in (
        (default.hidden_convolution, 9 * 32, 0.1),
        (default.output_convolution, 9 * 64, 0.001),
    ):
        deviation = ops.convert_to_numpy(layer.kernel).std()
        np.testing.assert_allclose(deviation, scale * np.sqrt(2 / fan_in), rtol=0.05)


@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "cnn"])
def test_kernel_regularizer_adds_a_loss_for_either_kernel(kind):
    predictor = SimilarityPredictor(3, kind, kernel_regularizer=keras.regularizers.L2(0.5))
    predictor.build((None, 7, 6, CHANNELS))
    expected = [
        0.5 * np.sum(ops.convert_to_numpy(layer.kernel).astype("float64") ** 2)
        for layer in (predictor.hidden_convolution, predictor.output_convolution)
    ]
    losses = [float(ops.convert_to_numpy(loss)) for loss in predictor.losses]
    np.testing.assert_allclose(sorted(losses), sorted(expected), rtol=1e-4)


def test_batch_norms_follow_the_mode():
    predictor = SimilarityPredictor(3, "sphere", padding="same", momentum=0.5)
    images = ops.convert_to_tensor(images_after_relu())
    predictor.build(images.shape)
    normalization = predictor.hidden_normalization

    def statistics():
        return np.array(ops.convert_to_numpy(normalization.moving_variance))

    start = statistics()
    predictor(images, training=False)
    np.testing.assert_array_equal(statistics(), start)
    predictor(images, training=True)
    assert np.all(statistics() < start)


def test_own_similarity_decides_width_and_outputs():
    class Pair(similarities.Similarity):
        predictor_filters = 5
        predictor_batch_normalization = True

        def parameter_shape(self, taps):
            return (taps, 2)

        def parameters_from(self, matrix):
            return matrix[:, :2]

        def matrix(self, parameters):
            raise NotImplementedError

    predictor = SimilarityPredictor((2, 3), similarity=Pair())
    assert predictor.hidden_filters == 5
    assert predictor.outputs == 12
    assert predictor.hidden_normalization is not None


def test_predictor_by_name_has_the_geometry_of_its_layer():
    layer = NeuralSimilarityConv2D(
        6,
        (2, 3),
        strides=(2, 1),
        padding="same",
        data_format="channels_first",
        similarity="unconstrained",
        predictor="full_sphere",
        kernel_regularizer="l2",
        dtype="mixed_bfloat16",
    )
    predictor = layer.predictor
    assert predictor.kind == "full_sphere"
    assert type(predictor.similarity) is similarities.Unconstrained
    assert predictor.kernel_size == (2, 3)
    assert predictor.strides == (2, 1)
    assert predictor.padding == "same"
    assert predictor.data_format == "channels_first"
    assert predictor.dtype_policy.name == "mixed_bfloat16"
    assert predictor.output_convolution.dtype_policy.name == "mixed_bfloat16"
    assert predictor.kernel_regularizer is layer.kernel_regularizer
    dilated = NeuralSimilarityConv2D(6, 3, dilation_rate=2, predictor="sphere")
    assert dilated.predictor.hidden_convolution.dilation_rate == (2, 2)
    assert dilated.predictor.output_convolution.dilation_rate == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "mlp"},
            r"`kind` must be one of 'sphere', 'full_sphere', 'cnn'.*kind='mlp'",
        ),
        ({"kind": None}, r"`kind` must be one of .*kind=None"),
        (
            {"similarity": "diag"},
            r"`similarity` must be one of 'diagonal', 'unconstrained'.*'diag'",
        ),
        ({"kernel_size": (3, 0)}, r"`kernel_size` must be .*kernel_size=\(3, 0\)"),
        ({"kernel_size": 3.0}, r"`kernel_size` must be .*kernel_size=3.0"),
        ({"kernel_size": ()}, r"`kernel_size` must be .* 1 to 3 .*kernel_size=\(\)"),
        ({"kernel_size": (3,) * 4}, r"`kernel_size` must be .*=\(3, 3, 3, 3\)"),
        ({"kernel_size": 0}, r"`kernel_size` must be .*kernel_size=0"),
        ({"kernel_size": (3,), "strides": (1, 1)}, r"`strides` must be .*\(1, 1\)"),
        ({"kind": np.ones(3)}, r"`kind` must be one of .*kind=array"),
        ({"similarity": "sparse"}, r"`similarity` must be one that can be .*'Sparse'"),
        ({"similarity": "full"}, r"`similarity` must be one that can be .*'Full'"),
        ({"hidden_filters": 0}, r"`hidden_filters` must be .*hidden_filters=0"),
        ({"hidden_filters": 1.5}, r"`hidden_filters` must be .*hidden_filters=1.5"),
        ({"strides": 0}, r"`strides` must be .*strides=0"),
        ({"dilation_rate": "2"}, r"`dilation_rate` must be .*dilation_rate='2'"),
        ({"strides": 2, "dilation_rate": 2}, r"`strides.*`dilation_rate"),
        ({"kind": "cnn", "strides": 2, "dilation_rate": 2}, r"`strides.*`dilation_rate"),
        ({"padding": "causal"}, r"`padding` must be one of 'valid', 'same'.*'causal'"),
        ({"data_format": "NHWC"}, r"`data_format` must be one of .*'NHWC'"),
        ({"momentum": 1.0}, r"`momentum` must be a number in \[0, 1\).*momentum=1.0"),
        ({"momentum": -0.1}, r"`momentum` must be a number in \[0, 1\).*momentum=-0.1"),
        ({"epsilon": 0}, r"`epsilon` must be a finite number above zero.*epsilon=0"),
        ({"epsilon": float("nan")}, r"`epsilon` must be a finite number.*epsilon=nan"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        SimilarityPredictor(**{"kernel_size": 3, **options})


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


def test_shared_predictor_is_one_network_behind_adaptations():
    shared = SharedSimilarityPredictor(3, adapted_filters=5, hidden_filters=7)
    model = shared_model(shared)
    assert all(layer.predictor is shared for layer in model.layers)
    adaptations = [layer.adaptation for layer in model.layers]
    assert len(set(map(id, adaptations))) == 3
    for layer, channels in zip(model.layers, (3, 6, 8), strict=True):
        assert type(layer.adaptation) is keras.layers.Conv2D
        assert tuple(layer.adaptation.kernel.shape) == (3, 3, channels, 5)
        assert layer.adaptation.strides == layer.strides
        assert layer.adaptation.padding == layer.padding
        assert layer.adaptation.bias is None
    assert tuple(shared.hidden_convolution.kernel.shape) == (3, 3, 5, 7)
    assert shared.hidden_convolution.strides == (1, 1)
    # Kernels and biases, adaptations, and once the two kernels and the batch norms.
    assert len(model.trainable_variables) == 3 * 2 + 3 + 2 + 4
    assert len(model.non_trainable_variables) == 4
    assert model.count_params() == count(model.variables)


def test_shared_predictor_predicts_from_the_adapted_input():
    shared = SharedSimilarityPredictor(3, adapted_filters=5, hidden_filters=7)
    layer = FAMILY["conv2d"].make_built(
        strides=2, padding="same", predictor=shared, use_bias=False
    )
    inputs = FAMILY["conv2d"].tensor()
    prediction = ops.convert_to_numpy(shared(layer.adaptation(inputs)))
    assert prediction.shape == (2, 5, 6, 9)
    matrix = (1 + prediction)[..., None] * np.eye(9)
    assert_close(layer(inputs), FAMILY["conv2d"].expected(layer, matrix), 1e-5)


def test_training_one_layer_moves_the_prediction_of_the_others():
    shared = SharedSimilarityPredictor(3, hidden_filters=7)
    first = NeuralSimilarityConv2D(4, 3, predictor=shared)
    second = NeuralSimilarityConv2D(4, 3, predictor=shared)
    images = images_after_relu(12, 10, 4)
    for layer in (first, second):
        layer.build(images.shape)
    randomize(second)
    before = np.array(ops.convert_to_numpy(second(images)))
    model = keras.Sequential([first])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    model.fit(images, np.ones((2, 10, 8, 4)), verbose=0)
    assert np.max(np.abs(ops.convert_to_numpy(second(images)) - before)) > 1e-4


def test_shared_predictor_stays_shared_in_a_file(tmp_path):
    shared = SharedSimilarityPredictor(
        3, "cnn", "symmetric", adapted_filters=5, hidden_filters=7, pooled=True
    )
    model = shared_model(shared, similarity="symmetric")
    randomize(model)
    model.save(tmp_path / "shared.keras")
    loaded = keras.saving.load_model(tmp_path / "shared.keras")
    first, second, third = (layer.predictor for layer in loaded.layers)
    assert first is second is third
    assert type(first) is SharedSimilarityPredictor
    assert first.get_config() == shared.get_config()
    assert loaded.count_params() == model.count_params()
    images = images_after_relu(12, 10, 3)
    assert_equal(loaded(images), model(images))
    # Two that are not shared stay two.
    apart = keras.Sequential(
        [
            keras.Input((12, 10, 3)),
            *(
                NeuralSimilarityConv2D(
                    4, 3, predictor=SharedSimilarityPredictor(3, hidden_filters=7)
                )
                for _ in range(2)
            ),
        ]
    )
    apart.save(tmp_path / "apart.keras")
    first, second = keras.saving.load_model(tmp_path / "apart.keras").layers
    assert first.predictor is not second.predictor


def test_sharing_saves_half_of_the_predictors_of_cnn9():
    """Section 7.1: "saves nearly half of the parameters used in the disjoint one"."""
    widths = [(32, 1)] * 3 + [(64, 1)] * 3 + [(128, 1)] * 3

    def predictor_parameters(predictor):
        model = shared_model(predictor, widths, channels=32)
        own = [v for layer in model.layers for v in (layer.kernel, layer.bias)]
        return count(model.trainable_variables) - count(own)

    disjoint = predictor_parameters("sphere")
    shared = predictor_parameters(SharedSimilarityPredictor(3))
    inputs = 3 * 32 + 32 + 2 * 64 + 64 + 2 * 128
    normalizations = 2 * (64 + 9)
    assert disjoint == 9 * inputs * 64 + 9 * (9 * 64 * 9 + normalizations)
    assert shared == 9 * inputs * 32 + 9 * 32 * 64 + 9 * 64 * 9 + normalizations
    assert 0.45 < shared / disjoint < 0.55


def test_shared_predictor_serves_layers_of_several_kinds():
    shared = SharedSimilarityPredictor((2, 3), similarity="unconstrained")
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
    shared = SharedSimilarityPredictor((3,), padding="causal")
    layer = NeuralSimilarityConv1D(4, 3, padding="causal", predictor=shared)
    layer.build((None, 9, 4))
    assert layer.adaptation.padding == "causal"
    assert shared.output_convolution.padding == "causal"


def test_regularizer_and_initializer_of_the_adaptations():
    shared = SharedSimilarityPredictor(
        3, kernel_regularizer=keras.regularizers.L2(0.5), adaptation_initializer="ones"
    )
    layer = NeuralSimilarityConv2D(4, 3, predictor=shared)
    layer.build((None, 9, 8, 4))
    assert_equal(layer.adaptation.kernel, np.ones((3, 3, 4, 32)))
    kernels = [layer.adaptation.kernel, shared.hidden_convolution.kernel]
    kernels.append(shared.output_convolution.kernel)
    expected = sum(0.5 * np.sum(ops.convert_to_numpy(each) ** 2) for each in kernels)
    assert_close(sum(layer.losses), expected, 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "valid"}, r"`padding` must be 'same' or 'causal'.*padding='valid'"),
        ({"padding": "causal"}, r"`padding` must be one of 'valid', 'same'.*'causal'"),
        ({"strides": 2}, r"`strides` belongs to the layers that share .*strides=2"),
        ({"dilation_rate": 2}, r"`dilation_rate` belongs to the layers .*rate=2"),
        ({"adapted_filters": 0}, r"`adapted_filters` must be .*adapted_filters=0"),
        ({"similarity": "sparse"}, r"`similarity` must be one that can be .*'Sparse'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_errors_of_shared_predictors(options, message):
    with pytest.raises(ValueError, match=message):
        SharedSimilarityPredictor(**{"kernel_size": 3, **options})


def test_errors_of_a_shared_predictor_of_other_axes():
    message = r"`predictor` must have a kernel of 1 axes here.*kernel_size=\(3, 3\)"
    layer = NeuralSimilarityConv1D(4, 3, predictor=SharedSimilarityPredictor(3))
    with pytest.raises(ValueError, match=message):
        layer.build((None, 9, 4))
    shared = SharedSimilarityPredictor((3,))
    with pytest.raises(ValueError, match=r"must have a kernel of 2 axes here"):
        NeuralSimilarityConv2D(4, 3, predictor=shared).build((None, 9, 8, 4))

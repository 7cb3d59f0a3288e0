"""Predictors of the similarity: their layers, positions and start."""

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras import similarities
from nsl_keras.layers import NeuralSimilarityConv2D, SphereConv2D
from nsl_keras.predictors import SimilarityPredictor

CHANNELS = 5

# kind, similarity: hidden filters, outputs, which layers normalise by norms or by batch.
ARCHITECTURES = [
    ("sphere", "diagonal", 64, 9, "input", True, None, True),
    ("sphere", "unconstrained", 128, 81, "input", False, None, False),
    ("full_sphere", "diagonal", 64, 9, "both", True, "both", True),
    ("full_sphere", "unconstrained", 128, 81, "both", True, "both", True),
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


@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "cnn"])
@pytest.mark.parametrize(
    "options",
    [
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": "same", "strides": 2},
        {"padding": "valid", "strides": (3, 1)},
        {"padding": "same", "dilation_rate": (2, 1)},
        {"padding": "valid", "dilation_rate": 2},
        {"padding": "same", "strides": 2, "data_format": "channels_first"},
    ],
    ids=str,
)
def test_positions_are_those_of_the_convolution(options, kind):
    images = images_after_relu()
    first = options.get("data_format") == "channels_first"
    if first:
        images = np.moveaxis(images, -1, 1)
    plain = keras.layers.Conv2D(6, (2, 3), **options)
    expected = list(plain.compute_output_shape(images.shape))
    expected[1 if first else -1] = 6
    predictor = SimilarityPredictor((2, 3), kind, **options)
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

"""The 4-layer ConvNet, against the authors' numbers."""

import keras
import numpy as np
import pytest
from golden_backbones import authors_variables, build_in, check_backbone
from golden_files import DTYPES, Golden
from keras import ops

from nsl_keras import backbones
from nsl_keras.layers import InstanceFiLM, NeuralSimilarityConv2D


def authors_name(name):
    return name.replace("convolution_", "conv")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "film"), [("mn_shallownet_modNone", None), ("mn_shallownet_modall", 10)]
)
def test_authors_numbers(name, film, dtype):
    model = build_in(dtype, lambda: backbones.convnet4(film=film))
    # Its convolutions are named `convolution_0` where others have `..._convolution`.
    variables = authors_variables(model, authors_name)
    for index in range(4):
        kernel = model.get_layer(f"convolution_{index}").kernel
        variables[f"conv{index}.W"] = kernel
    units = {
        f"film{layer.name[-6]}": layer.output
        for layer in model.layers
        if isinstance(layer, InstanceFiLM)
    }
    check_backbone(Golden(name), model, variables, dtype, units or None)


def count(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({}, 520_056),
        ({"film": 10}, 535_180),
        ({"similarity": "diagonal"}, 520_056 + 4 * 9),
        ({"similarity": "unconstrained"}, 520_056 + 4 * 81),
        ({"filters": (2, 3, 4, 5)}, 9 * (3 * 2 + 2 * 3 + 3 * 4 + 4 * 5) + 2 * 14),
    ],
    ids=str,
)
def test_trainable_parameters(options, parameters):
    model = backbones.convnet4(**options)
    assert count(model) == parameters
    assert model.output_shape == (None, options.get("filters", (192,))[-1])


def images(size=9, channels=3):
    rng = np.random.default_rng(2)
    return rng.random((2, size, size, channels)).astype("float32")


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
def test_static_similarity_starts_as_the_plain_network(similarity):
    filters = (4, 5, 6, 7)
    plain = backbones.convnet4((9, 9, 3), filters)
    model = backbones.convnet4((9, 9, 3), filters, similarity=similarity)
    for layer, ours in zip(plain.layers, model.layers, strict=True):
        if isinstance(ours, NeuralSimilarityConv2D):
            ours.kernel.assign(layer.kernel)
        else:
            ours.set_weights(layer.get_weights())
    expected = ops.convert_to_numpy(plain(images()))
    assert np.max(np.abs(expected)) > 0.01
    np.testing.assert_allclose(ops.convert_to_numpy(model(images())), expected, atol=1e-6)


def test_predictors_take_the_networks_options():
    model = backbones.convnet4(
        (9, 9, 3),
        (4, 5, 6, 7),
        predictor="sphere",
        batch_normalization_momentum=0.7,
        kernel_regularizer="l2",
    )
    layers = [layer for layer in model.layers if isinstance(layer, NeuralSimilarityConv2D)]
    assert len(layers) == 4
    assert len({id(layer.predictor) for layer in layers}) == 4
    for layer in layers:
        assert layer.predictor.kind == "sphere"
        assert layer.predictor.similarity.parameter_shape(9) == (9,)
        assert layer.predictor.output_normalization.momentum == 0.7
    # Three kernels a layer: its own, and its predictor's two.
    assert len(model.losses) == 12
    assert tuple(model(images()).shape) == (2, 7)


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_norms_are_synchronized_where_asked(synchronized):
    model = backbones.convnet4((9, 9, 3), predictor="sphere", synchronized=synchronized)
    found = []
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            found.append(layer.synchronized)
        elif isinstance(layer, NeuralSimilarityConv2D):
            found.append(layer.predictor.hidden_normalization.synchronized)
            found.append(layer.predictor.output_normalization.synchronized)
    # One a layer, and two in each predictor.
    assert found == [synchronized] * 12


def test_momentum_and_regularizer():
    model = backbones.convnet4(
        (9, 9, 3), batch_normalization_momentum=0.7, kernel_regularizer="l2"
    )
    momenta = [
        layer.momentum
        for layer in model.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    assert momenta == [0.7] * 4
    assert len(model.losses) == 4


def test_film_stands_behind_each_batch_norm():
    model = backbones.convnet4((9, 9, 3), film=5)
    films = [layer for layer in model.layers if isinstance(layer, InstanceFiLM)]
    assert [film.dictionary_size for film in films] == [5] * 4
    before = [model.layers[model.layers.index(film) - 1] for film in films]
    assert all(isinstance(layer, keras.layers.BatchNormalization) for layer in before)


@pytest.mark.parametrize(
    "options",
    [{}, {"film": 3}, {"similarity": "unconstrained"}, {"predictor": "sphere"}],
    ids=str,
)
def test_channels_first_computes_the_same(options):
    filters = (4, 5, 6, 7)
    last = backbones.convnet4((9, 9, 3), filters, **options)
    rng = np.random.default_rng(1)
    weights = [0.3 * np.abs(rng.normal(size=v.shape)) for v in last.variables]
    last.set_weights(weights)
    keras.config.set_image_data_format("channels_first")
    try:
        first = backbones.convnet4((3, 9, 9), filters, **options)
        first.set_weights(weights)
        received = ops.convert_to_numpy(first(np.moveaxis(images(), -1, 1)))
    finally:
        keras.config.set_image_data_format("channels_last")
    expected = ops.convert_to_numpy(last(images()))
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-4)


def test_smallest_image_and_unknown_size():
    assert tuple(backbones.convnet4((7, 7, 1))(images(7, 1)).shape) == (2, 192)
    unknown = backbones.convnet4((None, None, 3), (2, 2, 2, 2))
    assert tuple(unknown(images(12)).shape) == (2, 2)


def test_config_round_trip():
    model = backbones.convnet4((9, 9, 3), (2, 3, 4, 5), similarity="diagonal", name="mine")
    assert model.name == "mine"
    again = keras.Model.from_config(model.get_config())
    again.set_weights(model.get_weights())
    np.testing.assert_array_equal(
        ops.convert_to_numpy(again(images())), ops.convert_to_numpy(model(images()))
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"filters": (1, 2, 3)},
            r"`filters` must be a positive integer or 4 .*filters=\(1, 2, 3\)",
        ),
        ({"filters": (1, 2, 3, 0)}, r"`filters` must be .*filters=\(1, 2, 3, 0\)"),
        ({"filters": (1, 2, 3, 4.0)}, r"`filters` must be .*4.0\)"),
        (
            {"input_shape": (6, 32, 3)},
            r"`input_shape` must be at least 7x7 .*input_shape=\(6, 32, 3\)",
        ),
        ({"input_shape": (None, 6, 3)}, r"`input_shape` must be at least 7x7"),
        ({"similarity": "diag"}, r"`similarity` must be one of 'diagonal'"),
        ({"predictor": "mlp"}, r"must be .*'sphere', 'full_sphere', 'cnn'.*'mlp'"),
        ({"film": 0}, r"`dictionary_size` must be a positive integer.*0"),
    ],
    ids=str,
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        backbones.convnet4(**options)


def test_error_of_a_single_number_of_filters():
    with pytest.raises(ValueError, match=r"`filters` must be .*filters=24"):
        backbones.convnet4(filters=24)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 1.5])
def test_error_of_a_momentum_outside_its_range(momentum):
    with pytest.raises(ValueError, match="momentum"):
        backbones.convnet4((9, 9, 3), batch_normalization_momentum=momentum)

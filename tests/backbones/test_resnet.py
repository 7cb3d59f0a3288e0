"""Pre-activation residual networks, against the authors' numbers."""

import keras
import numpy as np
import pytest
from golden_backbones import authors_units, authors_variables, build_in, check_backbone
from golden_files import DTYPES, Golden
from keras import ops

from nsl_keras import backbones
from nsl_keras.layers import InstanceFiLM


def authors_name(name):
    """Their `conv0` is our root, their `layer_4` our shortcut."""
    return name.replace("root", "conv0").replace("shortcut", "layer_4")


def with_the_authors_films(model):
    """Adds the iFiLMs that the authors have without a batch norm before them."""

    def call(layer, *args, **kwargs):
        name = layer.name.replace("_convolution", "_film")
        if layer.name == "stage_0_block_0_layer_1_convolution":
            return layer(InstanceFiLM(10, name=name)(*args))
        outputs = layer(*args, **kwargs)
        if layer.name.endswith("shortcut_convolution"):
            outputs = InstanceFiLM(10, name=name)(outputs)
        return outputs

    return keras.models.clone_model(model, call_function=call)


def build(depth, film):
    model = backbones.resnet_v2(depth, film=film)
    return model if film is None else with_the_authors_films(model)


def check_authors_numbers(depth, film, dtype):
    model = build_in(dtype, lambda: build(depth, film))
    golden = Golden(f"mn_resnet{depth}_mod{'None' if film is None else 'all'}")
    variables = authors_variables(model, authors_name)
    units = authors_units(model, authors_name)
    # Their units end with the convolution, except the first one, and the shortcuts with
    # an iFiLM.
    units["conv0"] = model.get_layer("stage_0_block_0_shortcut_convolution").input
    if film is not None:
        units |= {unit: units[f"{unit}.film"] for unit in units if unit.endswith("layer_4")}
    assert set(units) == set(golden.meta["activation_shapes"])
    check_backbone(golden, model, variables, dtype, units)


@pytest.mark.parametrize("dtype", DTYPES)
def test_authors_numbers_at_depth_29(dtype):
    check_authors_numbers(29, None, dtype)


def test_authors_numbers_at_depth_29_with_film():
    # In float32 an activation next to zero may change its sign, and with it the gradients
    # before it, by up to 1e-2.
    check_authors_numbers(29, 10, DTYPES[0])


@pytest.mark.parametrize("film", [None, 10])
def test_authors_numbers_at_depth_56(film):
    check_authors_numbers(56, film, DTYPES[0])


def count(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


@pytest.mark.parametrize(("depth", "parameters"), [(29, 838_160), (56, 1_655_120)])
def test_trainable_parameters(depth, parameters):
    model = backbones.resnet_v2(depth)
    assert count(model) == parameters
    assert model.output_shape == (None, 256)
    assert model.name == f"resnet_v2_{depth}"


@pytest.fixture
def small():
    """The smallest depth there is, one block a stage."""

    def make(**options):
        return backbones.resnet_v2(11, (8, 8, 3), **options)

    return make


def images():
    return np.random.default_rng(2).random((2, 8, 8, 3)).astype("float32")


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def test_film_stands_behind_each_batch_norm_but_the_first(small):
    plain, model = small(), small(film=4)
    normalizations = layers_of(model, keras.layers.BatchNormalization)
    films = layers_of(model, InstanceFiLM)
    assert len(films) == len(normalizations) - 1
    assert normalizations[0].name == "root_normalization"
    for film in films:
        assert film.dictionary_size == 4
        before = model.get_layer(film.name.replace("_film", "_normalization"))
        assert film.input is before.output
    channels = [layer.gamma.shape[0] for layer in normalizations[1:]]
    assert count(model) - count(plain) == sum(3 * 4 * c + 1 for c in channels)


def test_final_relu(small):
    plain, rectified = small(), small(final_relu=True)
    rectified.set_weights(plain.get_weights())
    features = ops.convert_to_numpy(plain(images()))
    assert features.min() < 0
    features = ops.convert_to_numpy(rectified(images()))
    assert features.min() >= 0
    assert features.max() > 0


def test_momentum_and_regularizer(small):
    model = small(batch_normalization_momentum=0.7, kernel_regularizer="l2", name="mine")
    assert model.name == "mine"
    momenta = {
        layer.momentum for layer in layers_of(model, keras.layers.BatchNormalization)
    }
    assert momenta == {0.7}
    assert len(model.losses) == len(layers_of(model, keras.layers.Conv2D)) == 13


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_norms_are_synchronized_where_asked(synchronized, small):
    model = small(synchronized=synchronized)
    layers = layers_of(model, keras.layers.BatchNormalization)
    assert {layer.synchronized for layer in layers} == {synchronized}


@pytest.mark.parametrize("film", [None, 3])
def test_channels_first_computes_the_same(film, small):
    last = small(film=film)
    rng = np.random.default_rng(1)
    weights = [0.3 * np.abs(rng.normal(size=v.shape)) for v in last.variables]
    last.set_weights(weights)
    keras.config.set_image_data_format("channels_first")
    try:
        first = backbones.resnet_v2(11, (3, 8, 8), film=film)
        first.set_weights(weights)
        received = ops.convert_to_numpy(first(np.moveaxis(images(), -1, 1)))
    finally:
        keras.config.set_image_data_format("channels_last")
    expected = ops.convert_to_numpy(last(images()))
    error = np.max(np.abs(received - expected)) / np.max(np.abs(expected))
    assert error < 1e-4


@pytest.mark.parametrize("depth", [0, 2, 28, 30, 50])
def test_errors_of_depths(depth):
    message = rf"`depth` must be (of the form 9n \+ 2|a positive integer).*depth={depth}"
    with pytest.raises(ValueError, match=message):
        backbones.resnet_v2(depth)


@pytest.mark.parametrize("depth", [29.0, "29", True, None])
def test_errors_of_depths_that_are_no_integers(depth):
    with pytest.raises(ValueError, match=r"`depth` must be a positive integer"):
        backbones.resnet_v2(depth)


def test_error_of_an_empty_film(small):
    with pytest.raises(ValueError, match=r"`dictionary_size` must be a positive integer"):
        small(film=0)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 1.5])
def test_error_of_a_momentum_outside_its_range(momentum, small):
    with pytest.raises(ValueError, match="momentum"):
        small(batch_normalization_momentum=momentum)

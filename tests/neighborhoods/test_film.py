"""iFiLM beside its golden numbers, and added to models that have none."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_close, normal, randomize, refusing, stacked

from nsl_keras import convert, graphs
from nsl_keras.layers import InstanceFiLM


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 3, 5, 4)])
def test_starts_as_the_identity(shape, paper):
    options = {"residual": False, "learn_sharpness": False} if paper else {}
    layer, x = InstanceFiLM(6, **options), normal(2, *shape)
    assert_close(layer(x), x, 1e-6)
    # 3 K c + 1 numbers, as the authors' layer.
    numbers = sum(int(np.prod(v.shape)) for v in layer.trainable_variables)
    assert numbers == 3 * 6 * 4 + (not paper)


def test_the_paper_s_form():
    layer, x = InstanceFiLM(6, residual=False), normal(2, 4)
    layer.build(x.shape)
    randomize(layer.trainable_variables, positive=True)
    outputs = as_numpy(layer(x))
    twin = InstanceFiLM(6)
    twin.build(x.shape)
    twin.set_weights(layer.get_weights())
    twin.scales.assign(twin.scales - 1)
    assert_close(outputs, twin(x))


def test_masked_steps_are_left_out_of_the_mean():
    x, layer = normal(2, 5, 4), InstanceFiLM(6)
    mask = np.array([[True, True, True, False, False], [True] * 5])
    layer.build(x.shape)
    randomize(layer.trainable_variables, positive=True)
    masked = as_numpy(layer(x, mask=mask))
    assert_close(masked[:1, :3], layer(x[:1, :3]))
    assert_close(masked[1:], layer(x[1:]))
    assert np.abs(masked[:1] - as_numpy(layer(x[:1]))).max() > 1e-3
    assert np.all(np.isfinite(layer(x, mask=np.zeros_like(mask))))


IMAGES = normal(3, 8, 8, 3, seed=3)


def named(*names):
    return lambda layer: layer.name in names


def films_of(model):
    return [each.film for each in graphs.layers(model) if hasattr(each, "film")]


def residual():
    """A plain block, a residual one, a head with a batch norm of its own."""
    layers, inputs = keras.layers, keras.Input((8, 8, 3))
    first = layers.Conv2D(4, 3, padding="same", name="first")(inputs)
    first = layers.BatchNormalization(name="first_norm")(first)
    outputs = layers.Conv2D(4, 3, padding="same", name="second")(first)
    outputs = layers.BatchNormalization(name="second_norm")(outputs)
    outputs = layers.ReLU(name="relu")(layers.Add()([first, outputs]))
    outputs = layers.Dense(5, name="dense")(layers.GlobalAveragePooling2D()(outputs))
    outputs = layers.BatchNormalization(name="dense_norm")(outputs)
    model = keras.Model(inputs, layers.Dense(2, name="classes")(outputs), name="net")
    return randomize(model, positive=True)


def check_start(model, new_model, inputs=IMAGES):
    """Same outputs, bit by bit, and the source's weights beside those of iFiLM."""
    expected = as_numpy(model(inputs))
    assert np.ptp(expected) > 0
    np.testing.assert_array_equal(new_model(inputs), expected)
    added = {id(v) for film in films_of(new_model) for v in film.weights}
    kept = [variable for variable in new_model.weights if id(variable) not in added]
    for ours, others in zip(kept, model.weights, strict=True):
        assert ours is not others
        np.testing.assert_array_equal(as_numpy(ours), as_numpy(others))
    for film in films_of(new_model):
        randomize(film, positive=True)
    assert np.abs(as_numpy(new_model(inputs)) - expected).max() > 1e-3
    np.testing.assert_array_equal(model(inputs), expected)  # The source has no part in it.


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("all", ["first_norm", "second_norm", "dense_norm"]),
        ("last", ["dense_norm"]),
        (named("second_norm", "relu"), ["second_norm"]),
    ],
)
def test_places(where, after):
    model = residual()
    new_model = convert.add_film(model, where, dictionary_size=4)
    found = [each for each in new_model.layers if hasattr(each, "film")]
    assert [each.name for each in found] == after
    assert [each.film.dictionary_size for each in found] == [4] * len(after)
    assert new_model.name == "net" and not new_model.compiled
    paths = {variable.path for variable in new_model.variables}
    assert {variable.path for variable in model.variables} < paths
    assert f"{after[0]}/film/keys" in paths
    check_start(model, new_model)


def test_channels_first():
    model = randomize(stacked((3, 8, 8), keras.layers.BatchNormalization(1)), positive=True)
    new_model = convert.add_film(model)
    (film,) = films_of(new_model)
    assert (film.axis, film.keys.shape[-1]) == (1, 3)
    check_start(model, new_model, np.moveaxis(IMAGES, -1, 1))


def net(layer):
    return stacked((8, 8, 3), layer, name="net")


def test_masks_pass():
    inputs = keras.Input((5,), dtype="int32")
    outputs = keras.layers.Embedding(7, 4, mask_zero=True)(inputs)
    outputs = keras.layers.BatchNormalization()(outputs)
    model = keras.Model(inputs, keras.layers.GRU(3)(outputs))
    randomize(model.weights, positive=True)
    tokens = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]])
    check_start(model, convert.add_film(model), tokens)


def test_mixed_precision_and_frozen_layers():
    keras.config.set_dtype_policy("mixed_float16")
    model = residual()
    model.get_layer("first_norm").trainable = False
    new_model = convert.add_film(model)
    keras.config.set_dtype_policy("float32")
    assert {film.compute_dtype for film in films_of(new_model)} == {"float16"}
    assert not new_model.get_layer("first_norm").trainable
    model.trainable = False
    assert len(convert.add_film(model).trainable_variables) == 3 * 4
    assert all(film.trainable for film in films_of(new_model))
    check_start(model, new_model)


def add(where="all", model=None, **options):
    return convert.add_film(model or residual(), where, **options)


test_errors = refusing(
    (lambda: InstanceFiLM(0), "`dictionary_size` must be a positive integer"),
    (lambda: InstanceFiLM(axis=2), "`axis` must be one of -1, 1"),
    (lambda: InstanceFiLM().build((2, 4, None)), "`input_shape` must be known at the"),
    (lambda: add().layers[2].fold(), "`fold` needs a layer that .* a ModulatedBatchNorm"),
    (lambda: add("every"), "`where` must be one of 'all', 'last'"),
    (lambda: add(named("relu")), "batch norms of 'net'"),
    (lambda: add(model=keras.Model()), "`model` must be a functional or Sequential"),
    (lambda: add(model=net(keras.layers.Conv2D(2, 3))), "`where` must.*of 'net'"),
    (lambda: add(model=add()), "one or more batch norms of 'net'"),
    (lambda: add(model=net(keras.layers.BatchNormalization(2))), "`axis` must be.*=2"),
)

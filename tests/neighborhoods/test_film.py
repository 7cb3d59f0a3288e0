"""iFiLM beside its golden numbers, and added to models that have none."""

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras import convert, rewiring
from nsl_keras.layers import InstanceFiLM


@pytest.mark.parametrize("shape", [(4,), (5, 4), (3, 5, 4), (2, 3, 5, 4)])
def test_starts_as_the_identity(shape):
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    layer = InstanceFiLM(6)
    np.testing.assert_array_equal(layer(x), x)
    # 3 K c + 1 numbers, as the authors' layer.
    assert sum(int(np.prod(v.shape)) for v in layer.trainable_variables) == 3 * 6 * 4 + 1


def test_bad_arguments():
    with pytest.raises(ValueError, match="`dictionary_size` must be a positive integer"):
        InstanceFiLM(0)
    with pytest.raises(ValueError, match="`sharpness` must be a finite number"):
        InstanceFiLM(sharpness=0)
    with pytest.raises(ValueError, match="`axis` must be one of -1, 1"):
        InstanceFiLM(axis=2)
    with pytest.raises(ValueError, match="channel axis of the input must be known"):
        InstanceFiLM().build((None, 4, 4, None))


def test_masked_steps_are_left_out_of_the_mean():
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    mask = np.array([[True, True, True, False, False], [True] * 5])
    layer = InstanceFiLM(6)
    layer.build(x.shape)
    randomize(layer.trainable_variables)
    masked = ops.convert_to_numpy(layer(x, mask=mask))
    np.testing.assert_allclose(masked[:1, :3], layer(x[:1, :3]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(masked[1:], layer(x[1:]), rtol=1e-5, atol=1e-6)
    assert np.abs(masked[:1] - ops.convert_to_numpy(layer(x[:1]))).max() > 1e-3
    assert np.all(np.isfinite(layer(x, mask=np.zeros_like(mask))))


# iFiLM added to a model.

IMAGES = np.random.default_rng(3).normal(size=(3, 8, 8, 3)).astype("float32")


def randomize(variables):
    rng = np.random.default_rng(1)
    for variable in variables:
        variable.assign(0.5 + np.abs(0.3 * rng.normal(size=variable.shape)))


def films_of(model):
    return [each for each in rewiring.layers(model) if isinstance(each, InstanceFiLM)]


def residual(channels_first=False):
    """A plain block, a residual one, a head with a batch norm of its own."""
    options = {"padding": "same"}
    axis = -1
    if channels_first:
        options["data_format"], axis = "channels_first", 1
    pooling = {"data_format": options.get("data_format")}
    inputs = keras.Input((3, 8, 8) if channels_first else (8, 8, 3))
    first = keras.layers.Conv2D(4, 3, name="first", **options)(inputs)
    first = keras.layers.BatchNormalization(axis, name="first_norm")(first)
    outputs = keras.layers.Conv2D(4, 3, name="second", **options)(first)
    outputs = keras.layers.BatchNormalization(axis, name="second_norm")(outputs)
    outputs = keras.layers.Add(name="sum")([first, outputs])
    outputs = keras.layers.ReLU(name="relu")(outputs)
    outputs = keras.layers.GlobalAveragePooling2D(name="pooled", **pooling)(outputs)
    outputs = keras.layers.Dense(5, name="dense")(outputs)
    outputs = keras.layers.BatchNormalization(name="dense_norm")(outputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="classes")(outputs), name="net")
    randomize(model.weights)
    return model


def assert_same_at_the_start(model, new_model, inputs):
    """Same outputs, bit by bit, and the source's weights beside those of iFiLM."""
    before = model.get_weights()
    expected = ops.convert_to_numpy(model(inputs))
    assert np.ptp(expected) > 0
    np.testing.assert_array_equal(ops.convert_to_numpy(new_model(inputs)), expected)
    added = {id(v) for film in films_of(new_model) for v in film.weights}
    kept = [variable for variable in new_model.weights if id(variable) not in added]
    for ours, others in zip(kept, model.weights, strict=True):
        assert ours is not others
        np.testing.assert_array_equal(ops.convert_to_numpy(ours), others)
    # What is trained in one leaves the other as it is.
    randomize(variable for film in films_of(new_model) for variable in film.weights)
    changed = ops.convert_to_numpy(new_model(inputs))
    assert np.abs(changed - expected).max() > 1e-3
    np.testing.assert_array_equal(ops.convert_to_numpy(model(inputs)), expected)
    for one, two in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("all", ["first_norm", "second_norm", "dense_norm"]),
        ("last", ["dense_norm"]),
        ({"second", "relu", "dense"}, ["second", "relu", "dense"]),
        (lambda layer: layer.name in ("second", "relu"), ["second", "relu"]),
    ],
    ids=["all", "last", "names", "function"],
)
def test_places(where, after):
    model = residual()
    operations = [operation.name for operation in model.operations]
    new_model = convert.add_film(model, where, dictionary_size=4)
    films = films_of(new_model)
    assert [film.dictionary_size for film in films] == [4] * len(after)
    for film, name in zip(films, after, strict=True):
        assert film.input is new_model.get_layer(name).output
        assert film.name == f"{name}_film"
    assert new_model.name == "net"
    assert not new_model.compiled
    assert [operation.name for operation in model.operations] == operations
    assert_same_at_the_start(model, new_model, IMAGES)


def test_channels_of_layers_without_a_data_format():
    keras.config.set_image_data_format("channels_first")
    try:
        model = residual(channels_first=True)
        new_model = convert.add_film(model, ["second", "relu", "dense"])
        assert_same_at_the_start(model, new_model, np.moveaxis(IMAGES, -1, 1))
    finally:
        keras.config.set_image_data_format("channels_last")
    assert [film.axis for film in films_of(new_model)] == [1, 1, -1]


def test_channels_first():
    model = residual(channels_first=True)
    new_model = convert.add_film(model)
    assert films_of(new_model)[0].axis == 1
    assert_same_at_the_start(model, new_model, np.moveaxis(IMAGES, -1, 1))


@pytest.mark.parametrize("axis", [1, 3, -1])
def test_axis_of_the_batch_norm(axis):
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.BatchNormalization(axis),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    randomize(model.weights)
    new_model = convert.add_film(model)
    (film,) = films_of(new_model)
    assert film.axis == (1 if axis == 1 else -1)
    assert film.keys.shape == (10, 8 if axis == 1 else 3)
    assert isinstance(new_model, keras.Sequential)
    assert_same_at_the_start(model, new_model, IMAGES)


def shared_and_nested():
    """A batch norm called twice, one in a nested model, one inside TimeDistributed."""
    inner = keras.Sequential(
        [
            keras.Input((None, None, 3)),
            keras.layers.Conv2D(4, 3, padding="same"),
            keras.layers.BatchNormalization(name="norm"),
        ],
        name="inner",
    )
    inputs = keras.Input((8, 8, 3))
    shared = keras.layers.BatchNormalization(name="shared")
    outputs = shared(inner(shared(inputs)[:, ::2])[..., :3], training=False)
    frames = keras.layers.TimeDistributed(
        keras.layers.BatchNormalization(name="inside"), name="frames"
    )
    outputs = keras.layers.GlobalAveragePooling2D()(frames(outputs))
    model = keras.Model(inputs, keras.layers.Dense(2)(outputs))
    randomize(model.weights)
    return model


def test_shared_and_nested_batch_norms():
    model = shared_and_nested()
    new_model = convert.add_film(model, "all")
    assert sorted(film.name for film in films_of(new_model)) == [
        "inside_film",
        "norm_film",
        "shared_film",
    ]
    assert [layer.name for layer in new_model.get_layer("inner").layers][-1] == "norm_film"
    calls = [call.layer.name for call in rewiring.calls(new_model)]
    assert calls.count("shared_film") == calls.count("shared") == 2
    assert_same_at_the_start(model, new_model, IMAGES)
    assert [f.name for f in films_of(convert.add_film(model, "last"))] == ["inside_film"]


def test_masks_pass():
    inputs = keras.Input((5,), dtype="int32")
    outputs = keras.layers.Embedding(7, 4, mask_zero=True)(inputs)
    outputs = keras.layers.BatchNormalization()(outputs)
    outputs = keras.layers.GRU(3)(outputs)
    model = keras.Model(inputs, outputs)
    randomize(model.weights)
    tokens = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]])
    assert_same_at_the_start(model, convert.add_film(model), tokens)


def test_mixed_precision_and_frozen_layers():
    keras.config.set_dtype_policy("mixed_float16")
    model = residual()
    model.get_layer("first_norm").trainable = False
    new_model = convert.add_film(model)
    keras.config.set_dtype_policy("float32")
    assert {film.compute_dtype for film in films_of(new_model)} == {"float16"}
    assert not new_model.get_layer("first_norm").trainable
    assert all(film.trainable for film in films_of(new_model))
    assert_same_at_the_start(model, new_model, IMAGES)


@pytest.mark.long
def test_trains_and_is_saved(tmp_path):
    new_model = convert.add_film(residual(), "all")
    new_model.compile("adam", "mse")
    new_model.fit(IMAGES, np.ones((3, 2)), verbose=0)
    for film in films_of(new_model):
        assert np.abs(film.scales).max() > 0
        assert np.abs(film.shifts).max() > 0
    new_model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(IMAGES), new_model(IMAGES))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="mine")
        self.norm = keras.layers.BatchNormalization()

    def call(self, inputs):
        return self.norm(inputs)


def sequential(*layers):
    return keras.Sequential([keras.Input((8, 8, 3)), *layers], name="net")


def two_outputs():
    inputs = keras.Input((4, 3))
    outputs = keras.layers.GRU(2, return_state=True, name="recurrent")(inputs)
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize(
    ("make", "where", "message"),
    [
        (residual, "every", '`where` must choose layers: "all" or "last"'),
        (residual, [], "`where` must choose layers"),
        (residual, ["relu", "rule"], "for model 'net', which has no rule"),
        (residual, lambda layer: False, "for model 'net', which has no such layers"),
        (
            two_outputs,
            ["recurrent"],
            "`where` must choose layers with one output .*'recurrent' with outputs of",
        ),
        (Subclassed, "all", "`model` must be a functional or Sequential model"),
        (
            lambda: sequential(keras.layers.Conv2D(2, 3)),
            "all",
            "`where` must choose layers.*for model 'net'",
        ),
        (
            lambda: convert.add_film(residual()),
            "last",
            "`model` must not have iFiLM yet.*'net', with iFiLM in 'first_norm_film'",
        ),
        (
            lambda: sequential(keras.layers.BatchNormalization(axis=2)),
            "all",
            "Batch norms must be over .*axis=2 for 4 axes",
        ),
    ],
)
def test_errors(make, where, message):
    with pytest.raises(ValueError, match=message):
        convert.add_film(make(), where)


def test_error_of_a_dictionary_size():
    with pytest.raises(ValueError, match="`dictionary_size` must be a positive integer"):
        convert.add_film(residual(), dictionary_size=0)

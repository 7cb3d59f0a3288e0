"""The kernel's shape learned with the similarity: `M = D R`, Eqs. (4) and (5)."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES, gradients
from keras import ops
from similarity_layers import (
    FAMILY,
    SIMILARITIES,
    TOLERANCES,
    assert_close,
    assert_equal,
    identity_parameters,
    static_matrix,
    to_matrix,
)

from nsl_keras.layers import NeuralSimilarityConv2D

RNG = np.random.default_rng(9)
each_layer = pytest.mark.parametrize("name", FAMILY)
# A layer whose similarity is learned, and one whose similarity is predicted.
each_predictor = pytest.mark.parametrize("predictor", [None, "sphere"])


def make(name, predictor=None, dtype="float32", **options):
    """A layer with random weights whose shape is still the whole kernel."""
    layer = FAMILY[name].make_built(
        **{"kernel_size": 2, "padding": "same", **options},
        predictor=predictor,
        learn_shape=True,
        dtype=dtype,
    )
    layer.shape_parameters.assign(np.ones(layer.taps))
    return layer


def drop(layer, *taps):
    shape = np.ones(layer.taps)
    shape[list(taps)] = 0.2
    layer.shape_parameters.assign(shape)


@each_predictor
@each_layer
def test_shape_starts_as_the_whole_kernel(name, predictor):
    member = FAMILY[name]
    layer = member.make(kernel_size=2, learn_shape=True, predictor=predictor)
    without = member.make(kernel_size=2, predictor=predictor)
    for each in (layer, without):
        each.build(member.inputs.shape)
    assert_equal(layer.shape_parameters, np.ones(2**member.rank))
    assert_equal(layer.learned_shape, np.ones(2**member.rank))
    assert layer.shape_parameters.name == "shape"
    assert without.shape_parameters is None
    assert len(layer.trainable_variables) == len(without.trainable_variables) + 1


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5])
def test_shape_is_boolean_above_the_threshold(threshold):
    layer = NeuralSimilarityConv2D(2, (2, 3), learn_shape=True, shape_threshold=threshold)
    layer.build((None, 5, 5, 2))
    real = np.array([1.0, threshold, threshold + 0.01, threshold - 0.01, -2, 7])
    layer.shape_parameters.assign(real)
    # Not above the threshold where it is the threshold.
    assert_equal(layer.learned_shape, [1, 0, 1, 0, 0, 1])
    assert keras.backend.standardize_dtype(layer.learned_shape.dtype) == "float32"


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained", "sparse_of_3", "full"])
@each_layer
def test_static_layer_masks_the_rows_of_the_matrix(name, similarity):
    member, dtype = FAMILY[name], DTYPES[0]
    if similarity not in member.similarities():
        similarity = "symmetric"
    layer = make(name, similarity=SIMILARITIES[similarity], dtype=dtype)
    drop(layer, 0)
    shape = np.ones(layer.taps)
    shape[0] = 0
    matrix = static_matrix(layer)
    masked = np.tile(shape, len(matrix) // layer.taps)[:, None] * matrix
    outputs = layer(member.tensor(dtype))
    assert_close(outputs, member.expected(layer, masked), TOLERANCES[dtype])
    assert_close(layer.fold()(member.tensor(dtype)), outputs, TOLERANCES[dtype])
    # `R` itself is not masked.
    assert_close(layer.similarity_matrix, matrix, 1e-6)


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@each_layer
def test_dynamic_layer_masks_the_rows_of_every_matrix(name, similarity):
    member, dtype = FAMILY[name], DTYPES[0]
    layer = make(name, "sphere", dtype, similarity=SIMILARITIES[similarity])
    drop(layer, 1)
    inputs = member.tensor(dtype)
    identity = identity_parameters(layer.similarity, layer.taps)
    prediction = ops.convert_to_numpy(layer.predictor(inputs))
    prediction = prediction.reshape(*prediction.shape[:-1], *identity.shape)
    matrix = to_matrix(layer.similarity, identity + prediction)
    expected = member.expected(
        layer, np.where(np.arange(layer.taps) == 1, 0, 1)[:, None] * matrix
    )
    assert_close(layer(inputs), expected, TOLERANCES[dtype])


@each_layer
def test_dropped_tap_is_exactly_zero_and_can_come_back(name):
    layer = make(name, similarity="diagonal")
    whole = ops.convert_to_numpy(layer.equivalent_kernel)
    drop(layer, 0, 1)
    kernel = ops.convert_to_numpy(layer.equivalent_kernel)
    flat, before = (each.reshape(layer.taps, *each.shape[-2:]) for each in (kernel, whole))
    assert np.all(flat[:2] == 0.0)
    np.testing.assert_array_equal(flat[2:], before[2:])
    assert np.all(before != 0)
    layer.shape_parameters.assign(np.ones(layer.taps))
    assert_equal(layer.equivalent_kernel, whole)


@each_predictor
@each_layer
def test_gradient_of_the_boolean_shape_reaches_the_real_one(name, predictor):
    """The outputs are linear in `d`: its gradient is the change from 0 to 1."""
    member, dtype = FAMILY[name], DTYPES[0]
    layer = make(name, predictor, dtype)
    drop(layer, 1)
    inputs = member.tensor(dtype)
    cotangent = ops.cast(RNG.normal(size=layer.compute_output_shape(inputs.shape)), dtype)

    def scalar(inputs):
        return ops.sum(layer(inputs) * cotangent)

    (_, received) = gradients(scalar, [inputs], [layer.shape_parameters])
    real = np.array(ops.convert_to_numpy(layer.shape_parameters))
    expected = []
    for tap in range(layer.taps):
        values = []
        for state in (1.0, 0.0):
            changed = real.copy()
            changed[tap] = state
            layer.shape_parameters.assign(changed)
            values.append(float(ops.convert_to_numpy(scalar(inputs))))
        expected.append(values[0] - values[1])
    assert_close(received, expected, {"float64": 1e-10, "float32": 1e-4}[dtype])


@each_predictor
def test_one_step_of_gradient_descent_by_hand(predictor):
    """Eq. (5): `D_r <- D_r - rate * dL/dD`, the derivative taken at the Boolean `D`."""
    layer = make("conv2d", predictor, similarity="diagonal", padding="valid")
    drop(layer, 2)
    inputs = FAMILY["conv2d"].tensor()
    real = np.array(ops.convert_to_numpy(layer.shape_parameters))
    kernel = np.array(ops.convert_to_numpy(layer.kernel))
    (_, of_kernel) = gradients(
        lambda inputs: ops.mean(ops.square(layer(inputs, training=True))),
        [inputs],
        [layer.kernel],
    )
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.3), loss="mse")
    images = ops.convert_to_numpy(inputs)
    targets = np.zeros(layer.compute_output_shape(images.shape))
    model.fit(images, targets, batch_size=2, verbose=0)
    moved = ops.convert_to_numpy(layer.shape_parameters)
    # The loss sees `d W`: for a living tap, dL/dd = sum W dL/dW.
    of_shape = np.sum(kernel * ops.convert_to_numpy(of_kernel), axis=(2, 3)).reshape(-1)
    living = [0, 1, 3]
    assert_close((moved - real)[living], (-0.3 * of_shape)[living], 1e-4)
    # A tap that is dropped gets its gradient too.
    assert moved[2] != real[2]


def test_training_drops_a_tap_and_takes_it_back():
    """Towards a teacher without a tap, then towards one with it."""
    layer = NeuralSimilarityConv2D(
        4, 2, use_bias=False, learn_shape=True, kernel_initializer="ones"
    )
    inputs = RNG.normal(size=(16, 7, 7, 2)).astype("float32")
    layer.build(inputs.shape)
    for variable in (layer.kernel, layer.similarity_parameters):
        variable.trainable = False
    teacher = keras.layers.Conv2D(4, 2, use_bias=False)
    teacher.build(inputs.shape)
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    for kept in (0.0, 1.0):
        weights = np.ones((2, 2, 2, 4))
        weights[1, 0] = kept
        teacher.kernel.assign(weights)
        outputs = ops.convert_to_numpy(teacher(inputs))
        loss = model.fit(inputs, outputs, batch_size=16, epochs=40, verbose=0).history
        assert_equal(layer.learned_shape, [1, 1, kept, 1])
        assert loss["loss"][-1] < 1e-8
        equivalent = ops.convert_to_numpy(layer.equivalent_kernel)
        np.testing.assert_array_equal(equivalent[1, 0], kept)


@each_predictor
@pytest.mark.parametrize("name", ["conv2d", "depthwise_conv2d"])
def test_learned_shape_goes_through_a_file(name, predictor, tmp_path):
    member = FAMILY[name]
    layer = member.make(
        kernel_size=2, predictor=predictor, learn_shape=True, shape_threshold=0.4
    )
    model = keras.Sequential([keras.Input(member.inputs.shape[1:]), layer])
    drop(layer, 1)
    model.save(tmp_path / "shape.keras")
    loaded = keras.saving.load_model(tmp_path / "shape.keras")
    again = loaded.layers[0]
    assert again.learn_shape is True
    assert again.shape_threshold == 0.4
    assert_equal(again.shape_parameters, layer.shape_parameters)
    assert_equal(again.learned_shape, np.arange(2**member.rank) != 1)
    assert_equal(loaded(member.tensor()), model(member.tensor()))


@each_layer
def test_errors_of_the_learned_shape(name):
    member = FAMILY[name]
    message = r"`learned_shape` needs `learn_shape=True`.*'rigid' with learn_shape=False"
    with pytest.raises(ValueError, match=message):
        member.make_built(kernel_size=2, name="rigid").learned_shape  # noqa: B018
    early = member.make(kernel_size=2, name="early", learn_shape=True)
    with pytest.raises(ValueError, match=r"`learned_shape` needs a built .*'early'"):
        early.learned_shape  # noqa: B018

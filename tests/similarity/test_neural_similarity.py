"""The `M` of one kernel: matrix, learned shape, training, config and files."""

import inspect
import operator

import keras
import numpy as np
import pytest
from golden_files import DTYPES, gradients
from helpers import as_numpy, randomize, reloaded
from keras import ops
from similarity_layers import (
    FAMILY,
    TOLERANCES,
    assert_close,
    assert_equal,
    predicted_matrix,
    static_matrix,
    with_arguments,
)

from nsl_keras import layers, similarities
from nsl_keras.layers import NeuralSimilarityConv2D
from nsl_keras.predictors import SimilarityPredictor

RNG = np.random.default_rng(6)
one_layer_of_a_kind = pytest.mark.parametrize("name", ["conv2d", "depthwise_conv2d"])
# A layer whose similarity is learned, and one whose similarity is predicted.
SHAPED = similarities.Diagonal(learn_shape=True)
each_predictor = pytest.mark.parametrize("predictor", [None, "sphere"])


@pytest.mark.parametrize("what", ["fold", "equivalent_kernel", "similarity_matrix"])
def test_errors_of_what_needs_a_static_built_layer(what):
    def use(layer):
        attribute = getattr(layer, what)
        return attribute() if callable(attribute) else attribute

    member = FAMILY["conv2d"]
    with pytest.raises(ValueError, match=rf"`{what}` needs a built layer"):
        use(member.make(kernel_size=3))
    message = rf"`{what}` needs a static similarity.*kind='sphere'"
    with pytest.raises(ValueError, match=message):
        use(member.make(kernel_size=2, predictor="sphere"))


def test_a_similarity_is_built_and_trained_by_fit():
    """`fit` builds what is not built while it traces its step."""
    layer = NeuralSimilarityConv2D(3, 3, similarity="positive_semidefinite")
    inputs = RNG.normal(size=(4, 6, 5, 2)).astype("float32")
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=True)
    history = model.fit(inputs, np.ones((4, 4, 3, 3)), epochs=2, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert_close(layer.fold()(inputs), layer(inputs), 1e-5)


# Layers that are turned: a plain layer gets the class and an `M`, and keeps its variables.

SEQUENCE, IMAGE, VOLUME = (2, 7, 4), (2, 6, 5, 4), (2, 4, 5, 4, 4)
CONVOLUTION = {"filters": 3, "kernel_size": 2}
PLAIN = [
    (layers.NeuralSimilarityConv1D, SEQUENCE, CONVOLUTION),
    (layers.NeuralSimilarityConv2D, IMAGE, CONVOLUTION),
    (layers.NeuralSimilarityConv3D, VOLUME, CONVOLUTION),
    (layers.NeuralSimilarityConv2DTranspose, IMAGE, CONVOLUTION),
    (layers.NeuralSimilarityDepthwiseConv2D, IMAGE, {"kernel_size": 2}),
    (layers.NeuralSimilaritySeparableConv2D, IMAGE, CONVOLUTION),
    (layers.NeuralSimilarityDense, SEQUENCE, {"units": 3}),
    (layers.NeuralSimilarityGRUCell, (2, 4), {"units": 4}),
    (layers.NeuralSimilarityLSTMCell, (2, 4), {"units": 4}),
    (layers.NeuralSimilaritySimpleRNNCell, (2, 4), {"units": 4}),
]
each_plain = pytest.mark.parametrize(
    ("kind", "shape", "options"), PLAIN, ids=[kind.__name__ for kind, *_ in PLAIN]
)


def called(layer, inputs):
    if not hasattr(layer, "recurrent_kernel"):
        return as_numpy(layer(inputs))
    states = [inputs] * (2 if hasattr(layer, "unit_forget_bias") else 1)
    return as_numpy(layer(inputs, states)[0])


@each_plain
@each_predictor
def test_a_plain_layer_turns_in_place(kind, shape, options, predictor):
    plain, inputs = kind.plain(**options), RNG.normal(size=shape).astype("float32")
    plain.build(shape)
    if not hasattr(plain, "recurrent_kernel"):  # Cells are called by position.
        ours, keras_own = (inspect.signature(each.call) for each in (kind, kind.plain))
        assert [*ours.parameters] == [*keras_own.parameters]
    expected, variables = called(plain, inputs), plain.variables
    plain._tracker.unlock()
    plain.__class__ = kind
    plain.set_similarity("unconstrained", predictor)
    plain.build_similarity(shape)
    plain._tracker.lock()
    assert all(map(operator.is_, plain.variables, variables))
    assert_close(called(plain, inputs), expected, 1e-5)
    if predictor is not None:
        with pytest.raises(ValueError, match="`fold` needs a static similarity"):
            plain.folded_variables()
        return
    randomize(plain)
    expected = called(plain, inputs)
    assert_close(called(plain.fold(), inputs), expected, 1e-5)
    for variable, value in plain.folded_variables():
        variable.assign(value)
    plain.__class__ = kind.plain
    assert_close(called(plain, inputs), expected, 1e-5)


@pytest.mark.jax
def test_training_reaches_the_batch_norms_of_a_predictor():
    """In a call, and in `fit`, where the layer's own `call` has no such argument."""
    recipe = SimilarityPredictor("cnn", batch_normalization=True)
    convolution = layers.NeuralSimilarityConv2D(4, 2, predictor=recipe)
    dense = layers.NeuralSimilarityDense(3, predictor=recipe)
    model = keras.Sequential([keras.Input((6, 5, 2)), convolution, dense])
    model.compile("sgd", "mse")
    inputs, targets = RNG.normal(size=(8, 6, 5, 2)), np.zeros((8, 5, 4, 3))
    for layer, use in (
        (convolution, lambda: convolution(inputs, training=True)),
        (dense, lambda: dense(targets[..., :1] + np.ones(4), training=True)),
        (convolution, lambda: model.fit(inputs, targets, verbose=0)),
        (dense, lambda: model.fit(inputs, targets, verbose=0)),
    ):
        norm = layer.bilinear_form.network.get_layer("hidden_normalization")
        before = as_numpy(norm.moving_variance)
        layer(np.ones((1, 6, 5, layer.kernel.shape[-2])))
        assert_equal(norm.moving_variance, before)
        use()
        assert np.any(as_numpy(norm.moving_variance) != before)


# A frozen kernel.


def trained_names(layer):
    return [variable.name for variable in layer.trainable_variables]


def test_kernel_trainable_can_be_set_at_any_time():
    member = FAMILY["conv2d"]
    layer = member.make(kernel_size=2, kernel_trainable=False, similarity=SHAPED)
    layer.build(member.inputs.shape)
    for value in (False, True, False):
        layer.kernel_trainable = value
        of_kernel = ["kernel", "bias"] if value else []
        assert trained_names(layer) == [*of_kernel, "similarity", "shape"]


@pytest.mark.parametrize("value", [False, True])
def test_kernel_trainable_outlives_trainable_copies_and_files(value, tmp_path):
    member = FAMILY["conv2d"]
    layer = member.make(kernel_size=2)
    model = keras.Sequential([keras.Input(member.inputs.shape[1:]), layer])
    layer.kernel_trainable = value
    expected = sorted(trained_names(layer))
    assert len(expected) == (3 if value else 1)
    model.trainable = False
    assert model.trainable_variables == []
    loaded = reloaded(model, tmp_path)
    for each in (model, loaded, keras.models.clone_model(model)):
        each.trainable = False  # Keras passes on changes alone.
        each.trainable = True
        assert each.layers[0].kernel_trainable is value
        assert sorted(trained_names(each)) == expected


# The kernel's shape learned with the similarity: `D M`, Eqs. (4) and (5).


def make_shaped(name, predictor=None, dtype="float32", similarity="diagonal", **options):
    """A layer with random weights whose shape is still the whole kernel."""
    layer = FAMILY[name].make_built(
        **{"kernel_size": 2, "padding": "same", **options},
        predictor=predictor,
        similarity=with_arguments(similarity, learn_shape=True),
        dtype=dtype,
    )
    drop(layer)
    return layer


def drop(layer, *taps):
    shape = np.ones(layer.bilinear_form.taps)
    shape[list(taps)] = 0.2
    layer.bilinear_form.shape_parameters.assign(shape)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_shape_is_boolean_above_the_threshold(threshold):
    shaped = similarities.Diagonal(learn_shape=True, shape_threshold=threshold)
    layer = NeuralSimilarityConv2D(2, (2, 3), similarity=shaped)
    layer.build((None, 5, 5, 2))
    assert_equal(layer.learned_shape, np.ones(6))
    real = np.array([1.0, threshold, threshold + 0.01, threshold - 0.01, -2, 7])
    layer.bilinear_form.shape_parameters.assign(real)
    # Not above the threshold where it is the threshold.
    assert_equal(layer.learned_shape, [1, 0, 1, 0, 0, 1])
    assert keras.backend.standardize_dtype(layer.learned_shape.dtype) == "float32"


@pytest.mark.parametrize(
    ("name", "similarity"),
    [
        ("conv1d", "unconstrained"),
        ("conv2d", "diagonal"),
        ("conv2d", "full"),
        ("conv3d", "sparse_of_3"),
        ("depthwise_conv2d", "symmetric"),
    ],
)
def test_static_layer_masks_the_rows_of_the_matrix(name, similarity):
    member, dtype = FAMILY[name], DTYPES[0]
    layer = make_shaped(name, similarity=similarity, dtype=dtype)
    whole = ops.convert_to_numpy(layer.equivalent_kernel)
    drop(layer, 0)
    shape = np.ones(layer.bilinear_form.taps)
    shape[0] = 0
    matrix = static_matrix(layer)
    masked = np.tile(shape, len(matrix) // layer.bilinear_form.taps)[:, None] * matrix
    outputs = layer(member.tensor(dtype))
    assert_close(outputs, member.expected(layer, masked), TOLERANCES[dtype])
    assert_close(layer.fold()(member.tensor(dtype)), outputs, TOLERANCES[dtype])
    # `M` itself is not masked, and the tap can come back.
    assert_close(layer.similarity_matrix, matrix, 1e-6)
    drop(layer)
    assert_equal(layer.equivalent_kernel, whole)


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@one_layer_of_a_kind
def test_dynamic_layer_masks_the_rows_of_every_matrix(name, similarity):
    member, dtype = FAMILY[name], DTYPES[0]
    predictor = SimilarityPredictor("sphere", downsampling=1)
    layer = make_shaped(name, predictor, dtype, similarity)
    drop(layer, 1)
    inputs = member.tensor(dtype)
    rows = np.where(np.arange(layer.bilinear_form.taps) == 1, 0, 1)[:, None]
    expected = member.expected(layer, rows * predicted_matrix(layer, inputs))
    assert_close(layer(inputs), expected, TOLERANCES[dtype])


@each_predictor
@one_layer_of_a_kind
def test_gradient_of_the_boolean_shape_reaches_the_real_one(name, predictor):
    """The outputs are linear in `d`: its gradient is the change from 0 to 1."""
    member, dtype = FAMILY[name], DTYPES[0]
    layer = make_shaped(name, predictor, dtype)
    drop(layer, 1)
    inputs = member.tensor(dtype)
    cotangent = ops.cast(RNG.normal(size=layer.compute_output_shape(inputs.shape)), dtype)

    def scalar(inputs):
        return ops.sum(layer(inputs) * cotangent)

    (_, received) = gradients(scalar, [inputs], [layer.bilinear_form.shape_parameters])
    real = np.array(ops.convert_to_numpy(layer.bilinear_form.shape_parameters))
    expected = []
    for tap in range(layer.bilinear_form.taps):
        outcomes = []
        for state in (1.0, 0.0):
            changed = real.copy()
            changed[tap] = state
            layer.bilinear_form.shape_parameters.assign(changed)
            outcomes.append(float(ops.convert_to_numpy(scalar(inputs))))
        expected.append(outcomes[0] - outcomes[1])
    assert_close(received, expected, {"float64": 1e-10, "float32": 1e-4}[dtype])


def test_errors_of_the_learned_shape():
    for similarity, message in (
        ("diagonal", r"`learn_shape` must be True for `learned_shape`"),
        (SHAPED, r"`learned_shape` needs a built"),
    ):
        with pytest.raises(ValueError, match=message):
            FAMILY["conv2d"].make(kernel_size=2, similarity=similarity).learned_shape  # noqa: B018
    with pytest.raises(ValueError, match=r"`shape_threshold` must be a number in"):
        similarities.Diagonal(shape_threshold=1.0)

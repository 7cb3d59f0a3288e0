"""The `M` of one kernel: matrix, learned shape, training, config and files."""

import inspect

import keras
import numpy as np
import pytest
from helpers import DTYPES, as_numpy, assert_close, assert_equal, gradients, reloaded
from keras import ops
from layer_cases import TOLERANCES, built, by_formula, predicted_matrix, with_arguments

from nsl_keras import layers, similarities
from nsl_keras.layers import NeuralSimilarityConv2D
from nsl_keras.predictors import SimilarityPredictor

RNG = np.random.default_rng(6)
SHAPED = similarities.Diagonal(learn_shape=True)


@pytest.mark.parametrize("what", ["fold", "equivalent_kernel", "similarity_matrix"])
def test_errors_of_what_needs_a_static_built_layer(what):
    def use(layer):
        attribute = getattr(layer, what)
        return attribute() if callable(attribute) else attribute

    with pytest.raises(ValueError, match=rf"`{what}` needs a built layer"):
        use(NeuralSimilarityConv2D(4, 3))
    message = rf"`predictor` must be None for `{what}`.*kind='sphere'"
    dynamic = NeuralSimilarityConv2D(4, 3, predictor="sphere")
    dynamic.build((None, 8, 8, 2))
    with pytest.raises(ValueError, match=message):
        use(dynamic)


def test_a_similarity_is_built_and_trained_by_fit():
    """`fit` builds what is not built while it traces its step."""
    layer = NeuralSimilarityConv2D(3, 3, similarity="positive_semidefinite")
    inputs = RNG.normal(size=(4, 6, 5, 2)).astype("float32")
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    history = model.fit(inputs, np.ones((4, 4, 3, 3)), epochs=2, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert_close(layer.fold()(inputs), layer(inputs), 1e-5)


def test_calls_take_the_arguments_of_keras():
    for kind in vars(layers).values():
        plain = getattr(kind, "plain", None)
        # Cells are called by position.
        if plain is not None and not hasattr(kind, "get_initial_state"):
            ours, keras_own = (inspect.signature(each.call) for each in (kind, plain))
            assert [*ours.parameters] == [*keras_own.parameters], kind


@pytest.mark.jax
@pytest.mark.usefixtures("eager")
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


@pytest.mark.parametrize("value", [False, True])
def test_kernel_trainable_outlives_trainable_copies_and_files(value, tmp_path):
    layer = NeuralSimilarityConv2D(4, 3)
    model = keras.Sequential([keras.Input((6, 5, 2)), layer])
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


def make_shaped(name, predictor=None, dtype="float32", similarity="diagonal"):
    """A layer with random weights whose shape is still the whole kernel, and inputs."""
    similarity = with_arguments(similarity, learn_shape=True)
    options = {"kernel_size": 2, "padding": "same", "predictor": predictor}
    layer, inputs = built(name, similarity=similarity, dtype=dtype, **options)
    drop(layer)
    return layer, inputs


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
    ("name", "similarity"), [("conv2d", "unconstrained"), ("depthwise", "diagonal")]
)
def test_dynamic_layer_masks_the_rows_of_every_matrix(name, similarity):
    predictor = SimilarityPredictor("sphere", downsampling=1)
    layer, inputs = make_shaped(name, predictor, DTYPES[0], similarity)
    drop(layer, 1)
    rows = np.where(np.arange(layer.bilinear_form.taps) == 1, 0, 1)[:, None]
    expected = by_formula(layer, inputs, rows * predicted_matrix(layer, inputs))
    assert_close(layer(inputs), expected, TOLERANCES[DTYPES[0]])


@pytest.mark.parametrize(("name", "predictor"), [("conv2d", None), ("depthwise", "sphere")])
def test_gradient_of_the_boolean_shape_reaches_the_real_one(name, predictor):
    """The outputs are linear in `d`: its gradient is the change from 0 to 1."""
    dtype = DTYPES[0]
    layer, inputs = make_shaped(name, predictor, dtype)
    drop(layer, 1)
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
            NeuralSimilarityConv2D(4, 3, similarity=similarity).learned_shape  # noqa: B018
    with pytest.raises(ValueError, match=r"`shape_threshold` must be a number in"):
        similarities.Diagonal(shape_threshold=1.0)

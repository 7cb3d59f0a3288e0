"""MAML: outer gradients, policies, steps, errors, and `fit` around it."""

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from finite_differences import at_values, check_scalar_gradients
from helpers import BACKEND, CROSS_ENTROPY, as_numpy, randomize, refused, reloaded, stacked
from keras import layers

import nsl_keras
from nsl_keras import backend
from nsl_keras.backend import gradients_of
from nsl_keras.few_shot import MAML

WAYS, RATE = 2, 0.1


def network():
    """Smooth but for the pooling, for finite differences."""
    return stacked(
        (6, 6, 1),
        layers.Conv2D(2, 3, padding="same", activation="softplus", name="convolution"),
        nsl_keras.layers.BatchNormalization(name="norm"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(WAYS, name="head"),
    )


def of_layers(*stack):
    return stacked((6, 6, 1), *stack)


def perceptron():
    norm = nsl_keras.layers.BatchNormalization(name="norm")
    return of_layers(layers.Flatten(), norm, layers.Dense(WAYS, name="head"))


def episodes(count=2, dtype="float32"):
    (support, own, queries), labels = data.episodes(count, WAYS, 2, 6, (6, 6, 1))
    support, queries = (
        (images + numbers[..., None, None, None]).astype(dtype)
        for images, numbers in ((support, own), (queries, labels))
    )
    return (support, own, queries), labels


def built(*args, **kwargs):
    model = MAML(*args, **kwargs)
    inputs, _ = episodes()
    model.build([(None, *each.shape[1:]) for each in inputs])
    return model


def outer_loss(model, inputs, query_labels):
    """The loss as a function of the values of all trainable variables, and the values."""

    def loss():
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return loss_of(query_labels, model(inputs, training=True))

    return at_values(loss, model.trainable_variables)


def outer_gradients(model, inputs, query_labels, jit_compile=None):
    loss, values = outer_loss(model, inputs, query_labels)

    def compute(values):
        return gradients_of(lambda at: (loss(at), None), values)[0]

    if jit_compile is not None:
        compute = backend.compiled(compute, jit_compile)
    return [as_numpy(each) for each in compute(values)]


@pytest.mark.skipif(BACKEND == "jax", reason="finite differences need float64")
@pytest.mark.parametrize(
    ("steps", "policy"),
    [(1, "transductive"), pytest.param(2, "support", marks=pytest.mark.long)],
)
def test_outer_gradients_equal_finite_differences(steps, policy, float64):
    inputs, labels = episodes(dtype="float64")
    options = {"learning_rate_form": "learned", "batch_normalization": policy}
    model = built(network(), inner_steps=steps, inner_learning_rate=RATE, **options)
    randomize(model.trainable_variables, 0.3)
    found = outer_gradients(model, inputs, labels)
    assert len(found) == 12
    loss, values = outer_loss(model, inputs, labels)
    loss = backend.compiled(loss, jit_compile=False)
    check_scalar_gradients(loss, values, found, 1e-6, 1e-5, np.random.default_rng(1))


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.long)])
def test_outer_gradients_of_graphs(jit):
    inputs, labels = episodes()
    model = built(perceptron(), inner_steps=2, inner_learning_rate=RATE)
    randomize(model.trainable_variables, 0.3)
    expected = outer_gradients(model, inputs, labels)
    found = outer_gradients(model, inputs, labels, jit)
    scale = max(np.abs(each).max() for each in expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3 * scale)


@pytest.mark.parametrize("policy", ["support", "transductive", "moving"])
def test_policies(policy):
    """What they compute, the tests of `Finetuner` compare with a loop over `fit`."""
    (*support, queries), _ = episodes()
    model = built(perceptron(), inner_steps=2, batch_normalization=policy)
    logits = as_numpy(model((*support, queries)))
    alone = as_numpy(model((*support, queries[:, :1])))
    independent = np.allclose(alone, logits[:, :1], atol=1e-4)
    assert independent == (policy != "transductive")
    norm = model.model.get_layer("norm")
    norm.moving_mean.assign(norm.moving_mean + 1)
    stays = np.allclose(model((*support, queries)), logits, atol=1e-4)
    assert stays == (policy != "moving")


def compiled(model):
    model.compile(keras.optimizers.Adam(0.01), CROSS_ENTROPY, run_eagerly=True)
    return model


@pytest.mark.parametrize("policy", ["support", "moving"])
def test_fit_learns_with_rates_and_leaves_the_moving_statistics(policy):
    """In batches of two episodes and one."""
    inputs, labels = episodes(3)
    learned = {"learning_rate_form": "learned", "inner_learning_rate": 0.1}
    options = {"inner_steps": 1, "batch_normalization": policy, **learned}
    model = compiled(MAML(perceptron(), **options))
    history = model.fit(inputs, labels, batch_size=2, epochs=2, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    norm = model.model.get_layer("norm")
    np.testing.assert_array_equal(as_numpy(norm.moving_mean), 0)
    np.testing.assert_array_equal(as_numpy(norm.moving_variance), 1)
    assert len(set(map(float, model.inner_learning_rates))) == 4
    for variable in model.rate.weights:
        variable.assign(-0.2)
    np.testing.assert_allclose(list(map(float, model.inner_learning_rates)), 0.2, rtol=1e-6)


def test_steps_of_mixed_precision_are_those_of_full():
    """A head in float32 keeps small steps, which half precision would round away."""
    inputs, _ = episodes(1)
    keras.config.set_dtype_policy("mixed_bfloat16")
    head = layers.Dense(WAYS, dtype="float32")
    options = {"inner_steps": 1, "inner_learning_rate": 1e-5}
    model = built(of_layers(layers.Flatten(), head), "classifier", **options)
    head.bias.assign([1.0, -1.0])  # Large beside the step.
    adapted = as_numpy(model(inputs))
    model.rate.initial = 1e-30
    assert 0 < np.abs(as_numpy(model(inputs)) - adapted).max() < 1e-2
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = compiled(MAML(of_layers(layers.Flatten(), layers.Dense(2)))).optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def test_a_non_finite_inner_loss_stops_fit():
    inputs, labels = episodes(3)
    inputs[0][2] *= 1e25  # Finite; the second step is not.
    model = MAML(perceptron(), inner_steps=2, batch_normalization="moving")
    found = as_numpy(model(inputs))
    assert np.all(np.isfinite(found[:2])) and np.all(np.isnan(found[2]))
    with pytest.raises(nsl_keras.NonFiniteLossError, match="batch 1 of epoch 1"):
        compiled(model).fit(inputs, labels, batch_size=3, verbose=0)


def with_two_outputs():
    images = keras.Input((6, 6, 1))
    return keras.Model(images, [layers.Dense(2)(layers.Flatten()(images))] * 2)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (network, {"inner_learning_rate": 0.0}, "`inner_learning_rate` must be"),
        (network, {"learning_rate_form": "scalar"}, "`learning_rate_form` must be"),
        (network, {"test_inner_steps": 0}, "`test_inner_steps` must be"),
        (lambda: keras.Sequential([layers.Dense(2)]), {}, "`MAML` needs a built layer"),
        (lambda: of_layers(layers.Flatten(), layers.Softmax()), {}, "logits.*'softmax"),
        (lambda: of_layers(layers.Conv2D(2, 3)), {}, r"shape=\(None, 4, 4, 2\)"),
        (lambda: of_layers(layers.Flatten(), layers.Dense(1)), {}, "for two or more ways"),
        (with_two_outputs, {}, "`model` must be a model with one output, log"),
    ],
)
def test_errors(make, options, message):
    with refused(message):
        built(make(), **options)


@pytest.mark.parametrize(
    "selection",
    [lambda model: [model.layers[-1].kernel.path], lambda model: "all"],
    ids=["path", "all"],
)
def test_a_file_keeps_what_adapts(selection, tmp_path):
    """Variables are stored by their places: loaded ones have other paths, some frozen."""
    inputs, _ = episodes()
    network = of_layers(layers.Flatten(), layers.Dense(5), layers.Dense(WAYS))
    learned = {"inner_learning_rate": 0.1, "learning_rate_form": "learned"}
    model = MAML(network, selection(network), **learned)
    expected = as_numpy(model(inputs))
    network.layers[-1].trainable = False
    loaded = reloaded(model, tmp_path)
    np.testing.assert_allclose(as_numpy(loaded(inputs)), expected, rtol=1e-5)

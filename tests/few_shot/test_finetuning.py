"""Finetuning episodes together is a loop over `fit`, and leaves the model alone."""

import functools

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from helpers import IS_TENSORFLOW, randomize, refused, reloaded, stacked
from keras import ops

from nsl_keras.few_shot import Episode, Finetuner
from nsl_keras.layers import CosineDense, NeuralSimilarityConv2D

DTYPE = "float64" if IS_TENSORFLOW else "float32"
ATOL = 1e-8 if IS_TENSORFLOW else 1e-4
WAYS = data.WAYS
eager = pytest.mark.usefixtures("eager")


class TorchDescent(keras.optimizers.SGD):
    """The rule once more, as a Keras optimizer for `fit`."""

    def update_step(self, gradient, variable, learning_rate):
        buffer = self.momentums[self._get_variable_index(variable)]
        gradient = gradient + 0.001 * variable
        later = 0.9 * buffer + 0.1 * gradient
        self.assign(buffer, ops.where(ops.equal(self.iterations, 0), gradient, later))
        self.assign_sub(variable, learning_rate * buffer)


def network(classes, classifier=keras.layers.Dense, dtype=DTYPE):
    """Two neural similarity convolutions with batch norm and pooling, and a classifier."""
    inputs = outputs = keras.Input((6, 6, 2), dtype=dtype)
    for index, similarity in enumerate(("diagonal", "unconstrained")):
        options = {"padding": "same", "dtype": dtype, "name": f"convolution_{index}"}
        outputs = NeuralSimilarityConv2D(4, 3, similarity=similarity, **options)(outputs)
        norm = keras.layers.BatchNormalization(dtype=dtype, name=f"norm_{index}")
        outputs = norm(outputs)
        outputs = keras.layers.ReLU(dtype=dtype, name=f"relu_{index}")(outputs)
        if not index:
            outputs = keras.layers.MaxPooling2D(2, dtype=dtype, name="pool")(outputs)
    outputs = keras.layers.Flatten(dtype=dtype, name="flat")(outputs)
    return keras.Model(inputs, classifier(classes, dtype=dtype, name="classifier")(outputs))


def make_episodes(count=2, dtype=DTYPE):
    (support, own, queries), labels = data.episodes(count, shape=(6, 6, 2))
    return Episode(support.astype(dtype), own, queries.astype(dtype), labels)


def looped(model, episodes, chosen, steps, policy="support", rate=0.01, start=None):
    """A loop over `fit`: full batches, fresh weights in each episode.

    The steps of an episode are one epoch of repeated batches, which `fit` is faster at.
    The new classifier's kernel is `start`, or zero.
    """
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    logits = []
    for support, labels, queries, _ in zip(*episodes, strict=True):
        config = model.get_config()
        config["layers"][-1]["config"]["units"] = WAYS
        copy = keras.Model.from_config(config)
        for layer in copy.layers:
            if layer.name != "classifier":
                layer.set_weights(model.get_layer(layer.name).get_weights())
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.momentum = 0.0
                layer.trainable = policy != "moving"
        kernel = copy.get_layer("classifier").kernel
        kernel.assign(np.broadcast_to(0.0 if start is None else start, kernel.shape))
        for variable in copy.trainable_variables:
            variable.trainable = bool(chosen(variable))
        copy.compile(TorchDescent(rate, 0.9), loss, run_eagerly=True)
        repeated = [np.concatenate([each] * steps) for each in (support, labels)]
        copy.fit(*repeated, batch_size=len(support), shuffle=False, verbose=0)
        if policy == "support":
            copy(support, training=True)  # Leaves its statistics behind.
        logits.append(copy(queries, training=policy == "transductive"))
    return np.stack([ops.convert_to_numpy(each) for each in logits])


def similarity_and_classifier(variable):
    return variable.name == "similarity" or "classifier" in variable.path


@eager
@pytest.mark.parametrize("policy", ["support", "transductive", "moving"])
def test_through_the_network_is_a_loop_over_fit(policy):
    keras.config.set_floatx(DTYPE)
    model, episodes = randomize(network(7)), make_episodes()
    expected = looped(model, episodes, similarity_and_classifier, 3, policy, 0.1)
    if policy == "moving":  # A Sequential model, too.
        model = keras.Sequential([model.input, *model.layers[1:]])
    options = {"learning_rate": 0.1, "batch_normalization": policy}
    finetuner = Finetuner(model, WAYS, "similarity+classifier", 3, **options)
    np.testing.assert_allclose(finetuner(episodes), expected, rtol=0, atol=ATOL)


@eager
def test_classifier_alone_is_a_loop_over_fit():
    """Cosines, which have no direction at zero, start from their own initializer."""
    start = np.random.default_rng(2).normal(size=(36, 1)).astype("float32")
    initializer = keras.initializers.Constant(start)
    made = functools.partial(CosineDense, kernel_initializer=initializer)
    model = randomize(network(7, made, "float32"))
    episodes = make_episodes(dtype="float32")
    expected = looped(model, episodes, lambda v: "classifier" in v.path, 2, start=start)
    options = {"steps": 2, "batch_normalization": "support"}
    finetuner = Finetuner(model, WAYS, "classifier", **options)
    np.testing.assert_allclose(finetuner(episodes), expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 0.1


@eager
def test_the_model_stays_as_it_is_and_its_weights_are_followed(tmp_path):
    """Adapted models are the networks of an episode, also from their files."""
    model, episodes = randomize(network(7)), make_episodes(1)
    expected = model.get_weights()
    options = "similarity+classifier", 2, 0.01, "support"
    finetuner = Finetuner(model, WAYS, *options)
    before = finetuner(episodes)
    np.testing.assert_equal(model.get_weights(), expected)
    randomize(model, seed=5)
    after = finetuner(episodes)
    assert np.max(np.abs(after - before)) > 1e-2
    model.get_layer("classifier").trainable = False  # The new one is trained.
    finetuner = Finetuner(model, WAYS, *options)
    np.testing.assert_allclose(after, finetuner(episodes), rtol=0, atol=1e-6)
    adapted = finetuner.adapt(episodes.support_images[0], episodes.support_labels[0])
    again = reloaded(adapted, tmp_path)
    found = adapted.temperature * again.predict(episodes.query_images[0], verbose=0)
    np.testing.assert_allclose(found, after[0], rtol=0, atol=10 * ATOL)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="only TensorFlow counts its traces")
def test_episodes_of_other_sizes_are_not_traced_again():
    layers = [keras.layers.Flatten(), keras.layers.Dense(3), keras.layers.Dense(7)]
    finetuner = Finetuner(stacked((6, 6, 2), *layers), WAYS, steps=2)
    whole = make_episodes(5)
    for count in range(2, 6):
        support = slice(0, None, count % 2 + 1)
        images, labels, queries = (each[:count] for each in whole[:3])
        finetuner((images[:, support], labels[:, support], queries[:, :count]))
    assert finetuner._compiled.experimental_get_tracing_count() <= 3


@pytest.fixture(name="plain", scope="module")
def _plain():
    return network(7, dtype="float32")


def ends_in_a_convolution():
    layers = [keras.layers.Conv2D(WAYS, 6), keras.layers.Flatten()]
    return stacked((6, 6, 2), *layers)


def with_lora():
    model = network(7, dtype="float32")
    model.layers[-1].enable_lora(1)
    return model


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (None, {"variables": "kernels"}, r"`variables` must be .*classifier/kernel.*Rec"),
        (None, {"batch_normalization": "query"}, "`batch_normalization` must be one of"),
        (None, {"steps": 0}, "`steps` must be"),
        (None, {"learning_rate": 0}, "`learning_rate` must be"),
        (None, {"variables": "similarity"}, "`variables` must be .* kernel of the new"),
        (None, {"ways": 0}, "`ways` must be"),
        (keras.Model, {}, "`model` must be a functional or Sequential"),
        (lambda: stacked((6, 6, 2), network(7)), {}, "of inner models"),
        (ends_in_a_convolution, {}, r"ends in `Dense` or `CosineDense`.*conv2d"),
        (with_lora, {}, "without LoRA or quantization"),
    ],
)
def test_wrong_arguments(make, arguments, message, plain):
    with refused(message):
        Finetuner(make() if make else plain, **{"ways": WAYS} | arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, y, q, _: (s, y + 1, q), "`support_labels` must hold classes 0 to 2"),
        (lambda s, y, q, _: (s[0], y[0], q[0]), "Inputs must be .support_images, supp"),
        (lambda s, y, q, _: (s[:0], y[:0], q[:0]), "`episodes` must be .*episodes=0"),
        (lambda s, y, q, _: (s * np.nan, y, q), "`support_images` must be finite"),
        (lambda s, y, q, _: (s, y, q * np.inf), "`query_images` must be finite"),
    ],
)
def test_bad_episodes(change, message, plain):
    with refused(message):
        Finetuner(plain, WAYS)(change(*make_episodes()))


@eager
def test_what_follows_the_classifier_counts():
    """`keras.ops` in a graph are no layers; whether they keep logits cannot be told."""
    support, queries = np.random.default_rng(0).normal(size=(2, 1, 6, 5)).astype("float32")
    labels = np.arange(6)[None] % WAYS

    def logits(scaled):
        inputs = keras.Input((5,))
        model = keras.Model(inputs, scaled(keras.layers.Dense(WAYS)(inputs)))
        return Finetuner(model, WAYS, "classifier", 5)((support, labels, queries))

    by_layer = logits(keras.layers.Rescaling(20.0))
    assert np.abs(by_layer - logits(lambda outputs: outputs)).max() > 1
    with refused("outputs pass through 'multiply"):
        logits(lambda outputs: outputs * 20.0)

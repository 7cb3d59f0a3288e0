"""Finetuning by batches is a loop in NumPy, with draws of each episode's own."""

import keras
import numpy as np
import pytest
from helpers import IS_TENSORFLOW, randomize

from experiments.few_shot.closer_look import BatchFinetuner
from nsl_keras.few_shot import Episode, Finetuner

DTYPE = "float64" if IS_TENSORFLOW else "float32"
WAYS, SHOTS, QUERIES, EPISODES = 3, 2, 2, 2
MOVING = {"batch_normalization": "moving"}


def make_episodes(count=EPISODES, dtype=DTYPE, shape=(8,)):
    rng = np.random.default_rng(1)
    arrays = []
    for each in (SHOTS, QUERIES):
        arrays.append(rng.normal(size=(count, WAYS * each, *shape)).astype(dtype))
        labels = np.repeat(np.arange(WAYS, dtype="int32"), each)
        arrays.append(np.tile(labels, (count, 1)))
    return Episode(*arrays)


def feature_network(features=64):
    """A classifier of vectors, so that the features are the images."""
    inputs = keras.Input((features,), dtype=DTYPE)
    return keras.Model(inputs, keras.layers.Dense(7, dtype=DTYPE)(inputs))


def descended(features, labels, kernel, bias, batches, rate=0.01):
    """A plain loop in NumPy over the batches of one episode."""
    values, buffers = [kernel, bias], [None, None]
    for places in batches:
        places = places[places >= 0]
        given, targets = features[places], np.eye(kernel.shape[1])[labels[places]]
        logits = given @ values[0] + values[1]
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        errors = (shares / shares.sum(axis=1, keepdims=True) - targets) / len(places)
        for index, gradient in enumerate((given.T @ errors, errors.sum(axis=0))):
            gradient = gradient + 0.001 * values[index]
            before = buffers[index]
            buffers[index] = gradient if before is None else 0.9 * before + 0.1 * gradient
        values = [
            value - rate * buffer for value, buffer in zip(values, buffers, strict=True)
        ]
    return values


def test_closer_look_is_a_plain_loop_in_numpy():
    episodes = make_episodes(shape=(8,))
    finetuner = BatchFinetuner(feature_network(8), WAYS, **MOVING)
    kernels, biases, batches = finetuner._draws(episodes.support_images)
    # 100 passes over 6 images, in batches of 4 and 2.
    assert batches.shape == (2, 200, 4)
    sizes = np.sum(batches >= 0, axis=2)
    np.testing.assert_array_equal(sizes, np.tile([4, 2], (2, 100)))
    orders = batches[batches >= 0].reshape(-1, 6)
    assert np.all(np.sort(orders) == np.arange(6)) and np.any(orders != orders[0])
    for limit in (np.abs(kernels).max(), np.abs(biases).max()):
        assert 0.5 / np.sqrt(8) < limit <= 1 / np.sqrt(8)
    atol = 1e-6 if IS_TENSORFLOW else 1e-4
    starts = zip(kernels, biases, batches, strict=True)
    received = zip(*episodes, starts, finetuner(episodes), strict=True)
    for support, labels, queries, _, start, logits in received:
        kernel, bias = descended(support, labels, *start)
        np.testing.assert_allclose(logits, queries @ kernel + bias, rtol=0, atol=atol)


def test_draws_are_an_episodes_own_wherever_it_stands():
    """Also among more episodes than are finetuned at once, and without queries' labels."""
    model, episodes = feature_network(), make_episodes(9, shape=(64,))
    finetuner = BatchFinetuner(model, WAYS, epochs=2, **MOVING)
    received = finetuner(episodes)
    np.testing.assert_array_equal(finetuner(episodes), received)
    for place in (1, 8):
        alone = finetuner([array[[place]] for array in episodes[:3]])
        np.testing.assert_allclose(alone[0], received[place], rtol=0, atol=1e-6)
    other = BatchFinetuner(model, WAYS, epochs=2, seed=1, **MOVING)(episodes)
    assert np.max(np.abs(other - received)) > 1e-2
    kernels, _, _ = finetuner._draws(episodes.support_images)
    assert len({kernel.tobytes() for kernel in kernels}) == 9


def test_keras_initializers_are_drawn_in_each_episode():
    model, episodes = feature_network(), make_episodes(shape=(64,))

    def kernels(initializer, seed=0):
        finetuner = BatchFinetuner(model, WAYS, start=initializer, seed=seed)
        drawn, bias, _ = finetuner._draws(episodes.support_images)
        assert not bias.any()
        return drawn

    drawn, limit = kernels("glorot_uniform"), np.sqrt(6 / (64 + WAYS))
    assert 0.9 * limit < np.abs(drawn).max() <= limit
    assert np.any(drawn[0] != drawn[1])
    assert np.any(kernels("glorot_uniform", seed=1) != drawn)


@pytest.mark.parametrize("variables", ["classifier", "all"])
def test_whole_batches_are_finetuning(variables):
    """Also through the network, and of what `adapt` returns."""
    inputs = keras.Input((8,), dtype=DTYPE)
    hidden = keras.layers.Dense(5, "tanh", dtype=DTYPE)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(7, dtype=DTYPE)(hidden))
    randomize(model)
    expected = Finetuner(model, WAYS, variables, steps=3)(make_episodes())
    options = {"epochs": 3, "batch_size": None, "start": "zeros"}
    finetuner = BatchFinetuner(model, WAYS, variables, **options)
    np.testing.assert_allclose(finetuner(make_episodes()), expected, rtol=0, atol=1e-6)
    support, labels, queries, _ = (each[0] for each in make_episodes())
    adapted = finetuner.adapt(support, labels)
    found = adapted.layers[-1].temperature * adapted.predict(queries, verbose=0)
    np.testing.assert_allclose(found, expected[0], rtol=0, atol=1e-5)

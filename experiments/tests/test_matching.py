"""Matching networks against NumPy, full context embeddings included."""

import few_shot_episodes as data
import numpy as np
import pytest
from keras import ops

from experiments.few_shot.matching import MatchingNet


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attended_labels(support, labels, queries, temperature):
    """Class probabilities: attention on the labels."""
    cosines = np.einsum("bqd,bsd->bqs", data.unit(queries), data.unit(support))
    return softmax(cosines / temperature) @ np.eye(data.WAYS)[labels]


@pytest.mark.parametrize("temperature", [1.0, 0.01, 1e-3])
def test_attention_on_the_labels(temperature):
    """Of probabilities that are less than a float holds, too."""
    inputs, _ = data.episodes()
    model = MatchingNet(data.identity(), data.WAYS, temperature=temperature)
    found = ops.convert_to_numpy(model(inputs))
    expected = attended_labels(*inputs, temperature)
    np.testing.assert_allclose(np.exp(found), expected, rtol=1e-3, atol=1e-6)
    assert np.all(np.isfinite(found)) and (temperature > 1e-3 or found.min() < -150)
    assert not model.trainable_variables


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(weights, inputs, hidden, memory):
    """One step of an LSTM, gates in Keras's order: input, forget, cell, output."""
    kernel, recurrent, bias = weights
    gates = inputs @ kernel + hidden @ recurrent + bias
    entered, forgotten, new, out = np.split(gates, 4, axis=-1)
    memory = sigmoid(forgotten) * memory + sigmoid(entered) * np.tanh(new)
    return sigmoid(out) * np.tanh(memory), memory


@pytest.mark.parametrize("steps", [1, 3])
def test_full_context_embeddings(steps):
    inputs, _ = data.episodes()
    model = MatchingNet(data.identity(), data.WAYS, reading_steps=steps)
    model(inputs)
    rng = np.random.default_rng(5)
    model.set_weights([0.5 * rng.normal(size=v.shape) for v in model.get_weights()])
    support, labels, queries = inputs

    def along(layer, order):
        states = np.zeros_like(support)
        hidden = memory = np.zeros_like(support[:, 0])
        for index in order:
            weights = layer.get_weights()
            hidden, memory = lstm(weights, support[:, index], hidden, memory)
            states[:, index] = hidden
        return states

    both = model.support_context
    order = range(support.shape[1])
    embedded = support + along(both.forward_layer, order)
    embedded = embedded + along(both.backward_layer, reversed(order))
    hidden = memory = np.zeros_like(queries)
    for _ in range(steps):
        reading = softmax(np.einsum("bqd,bsd->bqs", hidden, embedded)) @ embedded
        joined = np.concatenate([queries, reading], axis=-1)
        output, memory = lstm(model.reader.get_weights(), joined, hidden, memory)
        hidden = output + queries
    expected = attended_labels(embedded, labels, hidden, 1.0)
    found = ops.convert_to_numpy(model(inputs))
    np.testing.assert_allclose(np.exp(found), expected, rtol=1e-4, atol=1e-5)

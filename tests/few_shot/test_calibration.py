"""Temperatures: a closed form, parts that are held out, and honest probabilities."""

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from helpers import as_numpy, randomize, refused, stacked

from nsl_keras import convert, few_shot
from nsl_keras.few_shot.calibration import fitted_temperature, held_out_parts


def test_temperature_of_equal_logits():
    """For two classes the best probability is the mean of the targets."""
    labels = np.zeros(10, int)
    logits = np.where(np.arange(10)[:, None] < 8, [3.0, 0.0], [0.0, 3.0])
    probability = (8 * (1 - 1 / 12) + 2 / 12) / 10
    expected = 3 / np.log(probability / (1 - probability))
    assert fitted_temperature(logits, labels, 1 / 12) == pytest.approx(expected, rel=0.02)
    scaled = fitted_temperature(1e-4 * logits, labels, 1 / 12)
    assert scaled == pytest.approx(1e-4 * expected, rel=0.02)


def test_logits_that_know_nothing_stay():
    assert fitted_temperature(np.ones((4, 3)), np.arange(4) % 3, 0.1) == 1


def test_parts_hold_each_example_out_once_and_never_a_whole_class():
    labels = np.repeat([0, 1, 2, 3], [1, 2, 5, 12])
    parts = held_out_parts(labels)
    np.testing.assert_array_equal(np.sum(parts, axis=0), labels != 0)
    for part in parts:
        assert set(labels[~part]) == {0, 1, 2, 3}
        assert part[labels == 2].sum() == 1
    assert held_out_parts(np.arange(3)) == []


def blobs(shots, queries, seed):
    rng = np.random.default_rng(seed)
    means, labels = rng.normal(size=(3, 8)), np.arange(3 * (shots + queries)) % 3
    x = (means[labels] + 1.2 * rng.normal(size=(len(labels), 8))).astype("float32")
    return x[: 3 * shots], labels[: 3 * shots], x[3 * shots :], labels[3 * shots :]


def test_probabilities_are_about_as_large_as_the_accuracy(eager):
    learner = few_shot.NearestCentroid(data.identity(8))
    certainties, hits, before = [], [], []
    for seed in range(2):
        support, labels, queries, expected = blobs(10, 50, seed)
        model = learner.adapt(support, labels)
        logits = model.predict(queries, verbose=0)
        hits.append(np.mean(logits.argmax(axis=1) == expected))
        for scale, found in ((1, certainties), (model.temperature, before)):
            probabilities = as_numpy(keras.ops.softmax(scale * logits))
            found.append(probabilities.max(axis=1).mean())
    gap = abs(np.mean(certainties) - np.mean(hits))
    assert gap < 0.06 and gap < abs(np.mean(before) - np.mean(hits))


def test_one_example_per_class(eager):
    support, labels, _, _ = blobs(1, 1, seed=0)
    model = few_shot.NearestCentroid(data.identity(8)).adapt(support, labels)
    logits = model.predict(support, verbose=0)
    found = as_numpy(keras.ops.softmax(logits))[np.arange(3), labels]
    assert np.exp(np.mean(np.log(found))) == pytest.approx(0.92, abs=0.07)


def test_neighbors_and_the_plain_model_have_the_temperature(eager):
    support, labels, queries, _ = blobs(4, 5, seed=0)
    model = few_shot.NeighborhoodLearner(data.identity(8)).adapt(support, labels)
    found = model.neighbors(queries, k=len(support), effects=True)
    after, before = model.predict(queries, verbose=0), model(queries, adapt=False)
    np.testing.assert_allclose(found.after, after, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.before, before, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.unadapted(queries), before, rtol=1e-5, atol=1e-6)
    change = found.output_changes.sum(axis=1)
    np.testing.assert_allclose(change, after - as_numpy(before), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind", [few_shot.NearestCentroid, few_shot.NeighborhoodLearner])
def test_a_temperature_is_fitted_again_after_a_change(kind, eager):
    """Of a classifier with similarities, trained and folded, on examples held out."""
    backbone = stacked((6, 6, 1), keras.layers.Conv2D(4, 3), keras.layers.Flatten())
    images = np.random.default_rng(0).normal(size=(18, 6, 6, 1)).astype("float32")
    labels = np.array(["elk", "fox", "owl"])[np.arange(18) % 3]
    model = convert.add_similarity(kind(backbone).adapt(images[:9], labels[:9]))
    randomize(model.trainable_variables)
    for given, y in ((model, labels[9:]), (convert.fold(model), np.arange(9) % 3)):
        given.calibrate(9.0)
        logits = given.temperature * as_numpy(given(images[9:]))
        given.calibrate(images[9:], y)
        expected = fitted_temperature(logits, np.arange(9) % 3, 1 / 11)
        assert given.temperature == pytest.approx(expected, rel=0.03)
        found = given.temperature * given.predict(images[9:], verbose=0)
        np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-4)
    with refused(r"`y` must be names in \('elk', 'fox', 'owl'\).*'gnu'"):
        model.calibrate(images[:1], ["gnu"])
    numbered = kind(backbone).adapt(images[:9], np.arange(9) % 3 + 1)
    numbered.calibrate(images[9:], np.arange(9) % 3 + 1)
    with refused(r"`y` must be names in \('1', '2', '3'\), or numbers in \[1, 2, 3\]"):
        numbered.calibrate(images[:2], [0, 1])
    counted = kind(backbone).adapt(images[:9], np.arange(9) % 3, [1, 10, 2])
    counted.calibrate(images[9:], np.arange(9) % 3)
    assert counted.temperature == pytest.approx(numbered.temperature, rel=0.03)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's alone")
def test_adapt_in_a_loop_traces_no_graph_for_itself(caplog):
    """TensorFlow would warn of a function that is traced five times."""
    network, (support, labels, *_) = stacked((8,), keras.layers.Dense(3)), blobs(3, 1, 0)
    for learner in (
        few_shot.NearestCentroid(network),
        few_shot.NeighborhoodLearner(network),
        few_shot.Finetuner(network, 3, steps=2),
    ):
        for _ in range(5):
            learner.adapt(support, labels)
    assert "retracing" not in caplog.text


def test_diverging_inner_steps_are_an_error():
    network = stacked((8,), keras.layers.Dense(3))
    support, labels, _, _ = blobs(2, 1, seed=0)
    learner = few_shot.MAML(network, inner_steps=9, inner_learning_rate=1e38)
    support *= 10
    with refused("`logits` must be finite"):
        learner.adapt(support, labels)

"""Accuracies by mode: what differs, and that what is measured changes nothing."""

import functools

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from benchmarks.no_harm import evaluation
from benchmarks.no_harm.methods import METHODS
from benchmarks.no_harm.networks import BATCH_NORMS, NETWORKS
from examples.common.data import Split


def test_evaluation_changes_no_state():
    make = functools.partial(NETWORKS["narrow_cnn"].make, (8, 8, 1), 3)
    model = METHODS["neighbors_film"].make(make, make())
    images = np.random.default_rng(0).random((10, 8, 8, 1)).astype("float32")
    before = [variable.numpy() for variable in model.variables]
    found = evaluation.accuracies_by_mode(model, Split(images, np.arange(10) % 3), 4)
    assert set(found) == {"training", "inference", "estimated"}
    np.testing.assert_equal([variable.numpy() for variable in model.variables], before)


@pytest.mark.parametrize("kind", BATCH_NORMS.values())
def test_modes_differ_by_the_batch_norms(kind):
    inputs = keras.Input((2,))
    normalized = kind(center=False, scale=False)(inputs)
    model = keras.Model(inputs, normalized)
    # Far from the moving statistics the first class always seems the larger.
    values = np.array([[9.0, 1.0], [8.0, 2.0], [7.0, 3.0], [6.0, 4.0]], "float32")
    split = Split(values, np.array([0, 0, 1, 1]))
    found = evaluation.accuracies_by_mode(model, split, batch_size=4)
    assert found == {"training": 1.0, "inference": 0.5, "estimated": 1.0}
    # Batch norms that are frozen have the same statistics in all modes.
    model.layers[1].trainable = False
    found = evaluation.accuracies_by_mode(model, split, batch_size=4)
    assert set(found.values()) == {0.5}


@pytest.mark.parametrize("kind", BATCH_NORMS.values())
def test_statistics_are_the_means_of_batches(kind):
    """Wherever the moving ones stand, and however many steps they have had."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, kind(center=False, scale=False, epsilon=0.0)(inputs))
    values = np.array([[1, 0], [3, 4], [5, 0], [9, 8]], "float32")
    model(values[:2], training=True)
    norms = evaluation.batch_norms(model)
    logits, found = evaluation.in_training_mode(model, norms, values, batch_size=2)
    np.testing.assert_allclose(logits, [[-1, -1], [1, 1]] * 2, rtol=1e-5)
    np.testing.assert_allclose(found, [[4.5, 3.0], [2.5, 10.0]], rtol=1e-6)

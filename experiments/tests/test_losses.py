"""The authors' cross-entropy: their numbers, and the docstring's formula."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES, Golden, gradients
from keras import ops

from experiments.common.losses import SmoothedCrossentropy

LOGITS = np.array([[2.0, -1.0, 0.5], [0.0, 30.0, -30.0], [1.0, 1.0, 1.0]])
LABELS = np.array([0, 2, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_authors_numbers(dtype):
    golden = Golden("nsl_loss2")
    loss = SmoothedCrossentropy(dtype=dtype)
    assert loss.label_smoothing == golden.meta["label_smoothing"]
    assert loss.offset == golden.meta["floor"]
    labels = golden["in.labels"]
    logits = ops.convert_to_tensor(golden["in.logits"], dtype=dtype)
    golden.check("out64.loss", loss(labels, logits), dtype)
    (gradient,) = gradients(lambda logits: loss(labels, logits), [logits])
    golden.check("grad64.loss.logits", gradient, dtype)


@pytest.mark.parametrize(("smoothing", "offset"), [(0.01, 1e-4), (0.0, 1e-2), (0.3, 0.1)])
def test_values(smoothing, offset):
    loss = SmoothedCrossentropy(smoothing, offset, reduction=None)
    loss = keras.losses.deserialize(keras.losses.serialize(loss))
    exponentials = np.exp(LOGITS - LOGITS.max(axis=-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True) + offset
    smoothed = (1 - smoothing) * np.eye(3)[LABELS] + smoothing / 3
    expected = -np.sum(smoothed * np.log(probabilities), axis=-1)
    for labels in (LABELS, LABELS[:, None], LABELS.astype("uint8")):
        losses = ops.convert_to_numpy(loss(labels, LOGITS))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_no_class_costs_more_than_the_offset_allows():
    loss = SmoothedCrossentropy(0.0, 1e-3, reduction=None)
    logits = ops.array([[0.0, 1e4]])
    np.testing.assert_allclose(
        ops.convert_to_numpy(loss([0], logits)), -np.log(1e-3), rtol=1e-5
    )
    (gradient,) = gradients(lambda logits: ops.sum(loss([0], logits)), [logits])
    assert np.all(np.isfinite(ops.convert_to_numpy(gradient)))

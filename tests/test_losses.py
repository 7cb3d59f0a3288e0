"""The authors' cross-entropy: their numbers, both kinds of labels, wrong labels."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES, Golden, gradients
from keras import ops

from nsl_keras.losses import SmoothedCrossentropy

LOGITS = np.array([[2.0, -1.0, 0.5], [0.0, 30.0, -30.0], [1.0, 1.0, 1.0]])
LABELS = np.array([0, 2, 1])


def expected_losses(labels, smoothing, offset):
    """The docstring's formula; `labels` one-hot or soft."""
    exponentials = np.exp(LOGITS - LOGITS.max(axis=-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True) + offset
    smoothed = (1 - smoothing) * labels + smoothing / 3
    return -np.sum(smoothed * np.log(probabilities), axis=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_hot", [False, True])
def test_authors_numbers(one_hot, dtype):
    golden = Golden("nsl_loss2")
    loss = SmoothedCrossentropy(dtype=dtype)
    assert loss.label_smoothing == golden.meta["label_smoothing"]
    assert loss.offset == golden.meta["floor"]
    labels = golden["in.labels"]
    if one_hot:
        labels = np.eye(7)[labels]
    logits = ops.convert_to_tensor(golden["in.logits"], dtype=dtype)
    golden.check("out64.loss", loss(labels, logits), dtype)
    (gradient,) = gradients(lambda logits: loss(labels, logits), [logits])
    golden.check("grad64.loss.logits", gradient, dtype)


@pytest.mark.parametrize(("smoothing", "offset"), [(0.01, 1e-4), (0.0, 1e-2), (0.3, 0.1)])
def test_values(smoothing, offset):
    loss = SmoothedCrossentropy(smoothing, offset, reduction=None)
    expected = expected_losses(np.eye(3)[LABELS], smoothing, offset)
    for labels in (LABELS, LABELS[:, None], np.eye(3)[LABELS], LABELS.astype("uint8")):
        losses = ops.convert_to_numpy(loss(labels, LOGITS))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    pixels = loss(np.stack([LABELS, LABELS]), np.stack([LOGITS, LOGITS]))
    np.testing.assert_allclose(ops.convert_to_numpy(pixels)[1], expected, rtol=1e-5)
    soft = np.array([[0.2, 0.3, 0.5]] * 3)
    np.testing.assert_allclose(
        ops.convert_to_numpy(loss(soft, LOGITS)),
        expected_losses(soft, smoothing, offset),
        rtol=1e-5,
    )


def test_no_class_costs_more_than_the_offset_allows():
    loss = SmoothedCrossentropy(0.0, 1e-3, reduction=None)
    logits = ops.array([[0.0, 1e4]])
    np.testing.assert_allclose(
        ops.convert_to_numpy(loss([0], logits)), -np.log(1e-3), rtol=1e-5
    )
    (gradient,) = gradients(lambda logits: ops.sum(loss([0], logits)), [logits])
    assert np.all(np.isfinite(ops.convert_to_numpy(gradient)))


@pytest.mark.parametrize("label", [-1, 3, 1.5])
def test_label_outside_makes_its_loss_nan(label):
    losses = SmoothedCrossentropy(reduction=None)(np.array([0, label, 2]), LOGITS)
    assert np.isnan(ops.convert_to_numpy(losses)).tolist() == [False, True, False]


def test_config():
    loss = SmoothedCrossentropy(0.1, 1e-3)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert isinstance(again, SmoothedCrossentropy)
    assert again.get_config() == loss.get_config()


def call(labels, logits):
    return lambda: SmoothedCrossentropy()(np.zeros(labels), np.zeros(logits))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SmoothedCrossentropy(1.0), r"`label_smoothing` must be .*smoothing=1.0"),
        (lambda: SmoothedCrossentropy(0.1, 0), r"`offset` must be .*offset=0"),
        (call((3, 2), (3, 3)), r"`y_true` class numbers or .*y_true.shape=\(3, 2\)"),
        (call((3, 1, 1), (3, 3)), r"`y_true` class numbers or .*\(3, 1, 1\)"),
        (call((4, 1), (4, 3, 5)), r"`y_true` class numbers or .*y_true.shape=\(4, 1, 5\)"),
        (call((1, 3), (4, 3, 5)), r"`y_true` class numbers or .*y_true.shape=\(1, 3, 5\)"),
        (call((3, 1), (3, 1)), r"at least 2 classes .*y_pred.shape=\(3, 1\)"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()

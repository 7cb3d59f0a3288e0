"""Predictions beside the training images that they attend to: all that is drawn."""

import keras
import numpy as np
import pytest
from pictures import attention_of, drawn, small_model

from nsl_keras import visualize

RNG = np.random.default_rng(9)
IMAGES = RNG.random((30, 4, 4, 1)).astype("float32")
LABELS = RNG.integers(0, 3, size=30)


def shares_of(model, x):
    """The attention of each query on each image, through the entries nearest to it."""
    keys = np.asarray(model.dictionary.keys)
    features = np.asarray(model.features(IMAGES))
    cosines = (features / np.linalg.norm(features, axis=1, keepdims=True)) @ keys.T
    nearest = cosines.argmax(axis=0)
    np.testing.assert_array_equal(model.nearest_examples(IMAGES, batch_size=7), nearest)
    return attention_of(model, x) @ np.eye(len(IMAGES))[nearest]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_images_labels_and_attention(task):
    model = small_model(keras.layers.Dense(3), task=task, shape=(4, 4, 1))
    shares = shares_of(model, IMAGES[:4])
    names = ["ant", "bee", "cat"]
    is_classifier = task == "classification"
    labels = LABELS if is_classifier else RNG.random((30, 3))
    figure = visualize.plot_neighbors(
        model,
        iter([IMAGES[:2], IMAGES[2:4]]),
        IMAGES,
        labels,
        k=3,
        class_names=names if is_classifier else None,
    )
    after, before = model.predict(IMAGES[:4]), np.asarray(model(IMAGES[:4], adapt=False))
    for row, (query, *neighbors) in enumerate(np.reshape(figure.axes, (4, 4))):
        np.testing.assert_array_equal(drawn(query), IMAGES[row, :, :, 0])
        expected = np.argsort(-shares[row])[:3]
        for axis, index in zip(neighbors, expected, strict=True):
            np.testing.assert_array_equal(drawn(axis), IMAGES[index, :, :, 0])
            label = (
                names[labels[index]]
                if is_classifier
                else ", ".join(f"{value:.3g}" for value in labels[index])
            )
            assert axis.get_xlabel() == f"{label}, {shares[row, index]:.1%}"
        old, new = (
            names[outputs[row].argmax()]
            if is_classifier
            else ", ".join(f"{value:.3g}" for value in outputs[row])
            for outputs in (before, after)
        )
        assert old != new
        assert query.get_xlabel() == f"{new}\nbefore: {old}"
    # Without a change of the class, it is written once.
    if is_classifier:
        for rate in model.neighborhood.learning_rate.weights:
            rate.assign(0.0)
        figure = visualize.plot_neighbors(model, IMAGES[:1], IMAGES, k=1)
        assert figure.axes[0].get_xlabel() == str(before[0].argmax())

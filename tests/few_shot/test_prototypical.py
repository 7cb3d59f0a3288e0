"""Prototypes against NumPy."""

import few_shot_episodes as data
import keras
import numpy as np
from keras import ops

from nsl_keras.few_shot import ProtoNet


def prototypes(support, labels):
    return np.stack(
        [
            [images[own == c].mean(axis=0) for c in range(labels.max() + 1)]
            for images, own in zip(support.astype("float64"), labels, strict=True)
        ]
    )


def test_cosines_with_the_means():
    inputs, _ = data.episodes()
    support, labels, queries = inputs
    model = ProtoNet(data.identity(), data.WAYS, metric="cosine", temperature=0.1)
    means = prototypes(support, labels)
    means /= np.linalg.norm(means, axis=-1, keepdims=True)
    units = queries / np.linalg.norm(queries, axis=-1, keepdims=True)
    expected = np.einsum("bqd,bwd->bqw", units, means) / 0.1
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-5, atol=1e-5)


def test_minus_squared_distances_to_the_means_of_unequal_shots():
    (support, _, queries), _ = data.episodes()
    labels = np.array([[0, 0, 0, 0, 1, 2], [2, 1, 1, 0, 2, 1]])
    model = ProtoNet(data.identity(), data.WAYS, temperature=2.0)
    means = prototypes(support, labels)
    expected = -((queries[:, :, None] - means[:, None]) ** 2).sum(-1) / 2
    found = model((support, labels, queries))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_features_of_several_axes_are_flattened():
    inputs, _ = data.episodes(shape=(2, 3))
    flat = tuple(
        each.reshape(*each.shape[:2], -1) if each.ndim > 2 else each for each in inputs
    )
    image = keras.Input((2, 3))
    model = ProtoNet(keras.Model(image, keras.layers.Identity()(image)), data.WAYS)
    expected = ProtoNet(data.identity(), data.WAYS)(flat)
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-6)


def test_the_temperature_is_learned_by_its_logarithm():
    inputs, labels = data.episodes()
    model = ProtoNet(data.identity(), data.WAYS, temperature=4.0, learn_temperature=True)
    logits = ops.convert_to_numpy(model(inputs))
    (variable,) = model.trainable_variables
    assert np.isclose(float(variable.value), np.log(4.0))
    fixed = ProtoNet(data.identity(), data.WAYS, temperature=4.0)
    np.testing.assert_allclose(fixed(inputs), logits, rtol=1e-6)
    assert not fixed.trainable_variables
    model.compile(keras.optimizers.SGD(0.1), data.cross_entropy(), jit_compile=False)
    model.fit(inputs, labels, verbose=0)
    rescaled = logits * 4 / np.exp(float(variable.value))
    assert np.abs(rescaled - logits).max() > 1e-4
    np.testing.assert_allclose(model(inputs), rescaled, rtol=1e-5)


def test_more_ways_in_training_than_at_test():
    backbone = data.identity()
    many, _ = data.episodes(ways=5)
    few, _ = data.episodes(ways=2)
    assert ProtoNet(backbone, 5)(many).shape == (2, data.QUERIES, 5)
    assert ProtoNet(backbone, 2)(few).shape == (2, data.QUERIES, 2)

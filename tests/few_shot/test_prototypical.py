"""Prototypes against NumPy."""

import few_shot_episodes as data
import keras
import numpy as np
from keras import ops

from nsl_keras.few_shot import EpisodeSampler, ProtoNet


def prototypes(support, labels):
    membership = np.eye(data.WAYS)[labels]
    return np.einsum("bsw,bsd->bwd", membership, support) / membership.sum(1)[..., None]


def test_cosines_with_the_means():
    inputs, _ = data.episodes()
    support, labels, queries = inputs
    model = ProtoNet(data.identity(), data.WAYS, metric="cosine", temperature=0.1)
    means = data.unit(prototypes(support, labels))
    expected = np.einsum("bqd,bwd->bqw", data.unit(queries), means) / 0.1
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
    model = ProtoNet(data.identity(2, 3), data.WAYS)
    expected = ProtoNet(data.identity(), data.WAYS)(flat)
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-6)


def test_the_temperature_is_learned_by_its_logarithm():
    inputs, _ = data.episodes()
    model = ProtoNet(data.identity(), data.WAYS, temperature=4.0, learn_temperature=True)
    fixed = ProtoNet(data.identity(), data.WAYS, temperature=4.0)
    logits = ops.convert_to_numpy(fixed(inputs))
    np.testing.assert_allclose(model(inputs), logits, rtol=1e-6)
    (variable,) = model.trainable_variables
    assert np.isclose(float(variable.value), np.log(4.0)) and not fixed.weights
    variable.assign(np.log(2.0))
    np.testing.assert_allclose(model(inputs), 2 * logits, rtol=1e-5)


def test_integer_images_train_in_a_graph():
    images = np.random.default_rng(0).integers(0, 256, (20, 4, 4, 1), "uint8")
    sampler = EpisodeSampler(images, np.arange(20) % 2, ways=2, shots=2, queries=2)
    backbone = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Flatten()])
    backbone.build((None, 4, 4, 1))
    model = ProtoNet(backbone, ways=2, learn_temperature=True)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(sampler.batches(batch_size=2, steps=2), verbose=0).history
    assert np.isfinite(history["loss"]).all()

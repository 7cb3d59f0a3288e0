"""Batch norms by the statistics of a batch: in values, gradients and moving statistics."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras.backend import gradients_of
from nsl_keras.training.normalization import (
    BatchNormalization,
    NormalizationByBatch,
    normalizing_by_batch,
)

SHAPES = {
    "images": ((5, 4, 3, 6), {"epsilon": 0.1}),
    "no scale": ((5, 4, 3, 6), {"scale": False, "axis": 3}),
    "no offset": ((5, 4, 3, 6), {"center": False}),
    "channels first": ((5, 4, 3, 6), {"axis": 1}),
    "vectors": ((5, 6), {}),
}


def filled(layer, shape):
    layer.build(shape)
    rng = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(rng.uniform(0.5, 2, size=weight.shape))
    return layer


def results(layer, weights, inputs, **arguments):
    """Gradients of a weighted sum of the outputs, these, and the statistics left."""
    norm = getattr(layer, "normalization", layer)

    def total(at):
        with keras.StatelessScope() as scope:
            outputs = layer(at[0], **arguments)
            mean = scope.get_current_value(norm.moving_mean)
            variance = scope.get_current_value(norm.moving_variance)
        return ops.sum(weights * outputs), [outputs, mean, variance]

    gradients, rest = gradients_of(total, [ops.convert_to_tensor(inputs)])
    return [*gradients, *rest]


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("second_order", [False, True])
def test_it_is_the_training_mode_of_keras(case, second_order):
    shape, options = SHAPES[case]
    rng = np.random.default_rng(1)
    inputs = rng.normal(2, 3, size=shape).astype("float32")
    weights = rng.normal(size=shape).astype("float32")
    reference = keras.layers.BatchNormalization(momentum=0.0, **options)
    expected = results(filled(reference, shape), weights, inputs, training=True)
    ours = filled(BatchNormalization(**options), shape)
    stand_in = NormalizationByBatch(
        filled(keras.layers.BatchNormalization(**options), shape)
    )
    for layer, arguments in ((ours, {"training": False}), (stand_in, {})):
        with normalizing_by_batch(second_order):
            found = results(layer, weights, inputs, **arguments)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_second_derivatives():
    """The penalty of a gradient, by finite differences."""
    shape = (7, 3)
    rng = np.random.default_rng(1)
    inputs, weights, direction = rng.normal(size=(3, *shape)).astype("float32")
    layer = filled(BatchNormalization(), shape)

    def gradient(at):
        total, _ = gradients_of(lambda at: (ops.sum(weights * layer(at[0]) ** 2), None), at)
        return total[0]

    with keras.StatelessScope(), normalizing_by_batch():
        at = [ops.convert_to_tensor(inputs)]
        (found,), _ = gradients_of(lambda at: (ops.sum(gradient(at) ** 2), None), at)
        above, below = (
            float(ops.sum(gradient([inputs + step * direction]) ** 2))
            for step in (1e-2, -1e-2)
        )
    received = float(np.sum(ops.convert_to_numpy(found) * direction))
    np.testing.assert_allclose(received, (above - below) / 2e-2, rtol=1e-2)


@pytest.mark.parametrize("trainable", [False, True])
def test_without_a_request_and_frozen_it_is_that_of_keras(trainable):
    shape = (5, 6)
    inputs = np.random.default_rng(1).normal(2, 3, size=shape).astype("float32")
    reference = filled(keras.layers.BatchNormalization(trainable=trainable), shape)
    options = {"trainable": trainable, "momentum_warmup": False}
    layer = filled(BatchNormalization(**options), shape)
    for training in (False, True):
        np.testing.assert_array_equal(
            layer(inputs, training=training), reference(inputs, training=training)
        )
    stand_in = NormalizationByBatch(reference)
    np.testing.assert_array_equal(stand_in(inputs), reference(inputs))
    if not trainable:
        with normalizing_by_batch():
            for each in (layer, stand_in):
                np.testing.assert_array_equal(each(inputs), reference(inputs))


# Unbiased moving statistics.


def batches(count, shape=(16, 3), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(3 + 0.1 * n, 2, size=shape).astype("float32") for n in range(count)]


def rate_of(count, seen, momentum=0.99):
    window = max(seen / 512, min(seen, 32))
    return max(1 - momentum, count / (count + window))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("before", [0, 512 * 100])
def test_moving_statistics_are_the_weighted_average(momentum, before):
    """From the first batch on, and where the window is one of many examples."""
    layer = filled(BatchNormalization(momentum=momentum), (16, 3))
    layer.seen_examples.assign(before)
    mean, variance = (each.numpy() for each in (layer.moving_mean, layer.moving_variance))
    for step, batch in enumerate(batches(30)):
        layer(batch, training=True)
        rate = rate_of(16, before + 16 * step, momentum)
        mean = (1 - rate) * mean + rate * batch.astype("float64").mean(axis=0)
        variance = (1 - rate) * variance + rate * batch.astype("float64").var(axis=0)
        np.testing.assert_allclose(layer.moving_mean, mean, rtol=2e-5)
        np.testing.assert_allclose(layer.moving_variance, variance, rtol=2e-5)
    assert float(layer.seen_examples) == before + 30 * 16


def test_a_batch_counts_by_its_examples():
    """A last one of a single example moves the average little."""
    parts = [2.0 * batches(1, (size, 3), size)[0] for size in (20, 20, 20, 1)]
    layer = BatchNormalization()
    mean, seen = 0.0, 0
    for part in parts:
        layer(part, training=True)
        rate = rate_of(len(part), seen)
        mean = (1 - rate) * mean + rate * part.mean(axis=0)
        seen += len(part)
    assert rate == 1 / 33
    np.testing.assert_allclose(layer.moving_mean, mean, rtol=1e-5)
    assert float(layer.seen_examples) == 61


def test_padding_counts_as_no_examples():
    layer = filled(BatchNormalization(), (4, 6, 3))
    batch = batches(1, (4, 6, 3))[0]
    mask = np.zeros((4, 6), bool)
    before = [weight.numpy() for weight in layer.weights]
    layer(batch, mask=mask, training=True)
    layer(batch[:0], mask=mask[:0], training=True)
    layer(batch[:0], training=True)
    for weight, expected in zip(layer.weights, before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    layer.seen_examples.assign(64)
    mask[1, :3] = True
    layer(batch, mask=mask, training=True)
    expected = before[2] + rate_of(0.5, 64) * (batch[1, :3].mean(axis=0) - before[2])
    np.testing.assert_allclose(layer.moving_mean, expected, rtol=1e-5)
    assert float(layer.seen_examples) == 64.5


@pytest.mark.parametrize("momentum", [0.9, 0.9999])
def test_small_variances_are_not_rounded_away(momentum):
    layer = BatchNormalization(momentum=momentum)
    batch = np.float32([1, 1e-6, 0]) * batches(1)[0]
    layer(batch, training=True)
    np.testing.assert_allclose(layer.moving_variance, batch.var(axis=0), rtol=1e-5)


def test_training_reads_the_weights_of_the_scope():
    """As in a training step on JAX, which gives a layer its weights in a scope."""
    layer = filled(BatchNormalization(), (16, 3))
    (batch,) = batches(1)
    with keras.StatelessScope([(layer.gamma, 2 * layer.gamma)]):
        doubled = layer(batch, training=True) - layer.beta
    single = layer(batch, training=True) - layer.beta
    np.testing.assert_allclose(doubled, 2 * single, rtol=1e-5)


def test_training_outputs_masks_and_gradients_are_those_of_keras():
    inputs = np.random.default_rng(1).normal(2, 3, size=(4, 5, 6)).astype("float32")
    mask = np.arange(20).reshape(4, 5) % 3 > 0
    for each in (None, mask):
        layers = (
            filled(BatchNormalization(momentum=0.0), inputs.shape),
            filled(keras.layers.BatchNormalization(momentum=0.0), inputs.shape),
        )
        outputs = [layer(inputs, training=True, mask=each) for layer in layers]
        np.testing.assert_array_equal(*outputs)
        for name in ("moving_mean", "moving_variance"):
            np.testing.assert_allclose(*(getattr(layer, name) for layer in layers))


def test_settled_statistics_move_as_those_of_keras():
    layer = filled(BatchNormalization(momentum=0.9), (16, 3))
    plain = filled(keras.layers.BatchNormalization(momentum=0.9), (16, 3))
    layer.seen_examples.assign(1e12)
    for batch in batches(5):
        layer(batch, training=True)
        plain(batch, training=True)
    np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, plain.moving_variance, rtol=1e-5)


@pytest.mark.parametrize("scale", [False, True])
def test_weights_of_keras_load_as_settled(scale, tmp_path):
    models = [
        keras.Sequential([keras.Input((3,)), layer(scale=scale, name="norm")])
        for layer in (keras.layers.BatchNormalization, BatchNormalization)
    ]
    models[0].layers[0].moving_mean.assign([1.0, 2.0, 3.0])
    models[0].save_weights(tmp_path / "plain.weights.h5")
    models[1].load_weights(tmp_path / "plain.weights.h5")
    layer = models[1].layers[0]
    np.testing.assert_array_equal(layer.moving_mean, [1.0, 2.0, 3.0])
    layer(batches(1)[0], training=True)
    assert float(layer.moving_mean[0]) < 1.1
    models[1].save(tmp_path / "ours.keras")
    again = keras.saving.load_model(tmp_path / "ours.keras").layers[0]
    assert type(again) is BatchNormalization
    for one, other in zip(again.get_weights(), layer.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("warmup", [False, True])
def test_fold(warmup):
    layer = filled(
        BatchNormalization(axis=1, epsilon=0.1, momentum_warmup=warmup), (4, 3, 5)
    )
    inputs = np.random.default_rng(1).normal(2, 3, size=(4, 3, 5)).astype("float32")
    layer(inputs, training=True)
    plain = layer.fold()
    assert type(plain) is keras.layers.BatchNormalization
    np.testing.assert_array_equal(plain(inputs), layer(inputs))
    with pytest.raises(ValueError, match="`fold` needs a built layer"):
        BatchNormalization().fold()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"`momentum` must be a number in \[0, 1\).*=1.0"),
        ({"momentum_warmup": "no"}, "`momentum_warmup` must be .*='no'"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        BatchNormalization(**options)


def test_renormalization_is_refused():
    if "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters:
        pytest.skip("This version of Keras has no batch renormalization.")
    with pytest.raises(ValueError, match=r"`renorm` must be False.*renorm=True"):
        BatchNormalization(renorm=True)


def test_masks_and_second_calls_are_refused():
    inputs = np.ones((2, 3, 4), "float32")
    layer = filled(BatchNormalization(name="norm"), inputs.shape)
    with keras.StatelessScope(), normalizing_by_batch(once=True):
        layer(inputs)
        with pytest.raises(ValueError, match="layer 'norm', which is called more often"):
            layer(inputs)
    with normalizing_by_batch(), pytest.raises(ValueError, match="not have masked inputs"):
        layer(inputs, mask=np.ones((2, 3), bool))

"""Batch norms by the statistics of a batch, and their moving statistics."""

import functools
import inspect

import keras
import numpy as np
import pytest
from helpers import DTYPES, gradients, normal, randomize, refusing, stacked
from keras import ops

from nsl_keras.normalization import (
    BatchNormalization,
    convert_batch_norms,
    normalizing_by_batch,
)

pytestmark = pytest.mark.jax

SHAPES = {
    "no scale": ((5, 4, 3, 6), {"scale": False, "epsilon": 0.1}),
    "channels first": ((5, 4, 3, 6), {"axis": 1, "center": False}),
    "vectors": ((5, 6), {}),
}


def filled(layer, shape):
    layer.build(shape)
    rng = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(rng.uniform(0.5, 2, size=weight.shape))
    return layer


def by_batch(layer, inputs, mask=None):
    """A layer's outputs, normalized by the batch, and the statistics of the batch."""
    moving = layer.moving_mean, layer.moving_variance
    state = [(each, ops.convert_to_tensor(each)) for each in layer.variables]
    with keras.StatelessScope(state) as scope, normalizing_by_batch([layer]):
        outputs = layer(inputs, training=False, mask=mask)
    return outputs, [scope.get_current_value(each) for each in moving]


@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="a traced call moves Keras's statistics"
)
@pytest.mark.parametrize("case", SHAPES)
def test_by_batch_it_is_the_training_mode_of_keras(case):
    shape, options = SHAPES[case]
    inputs, weights = 2 + 3 * normal(2, *shape)
    plain = filled(keras.layers.BatchNormalization(momentum=0.0, **options), shape)
    layer = filled(BatchNormalization(**options), shape)
    before = layer.get_weights()

    def in_training(inputs):
        return plain(inputs, training=True), [plain.moving_mean, plain.moving_variance]

    found = []
    for run in (functools.partial(by_batch, layer), in_training):
        outputs, statistics = run(inputs)
        (gradient,) = gradients(lambda x: ops.sum(weights * run(x)[0]), [inputs])
        found.append([*map(ops.convert_to_numpy, [outputs, gradient, *statistics])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_equal(layer.get_weights(), before)


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({"momentum_warmup": False}, True),
        ({"momentum_warmup": False}, False),
        ({"trainable": False}, False),
        ({"momentum": 0.0}, True),
    ],
    ids=str,
)
def test_it_computes_as_that_of_keras(options, masked):
    """Outputs in training and after, and moving statistics: without warmup, for example."""
    inputs = 2 + 3 * normal(4, 5, 6)
    mask = np.arange(20).reshape(4, 5) % 3 > 0 if masked else None
    own = filled(BatchNormalization(**options), inputs.shape)
    options = {key: value for key, value in options.items() if key != "momentum_warmup"}
    plain = filled(keras.layers.BatchNormalization(**options), inputs.shape)
    for training in (True, False):
        found = [each(inputs, training=training, mask=mask) for each in (own, plain)]
        np.testing.assert_array_equal(*found)
    for name in ("moving_mean", "moving_variance"):
        np.testing.assert_allclose(*(getattr(each, name) for each in (own, plain)))


def test_conversion_of_a_model():
    """Nested models and shared layers included; the copy computes and trains the same."""
    inputs = keras.Input((4,))
    norm = keras.layers.BatchNormalization(name="shared", momentum=0.8)
    inner = stacked((4,), keras.layers.BatchNormalization(name="inner", trainable=False))
    outputs = norm(inner(norm(inputs)))
    ours = BatchNormalization(name="ours")
    model = keras.Model(inputs, ours(outputs))
    randomize(model)
    converted = convert_batch_norms(model)
    assert type(converted.get_layer("shared")) is BatchNormalization
    assert not converted.layers[2].layers[0].trainable
    assert converted.get_layer("ours").momentum_warmup
    batch = normal(6, 4)
    for training in (False, True):
        np.testing.assert_allclose(
            converted(batch, training=training), model(batch, training=training), atol=1e-6
        )
    np.testing.assert_equal(converted.get_weights(), model.get_weights())


def batches(count, shape=(16, 3), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(3 + 0.1 * n, 2, size=shape).astype("float32") for n in range(count)]


def rate_of(count, seen, momentum=0.99):
    window = max(seen / 512, min(seen, 32))
    return max(1 - momentum, count / (count + window))


@pytest.mark.parametrize(
    ("momentum", "dtype", "before"),
    [(0.5, "float32", 0), (0.99, "float32", 512 * 100), (0.8, DTYPES[0], 0)],
)
def test_moving_statistics_are_the_weighted_average(momentum, dtype, before):
    """From the first batch on; a last one of a single example moves them little.

    Small variances are not rounded away, and in float64 nothing passes through float32.
    """
    layer = filled(BatchNormalization(momentum=momentum, dtype=dtype), (16, 3))
    layer.seen_examples.assign(before)
    mean, variance = (each.numpy() for each in (layer.moving_mean, layer.moving_variance))
    seen, tolerance = before, 2e-5 if dtype == "float32" else 1e-12
    for batch in [*batches(30), *batches(1, (1, 3))]:
        batch = (batch * [1, 1e-6, 1]).astype(dtype)
        layer(batch, training=True)
        rate = rate_of(len(batch), seen, momentum)
        seen += len(batch)
        mean = (1 - rate) * mean + rate * batch.astype("float64").mean(axis=0)
        variance = (1 - rate) * variance + rate * batch.astype("float64").var(axis=0)
        np.testing.assert_allclose(layer.moving_mean, mean, rtol=tolerance)
        np.testing.assert_allclose(layer.moving_variance, variance, rtol=tolerance)
    assert float(layer.seen_examples) == seen == before + 30 * 16 + 1


def test_padding_counts_as_no_examples():
    layer = filled(BatchNormalization(), (4, 6, 3))
    batch = batches(1, (4, 6, 3))[0]
    mask = np.zeros((4, 6), bool)
    before = layer.get_weights()
    layer(batch, mask=mask, training=True)
    layer(batch[:0], mask=mask[:0], training=True)
    layer(batch[:0], training=True)
    np.testing.assert_equal(layer.get_weights(), before)
    layer.seen_examples.assign(64)
    mask[1, :3] = True
    layer(batch, mask=mask, training=True)
    expected = before[2] + rate_of(0.5, 64) * (batch[1, :3].mean(axis=0) - before[2])
    np.testing.assert_allclose(layer.moving_mean, expected, rtol=1e-5)
    assert float(layer.seen_examples) == 64.5


def masked_by_batch():
    norm, inputs = filled(BatchNormalization(), (2, 3, 4)), np.ones((2, 3, 4))
    by_batch(norm, by_batch(norm, inputs)[0])  # Once in each context.
    by_batch(norm, inputs, np.ones((2, 3), bool))


def twice_by_batch():
    norm = filled(BatchNormalization(), (2, 4))
    with normalizing_by_batch([norm]):
        norm(norm(np.ones((2, 4), "float32")))


def converted_renorm():
    norm = keras.layers.BatchNormalization(renorm=True)
    convert_batch_norms(stacked((4,), norm))


RENORM = "renorm" in inspect.signature(keras.layers.BatchNormalization).parameters


test_errors = refusing(
    (lambda: BatchNormalization(momentum=1.0), r"`momentum` must be .* \[0, 1\).*=1.0"),
    (lambda: BatchNormalization().fold(), "`fold` needs a built layer"),
    (masked_by_batch, "called once in a model, without a mask, to"),
    (twice_by_batch, "must be called once in a model.*several calls"),
    pytest.param(
        converted_renorm,
        "`renorm` must be False.*renorm=True",
        marks=pytest.mark.skipif(not RENORM, reason="not in this version of Keras"),
    ),
)

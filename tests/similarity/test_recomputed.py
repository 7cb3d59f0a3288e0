"""Dynamic convolutions in training: a few examples at a time, and anew for gradients."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES
from helpers import IS_TENSORFLOW, assert_close, normal, randomize
from keras import ops

from nsl_keras import backend, layers
from nsl_keras.backend import gradients_of
from nsl_keras.predictors import SimilarityPredictor

BATCH, DTYPE = 5, DTYPES[0]
UNCONSTRAINED = {"similarity": "unconstrained"}
KINDS = {
    "conv1d": (layers.NeuralSimilarityConv1D, (9, 3), {"padding": "causal"}),
    "conv2d": (layers.NeuralSimilarityConv2D, (6, 5, 3), {"padding": "same", "strides": 2}),
    "depthwise": (layers.NeuralSimilarityDepthwiseConv2D, (6, 5, 3), {"padding": "same"}),
}


def make(kind, most, monkeypatch, dtype=DTYPE, **options):
    """A layer, inputs, and at `most` so many examples in a chunk."""
    layer, shape, own = KINDS[kind]
    if kind != "depthwise":
        options["filters"] = 4
    recipe = SimilarityPredictor("cnn", batch_normalization=False)
    layer = layer(**own, **options, kernel_size=3, predictor=recipe, dtype=dtype)
    layer.build((None, *shape))
    elements = most * np.prod(shape) * layer.bilinear_form.taps
    monkeypatch.setattr(backend, "ELEMENTS", int(elements))
    return randomize(layer), normal(BATCH, *shape, dtype="float64")


def derivatives(layer, images, training, second=True):
    """Outputs, gradients, and gradients of a function of these."""
    kernel, *others = (ops.convert_to_tensor(each) for each in layer.trainable_variables)

    def of_outputs(at):
        images, kernel = at
        values = zip(layer.trainable_variables, [kernel, *others], strict=True)
        with keras.StatelessScope(values):
            outputs = layer(images, training=training)
        return ops.sum(ops.sin(ops.cast(outputs, DTYPE))), outputs

    def of_gradients(at):
        gradients, outputs = gradients_of(of_outputs, at)
        return sum(ops.sum(ops.sin(each)) for each in gradients), (gradients, outputs)

    if not second:
        return gradients_of(of_outputs, [images, kernel])[0]
    again, (gradients, outputs) = gradients_of(of_gradients, [images, kernel])
    return [outputs, *gradients, *again]


@pytest.mark.jax
@pytest.mark.parametrize(
    ("kind", "options", "batch", "most", "second"),
    [
        ("conv1d", {}, None, 100, False),
        ("conv2d", UNCONSTRAINED, None, 2, True),
        ("conv2d", {}, BATCH, 2, False),
        ("depthwise", {}, BATCH, 1, False),
    ],
    ids=str,
)
def test_training_equals_the_plain_sum(kind, options, batch, most, second, monkeypatch):
    layer, images = make(kind, most, monkeypatch, **options)
    images = ops.convert_to_tensor(images, DTYPE)
    received, expected = (
        lambda images, training=training: derivatives(layer, images, training, second)
        for training in (True, False)
    )
    if IS_TENSORFLOW:
        import tensorflow as tf

        signature = [tf.TensorSpec((batch, *images.shape[1:]), DTYPE)]
        received = tf.function(received, input_signature=signature)
    else:  # JAX takes longer to compile each operation.
        received, expected = (
            backend.compiled(each, False) for each in (received, expected)
        )
    for one, other in zip(received(images), expected(images), strict=True):
        assert_close(one, other, {"float64": 1e-10, "float32": 1e-4}[DTYPE])


@pytest.mark.parametrize("jit_compile", [True, False])
def test_batches_of_several_sizes_train(jit_compile, monkeypatch):
    layer, images = make("conv2d", 2, monkeypatch, "float32", **UNCONSTRAINED)
    sizes = images.shape[1:] if jit_compile else (None, None, 3)
    model = keras.Sequential([keras.Input(sizes), layer])
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=jit_compile)
    targets = ops.convert_to_numpy(layer(images)) + 1
    before = model.evaluate(images, targets, verbose=0)
    model.fit(images, targets, batch_size=4, verbose=0)  # Batches of 4 and of 1.
    assert model.evaluate(images, targets, verbose=0) < before


def test_gradients_of_kernels_add_up_in_float32(monkeypatch):
    # Of 320 equal terms, a sum in bfloat16 would stop early.
    layer, images = make("conv1d", 1, monkeypatch, "mixed_bfloat16")
    images = ops.convert_to_tensor(np.repeat(images[:1], 320, axis=0), "float32")
    received = lambda each: derivatives(layer, each, training=True, second=False)  # noqa: E731
    _, gradient = backend.compiled(received, jit_compile=False)(images)
    _, plain = derivatives(layer, images, training=False, second=False)
    assert_close(gradient, plain, 0.02)


@pytest.mark.jax
def test_a_training_step_keeps_no_products(monkeypatch):
    layer, _ = make("conv2d", 2, monkeypatch, "float32")
    images = ops.zeros((64, 6, 5, 3))

    def step():
        return backend.compiled(lambda x: derivatives(layer, x, True, second=False), False)

    if IS_TENSORFLOW:
        graph = step().get_concrete_function(images).graph
        # They stand in the graphs of the loops.
        assert "MatMul" not in {each.type for each in graph.get_operations()}
        return
    sizes = []
    for in_chunks in (True, False):
        monkeypatch.setattr(backend, "on_cpu", lambda in_chunks=in_chunks: in_chunks)
        memory = step().lower(images).compile().memory_analysis()
        sizes.append(memory.temp_size_in_bytes)
    assert sizes[0] < 0.5 * sizes[1]

"""What is a depthwise layer's own; tests/similarity/test_convolution.py has the rest."""

import keras
import numpy as np
import pytest
from keras import ops
from similarity_layers import FAMILY, assert_close, assert_equal

from nsl_keras.layers import NeuralSimilarityDepthwiseConv2D

MEMBER = FAMILY["depthwise_conv2d"]


@pytest.mark.parametrize("predictor", [None, "sphere"])
@pytest.mark.parametrize("depth_multiplier", [1, 3])
def test_channels_stay_apart_and_are_ordered_as_in_keras(depth_multiplier, predictor):
    """Channel `c` of the input moves the outputs `c * multiplier + m` alone."""
    layer = NeuralSimilarityDepthwiseConv2D(
        3,
        depth_multiplier=depth_multiplier,
        similarity="unconstrained",
        predictor=predictor,
    )
    inputs = MEMBER.tensor()
    layer.build(inputs.shape)
    if predictor is not None:
        # One `M` for all channels sees all of them: freeze it.
        layer.predictor.output_convolution.kernel.assign(
            np.zeros(layer.predictor.output_convolution.kernel.shape)
        )
    outputs = ops.convert_to_numpy(layer(inputs))
    assert outputs.shape == (2, 7, 9, 4 * depth_multiplier)
    assert tuple(layer.kernel.shape) == (3, 3, 4, depth_multiplier)
    changed = np.array(ops.convert_to_numpy(inputs))
    changed[..., 2] += 1.0
    moved = ops.convert_to_numpy(layer(ops.convert_to_tensor(changed))) != outputs
    channels = np.any(moved, axis=(0, 1, 2))
    np.testing.assert_array_equal(channels, np.arange(4).repeat(depth_multiplier) == 2)


def test_all_channels_share_one_matrix():
    layer = MEMBER.make_built(similarity="unconstrained")
    assert tuple(layer.similarity_matrix.shape) == (9, 9)
    dynamic = MEMBER.make_built(kernel_size=2, similarity="diagonal", predictor="sphere")
    assert dynamic.predictor.outputs == 4


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_dynamic_layer_with_the_plain_kernel_of_keras(padding):
    """Unequal strides, which the static layer cannot have on TensorFlow."""
    constant = keras.layers.Conv2D(
        9, 3, strides=(2, 1), padding=padding, kernel_initializer="zeros"
    )
    layer = MEMBER.make(kernel_size=3, strides=(2, 1), padding=padding, predictor=constant)
    inputs = MEMBER.tensor()
    received = layer(inputs)
    plain = keras.layers.DepthwiseConv2D(3, depth_multiplier=3, padding="valid")
    plain.build(inputs.shape)
    plain.kernel.assign(layer.kernel)
    if padding == "same":
        # Nine rows and a stride of two: one row before, one after; eleven columns.
        inputs = ops.pad(inputs, [[0, 0], [1, 1], [1, 1], [0, 0]])
    assert_close(received, plain(inputs)[:, ::2], 1e-5)


def test_depthwise_arguments_hold_the_kernel():
    layer = MEMBER.make(
        kernel_size=2,
        depthwise_initializer="ones",
        depthwise_regularizer=keras.regularizers.L2(0.5),
        depthwise_constraint="non_neg",
    )
    layer.build(MEMBER.inputs.shape)
    assert_equal(layer.kernel, np.ones((2, 2, 4, 3)))
    assert_close(sum(layer.losses), 0.5 * 48, 1e-6)
    assert isinstance(layer.kernel.constraint, keras.constraints.NonNeg)
    assert "kernel_initializer" not in layer.get_config()
    again = NeuralSimilarityDepthwiseConv2D.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


def test_error_of_unknown_arguments():
    with pytest.raises(ValueError, match="filters"):
        NeuralSimilarityDepthwiseConv2D(3, filters=4)

"""The orthogonality regularizer: the authors' numbers, and what it does in training."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES, Golden, gradients
from keras import ops

from nsl_keras.layers import SphereConv2D
from nsl_keras.regularizers import OrthogonalityRegularizer


@pytest.mark.parametrize("dtype", DTYPES)
def test_authors_numbers(dtype):
    golden = Golden("nsl_gns_conv")
    layer = SphereConv2D(
        6, 3, kernel_regularizer=OrthogonalityRegularizer(1e-4), dtype=dtype
    )
    layer.build(golden["in.x"].shape)
    layer.kernel.assign(golden["w.W"])
    golden.check("out64.orth_loss", layer.losses[0], dtype)
    kernel = ops.convert_to_tensor(layer.kernel)
    (gradient,) = gradients(layer.kernel_regularizer, [kernel])
    golden.check("grad64.orth_loss.W", gradient, dtype)


def test_values_and_config():
    kernel = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    matrix = kernel.reshape(6, 4)
    distance = np.sum((matrix.T @ matrix - np.eye(4)) ** 2)
    regularizer = OrthogonalityRegularizer(0.5, l2=0.25)
    np.testing.assert_allclose(
        float(regularizer(ops.convert_to_tensor(kernel))),
        0.5 * distance + 0.25 * np.sum(kernel**2),
        rtol=1e-5,
    )
    assert regularizer.get_config() == {"strength": 0.5, "l2": 0.25}
    again = keras.regularizers.get(keras.regularizers.serialize(regularizer))
    assert isinstance(again, OrthogonalityRegularizer)
    assert again.get_config() == regularizer.get_config()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": -1.0}, r"`strength` must be .*strength=-1.0"),
        ({"strength": "1"}, r"`strength` must be .*strength='1'"),
        ({"l2": float("nan")}, r"`l2` must be .*l2=nan"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        OrthogonalityRegularizer(**arguments)

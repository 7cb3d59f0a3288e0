"""iFiLM beside its golden numbers."""

import numpy as np
import pytest
from keras import ops

from nsl_keras.layers import InstanceFiLM


@pytest.mark.parametrize("shape", [(4,), (5, 4), (3, 5, 4), (2, 3, 5, 4)])
def test_starts_as_the_identity(shape):
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    layer = InstanceFiLM(6)
    np.testing.assert_array_equal(layer(x), x)
    # 3 K c + 1 numbers, as the authors' layer.
    assert sum(int(np.prod(v.shape)) for v in layer.trainable_variables) == 3 * 6 * 4 + 1


def test_modulates_each_example_by_itself():
    x = np.random.default_rng(0).normal(size=(3, 4, 4, 8)).astype("float32")
    layer = InstanceFiLM(6)
    layer.build(x.shape)
    for variable in layer.trainable_variables[:3]:
        variable.assign(np.random.default_rng(1).normal(size=variable.shape))
    together = ops.convert_to_numpy(layer(x))
    alone = np.concatenate([ops.convert_to_numpy(layer(x[i : i + 1])) for i in range(3)])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)
    assert np.abs(together - x).max() > 0.1


def test_bad_arguments():
    with pytest.raises(ValueError, match="`dictionary_size` must be a positive integer"):
        InstanceFiLM(0)
    with pytest.raises(ValueError, match="`temperature` must be a finite number"):
        InstanceFiLM(temperature=0)
    with pytest.raises(ValueError, match="`axis` must be one of -1, 1"):
        InstanceFiLM(axis=2)
    with pytest.raises(ValueError, match="channel axis of the input must be known"):
        InstanceFiLM().build((None, 4, 4, None))

"""A loop on the device trains as Keras's own does, on the same batches."""

import pytest
from helpers import run_under_jax

LOOP = """
import pathlib, sys
import keras, numpy as np
from examples.common import data, recipe
rng = np.random.default_rng(0)
split = data.Split(rng.random((40, 8, 8, 3)).astype("float32"), rng.integers(0, 4, 40))
trained = recipe.Recipe(
    6, (3,), learning_rate=0.01, batch_size=8, augmentation="pad_crop_flip_cutout"
)
found = []
for on_device in (False, True):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3, seed=0),
        keras.layers.Dense(4),
    ])
    recipe.compile_classifier(model, trained)
    batches = recipe.Batches(split, trained, seed=0, chunk=3)
    folder = pathlib.Path(sys.argv[1]) / str(on_device)
    record = recipe.fit(model, batches, trained, folder, on_device=on_device)
    found.append((record["training_loss"], model.get_weights()))
np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4)
for host, device in zip(found[0][1], found[1][1], strict=True):
    np.testing.assert_allclose(host, device, rtol=1e-3, atol=1e-5)
"""


@pytest.mark.long
def test_a_loop_on_the_device_is_the_loop_of_keras(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    run_under_jax(script, str(tmp_path))

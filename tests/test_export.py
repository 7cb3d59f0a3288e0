"""SavedModels in serving layout."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import nsl_keras
from nsl_keras import export


def make_model():
    convolution = functools.partial(
        nsl_keras.layers.NeuralSimilarityConv2D, predictor="sphere"
    )
    model = nsl_keras.MetaNeighborhoodModel(
        nsl_keras.backbones.convnet4((8, 8, 1), 4, convolution),
        nsl_keras.layers.CosineDense(3),
        dictionary=20,
    )
    model.build((None, 8, 8, 1))
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, and what its files hold."""
    model, folder = make_model(), tmp_path_factory.mktemp("exported") / "model"
    path = export.save_model(
        model, folder, version=3, signatures={"features": model.features}
    )
    assert path == folder / "3"
    return model, tf.saved_model.load(str(path))


def test_signatures_at_any_batch_size(exported):
    model, loaded = exported
    signatures = loaded.signatures
    assert set(signatures) == {"serve", "serving_default", "unadapted", "features"}
    functions = {
        "serving_default": model,
        "unadapted": lambda x: model(x, adapt=False),
        "features": model.features,
    }
    for batch in (1, 5, 64):
        x = np.random.default_rng(batch).normal(size=(batch, 8, 8, 1)).astype("float32")
        for name, function in functions.items():
            (argument,) = signatures[name].structured_input_signature[1]
            (served,) = signatures[name](**{argument: tf.constant(x)}).values()
            np.testing.assert_allclose(served, function(x), rtol=1e-4, atol=2e-6)


def test_bad_examples_stay_alone(exported):
    """Served models check nothing: one bad request must not spoil its batch."""
    _, loaded = exported
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype("float32")
    expected = loaded.serve(x).numpy()
    x[2] = np.nan
    received = loaded.serve(x).numpy()
    np.testing.assert_allclose(received[[0, 1, 3]], expected[[0, 1, 3]], rtol=1e-5)


def test_plain_keras_models_export_too(tmp_path):
    model = nsl_keras.backbones.convnet4((8, 8, 1), filters=(4, 4, 4, 4))
    path = export.save_model(model, tmp_path)
    assert set(tf.saved_model.load(str(path)).signatures) == {"serve", "serving_default"}


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mine").write_text("kept")
    with pytest.raises(ValueError, match=r"must not hold version 1 yet.*nothing is overwr"):
        export.save_model(make_model(), tmp_path)
    assert [p.name for p in (tmp_path / "1").iterdir()] == ["mine"]


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="`version` must be a positive integer"):
        export.save_model(make_model(), tmp_path, version=0)
    unbuilt = nsl_keras.MetaNeighborhoodModel(None, keras.layers.Dense(3))
    with pytest.raises(ValueError, match="`model` must be built before export"):
        export.save_model(unbuilt, tmp_path)
    unbuilt.build((None, 4))
    with pytest.raises(ValueError, match="`input_shape` must be given"):
        export.save_model(unbuilt, tmp_path)
    assert not list(tmp_path.iterdir())

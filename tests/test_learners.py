"""Every learner through the harness, its graphs and its exports."""

import few_shot_episodes as data
import keras
import learner_harness as harness
import numpy as np
import pytest
from helpers import as_numpy, run_litert

import nsl_keras

LONG = pytest.mark.long
CASES = {case.name: case for case in harness.CASES}
ADAPTABLE = harness.adaptable()
#: In graphs, a neighborhood takes several inner steps.
COMPILED = (
    "meta_neighborhoods",
    *(pytest.param(each, marks=LONG) for each in ("proto", "neighborhood_steps", "maml")),
)


@pytest.mark.parametrize("name", CASES)
def test_learner(name, tmp_path):
    harness.check_learner(CASES[name], tmp_path)


@pytest.mark.parametrize("name", ADAPTABLE)
def test_adapt(name, tmp_path, eager):
    harness.check_adapt(ADAPTABLE[name], tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
# One for each kind of head. Several inner steps of Meta-Neighborhoods need gradients, which
# the other engines do not have.
@pytest.mark.parametrize("name", ["proto", "neighborhood", "maml"])
def test_export_of_adapted_models(name, tmp_path):
    """Exported adapted models answer one image and five, in every format."""
    import onnxruntime
    import tensorflow as tf

    learner, (support, labels, queries), _ = ADAPTABLE[name].built()
    images = queries.reshape(-1, *harness.IMAGE)[:5]
    model = learner.adapt(support[0], labels[0])
    expected = as_numpy(model(images))
    nsl_keras.export.save_model(model, tmp_path / "1", examples=images)
    loaded = tf.saved_model.load(str(tmp_path / "1"))
    named = loaded.signatures["classify"](inputs=tf.constant(images))
    own = model.classify(images)
    assert named["class"].numpy().astype(str).tolist() == own["class"].tolist()
    np.testing.assert_allclose(named["probabilities"], own["probabilities"], 1e-4)
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (given,) = (each.name for each in session.get_inputs())
    model.export(tmp_path / "model.tflite", format="litert", verbose=False)
    for count in (1, 5):
        batch = images[:count]
        for found in (
            loaded.serve(tf.constant(batch)),
            session.run(None, {given: batch})[0],
            run_litert(tmp_path / "model.tflite", batch),
        ):
            np.testing.assert_allclose(found, expected[:count], rtol=1e-4, atol=1e-4)


@pytest.fixture
def checked_numbers():
    """No operation of a graph may return NaN, which a gradient would multiply by zero."""
    import tensorflow as tf

    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, checked_numbers):
    """Prediction and training in graphs, of several numbers of examples."""
    model, inputs, labels = (CASES | ADAPTABLE)[name].built(jit_compile=False)
    expected = as_numpy(model(inputs))
    for count in (len(expected), 1):
        first = keras.tree.map_structure(lambda each, n=count: each[:n], inputs)
        found = model.predict(first, verbose=0)
        np.testing.assert_allclose(found, expected[:count], rtol=1e-3, atol=1e-4)
    harness.check_step(model, inputs, labels)


@pytest.mark.long
@pytest.mark.parametrize("name", ["proto", "neighborhood", "maml"])
def test_exported_learners_take_any_number_of_images(name, tmp_path):
    """An exported learner answers episodes with other shots and queries."""
    import tensorflow as tf

    learner, inputs, _ = CASES[name].built()
    nsl_keras.export.save_model(learner, tmp_path / "1", examples=inputs)
    loaded = tf.saved_model.load(str(tmp_path / "1"))
    others, _ = data.episodes(batch=3, shots=4, queries=5, shape=harness.IMAGE)
    for support, labels, queries in (inputs, others):
        given = support, labels.astype("int32"), queries
        found = loaded.serve(tuple(map(tf.constant, given))).numpy()
        np.testing.assert_allclose(found, as_numpy(learner(given)), rtol=1e-4, atol=1e-4)

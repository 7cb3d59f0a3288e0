"""SavedModels in serving layout."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import nsl_keras
from nsl_keras import export

BATCHES = (0, 1, 5, 64)


def make_model():
    # Convolution and ReLU, which TensorFlow fuses: a NaN goes in and zero comes out.
    backbone = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    model = nsl_keras.MetaNeighborhoodModel(
        backbone, nsl_keras.layers.CosineDense(3), dictionary=20
    )
    model.build((None, 8, 8, 1))
    return model


def small_model(**options):
    """No backbone, so that exports take no time."""
    model = nsl_keras.MetaNeighborhoodModel(
        None, options.pop("head", keras.layers.Dense(3)), dictionary=20, **options
    )
    model.build((None, 4))
    return model


def images(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 8, 8, 1)).astype("float32")


def vectors(count):
    return np.random.default_rng(0).normal(size=(count, 4)).astype("float32")


def numbers(outputs):
    return {name: value.numpy() for name, value in outputs.items()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, and what its files hold."""
    model, folder = make_model(), tmp_path_factory.mktemp("exported") / "model"
    path = export.save_model(
        model, folder, version=3, signatures={"twice": lambda x: 2 * model(x)}
    )
    assert path == folder / "3"
    assert os.listdir(folder) == ["3"]
    return model, tf.saved_model.load(str(path))


def test_signatures_at_any_batch_size(exported):
    model, loaded = exported
    signatures = loaded.signatures
    assert set(signatures) == {
        *("serve", "serving_default", "unadapted", "features", "neighbors", "twice")
    }
    functions = {
        "serving_default": model,
        "unadapted": lambda x: model(x, adapt=False),
        "features": model.features,
        "twice": lambda x: 2 * model(x),
    }
    for batch in BATCHES:
        x = images(batch, seed=batch)
        for name, function in functions.items():
            (served,) = signatures[name](inputs=tf.constant(x)).values()
            expected = function(x if batch else images(1))[:batch]
            np.testing.assert_allclose(served, expected, rtol=1e-4, atol=2e-6)


def test_neighbors(exported):
    model, loaded = exported
    x = images(6)
    expected = model.neighbors(x, k=5)
    found = numbers(loaded.signatures["neighbors"](inputs=tf.constant(x)))
    assert found["entries"].dtype == found["classes"].dtype == "int32"
    np.testing.assert_array_equal(found["entries"], expected.indices)
    np.testing.assert_allclose(found["weights"], expected.weights, rtol=1e-4)
    np.testing.assert_allclose(found["values"], expected.values, rtol=1e-4)
    np.testing.assert_array_equal(found["classes"], expected.values.argmax(axis=-1))


def test_inputs_of_other_shapes_are_refused(exported):
    """Without the check TensorFlow answers some, and ends the process at others."""
    _, loaded = exported
    for serve in loaded.signatures.values():
        for shape in [(8, 8, 1), (2, 9, 8, 1), (2, 8, 8, 3), (2, 8, 8, 1, 1), ()]:
            with pytest.raises(tf.errors.InvalidArgumentError):
                serve(inputs=tf.zeros(shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_examples_get_no_answer(exported, bad):
    """They get NaN, or no entry; the others in the batch what they get alone."""
    model, loaded = exported
    x = images(4)
    expected = {name: numbers(f(inputs=x)) for name, f in loaded.signatures.items()}
    x[2, 0, 0] = bad
    for name, serve in loaded.signatures.items():
        for key, received in numbers(serve(inputs=x)).items():
            others = received[[0, 1, 3]]
            np.testing.assert_allclose(others, expected[name][key][[0, 1, 3]], rtol=1e-5)
            assert np.all(
                np.isnan(received[2]) if received.dtype == "float32" else received[2] == -1
            )
    predicted = model.predict(x, verbose=0)
    assert np.isnan(predicted).all(axis=1).tolist() == [False, False, True, False]
    np.testing.assert_allclose(
        predicted[:2], expected["serve"]["output_0"][:2], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", ["serve", "serving_default"])
def test_a_signature_takes_the_place_of_the_predictions(tmp_path, name):
    """It has both names, and is what the written model is compared with."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

    def probabilities(x):
        return keras.ops.softmax(model(x))

    path = export.save_model(model, tmp_path, signatures={name: probabilities})
    loaded, x = tf.saved_model.load(str(path)), vectors(5)
    expected = keras.ops.convert_to_numpy(probabilities(x))
    for served in ("serve", "serving_default"):
        (found,) = loaded.signatures[served](inputs=tf.constant(x)).values()
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    both = dict.fromkeys(("serve", "serving_default"), probabilities)
    with pytest.raises(ValueError, match="`signatures` must not hold both"):
        export.save_model(model, tmp_path, version=2, signatures=both)


def test_static_models_are_folded(tmp_path):
    convolution = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, similarity="unconstrained")
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            convolution,
            keras.layers.GlobalAveragePooling2D(),
            nsl_keras.layers.CosineDense(3),
        ]
    )
    for variable in model.trainable_variables:
        variable.assign_add(0.1 * keras.random.normal(variable.shape, seed=1))
    loaded = tf.saved_model.load(str(export.save_model(model, tmp_path)))
    assert set(loaded.signatures) == {"serve", "serving_default"}
    shapes = [tuple(each.shape) for each in loaded.signatures["serve"].variables]
    assert (9, 9) not in shapes and (3, 3, 1, 4) in shapes
    x = images(5)
    np.testing.assert_allclose(loaded.serve(x), model(x), rtol=1e-4, atol=1e-5)


def test_static_backbones_are_folded_in_meta_neighborhoods(tmp_path):
    backbone = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            nsl_keras.layers.NeuralSimilarityConv2D(4, 3),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    model = nsl_keras.MetaNeighborhoodModel(backbone, keras.layers.Dense(3), dictionary=8)
    model.build((None, 6, 6, 1))
    loaded = tf.saved_model.load(str(export.save_model(model, tmp_path)))
    served = loaded.signatures["serving_default"].variables
    assert (9,) not in [tuple(each.shape) for each in served]


@pytest.mark.parametrize("form", [pytest.param("list", marks=pytest.mark.long), "dict"])
def test_several_inputs(tmp_path, form):
    first, second = keras.Input((4,), name="first"), keras.Input((2,), name="second")
    features = keras.layers.Dense(5)(keras.layers.Concatenate()([first, second]))
    tensors = [first, second]
    x = [vectors(6), vectors(6)[:, :2]]
    if form == "dict":
        tensors = {"first": first, "second": second}
        x = dict(zip(tensors, x, strict=True))
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Model(tensors, features), keras.layers.Dense(3), dictionary=8
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)
    model.fit(x, np.arange(6) % 3, verbose=0)
    many = keras.tree.map_structure(lambda each: np.tile(each, (2, 1)), x)
    model.initialize_from(many, np.arange(12) % 3, seed=0)
    predicted = model.predict(x, verbose=0)
    assert model.neighbors(x, k=2).indices.shape == (6, 2)
    loaded = tf.saved_model.load(str(export.save_model(model, tmp_path)))
    given = dict(zip(("first", "second"), keras.tree.flatten(x), strict=True))
    serve = loaded.signatures["serving_default"]
    np.testing.assert_allclose(serve(**given)["output_0"], predicted, rtol=1e-4, atol=1e-6)
    given["second"] = given["second"][:5]
    with pytest.raises(tf.errors.InvalidArgumentError, match="Batch sizes must agree"):
        serve(**given)
    bad = keras.tree.map_structure(np.copy, x)
    keras.tree.flatten(bad)[1][3] = np.nan
    assert np.isnan(model.predict(bad, verbose=0)).any(axis=1).tolist() == [
        each == 3 for each in range(6)
    ]
    with pytest.raises(ValueError, match=r"`x\[.+\]` must be finite"):
        model.evaluate(bad, np.arange(6) % 3, verbose=0)


def test_preprocessing_is_part_of_the_signatures(tmp_path):
    raw = keras.Sequential(
        [keras.Input((2, 2), dtype="uint8"), keras.layers.Rescaling(1 / 255)]
    )
    raw.add(keras.layers.Flatten())
    model = small_model()
    loaded = tf.saved_model.load(str(export.save_model(model, tmp_path, preprocessing=raw)))
    x = np.random.default_rng(0).integers(256, size=(5, 2, 2)).astype("uint8")
    found = loaded.signatures["serving_default"](inputs=tf.constant(x))["output_0"]
    np.testing.assert_allclose(found, model(raw(x)), rtol=1e-5, atol=1e-6)
    # A function, whose inputs have the shape that is given.
    path = export.save_model(
        *(model, tmp_path, 2), (2, 2), preprocessing=lambda x: ops.reshape(x / 255, (-1, 4))
    )
    loaded = tf.saved_model.load(str(path))
    found = loaded.serve(x.astype("float32"))
    np.testing.assert_allclose(found, model(raw(x)), rtol=1e-5, atol=1e-6)


def test_regressions_have_no_classes(tmp_path):
    model = small_model(head=keras.layers.Dense(2), task="regression")
    loaded = tf.saved_model.load(str(export.save_model(model, tmp_path, k=3)))
    found = loaded.signatures["neighbors"](inputs=tf.constant(vectors(5)))
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "entries": (5, 3),
        "weights": (5, 3),
        "values": (5, 3, 2),
    }


@pytest.mark.parametrize("size", [(None, None, 1), (8, 8, 1)])
def test_plain_keras_models_export_too(tmp_path, size):
    model = keras.Sequential(
        [keras.Input(size), keras.layers.Conv2D(2, 3), keras.layers.GlobalMaxPooling2D()]
    )
    if None in size:
        with pytest.raises(ValueError, match=r"`examples` must be given.*unknown sizes"):
            export.save_model(model, tmp_path)
        assert not list(tmp_path.iterdir())
    path = export.save_model(model, tmp_path, examples=images(2))
    loaded = tf.saved_model.load(str(path))
    assert set(loaded.signatures) == {"serve", "serving_default"}
    np.testing.assert_allclose(loaded.serve(images(3)), model(images(3)), rtol=1e-5)


def test_half_precision_inside_is_compared_as_such(tmp_path):
    """Compiled, bfloat16 rounds elsewhere; a last layer in float32 does not change that."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    last = keras.layers.Dense(10, dtype="float32")
    model = keras.Sequential([keras.Input((64,)), *hidden, last])
    rng = np.random.default_rng(0)
    for weight in model.trainable_variables:
        weight.assign(weight + rng.uniform(-0.5, 0.5, weight.shape))
    examples = rng.random((64, 64)).astype("float32")
    eager = keras.ops.convert_to_numpy(model(examples))
    path = export.save_model(model, tmp_path, examples=examples)
    loaded = tf.saved_model.load(str(path))
    served = loaded.serve(examples)
    scale = np.abs(eager).max()
    np.testing.assert_allclose(served, eager, atol=0.05 * scale)
    if np.abs(served - eager).max() <= 1e-4 * scale:
        pytest.skip("this processor rounds alike, compiled or not")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mine").write_text("kept")
    with pytest.raises(ValueError, match=r"must not hold version 1 yet.*nothing is overwr"):
        export.save_model(small_model(), tmp_path)
    assert [p.name for p in (tmp_path / "1").iterdir()] == ["mine"]


def test_tensorflow_is_named_where_it_is_missing(tmp_path, monkeypatch):
    model = small_model()
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"`save_model` writes TensorFlow's SavedModel"):
        export.save_model(model, tmp_path)


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="`version` must be a positive integer"):
        export.save_model(small_model(), tmp_path, version=0)
    with pytest.raises(
        ValueError, match=r"`model` must be a Keras model. Received: model=3"
    ):
        export.save_model(3, tmp_path)
    unbuilt = nsl_keras.MetaNeighborhoodModel(None, keras.layers.Dense(3))
    with pytest.raises(ValueError, match="`model` must be built before export"):
        export.save_model(unbuilt, tmp_path)
    with pytest.raises(ValueError, match="`k` must be at most `num_neighbors`"):
        export.save_model(small_model(), tmp_path, k=21)
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(ops.log)])
    with pytest.raises(ValueError, match="`k` must be None for a model without a dict"):
        export.save_model(plain, tmp_path, k=3)
    with pytest.raises(
        ValueError, match=r"`examples` must be arrays for the inputs inputs"
    ):
        export.save_model(plain, tmp_path, examples=[vectors(2), vectors(2)])
    with pytest.raises(ValueError, match=r"`examples: inputs` must be finite"):
        export.save_model(plain, tmp_path, examples=np.full((2, 4), np.nan))
    with pytest.raises(
        RuntimeError, match=r"`model` for `examples` must be finite; for an"
    ):
        export.save_model(plain, tmp_path)
    export.save_model(plain, tmp_path / "plain", examples=np.ones((2, 4)))
    shutil.rmtree(tmp_path / "plain")
    model = small_model()
    model.head.bias.assign([0.0, np.inf, 0.0])
    with pytest.raises(ValueError, match=r"finite weights. Received: NaN or inf.*bias'"):
        export.save_model(model, tmp_path)
    assert not list(tmp_path.iterdir())


class Unshaped(keras.Model):
    """A model that is built without having seen a shape."""

    def __init__(self):
        super().__init__()
        self.built = True

    def call(self, inputs):
        return 2 * inputs


def test_unknown_input_shapes(tmp_path):
    with pytest.raises(ValueError, match="`input_shape` must be given for a model whose"):
        export.save_model(Unshaped(), tmp_path)
    path = export.save_model(Unshaped(), tmp_path, input_shape=(3,))
    loaded = tf.saved_model.load(str(path))
    np.testing.assert_array_equal(loaded.serve(np.ones((1, 3), "float32")), 2)


def test_a_model_that_predicts_something_else_is_not_written(tmp_path):
    seeds = keras.random.SeedGenerator(0)
    inputs = keras.Input((3,))
    noisy = keras.layers.Lambda(lambda x: x + keras.random.normal((3,), seed=seeds))
    with pytest.raises(
        RuntimeError, match=r"must predict what the model predicts.*differs"
    ):
        export.save_model(keras.Model(inputs, noisy(inputs)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_version_that_another_process_wrote_first_stays(tmp_path, monkeypatch):
    model = small_model()
    compare = export._compare

    def compare_slowly(*arguments):
        compare(*arguments)
        (tmp_path / "1").mkdir()

    monkeypatch.setattr(export, "_compare", compare_slowly)
    with pytest.raises(ValueError, match="must not hold version 1 yet"):
        export.save_model(model, tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["1"]


UNDER_JAX = """
import sys
import keras, numpy as np, tensorflow as tf
import nsl_keras
assert keras.backend.backend() == "jax"
model = nsl_keras.MetaNeighborhoodModel(
    None, nsl_keras.layers.CosineDense(3), dictionary=20)
model.build((None, 4))
served = tf.saved_model.load(str(nsl_keras.export.save_model(model, sys.argv[1])))
x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
x[1] = np.nan
found = served.signatures["serving_default"](inputs=tf.constant(x))["output_0"]
np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
assert np.isnan(found).any(axis=1).tolist() == [False, True, False, False, False]
nearest = served.signatures["neighbors"](inputs=tf.constant(x))["entries"]
np.testing.assert_array_equal(nearest[2:], model.neighbors(x[2:], k=5).indices)
for shape in [(4,), (2, 5)]:
    try:
        served.signatures["serving_default"](inputs=tf.zeros(shape))
    except tf.errors.InvalidArgumentError:
        continue
    raise SystemExit(f"Inputs of shape {shape} were answered.")
"""


@pytest.mark.long
def test_models_of_jax(tmp_path):
    subprocess.run(
        [sys.executable, "-c", UNDER_JAX, str(tmp_path)],
        cwd=pathlib.Path(__file__).parents[1],
        check=True,
        timeout=200,
        env={**os.environ, "KERAS_BACKEND": "jax"},
    )


#: Writes versions without end, and says before each.
EXPORTER = """
import itertools, sys
import keras
from nsl_keras import export
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
for version in itertools.count(1):
    print(version, flush=True)
    export.save_model(model, sys.argv[1], version)
"""


@pytest.mark.long
def test_a_killed_export_leaves_whole_versions(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTER, str(tmp_path)],
        cwd=pathlib.Path(__file__).parents[1],
        stdout=subprocess.PIPE,
    ) as process:
        for _ in range(4):
            process.stdout.readline()
        time.sleep(0.1)  # In the midst of the fourth.
        process.send_signal(signal.SIGKILL)
    versions = [path for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(versions) >= 3
    for path in versions:
        loaded = tf.saved_model.load(str(path))
        assert loaded.serve(vectors(1)).shape == (1, 2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    export.save_model(model, tmp_path, version=len(versions) + 1)

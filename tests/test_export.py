"""SavedModels in serving layout."""

import os
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import normal, refused, reloaded, stacked
from keras import ops

import nsl_keras
from nsl_keras import export

OF_ANY_SIZE = (None, None, 3)


def convolution(**options):
    return nsl_keras.layers.NeuralSimilarityConv2D(3, 3, padding="same", **options)


def calling(function):
    return stacked((4,), keras.layers.Lambda(function))


def noisy_model():
    seeds = keras.random.SeedGenerator(0)
    return calling(lambda x: x + keras.random.normal((4,), seed=seeds))


def exported(model, folder, **options):
    """The loaded SavedModel of a model."""
    export.save_model(model, folder / "1", **options)
    return tf.saved_model.load(str(folder / "1"))


@pytest.fixture(scope="module")
def neighborhoods(tmp_path_factory):
    """A model and what its files hold: a static similarity, and a further signature."""
    similarity = nsl_keras.similarities.Diagonal(initializer="glorot_uniform")
    options = {"activation": "relu", "similarity": similarity}
    convolution = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, **options)
    backbone = stacked((8, 8, 1), convolution, keras.layers.GlobalAveragePooling2D())
    head = nsl_keras.layers.CosineDense(3)
    model = nsl_keras.MetaNeighborhoodModel(backbone, head, dictionary=20)
    model.build((None, 8, 8, 1))
    folder = tmp_path_factory.mktemp("exported") / "model"
    loaded = exported(model, folder, signatures={"twice": lambda x: 2 * model(x)})
    assert os.listdir(folder) == ["1"]
    return model, loaded


class Unshaped(keras.Model):
    """A model that is built without having seen a shape."""

    def __init__(self):
        super().__init__()
        self.built = True

    def call(self, inputs):
        one, two = inputs
        return one + ops.cast(two, "float32")


def test_signatures(neighborhoods):
    model, loaded = neighborhoods
    signatures = loaded.signatures
    functions = {
        "serve": model,
        "serving_default": model,
        "unadapted": lambda x: model(x, adapt=False),
        "features": model.features,
        "twice": lambda x: 2 * model(x),
    }
    assert set(signatures) == {*functions, "neighbors"}
    for batch in (1, 5, 64):
        x = normal(batch, 8, 8, 1, seed=batch)
        for name, function in functions.items():
            (served,) = signatures[name](inputs=tf.constant(x)).values()
            np.testing.assert_allclose(served, function(x), rtol=1e-4, atol=2e-6)
    expected, found = model.neighbors(x, k=5), signatures["neighbors"](inputs=x)
    assert found["entries"].dtype == found["classes"].dtype == tf.int32
    np.testing.assert_array_equal(found["entries"], expected.indices)
    np.testing.assert_array_equal(found["classes"], expected.values.argmax(axis=-1))
    for name in ("weights", "values"):
        np.testing.assert_allclose(found[name], getattr(expected, name), rtol=1e-4)
    # Static similarities are folded.
    shapes = [tuple(each.shape) for each in signatures["serve"].variables]
    assert (9,) not in shapes and (3, 3, 1, 4) in shapes


def test_keras_exports_a_loaded_model_that_was_not_called(neighborhoods, tmp_path):
    model, _ = neighborhoods
    again = reloaded(model, tmp_path)
    again.export(tmp_path / "1", verbose=False)
    x = normal(3, 8, 8, 1)
    loaded = tf.saved_model.load(str(tmp_path / "1"))
    np.testing.assert_allclose(loaded.serve(x), model(x), rtol=1e-4, atol=1e-5)


def test_inputs_of_other_shapes_are_refused(neighborhoods):
    """Without the check TensorFlow answers some, and ends the process at others."""
    _, loaded = neighborhoods
    for serve in loaded.signatures.values():
        for shape in [(8, 8, 1), (2, 9, 8, 1), (2, 8, 8, 3), (2, 8, 8, 1, 1), ()]:
            with pytest.raises(tf.errors.InvalidArgumentError):
                serve(inputs=tf.zeros(shape))


def test_several_inputs_of_a_regression(tmp_path):
    tensors = {name: keras.Input((4,), name=name) for name in ("first", "second")}
    features = keras.layers.Dense(5)(keras.layers.Add()(list(tensors.values())))
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Model(tensors, features), keras.layers.Dense(2), 3, task="regression"
    )
    model.build({name: (None, 4) for name in tensors})
    loaded = exported(model, tmp_path, k=3)
    given = {"first": normal(5, 4), "second": 2 * normal(5, 4)}
    served = loaded.signatures["serving_default"](**given)["output_0"]
    np.testing.assert_allclose(served, model(given), rtol=1e-4, atol=1e-6)
    found = loaded.signatures["neighbors"](**given)
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "entries": (5, 3),
        "weights": (5, 3),
        "values": (5, 3, 2),
        "before": (5, 2),
        "after": (5, 2),
    }


def test_preprocessing_and_a_signature_in_place_of_the_predictions(tmp_path):
    raw = keras.Sequential(
        [keras.Input((None, 2), dtype="uint8"), keras.layers.Rescaling(1 / 255)]
    )
    model = stacked((2, 2), keras.layers.Dense(3))

    def named(x):
        probabilities = ops.softmax(model(x))
        names = tf.gather(["cat", "dog", "elk"], tf.argmax(probabilities, axis=-1))
        return {"label": names, "numbers": probabilities}

    options = {"preprocessing": raw, "examples": np.ones((1, 2, 2)).tolist()}
    loaded = exported(model, tmp_path, signatures={"serve": named}, **options)
    x = np.random.default_rng(0).integers(256, size=(5, 2, 2)).astype("uint8")
    expected, found = named(raw(x)), loaded.serve(x)
    np.testing.assert_array_equal(found["label"], expected["label"])
    np.testing.assert_allclose(found["numbers"], expected["numbers"], rtol=1e-4)
    found = loaded.signatures["serving_default"](inputs=tf.constant(x))
    np.testing.assert_array_equal(found["label"], expected["label"])


def test_inputs_like_the_examples(tmp_path):
    examples = [np.ones((1, 3)), np.ones((1, 3), "int32")]
    loaded = exported(Unshaped(), tmp_path, examples=examples)
    found = loaded.serve([np.ones((2, 3), "float32"), np.ones((2, 3), "int32")])
    np.testing.assert_array_equal(found, np.full((2, 3), 2.0))


def difference_of(make, names=(None, None)):
    """A model of two inputs, and arrays for it; `make` puts both into a structure."""
    tensors = [keras.Input((4,), name=name) for name in names]
    with warnings.catch_warnings(action="ignore"):  # Keys are not names.
        model = keras.Model(make(*tensors), keras.layers.Subtract()(tensors))
    return model, make(normal(5, 4), 2 * normal(5, 4))


@pytest.mark.parametrize(
    ("make", "names", "expected"),
    [
        (lambda a, b: [a, b], ("b", "a c"), {"b", "a_c"}),
        (lambda a, b: {"x": {"a/c": a}, "y": [b]}, ("b", "a"), {"x_a_c", "y_0"}),
    ],
    ids=["list", "nested"],
)
def test_keras_calls_exports_in_the_structure_of_the_model(make, names, expected, tmp_path):
    model, given = difference_of(make, names)
    loaded = exported(model, tmp_path)
    _, named = loaded.signatures["serving_default"].structured_input_signature
    assert set(named) == expected
    layer = keras.layers.TFSMLayer(str(tmp_path / "1"), call_endpoint="serve")
    np.testing.assert_allclose(layer(given), model(given), rtol=1e-6)


def lookup(**options):
    return keras.layers.StringLookup(vocabulary=["cat", "dog"], **options)


def words_inside():
    tensor = keras.Input((4,), dtype="string")
    return {"model": keras.Model(tensor, keras.layers.Rescaling(1.0)(lookup()(tensor)))}


def words_before():
    """A stack that knows no shape of its inputs, and a further signature."""
    numbers = keras.Input((4,), dtype="int64")
    names = keras.Model(numbers, lookup(invert=True)(numbers))
    model = stacked((4,), keras.layers.Rescaling(1.0))
    before = keras.Sequential([lookup()])
    return {"model": model, "preprocessing": before, "signatures": {"names": names}}


@pytest.mark.parametrize("make", [words_inside, words_before])
def test_vocabularies_are_part_of_the_export(make, tmp_path):
    words = np.array([["cat", "dog", "owl", "cat"]])
    loaded = exported(**make(), folder=tmp_path, examples=words)
    np.testing.assert_array_equal(loaded.serve(tf.constant(words)), [[1, 2, 0, 1]])
    if make is words_before:
        found = loaded.names(tf.constant(words)).numpy().tolist()
        assert found == [[b"cat", b"dog", b"[UNK]", b"cat"]]


def test_random_models_are_exported(tmp_path):
    loaded = exported(noisy_model(), tmp_path)
    one, two = (loaded.serve(normal(5, 4)) - normal(5, 4) for _ in range(2))
    assert np.abs(one - two).max() > 0.1
    np.testing.assert_allclose(one, np.broadcast_to(one[0], (5, 4)), atol=1e-6)


def neighborhood(entries=6):
    return nsl_keras.MetaNeighborhoodModel(None, keras.layers.Dense(2), entries)


def few_entries(entries=3):
    model = neighborhood(entries)
    model.build((None, 4))
    return model


def eager_only(x):
    return x + float(tf.executing_eagerly())


X = normal(2, 4)
KEYS = (lambda a, b: {"a b": a, "a/b": b},)
BAD = {
    "unshaped": (Unshaped, {}, "`examples` must be given, unless"),
    "eager": (lambda: calling(eager_only), {}, "must predict what the model predicts"),
    "k": (few_entries, {"examples": X}, "`k` must be at most the number of dictionary ent"),
    "remote": (noisy_model, {"filepath": "gs://bucket/1"}, "must be on this machine"),
    "not built": (neighborhood, {"examples": X}, "save_model` needs a built"),
    "shapes": (noisy_model, {"examples": normal(2, 5)}, "`examples` must be of the shapes"),
    "ragged": (
        noisy_model,
        {"examples": tf.ragged.constant([[1.0], []])},
        "must be .*dense",
    ),
    "names": (lambda: difference_of(*KEYS)[0], {}, "`inputs` must be .*'a b', 'a/b'"),
}


@pytest.mark.parametrize("case", BAD)
def test_nothing_is_written_after_an_error(case, tmp_path):
    make, options, message = BAD[case]
    kind = RuntimeError if case == "eager" else ValueError
    with pytest.raises(kind, match=message):
        export.save_model(make(), **{"filepath": tmp_path / "1"} | options)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("kept")
    with refused("`filepath` must be a folder that does not exist yet; for a Keras file"):
        export.save_model(noisy_model(), tmp_path)
    with refused("for a Keras file call `model.save`"):
        export.save_model(noisy_model(), tmp_path / "model.keras")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.jax
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Between JAX and TensorFlow.
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="Others export on TensorFlow")
def test_models_of_jax(tmp_path):
    model, x = few_entries(20), normal(5, 4)
    served = exported(model, tmp_path, examples=x)
    serve, neighbors = (served.signatures[n] for n in ("serving_default", "neighbors"))
    found = serve(inputs=tf.constant(x))["output_0"]
    np.testing.assert_allclose(found, model(x), rtol=1e-4, atol=1e-5)
    nearest = neighbors(inputs=tf.constant(x))["entries"]
    np.testing.assert_array_equal(nearest, model.neighbors(x, k=5).indices)
    for shape in [(4,), (2, 5)]:
        with pytest.raises(tf.errors.InvalidArgumentError):
            serve(inputs=tf.zeros(shape))


@pytest.mark.jax
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Between JAX and TensorFlow.
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has no symbols")
def test_jax_exports_convolutions_of_images_of_unknown_sizes(tmp_path):
    sphere = nsl_keras.layers.SphereConv2D(4, 3, padding="same")
    for number, layer in enumerate([sphere, convolution(predictor="sphere")]):
        model = stacked(OF_ANY_SIZE, layer)
        model.export(tmp_path / str(number), verbose=False)
        served = tf.saved_model.load(str(tmp_path / str(number)))
        x = normal(2, 9, 7, 3)
        np.testing.assert_allclose(served.serve(x), model(x), rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Of tf2onnx.
@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras needs TensorFlow")
@pytest.mark.parametrize(
    ("layer", "shape", "size"),
    [
        (convolution(strides=3, predictor="sphere"), OF_ANY_SIZE, (7, 8)),
        (nsl_keras.layers.NeuralSimilarityGRU(3), (6, 4), ()),
    ],
    ids=["strided", "recurrent"],
)
def test_onnx(layer, shape, size, tmp_path):
    import onnxruntime

    model = stacked(shape, layer)
    x = normal(2, *(size or shape[:1]), shape[-1])
    expected = model(x)
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (received,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)

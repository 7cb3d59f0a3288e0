"""`MetaNeighborhoodModel` in `fit`, `evaluate`, `predict` and on file."""

import operator

import keras
import numpy as np
import pytest
from helpers import (
    CROSS_ENTROPY,
    Batches,
    Subclassed,
    as_numpy,
    assert_all_equal,
    assert_close,
    normal,
    randomize,
    refused,
    refusing,
    reloaded,
    stacked,
)
from keras import ops

import nsl_keras
from nsl_keras import backend
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary

tensorflow_only = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow's alone"
)
X = normal(48, 6)
Y = np.random.default_rng(0).integers(0, 3, size=48)
CLASS_WEIGHTS = {0: 1.0, 1: 3.0, 2: 0.5}
WEIGHTS = np.linspace(0, 2, 48).astype("float32")
TARGETS = np.stack([np.sin(2 * X[:, 0]), X[:, 1] * X[:, 2]], axis=1).astype("float32")


def make_backbone(**options):
    return stacked((6,), keras.layers.Dense(5, **options))


def make_dictionary(dropout=0.0, **options):
    """By default one that makes a training step deterministic."""
    return NeighborDictionary(10, dropout=dropout, **options)


def make_model(dictionary=None, head=None, backbone=None, **options):
    return nsl_keras.MetaNeighborhoodModel(
        backbone or make_backbone(),
        head or CosineDense(3),
        dictionary or make_dictionary(),
        **options,
    )


def compiled(model, loss=CROSS_ENTROPY, optimizer="sgd", **options):
    """The model for eager training: no test but those of graphs waits for a trace."""
    model.compile(optimizer, loss, **{"run_eagerly": True, **options})
    return model


@pytest.mark.parametrize(
    ("jit_compile", "fit"),
    [
        (False, {"validation_split": 0.25, "sample_weight": WEIGHTS}),
        pytest.param(True, {"class_weight": CLASS_WEIGHTS}, marks=pytest.mark.long),
    ],
)
def test_step_equals_that_of_keras(jit_compile, fit):
    """Options of `fit` and of optimizers act as in Keras, in graphs; so do added losses."""
    backbone = make_backbone(kernel_regularizer="l2", activity_regularizer="l1")
    model = make_model(backbone=backbone)
    model.build(X.shape)
    start, found = randomize(model).get_weights(), []
    stock = keras.Model(backbone.inputs, model.neighborhood(backbone.outputs[0]))
    options = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0, **fit}
    for each, how in (
        (model, {"jit_compile": jit_compile}),
        (stock, {"run_eagerly": True}),
    ):
        model.set_weights(start)
        optimizer = keras.optimizers.SGD(0.5, global_clipnorm=0.1, use_ema=True)
        scaled = keras.optimizers.LossScaleOptimizer(optimizer)
        each.compile(scaled, CROSS_ENTROPY, metrics=["accuracy"], **how)
        found.append((each.fit(X, Y, **options).history, model(X)))
    (history, outputs), (expected, others) = found
    assert set(history) == set(expected)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4)
    assert_close(outputs, others, 1e-4)


def test_unadapted_is_a_plain_model_on_the_same_weights(eager):
    model = compiled(make_model(inner_learning_rate=5.0))
    model.fit(X, Y, verbose=0)
    assert model.get_build_config()["input_shape"] == (None, 6)  # From arrays.
    plain = model.unadapted
    assert plain is model.unadapted
    assert type(plain) is type(keras.Model(plain.inputs, plain.outputs))
    plain.compile(loss=CROSS_ENTROPY)
    assert plain.evaluate(X, Y, verbose=0) != model.evaluate(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)
    assert_close(plain(X), model(X, adapt=False))
    for backbone in (None, Subclassed()):  # Without a graph too.
        model = compiled(nsl_keras.MetaNeighborhoodModel(backbone, CosineDense(3), 8))
        model.fit(X, Y, verbose=0)
        assert_close(model(X, adapt=False), model.unadapted(X))


def test_inputs_are_not_rounded():
    """In half precision too: a backbone may need integers or wide floats."""
    backbone = stacked((6,), keras.layers.Rescaling(1e-6), keras.layers.Dense(5))
    model = make_model(backbone=backbone, dtype="mixed_float16")
    x = X * 1e6
    compiled(model).evaluate(x, Y, verbose=0)
    assert np.isfinite(as_numpy(model(x))).all()
    np.testing.assert_allclose(model.predict(x, verbose=0), model(x), rtol=1e-3)


def test_frozen_models_adapt_and_do_not_train():
    model = make_model()
    expected = model(X)
    model.trainable = False
    compiled(model, metrics=["accuracy"])
    history = model.fit(X, Y, verbose=0).history
    assert {"loss", "accuracy"} == set(history)
    assert_close(model(X), expected)


@pytest.mark.parametrize("path", ["neighborhood", "neighborhood.learning_rate"])
def test_files_keep_which_parts_are_frozen(path, tmp_path):
    model = make_model()
    model.build(X.shape)
    operator.attrgetter(path)(model).trainable = False
    again = reloaded(model, tmp_path)
    names = sorted(variable.name for variable in model.trainable_variables)
    assert sorted(variable.name for variable in again.trainable_variables) == names


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
def test_quantization_leaves_the_head_alone(tmp_path):
    model = make_model(head=keras.layers.Dense(3))
    before, plain = model.predict(X, verbose=0), model.unadapted
    plain.predict(X, verbose=0)
    model.quantize("int8")
    after = as_numpy(model(X))
    for each, adapt in ((model, True), (plain, False)):  # No graph is out of date.
        assert_close(each.predict(X, verbose=0), model(X, adapt=adapt))
    assert 0 < np.abs(after - before).max() < 0.1
    assert model.head.quantization_mode is None
    again = reloaded(model, tmp_path)
    np.testing.assert_allclose(again(X), after, rtol=1e-5)


def spoiled(array, value):
    array = array.copy()
    array[5] = value
    return array


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (spoiled(X, np.nan), TARGETS, "`x` must be finite. Received: 6 others"),
        (X, TARGETS[:, 0], r"the shape of the head's outputs, \(n, 2\).*\(48,\)"),
        (X, spoiled(TARGETS, np.nan), "`y` must be finite"),
    ],
)
def test_bad_arrays(x, y, message):
    model = compiled(make_model(head=keras.layers.Dense(2), task="regression"), "mse")
    model.build((None, 6))
    before = model.get_weights()
    for use in (
        lambda: model.fit(x, y, verbose=0),
        lambda: model.evaluate(ops.convert_to_tensor(x), y, verbose=0),
        lambda: model.fit(X, TARGETS, validation_data=(x, y), verbose=0),
        lambda: model.initialize_from(x, y),
    ):
        with refused(message):
            use()
    assert_all_equal(model.get_weights(), before)  # Nothing was lost.


test_bad_use = refusing(
    (lambda: make_model().compile(loss="binary_crossentropy"), "must take logits"),
    (lambda: make_model(backbone="resnet"), "`backbone` must be a Keras layer"),
    (lambda: make_model().unadapted, "`unadapted` needs a built layer"),
    (lambda: make_model().export("folder"), "`export` needs a built layer"),
    (lambda: make_model().initialize_from(iter([])), "`x` must be batches, as"),
    (lambda: make_model().initialize_from(Batches((X,))), "`y` must be given"),
    (lambda: make_model().initialize_from(iter(X), Y), "`y` must be None if `x` is"),
)


def two_inputs(kind):
    image, other = keras.Input((2, 3), name="image"), keras.Input((1,), name="kind")
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(image), other])
    inputs = [image, other] if kind == "list" else {"image": image, "kind": other}
    return keras.Model(inputs, keras.layers.Dense(5)(joined))


def as_two(kind, x):
    image, other = x.reshape(-1, 2, 3), Y[:, None].astype("int32")
    return [image, other] if kind == "list" else {"image": image, "kind": other}


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_backbones_of_several_inputs(kind, tmp_path, eager):
    inputs = as_two(kind, X)
    model = compiled(make_model(backbone=two_inputs(kind)))
    model.fit(as_two("dict", X), Y, batch_size=48, verbose=0)  # By name in both.
    model.initialize_from(inputs, Y, seed=0)
    predicted = as_numpy(model(inputs))
    assert_close(model.predict(inputs, verbose=0), predicted)
    changes = model.neighbors(inputs, k=10, effects=True).output_changes.sum(axis=1)
    assert_close(changes, predicted - as_numpy(model.unadapted(inputs)), 1e-4)
    loaded = reloaded(model, tmp_path)
    assert_close(loaded(inputs), predicted)
    assert len(loaded.weights) == len(model.weights)
    assert_close(loaded.unadapted(inputs), model(inputs, adapt=False))
    backbone = model.backbone
    classifier = keras.Model(backbone.input, keras.layers.Dense(3)(backbone.output))
    made = nsl_keras.MetaNeighborhoodModel.from_classifier(classifier, 6)
    assert made(inputs).shape == (48, 3)
    with refused(r"`x\[(0|'image')\]` must be finite"):
        model.fit(as_two(kind, spoiled(X, np.nan)), Y, verbose=0)


def test_neighbors_and_starts_of_data_sets(eager):
    batches = [(X[:24], Y[:24]), (X[24:], Y[24:])]
    model = make_model()
    model.build((None, 6))
    expected = model.neighbors(X, k=3)
    found = model.neighbors((batch for batch in batches), k=3, steps=2)
    np.testing.assert_array_equal(found.indices, expected.indices)
    assert_close(found.weights, expected.weights)
    model.initialize_from(X, Y, seed=4)
    keys = as_numpy(model.dictionary.keys)
    model.dictionary.keys.assign(np.ones_like(keys))
    model.initialize_from(iter(batches), seed=4)
    assert_close(model.dictionary.keys, keys)


def test_nearest_examples(eager):
    """Of all examples, or of those of an entry's own class; nested lists are arrays."""
    model, rows = make_model(), X.tolist()
    drawn = model.initialize_from(rows, Y, seed=0)
    np.testing.assert_array_equal(model.nearest_examples(rows), drawn)
    expected = model.neighbors(X, k=3).indices
    np.testing.assert_array_equal(model.neighbors(rows, k=3).indices, expected)
    labels, features = (Y + 1) % 3, as_numpy(model.features(X))
    cosines = features @ features[drawn].T / np.linalg.norm(features, axis=1)[:, None]
    cosines[labels[:, None] != Y[drawn]] = -np.inf
    for given in (labels, np.eye(3)[labels]):
        found = model.nearest_examples(X, given)
        np.testing.assert_array_equal(found, cosines.argmax(axis=0))
    with refused(r"labels of all classes.*no label \[1 2\]"):
        model.nearest_examples(X, np.zeros(48))
    regression = make_model(head=keras.layers.Dense(2), task="regression")
    regression.build(X.shape)
    found = regression.nearest_examples(X, TARGETS)
    np.testing.assert_array_equal(found, regression.nearest_examples(X))


def test_neighbors_follow_changed_layers_and_are_not_rounded():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = make_model(head=keras.layers.Dense(3), inner_learning_rate=1.0)
    model.build(X.shape)
    assert_close(model.neighbors(X).after, model.predict(X, verbose=0))
    model.backbone.layers[0].enable_lora(2)
    model.compile(keras.optimizers.Adam(0.1), CROSS_ENTROPY)
    model.fit(X, Y, verbose=0)
    assert_close(model.neighbors(X).after, model.predict(X, verbose=0))


@pytest.mark.jax
def test_neighbors_are_traced_once():
    traces = []

    class Noting(Subclassed):
        def call(self, inputs):
            traces.append(inputs)
            return super().call(inputs)

    model = make_model(backbone=Noting())
    model.build(X.shape)
    found = model.neighbors(X, k=2)
    model.dictionary.keys.assign(-1 * model.dictionary.keys)
    count = len(traces)
    again = model.neighbors(X, k=2)
    assert len(traces) == count
    assert np.abs(found.weights - again.weights).max() > 0  # It reads the weights anew.


def test_one_output_takes_vectors_and_may_be_squashed():
    model = make_model(head=keras.layers.Dense(1, "sigmoid"), task="regression")
    y = np.round(3 * TARGETS[:, 0]).astype("int64")
    compiled(model, "mse")
    found = [model.evaluate(X, targets, verbose=0) for targets in (y, y[:, None])]
    expected = np.mean((as_numpy(model(X))[:, 0] - y) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@tensorflow_only  # JAX needs no tape.
@pytest.mark.parametrize(("inner_loop", "in_graph"), [("dual", True), ("tape", False)])
def test_rematerialization_is_refused(inner_loop, in_graph):
    """It stops the tapes, so that adaptation would vanish."""
    compile_step = backend.compiled if in_graph else lambda step, _: step
    model = make_model(inner_loop=inner_loop)
    model.build(X.shape)
    with pytest.raises((RuntimeError, ValueError), match="apply them to the backbone"):
        compile_step(keras.remat(lambda x: model(x)), False)(ops.convert_to_tensor(X))


@tensorflow_only
def test_sparse_inputs():
    import tensorflow as tf

    x, layers = tf.sparse.from_dense(X), [keras.Input((6,), sparse=True), CosineDense(4)]
    for each in (keras.Sequential(layers), None):
        model = compiled(nsl_keras.MetaNeighborhoodModel(each, CosineDense(3), 8))
        model.fit(x, Y, verbose=0)
        np.testing.assert_allclose(model.predict(x, verbose=0), model(X), 1e-4, 1e-5)
    for layer in (nsl_keras.layers.SphereDense(3), make_dictionary(num_values=3)):
        layer.build(X.shape)
        assert_close(layer(x), layer(X))
    with refused(r"`x` must be dense.*SparseTensor"):
        model.initialize_from(x, Y)


def test_inputs_without_a_last_axis_of_one_and_targets_in_a_list(eager):
    backbone = stacked((6, 6, 1), keras.layers.Conv2D(4, 3), keras.layers.Flatten())
    model, images = compiled(make_model(backbone=backbone)), normal(48, 6, 6)
    model.fit(images, [Y], verbose=0)
    assert_close(model.predict(images, verbose=0), model(images[..., None]), 1e-4)


@tensorflow_only
def test_xla_is_left_out_by_default_where_it_compiles_each_step():
    inputs, dense = keras.Input((5,)), keras.layers.Dense(3)
    stack = keras.Sequential([keras.layers.Dense(4), keras.layers.ReLU(), CosineDense(3)])
    graph = keras.Model(inputs, dense(inputs))
    squashed = keras.layers.Dense(3, keras.layers.PReLU())
    cases = (stack, "auto", True), (dense, "tape", False), (graph, "auto", False)
    for head, inner_loop, supported in (*cases, (squashed, "auto", False)):
        head = MetaNeighborhoodHead(head, make_dictionary(), inner_loop=inner_loop)
        assert head.supports_jit is supported


@tensorflow_only
def test_onnx_is_refused_where_it_has_no_operations(tmp_path):
    model = make_model(inner_steps=2)
    model(X)
    with refused('`format` must be other than "onnx" for a head'):
        model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    assert not list(tmp_path.iterdir())

"""`MetaNeighborhoodModel` in `fit`, `evaluate`, `predict` and on file."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import OneBatch
from keras import ops

import nsl_keras
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
FILES = pathlib.Path(__file__).parents[1] / "files"
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
rng = np.random.default_rng(0)
X = rng.normal(size=(48, 6)).astype("float32")
Y = rng.integers(0, 3, size=48)
TARGETS = np.stack([np.sin(2 * X[:, 0]), X[:, 1] * X[:, 2]], axis=1).astype("float32")


def make_backbone(**options):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, **options)])


def make_dictionary(dropout=0.0, **options):
    """By default one that makes a training step deterministic."""
    return NeighborDictionary(10, dropout=dropout, **options)


def make_model(dictionary=None, head=None, **options):
    return nsl_keras.MetaNeighborhoodModel(
        make_backbone(), head or CosineDense(3), dictionary or make_dictionary(), **options
    )


def make_regression(head=None, dictionary=None, **options):
    head = head or keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)])
    dictionary = dictionary or NeighborDictionary(20, seed=0)
    return nsl_keras.MetaNeighborhoodModel(
        None, head, dictionary, task="regression", **options
    )


def make_twins(**backbone_options):
    """A model, and the same network as a functional model, trained by Keras's own step."""
    backbone = make_backbone(**backbone_options)
    outputs = MetaNeighborhoodHead(CosineDense(3), make_dictionary())(backbone.outputs[0])
    stock = keras.Model(backbone.inputs[0], outputs)
    model = nsl_keras.MetaNeighborhoodModel(
        make_backbone(**backbone_options), CosineDense(3), make_dictionary()
    )
    model.build((None, 6))
    rng = np.random.default_rng(1)
    for ours, others in zip(
        sorted(model.trainable_variables, key=lambda v: (v.name, tuple(v.shape))),
        sorted(stock.trainable_variables, key=lambda v: (v.name, tuple(v.shape))),
        strict=True,
    ):
        value = ops.convert_to_numpy(others.value) + 0.3 * rng.normal(size=ours.shape)
        ours.assign(value)
        others.assign(value)
    return model, stock


def check_same_training(model, stock, make_optimizer, **fit):
    histories = []
    for each in (model, stock):
        each.compile(optimizer=make_optimizer(), loss=LOSS, metrics=["accuracy"])
        arguments = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0}
        histories.append(each.fit(X, Y, **arguments, **fit).history)
    for key in ("loss", "accuracy"):
        np.testing.assert_allclose(histories[0][key], histories[1][key], rtol=1e-4)
    np.testing.assert_allclose(model(X), stock(X), rtol=1e-3, atol=1e-4)
    return histories[0]


def scaled_and_clipped():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1, use_ema=True)
    )


@pytest.mark.parametrize(
    ("fit", "make_optimizer"),
    [
        (
            {
                "validation_split": 0.25,
                "sample_weight": np.linspace(0, 2, 48).astype("float32"),
            },
            lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2),
        ),
        pytest.param(
            {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
            lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.05),
            marks=pytest.mark.long,
        ),
        pytest.param({}, scaled_and_clipped, marks=pytest.mark.long),
    ],
    ids=["validation_weights_accumulation", "class_weights_adamw", "loss_scale_clip_ema"],
)
def test_step_equals_that_of_keras(fit, make_optimizer):
    """Options of `fit` and of optimizers act as in Keras; so do added losses."""
    twins = make_twins(kernel_regularizer="l2", activity_regularizer="l1")
    twins[0](X)
    assert min(float(loss) for loss in twins[0].losses) > 1e-3
    history = check_same_training(*twins, make_optimizer, **fit)
    assert "unadapted_accuracy" in history
    assert ("val_unadapted_accuracy" in history) == ("validation_split" in fit)


@pytest.mark.parametrize(
    ("inner_loop", "jit_compile"),
    [
        pytest.param("dual", True, marks=pytest.mark.long),
        ("dual", False),
        pytest.param("tape", False, marks=pytest.mark.long),
    ],
)
def test_compiled_steps(inner_loop, jit_compile):
    model = make_model(make_dictionary(0.5, seed=0), inner_loop=inner_loop)
    model.compile("adam", LOSS, metrics=["accuracy"], jit_compile=jit_compile)
    first = model.fit(X, Y, epochs=8, batch_size=16, verbose=0).history["loss"]
    assert first[-1] < first[0]


@pytest.mark.long
@pytest.mark.skipif(not IS_TENSORFLOW, reason="JAX compiles a tape once")
def test_compiled_tape_warns():
    model = make_model(inner_loop="tape")
    model.compile("sgd", LOSS, jit_compile=True)
    with pytest.warns(UserWarning, match="anew at every step"):
        model.train_on_batch(X[:4], Y[:4])


def test_metrics_before_adaptation():
    model = make_model(inner_learning_rate=5.0)
    model.compile(
        "sgd",
        LOSS,
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="xent")
        ],
    )
    weights = np.linspace(0, 2, 48).astype("float32")
    found = model.evaluate(
        X, Y, sample_weight=weights, verbose=0, return_dict=True, batch_size=10
    )
    assert set(found) == {
        "loss",
        *("accuracy", "top2", "xent"),
        *("unadapted_accuracy", "unadapted_top2", "unadapted_xent"),
    }
    both = model.predictions(X)
    np.testing.assert_allclose(both.adapted, model(X), rtol=1e-5)
    np.testing.assert_allclose(both.unadapted, model.head(model.backbone(X)), rtol=1e-5)
    for prefix, logits in (("", both.adapted), ("unadapted_", both.unadapted)):
        logits = ops.convert_to_numpy(logits)
        np.testing.assert_allclose(
            found[f"{prefix}accuracy"], np.mean(logits.argmax(axis=1) == Y), rtol=1e-5
        )
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(48), Y]
        np.testing.assert_allclose(
            found[f"{prefix}xent"], np.average(losses, weights=weights), rtol=1e-4
        )
    assert found["accuracy"] != found["unadapted_accuracy"]
    assert found["xent"] != found["unadapted_xent"]


class TopTwo:
    """A metric without a name."""

    def __call__(self, targets, outputs):
        return keras.metrics.sparse_top_k_categorical_accuracy(targets, outputs, k=2)


def test_metrics_before_adaptation_have_the_names_of_keras():
    given = {
        "metrics": ["accuracy", "acc", "Accuracy", lambda y, outputs: outputs[:, 0]],
        "weighted_metrics": ["accuracy", TopTwo(), "accuracy"],
    }
    weights = np.linspace(0, 2, 48).astype("float32")
    stock, model = keras.Sequential([keras.layers.Dense(3)]), make_model()
    for each in (stock, model):
        each.compile("sgd", LOSS, **given)
        each.fit(X, Y, sample_weight=weights, verbose=0)
    found = model.evaluate(X, Y, sample_weight=weights, verbose=0, return_dict=True)
    names = set(stock.history.history) - {"loss"}
    assert {"lambda", "top_two", "weighted_accuracy_1"} < names
    assert set(found) == {"loss", *names, *(f"unadapted_{name}" for name in names)}
    right = ops.convert_to_numpy(model(X, adapt=False)).argmax(axis=1) == Y
    np.testing.assert_allclose(found["unadapted_accuracy"], right.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        found["unadapted_weighted_accuracy"], np.average(right, weights=weights), rtol=1e-5
    )


class Range(keras.metrics.Metric):
    """A metric of two results."""

    def __init__(self, name="range", **kwargs):
        super().__init__(name=name, **kwargs)
        self.sum = self.add_weight(name="sum", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sum.assign_add(ops.sum(ops.abs(y_pred)))

    def result(self):
        return {"total": self.sum.value, "negative": -self.sum.value}


def test_a_metric_of_several_results_keeps_those_before_adaptation():
    model = make_model(inner_learning_rate=5.0)
    model.compile("sgd", LOSS, metrics=[Range()])
    for found in (
        model.evaluate(X, Y, batch_size=48, verbose=0, return_dict=True),
        model.test_on_batch(X, Y, return_dict=True),
    ):
        names = ("total", "negative", "unadapted_total", "unadapted_negative")
        assert set(found) == {"loss", *names}
        for name, adapt in (("total", True), ("unadapted_total", False)):
            expected = np.abs(ops.convert_to_numpy(model(X, adapt=adapt))).sum()
            np.testing.assert_allclose(found[name], expected, rtol=1e-5)
        assert found["total"] != found["unadapted_total"]
        assert found["unadapted_negative"] == -found["unadapted_total"]


class Above(keras.metrics.Mean):
    """A metric whose argument its config does not hold."""

    def __init__(self, threshold=0.0, name="above", **kwargs):
        super().__init__(name=name, **kwargs)
        self.threshold = threshold

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(ops.cast(y_pred > self.threshold, "float32"))


def test_a_metric_that_would_lose_its_arguments():
    model = make_model()
    model.compile("sgd", LOSS, metrics=[Above(100.0)])
    with pytest.raises(ValueError, match="`metrics` must be metrics whose `get_config`"):
        model.evaluate(X, Y, verbose=0)

    class Kept(Above):
        def get_config(self):
            return {**super().get_config(), "threshold": self.threshold}

    model.compile("sgd", LOSS, metrics=[Kept(100.0)])
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert (found["above"], found["unadapted_above"]) == (0.0, 0.0)


@pytest.mark.parametrize("with_backbone", [True, False])
def test_inputs_are_not_rounded_in_predict_alone(with_backbone):
    """In half precision `fit` and `evaluate` go past the cast of `__call__`."""
    layers = [
        keras.layers.Rescaling(1e-6, dtype="float32"),
        keras.layers.Dense(5, dtype="float32"),
    ]
    backbone = keras.Sequential([keras.Input((6,)), *layers])
    model = nsl_keras.MetaNeighborhoodModel(
        backbone if with_backbone else None,
        keras.layers.Dense(3, dtype="float32"),
        make_dictionary(dtype="float32"),
        dtype="mixed_float16",
    )
    x = X * (1e6 if with_backbone else 1 + 2**-12)
    model.compile("sgd", LOSS)
    model.build((None, 6))
    adapted = ops.convert_to_numpy(model.predictions(x).adapted)
    assert np.isfinite(adapted).all()
    np.testing.assert_array_equal(model(x), adapted)
    np.testing.assert_allclose(model.predict(x, verbose=0), adapted, rtol=1e-3)


def test_an_only_output_may_come_in_a_list():
    inputs = keras.Input((6,))
    backbone = keras.Model(inputs, [keras.layers.Dense(5)(inputs)])
    model = nsl_keras.MetaNeighborhoodModel(backbone, CosineDense(3), make_dictionary())
    assert model.compute_output_shape((None, 6)) == (None, 3)
    model.compile("sgd", LOSS)
    model.fit(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == (48, 3)
    classifier = keras.Model(inputs, [keras.layers.Dense(3)(inputs)])
    converted = nsl_keras.MetaNeighborhoodModel.from_classifier(classifier, 6)
    np.testing.assert_allclose(
        converted(X, adapt=False), classifier(X), rtol=1e-5, atol=1e-6
    )
    model = nsl_keras.MetaNeighborhoodModel(None, classifier, make_dictionary())
    with pytest.raises(ValueError, match="`head` must have one output, outside a list"):
        model.build((None, 6))


@pytest.mark.skipif(not IS_TENSORFLOW, reason="data sets of TensorFlow")
def test_soft_labels_of_unknown_size():
    import tensorflow as tf

    rows = (np.eye(3)[Y] * 0.9 + 0.1 / 3).astype("float32")
    signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, None)))
    model = make_model()
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))

    def batches(labels):
        made = tf.data.Dataset.from_generator(
            lambda: iter([(X, labels)]), output_signature=signature
        )
        return made.apply(tf.data.experimental.assert_cardinality(1))

    expected = model.evaluate(X, rows, batch_size=48, verbose=0)
    assert model.evaluate(batches(rows), verbose=0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="data sets of TensorFlow")
def test_soft_labels_in_bfloat16():
    """Their rows sum to 1 as nearly as eight bits can."""
    import tensorflow as tf

    rows = tf.nn.softmax(tf.cast(np.random.default_rng(0).normal(size=(48, 3)), "bfloat16"))
    assert np.abs(tf.reduce_sum(tf.cast(rows, "float32"), -1) - 1).max() > 1e-3
    model = make_model()
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    batches = tf.data.Dataset.from_tensors((X, rows))
    losses = [
        model.evaluate(*given, batch_size=size, verbose=0)
        for given, size in (((X, rows), 48), ((batches,), None))
    ]
    assert np.isfinite(losses).all() and losses[0] == pytest.approx(losses[1], rel=1e-3)
    with pytest.raises(ValueError, match="must be a probability distribution"):
        model.evaluate(X, rows * 1.1, verbose=0)


def test_one_hot_targets_and_recompilation():
    model = make_model()
    one_hot = np.eye(3, dtype="float32")[Y]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    for name in ("accuracy", "categorical_accuracy"):
        model.compile("sgd", loss, metrics=[name])
        found = model.evaluate(X, one_hot, verbose=0, return_dict=True)
        assert set(found) == {"loss", name, f"unadapted_{name}"}
    predicted = ops.convert_to_numpy(model(X)).argmax(axis=1)
    np.testing.assert_allclose(
        found["categorical_accuracy"], np.mean(predicted == Y), rtol=1e-5
    )


def test_train_on_batch_and_data_sets():
    model = make_model()
    model.compile("sgd", LOSS, metrics=["accuracy"])
    batches = [(X[:16], Y[:16]), (X[16:], Y[16:])]

    def generate():
        while True:
            yield from batches

    history = model.fit(generate(), steps_per_epoch=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0])
    assert model.built
    assert "unadapted_accuracy" in model.train_on_batch(X, Y, return_dict=True)
    assert "unadapted_accuracy" in model.test_on_batch(X, Y, return_dict=True)


@pytest.mark.parametrize("one_hot", [False, True])
def test_boolean_labels(one_hot):
    labels = np.eye(2, dtype=bool)[Y % 2] if one_hot else Y % 2 == 1
    loss = keras.losses.CategoricalCrossentropy(from_logits=True) if one_hot else LOSS
    model = nsl_keras.MetaNeighborhoodModel(None, CosineDense(2), make_dictionary())
    model.compile("sgd", loss, metrics=["accuracy"])
    model.fit(X, labels, verbose=0)
    found = model.evaluate(X, labels, verbose=0, return_dict=True)
    assert found == model.evaluate(X, labels.astype("int32"), verbose=0, return_dict=True)


def test_shapes_of_features():
    model = nsl_keras.MetaNeighborhoodModel(None, keras.layers.Dense(3), 5)
    assert model.predict(X, verbose=0).shape == (48, 3)
    with pytest.raises(ValueError, match="must be flattened or pooled"):
        nsl_keras.MetaNeighborhoodModel(None, keras.layers.Dense(3)).build((None, 4, 4, 3))


def test_attributes_are_the_parts_given():
    backbone, head, dictionary = make_backbone(), CosineDense(3), make_dictionary()
    model = nsl_keras.MetaNeighborhoodModel(backbone, head, dictionary, inner_steps=2)
    assert model.backbone is backbone
    assert model.head is head
    assert model.dictionary is dictionary
    assert (model.num_neighbors, model.inner_steps) == (10, 2)
    assert [layer.name for layer in model.layers] == [backbone.name, "neighborhood"]


def test_no_layer_is_left_behind():
    """An unbuilt sublayer would have Keras build the model anew in every `fit`."""
    model = make_model()
    with pytest.raises(ValueError, match="`decay_exempt_variables` needs a built"):
        _ = model.decay_exempt_variables
    model.build((None, 6))
    stack, seen = [model], []
    while stack:
        layer = stack.pop()
        seen.append(layer)
        stack += [each for each in vars(layer).values() if isinstance(each, keras.Layer)]
        assert layer.built, layer
    assert len({layer.name for layer in seen}) >= 5
    names = [v.path for v in model.variables]
    assert len(names) == len(set(names))
    assert sum("seed_generator" in name for name in names) == 1
    exempt = {v.path for v in model.decay_exempt_variables}
    backbone = {v.path for v in model.backbone.trainable_variables}
    assert exempt | backbone == {v.path for v in model.trainable_variables}
    assert not exempt & backbone


def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = make_model()
    model.compile("adam", LOSS, metrics=["accuracy"])
    losses = model.fit(X, Y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert ops.convert_to_numpy(model(X)).dtype == "float32"


# Files.


def normal_form(config):
    return json.loads(json.dumps(config, default=str))


def test_keras_file_keeps_everything(tmp_path):
    model = make_model(inner_steps=2, learning_rate_form="diagonal")
    model.compile("adam", LOSS, metrics=["accuracy"], run_eagerly=True)
    model.fit(X, Y, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.saving.load_model(path)
    np.testing.assert_array_equal(again(X), model(X))
    assert normal_form(again.get_config()) == normal_form(model.get_config())
    # Compiled again, with the optimizer's state: training goes on alike.
    first, second = (
        each.fit(X, Y, batch_size=48, verbose=0).history for each in (model, again)
    )
    assert set(first) == set(second)
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=1e-4)
    np.testing.assert_allclose(again(X), model(X), rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_keras_file_in_a_fresh_process(tmp_path):
    model = make_model()
    model.build((None, 6))
    model.save(tmp_path / "model.keras")
    script = (
        "import sys, numpy as np, keras, nsl_keras\n"
        "model = keras.saving.load_model(sys.argv[1])\n"
        "np.save(sys.argv[2], model(np.load(sys.argv[2])))\n"
    )
    np.save(tmp_path / "x.npy", X)
    files = [str(tmp_path / name) for name in ("model.keras", "x.npy")]
    subprocess.run([sys.executable, "-c", script, *files], check=True, timeout=200)
    np.testing.assert_allclose(np.load(files[1]), model(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["model", "head"])
def test_files_written_before_dictionaries_were_given(name):
    """Written when the dictionary's arguments were the model's, by Keras 3.10."""
    loaded = keras.saving.load_model(FILES / f"{name}.keras")
    with np.load(FILES / "outputs.npz") as outputs:
        found = loaded(outputs[f"{name}_inputs"])
        np.testing.assert_allclose(found, outputs[name], rtol=1e-5, atol=1e-6)
    if name == "model":
        assert loaded.dictionary.metric.__class__.__name__ == "Euclidean"
        assert (loaded.dictionary.dropout, loaded.dictionary.seed) == (0.25, 3)
        assert loaded.backbone.layers[0].sharpness == 3.0


# Checks of data and arguments.


def spoiled(array, value):
    array = array.copy()
    array[5] = value
    return array


MULTI_LABEL = (np.eye(3) + np.eye(3)[::-1])[Y]


@pytest.fixture(scope="module")
def classifier():
    model = make_model()
    model.build((None, 6))
    model.compile("sgd", LOSS)
    return model


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (spoiled(X, np.nan), Y, "`x` must be finite. Received: 6 NaN"),
        (X, spoiled(Y, 3), "`y` must hold classes 0 to 2. Received: 1 labels .*5: 3"),
        (X, spoiled(Y, -1), "`y` must hold classes 0 to 2"),
        (X, Y + 0.5, "`y` must hold classes 0 to 2"),
        (X, MULTI_LABEL, "multi-label targets are not supported"),
        (X, np.eye(4)[Y], r"`y` must have shape \(n,\), \(n, 1\) or \(n, 3\)"),
    ],
)
def test_bad_arrays(classifier, x, y, message):
    before = classifier.get_weights()
    for use in (
        lambda: classifier.fit(x, y, verbose=0),
        lambda: classifier.evaluate(ops.convert_to_tensor(x), y, verbose=0),
        lambda: classifier.fit(X, Y, validation_data=(x, y), verbose=0),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    for new, old in zip(classifier.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)  # Nothing was lost.


@pytest.mark.long
def test_non_finite_loss_stops_compiled_training():
    batches = [(X[:16], Y[:16]), (spoiled(X[:16], np.nan), Y[:16])]

    def generate():
        while True:
            yield from batches

    model = make_model()
    model.compile("sgd", LOSS, jit_compile=True)
    with pytest.raises(
        nsl_keras.NonFiniteLossError, match="became nan by batch 2 of epoch 1"
    ):
        model.fit(generate(), steps_per_epoch=4, shuffle=False, verbose=0)


def test_losses_and_metrics_of_probabilities_are_refused():
    model = make_model()
    for loss in (
        "sparse_categorical_crossentropy",
        "SparseCategoricalCrossentropy",
        "kl_divergence",
        keras.losses.sparse_categorical_crossentropy,
        ["sparse_categorical_crossentropy"],
        keras.losses.CategoricalCrossentropy(from_logits=False),
        keras.losses.KLDivergence(),
    ):
        with pytest.raises(ValueError, match="`loss` must take logits"):
            model.compile("sgd", loss)
    model.compile("sgd", LOSS, metrics=["crossentropy"])
    with pytest.raises(ValueError, match="'crossentropy'"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("head", [CosineDense, keras.layers.Dense])
@pytest.mark.parametrize("inner_loop", ["dual", "tape"])
def test_frozen_models_adapt_and_load(inner_loop, head, tmp_path):
    model = make_model(head=head(3), inner_loop=inner_loop)
    model.build((None, 6))
    expected = model(X)
    model.trainable = False
    np.testing.assert_allclose(model(X), expected, atol=1e-6)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(X), expected, atol=1e-6)
    assert not again.trainable_variables


def test_a_frozen_rate_goes_through_a_file(tmp_path):
    model = make_model()
    model.build((None, 6))
    model.neighborhood.rate.trainable = False
    model.compile("adam", LOSS)
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    again.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(again.inner_rates[0], model.inner_rates[0])


def test_nothing_is_trained_where_all_is_frozen():
    model = make_model()
    model.build((None, 6))
    model.trainable = False
    model.compile("sgd", LOSS, None, ["accuracy"])
    before = model.get_weights()
    assert {"loss", "accuracy"} < set(model.fit(X, Y, verbose=0).history)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)


def test_output_shape_without_a_call():
    assert make_model().compute_output_shape((None, 6)) == (None, 3)


def test_labels_in_other_arrays_are_checked():
    class Series:
        """As a column of pandas: an array to NumPy, and to nothing else."""

        def __init__(self, values):
            self.values, self.shape = values, values.shape

        def __array__(self, dtype=None, copy=None):
            return np.array(self.values, dtype=dtype, copy=copy)

        def __len__(self):
            return len(self.values)

    model = make_model()
    model.compile("sgd", LOSS)
    with pytest.raises(ValueError, match=r"`y` must hold classes 0 to 2"):
        model.fit(X, Series(Y + 1), verbose=0)


def test_what_needs_a_built_model():
    model = make_model(name="early")
    with pytest.raises(ValueError, match=r"`inner_rates` needs a built layer.*'early'"):
        _ = model.inner_rates
    with pytest.raises(ValueError, match="`count_head_multiply_adds` needs a built layer"):
        model.count_head_multiply_adds()


def test_bad_arguments():
    with pytest.raises(ValueError, match="`backbone` must be a Keras layer"):
        nsl_keras.MetaNeighborhoodModel("resnet", CosineDense(3))
    with pytest.raises(ValueError, match="`y` must be None where `x` is a data set"):
        make_model().initialize_from((row for row in X), Y)
    with pytest.raises(ValueError, match=r"`x` must be an array.*type NoneType"):
        make_model().initialize_from(None)
    with pytest.raises(ValueError, match="`y` must be given"):
        make_model().initialize_from(X)
    two = keras.Input((6,))
    backbone = keras.Model(two, [two, 2 * two])
    with pytest.raises(ValueError, match=r"`backbone` must have one output.*2 outputs"):
        nsl_keras.MetaNeighborhoodModel(backbone, CosineDense(3), 5).build((None, 6))


# Inputs in every form that `fit` and `predict` take.


def two_inputs(kind):
    image = keras.Input((2, 3), name="image")
    kinds = keras.Input((1,), dtype="int32", name="kind")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(3, 4)(kinds))
    # A layer that heeds the rank of what it gets.
    row = keras.layers.Conv1D(4, 2)(image)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(row), embedded])
    inputs = [image, kinds] if kind == "list" else {"image": image, "kind": kinds}
    return keras.Model(inputs, keras.layers.Dense(5)(joined))


def as_two(kind, x):
    parts = (x[:, :6].reshape(-1, 2, 3), np.abs(x[:, :1]).astype("int32") % 3)
    return (
        list(parts) if kind == "list" else dict(zip(("image", "kind"), parts, strict=True))
    )


class Subclassed(keras.Model):
    """Has neither `build` nor `compute_output_shape`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_inputs_by_name(kind):
    x = np.random.default_rng(3).normal(size=(24, 6)).astype("float32")
    inputs = as_two("dict", x) | {"also": x}
    if kind == "dict":
        del inputs["also"]  # Keras's own models of a dict take no other keys either.
    model = nsl_keras.MetaNeighborhoodModel(two_inputs(kind), CosineDense(3), 6)
    model.compile("sgd", LOSS)
    model.fit(inputs, np.arange(24) % 3, verbose=0)
    assert model.predict(inputs, verbose=0).shape == (24, 3)


@pytest.mark.parametrize("kind", [pytest.param("list", marks=pytest.mark.long), "dict"])
def test_backbones_of_several_inputs(kind, tmp_path):
    x = np.random.default_rng(3).normal(size=(24, 6)).astype("float32")
    y = np.arange(24) % 3
    inputs = as_two(kind, x)
    backbone = two_inputs(kind)
    model = nsl_keras.MetaNeighborhoodModel(backbone, CosineDense(3), dictionary=6)
    model.compile("sgd", LOSS, metrics=["accuracy"])
    model.fit(inputs, y, batch_size=12, verbose=0)
    model.evaluate(inputs, y, verbose=0)
    model.initialize_from(inputs, y, seed=0)
    predicted = model.predict(inputs, verbose=0)
    changes = model.neighbors(inputs, k=6).output_changes.sum(axis=1)
    before = ops.convert_to_numpy(
        model(keras.tree.map_structure(ops.convert_to_tensor, inputs), adapt=False)
    )
    np.testing.assert_allclose(changes, predicted - before, atol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(inputs, verbose=0), predicted, atol=1e-6)
    classifier = keras.Model(backbone.input, keras.layers.Dense(3)(backbone.output))
    made = nsl_keras.MetaNeighborhoodModel.from_classifier(classifier, 6)
    assert made.predict(inputs, verbose=0).shape == (24, 3)
    broken = as_two(kind, x)
    broken[0 if kind == "list" else "image"][5] = np.nan
    with pytest.raises(ValueError, match=r"`x\[(0|'image')\]` must be finite"):
        model.fit(broken, y, verbose=0)


def test_a_subclassed_backbone_needs_no_shapes():
    model = nsl_keras.MetaNeighborhoodModel(Subclassed(), CosineDense(3), dictionary=6)
    model.compile("sgd", LOSS)
    model.fit(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == (len(X), 3)
    assert [w.shape for w in model.backbone.weights] == [(X.shape[1], 5), (5,)]


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        part = slice(index * len(X) // 3, (index + 1) * len(X) // 3)
        return X[part], Y[part]


def test_neighbors_and_starts_of_data_sets():
    import tensorflow as tf

    model = make_model()
    expected = model.neighbors(X, k=3)
    pairs = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)
    for source in (pairs, Numbered(), iter(pairs), pairs.map(lambda x, y: x)):
        found = model.neighbors(source, k=3)
        np.testing.assert_array_equal(found.indices, expected.indices)
        np.testing.assert_allclose(found.output_changes, expected.output_changes, atol=1e-5)
    assert len(model.neighbors(pairs.repeat(), k=3, steps=2).indices) == 14
    model.initialize_from(X, Y, seed=4)
    keys = ops.convert_to_numpy(model.dictionary.keys)
    values = ops.convert_to_numpy(model.dictionary.values)
    for source in (pairs, Numbered(), iter(pairs)):
        model.dictionary.keys.assign(np.ones_like(keys))
        model.initialize_from(source, seed=4)
        np.testing.assert_allclose(model.dictionary.keys, keys, atol=1e-5)
        np.testing.assert_allclose(model.dictionary.values, values, atol=1e-6)
    with pytest.raises(ValueError, match=r"`x` must end, .*or `steps` say.*an endless"):
        model.initialize_from(pairs.repeat())
    with pytest.raises(ValueError, match="`y` must be given, or come with the data set"):
        model.initialize_from(pairs.map(lambda x, y: x))


# Regression.


def test_a_regression_learns():
    model = make_regression(
        dictionary=NeighborDictionary(20, metric="euclidean", temperature=1.0, seed=0),
        inner_learning_rate=0.1,
    )
    model.compile(keras.optimizers.Adam(0.04), "huber", metrics=["mae"])
    history = model.fit(X, TARGETS, epochs=12, batch_size=16, verbose=0).history
    assert set(history) == {"loss", "mae", "unadapted_mae"}
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    found = model.evaluate(X, TARGETS, verbose=0, return_dict=True)
    for prefix, predicted in zip(("", "unadapted_"), model.predictions(X), strict=True):
        errors = np.abs(ops.convert_to_numpy(predicted) - TARGETS)
        np.testing.assert_allclose(found[f"{prefix}mae"], errors.mean(), rtol=1e-4)
    assert found["mae"] != found["unadapted_mae"]


def test_one_output_takes_vectors_and_may_be_squashed():
    model = make_regression(keras.layers.Dense(1, "sigmoid"))
    y = np.round(3 * TARGETS[:, 0]).astype("int64")
    found = []
    for targets in (y, y[:, None]):
        model.compile("sgd", "mse")
        found.append(model.evaluate(X, targets, verbose=0))
    expected = np.mean((ops.convert_to_numpy(model(X))[:, 0] - y) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_given_targets_are_kept(tmp_path):
    given = np.linspace(-5, 5, 40).reshape(20, 2)
    model = make_regression(dictionary=NeighborDictionary(20, fixed_values=given))
    model.build((None, 6))
    assert [v.name for v in model.dictionary.trainable_variables] == ["keys"]
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.dictionary.values, given, rtol=1e-6)
    np.testing.assert_array_equal(again(X), model(X))
    assert again.task == "regression"
    too_wide = NeighborDictionary(20, fixed_values=np.zeros((20, 3)))
    with pytest.raises(ValueError, match=r"`num_values` of a dictionary .*=3, a head .*=2"):
        make_regression(dictionary=too_wide).build((None, 6))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (
            TARGETS[:, 0],
            r"the shape of the head's outputs, \(n, 2\).*\(48,\)",
        ),
        (TARGETS[:, :1], r"`y` must have the shape of the head's outputs"),
        (spoiled(TARGETS, np.nan), r"`y` must be finite.*\(5, 0\)"),
        (TARGETS.astype("str"), "`y` must hold numbers"),
    ],
)
def test_bad_targets(y, message):
    model = make_regression()
    model.compile("sgd", "mse")
    for method in ("fit", "evaluate", "initialize_from"):
        options = {} if method == "initialize_from" else {"verbose": 0}
        with pytest.raises(ValueError, match=message):
            getattr(model, method)(X, y, **options)


def test_building_twice_changes_nothing(tmp_path):
    model = make_model()
    model.compile(keras.optimizers.Adam(0.1), LOSS)
    model.fit(X, Y, epochs=2, verbose=0)
    expected = model.predict(X, verbose=0)
    model.build((None, 6))
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    again.build((None, 6))
    assert len(again.weights) == len(model.weights)
    np.testing.assert_allclose(again.predict(X, verbose=0), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "labels", [np.full(48, 7), np.ones((48, 3))], ids=["numbers", "rows"]
)
def test_labels_of_a_data_set_in_a_compiled_step(labels):
    """Keras's loss would take numbers outside the classes for none of them on JAX."""
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if labels.ndim == 2:
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=True)
    with pytest.raises(nsl_keras.NonFiniteLossError):
        model.fit(OneBatch(X, labels), verbose=0)


def test_callback_list():
    class Counting(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1

    counting = Counting()
    model = make_model()
    model.compile("sgd", LOSS)
    for _ in range(2):
        given = keras.callbacks.CallbackList(
            [counting], add_history=True, model=model, epochs=1, steps=2
        )
        history = model.fit(X, Y, batch_size=24, callbacks=given, verbose=0)
        assert len(given.callbacks) == 2
        assert len(history.history["loss"]) == 1
    assert counting.batches == 4
    with pytest.raises(nsl_keras.NonFiniteLossError):
        model.fit(X, Y, sample_weight=np.full(48, np.nan), callbacks=given, verbose=0)


def test_a_subclass_overrides_call_and_predictions_together():
    with pytest.raises(ValueError, match=r"`predictions` of its own too.*'Scaled'"):

        class Scaled(nsl_keras.MetaNeighborhoodModel):
            def call(self, inputs, training=None, adapt=True):
                return 3.0 * super().call(inputs, training=training, adapt=adapt)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="a SavedModel")
@pytest.mark.parametrize("loaded", [False, True])
def test_export_without_a_call(loaded, tmp_path):
    import tensorflow as tf

    model = make_model()
    model.compile("sgd", LOSS)
    model.fit(X, Y, verbose=0)
    if loaded:
        model.save(tmp_path / "model.keras")
        model = keras.saving.load_model(tmp_path / "model.keras")
    model.export(str(tmp_path / "served"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(X), model.predict(X, verbose=0), atol=1e-5)


@pytest.mark.parametrize("change", ["from the start", "later"])
def test_low_rank_heads_are_refused(change):
    head = keras.layers.Dense(3, lora_rank=2 if change == "from the start" else None)
    model = make_model(head=head)
    message = r"`head` must have neither LoRA nor quantized weights.*'dense\w*' with LoRA"
    if change == "later":
        model.build((None, 6))
        head.enable_lora(2)
    with pytest.raises(ValueError, match=message):
        model(X)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
def test_quantization_leaves_the_head_alone(tmp_path):
    model = make_model(head=keras.layers.Dense(3))
    before = model.predict(X, verbose=0)
    model.quantize("int8")
    after = model.predict(X, verbose=0)
    assert 0 < np.abs(after - before).max() < 0.1
    assert model.head.quantization_mode is None
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.predict(X, verbose=0), after, rtol=1e-5)
    without = make_regression()
    without.build((None, 6))
    with pytest.raises(ValueError, match=r"`quantize` needs a backbone.*Received"):
        without.quantize("int8")


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
def test_quantized_classifiers_are_named():
    trained = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    trained.quantize("int8")
    with pytest.raises(ValueError, match=r"`head` must have neither .*quantized weights$"):
        nsl_keras.MetaNeighborhoodModel.from_classifier(trained)

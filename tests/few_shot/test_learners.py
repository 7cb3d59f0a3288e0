"""What all learners by metric share: files, compiled training, policies, bad input."""

import functools

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from golden_files import gradients
from keras import ops

import nsl_keras
from nsl_keras import few_shot

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
IMAGE = (6, 6, 1)


def relation(backbone, ways, **options):
    del backbone
    return few_shot.RelationNet(data.convolutional(flat=False), ways, **options)


LEARNERS = {
    "proto": functools.partial(few_shot.ProtoNet, learn_temperature=True),
    "proto_cosine": functools.partial(few_shot.ProtoNet, metric="cosine", temperature=0.1),
    "matching": functools.partial(few_shot.MatchingNet, temperature=0.1),
    "matching_context": functools.partial(
        few_shot.MatchingNet, reading_steps=2, learn_temperature=True
    ),
    "relation": relation,
    "neighborhood_cosine": few_shot.NeighborhoodLearner,
    "neighborhood_dense": functools.partial(
        few_shot.NeighborhoodLearner,
        head="dense",
        inner_steps=2,
        learning_rate_form="diagonal",
        metric="euclidean",
    ),
    "nearest_centroid": few_shot.NearestCentroid,
    "nearest_neighbor": few_shot.NearestNeighbor,
}


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make(name, **options):
    return LEARNERS[name](data.convolutional(), data.WAYS, **options)


def as_numpy(tensor):
    return ops.convert_to_numpy(tensor)


@pytest.fixture(name="built", scope="module", params=LEARNERS)
def _built(request):
    """A learner by its name, its batch norms by the support set."""
    keras.utils.set_random_seed(0)
    model = make(request.param, batch_normalization="support")
    inputs, _ = data.episodes(batch=3, shape=IMAGE)
    return request.param, model, as_numpy(model(inputs))


def test_keras_file(built, tmp_path):
    _, model, expected = built
    inputs, _ = data.episodes(batch=3, shape=IMAGE)
    shapes = [each.shape for each in inputs]
    assert expected.shape == (3, data.QUERIES, data.WAYS)
    assert expected.shape == model.compute_output_shape(shapes)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(inputs), expected)
    assert type(again) is type(model)
    own = {"backbone", "relation"}
    assert {k: v for k, v in again.get_config().items() if k not in own} == {
        k: v for k, v in model.get_config().items() if k not in own
    }


def test_episodes_queries_and_the_order_of_the_support_do_not_matter(built):
    name, model, expected = built
    (support, labels, queries), _ = data.episodes(batch=3, shape=IMAGE)
    assert np.ptp(expected) > 0
    order = np.array([3, 0, 5, 1, 4, 2])
    if name == "matching_context":  # It reads the support set as a sequence.
        order = np.sort(order)
    found = model((support[1:2, order], labels[1:2, order], queries[1:2, :1]))
    np.testing.assert_allclose(found, expected[1:2, :1], rtol=1e-3, atol=1e-5)


def test_every_weight_gets_a_finite_gradient(built):
    _, model, _ = built
    inputs, labels = data.episodes(shape=IMAGE)
    variables = model.trainable_variables

    def loss():
        return data.cross_entropy()(labels, model(inputs, training=True))

    for variable, gradient in zip(variables, gradients(loss, [], variables), strict=True):
        gradient = as_numpy(gradient)
        assert np.all(np.isfinite(gradient)), variable.path
        # A bias followed by a batch norm has none; one right before the features none
        # where distances alone count.
        if variable.name != "bias":
            assert np.any(gradient != 0), variable.path


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("proto", "support"),
        pytest.param("neighborhood_cosine", "moving", marks=pytest.mark.long),
    ],
)
def test_fit_and_predict(name, policy):
    model = make(name, batch_normalization=policy)
    inputs, labels = data.episodes(batch=6, shape=IMAGE)
    model.compile("adam", data.cross_entropy(), metrics=["accuracy"], jit_compile=False)
    history = model.fit(inputs, labels, batch_size=4, epochs=2, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    found = model.predict(inputs, batch_size=4, verbose=0)
    np.testing.assert_allclose(found, as_numpy(model(inputs)), rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["matching", "relation", "neighborhood_dense"])
def test_compiled(name):
    model = make(name, batch_normalization="support")
    inputs, labels = data.episodes(batch=2, shape=IMAGE)
    expected = as_numpy(model(inputs))
    model.compile("sgd", data.cross_entropy(), jit_compile=True)
    found = model.predict(inputs, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    if name != "matching":
        assert np.isfinite(model.train_on_batch(inputs, labels))


@pytest.mark.parametrize(
    "name",
    [
        "proto",
        pytest.param("matching", marks=pytest.mark.long),
        pytest.param("neighborhood_cosine", marks=pytest.mark.long),
    ],
)
def test_training_helps(name):
    """Two of six inputs tell the classes apart; the backbone learns which."""
    keras.utils.set_random_seed(1)
    backbone = keras.Sequential([keras.Input((data.SIZE,)), keras.layers.Dense(4)])
    model = LEARNERS[name](backbone, 2)
    model.compile(keras.optimizers.Adam(0.03), data.cross_entropy(), jit_compile=False)
    inputs, labels = data.class_blobs(200, seed=1)

    def accuracy():
        return np.mean(as_numpy(model(inputs)).argmax(axis=-1) == labels)

    before = accuracy()
    model.fit(*data.class_blobs(400), batch_size=16, epochs=4, verbose=0)
    after = accuracy()
    assert before < 0.9
    assert after > max(0.95, before + 0.05), (before, after)


def normalized(images, mean, variance, layer):
    gamma, beta = (as_numpy(each) for each in (layer.gamma, layer.beta))
    return (images - mean) / np.sqrt(variance + layer.epsilon) * gamma + beta


@pytest.mark.parametrize("policy", ["moving", "support", "transductive"])
@pytest.mark.parametrize("training", [False, True])
def test_batch_normalization_policies(policy, training):
    """Which images' statistics a batch norm takes, and what its moving ones become."""
    layer = keras.layers.BatchNormalization(momentum=0.75)
    backbone = keras.Sequential([keras.Input((data.SIZE,)), layer])
    rng = np.random.default_rng(3)
    stored = [rng.uniform(0.5, 2, size=data.SIZE).astype("float32") for _ in range(4)]
    layer.set_weights(stored)
    model = few_shot.ProtoNet(backbone, data.WAYS, batch_normalization=policy)
    (support, labels, queries), _ = data.episodes()
    support += 1
    found = model((support, labels, queries), training=training)

    def statistics(images, axes):
        return [images.mean(axes, keepdims=True), images.var(axes, keepdims=True)]

    if policy == "moving":
        everything = np.concatenate([support, queries], axis=1)
        taken = statistics(everything, (0, 1)) if training else stored[2:]
        of_support = of_queries = taken
        update = taken
    else:
        of_support, of_queries = statistics(support, 1), statistics(queries, 1)
        update = of_support
        if policy == "support":
            of_queries = of_support
        else:
            update = [(a + b) / 2 for a, b in zip(of_support, of_queries, strict=True)]
    support = normalized(support, *of_support, layer)
    queries = normalized(queries, *of_queries, layer)
    means = np.stack(
        [
            [images[own == c].mean(axis=0) for c in range(data.WAYS)]
            for images, own in zip(support, labels, strict=True)
        ]
    )
    expected = -((queries[:, :, None] - means[:, None]) ** 2).sum(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    for new, old, batch in zip(layer.get_weights()[2:], stored[2:], update, strict=True):
        batch = batch.mean(axis=(0, 1)) if batch.ndim == 3 else batch
        expected = 0.75 * old + 0.25 * batch if training else old
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["moving", "support", "transductive"])
def test_moving_statistics_count_the_images_of_all_sets(policy):
    layer = nsl_keras.layers.BatchNormalization()
    backbone = keras.Sequential([keras.Input((data.SIZE,)), layer])
    model = few_shot.ProtoNet(backbone, data.WAYS, batch_normalization=policy)
    (support, labels, queries), _ = data.episodes()
    model((support, labels, queries), training=True)
    images = support.shape[:2], queries.shape[:2]
    assert float(layer.seen_examples) == sum(map(np.prod, images))


def test_a_frozen_backbone_keeps_its_statistics():
    backbone = data.convolutional()
    inputs, _ = data.episodes(shape=IMAGE)
    expected = as_numpy(few_shot.ProtoNet(backbone, data.WAYS)(inputs))
    backbone.trainable = False
    frozen = few_shot.ProtoNet(backbone, data.WAYS, batch_normalization="support")
    np.testing.assert_array_equal(frozen(inputs, training=True), expected)
    np.testing.assert_array_equal(frozen(inputs), expected)


def test_mixed_precision():
    inputs, _ = data.episodes(shape=IMAGE)
    reference = make("proto")
    expected = as_numpy(reference(inputs))
    keras.config.set_dtype_policy("mixed_float16")
    model = make("proto")
    found = model(inputs)
    model.set_weights(reference.get_weights())
    found = model(inputs)
    assert keras.backend.standardize_dtype(found.dtype) == "float32"
    error = np.abs(as_numpy(found) - expected).max()
    assert error < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["proto", "matching"])
def test_double_precision(name):
    if keras.backend.backend() == "jax":
        pytest.skip("JAX computes in float32 unless its switch for float64 is on")
    keras.config.set_floatx("float64")
    (support, labels, queries), _ = data.episodes(shape=IMAGE)
    found = make(name)((support.astype("float64"), labels, queries.astype("float64")))
    assert keras.backend.standardize_dtype(found.dtype) == "float64"


def test_loss_scaling_follows_the_layers():
    keras.config.set_dtype_policy("mixed_float16")
    learner = make("proto")
    keras.config.set_dtype_policy("float32")
    scaled = keras.optimizers.LossScaleOptimizer
    for options, expected in (({}, True), ({"auto_scale_loss": False}, False)):
        learner.compile("sgd", LOSS, None, ["accuracy"], **options)
        assert isinstance(learner.optimizer, scaled) == expected
    found = learner.evaluate(*data.episodes(shape=IMAGE), verbose=0, return_dict=True)
    assert "accuracy" in found  # Of the metrics, which are given by position.
    plain = make("proto")
    plain.compile("sgd", LOSS)
    assert not isinstance(plain.optimizer, scaled)


def test_layers_in_full_precision_keep_their_weights():
    """In a mixed network, whatever batch norms normalize by."""
    inputs, _ = data.episodes(shape=IMAGE)
    learner = few_shot.ProtoNet(
        keras.Sequential(
            [
                keras.Input(IMAGE),
                keras.layers.Flatten(),
                keras.layers.BatchNormalization(dtype="mixed_bfloat16"),
                keras.layers.Dense(3, dtype="float32"),
            ]
        ),
        data.WAYS,
        batch_normalization="support",
        dtype="mixed_bfloat16",
    )
    whole = as_numpy(learner(inputs))
    kernel = learner.backbone.layers[-1].kernel
    kernel.assign(ops.cast(ops.cast(kernel.value, "bfloat16"), "float32"))
    assert np.abs(as_numpy(learner(inputs)) - whole).max() > 0


def test_class_weights_are_refused():
    inputs, labels = data.episodes(shape=IMAGE)
    learner = make("proto")
    learner.compile("sgd", LOSS)
    with pytest.raises(ValueError, match=r"`class_weight` must be None.*\{0: 2.0\}"):
        learner.fit(inputs, labels, class_weight={0: 2.0}, verbose=0)


def test_labels_that_are_not_the_classes():
    (support, labels, queries), _ = data.episodes()
    model = few_shot.ProtoNet(data.identity(), data.WAYS)
    for wrong in (-1, data.WAYS):
        bad = labels.copy()
        bad[1, 0] = wrong
        with pytest.raises(ValueError, match="`support_labels` must be the classes 0 to 2"):
            model((support, bad, queries))
    model = few_shot.ProtoNet(data.identity(), data.WAYS + 1)
    with pytest.raises(ValueError, match=r"each of them present.*the labels \[0, 1, 2\]"):
        model((support, labels, queries))


def maml(backbone, ways, **options):
    del backbone
    network = keras.Sequential(
        [keras.Input((data.SIZE,)), keras.layers.Dense(3), keras.layers.Dense(ways)]
    )
    return few_shot.MAML(network, inner_steps=1, **options)


@pytest.mark.parametrize(
    ("learner", "wrong"),
    [
        (LEARNERS["proto"], 0),
        pytest.param(maml, data.WAYS, marks=pytest.mark.long),
    ],
)
def test_wrong_labels_do_not_go_unseen_in_compiled_code(learner, wrong):
    """Without a check the episode's logits, and no others, are NaN; `fit` stops."""
    inputs, labels = data.episodes(batch=2)
    model = learner(data.identity(), data.WAYS)
    model.compile("sgd", data.cross_entropy(), jit_compile=True)
    model.predict_on_batch(inputs)
    inputs[1][1] = wrong
    found = as_numpy(model.predict_on_batch(inputs))
    assert np.all(np.isfinite(found[0])) and np.all(np.isnan(found[1]))

    class LaterBatch(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            part = [each[[index, index]] for each in inputs]
            return tuple(part), labels[[index, index]]

    # Only the first batch of such a data set is looked at on the host.
    with pytest.raises(nsl_keras.NonFiniteLossError, match="labels for numbers outside"):
        model.fit(LaterBatch(), verbose=0, shuffle=False)


def test_bad_arrays_are_found_before_the_first_step():
    inputs, labels = data.episodes()
    model = few_shot.ProtoNet(data.identity(), data.WAYS)
    model.compile("sgd", data.cross_entropy())
    bad = inputs[0].copy()
    bad[0, 1, 2] = np.nan
    wrong = inputs[1] + 1
    for run in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=r"`support_images` .* index \(0, 1, 2\)"):
            run((bad, *inputs[1:]), labels)
        with pytest.raises(ValueError, match=r"the labels \[1, 2, 3\] in episode 0"):
            run((inputs[0], wrong, inputs[2]), labels)
    with pytest.raises(ValueError, match="`query_images` must be finite"):
        model.predict((*inputs[:2], np.inf * inputs[2]))
    with pytest.raises(ValueError, match="Received: 2 arrays"):
        model.predict(inputs[:2])


def test_losses_of_probabilities_are_refused():
    model = few_shot.ProtoNet(data.identity(), data.WAYS)
    with pytest.raises(ValueError, match="`loss` must take logits"):
        model.compile("adam", "sparse_categorical_crossentropy")


def test_a_compiled_learner_goes_on_from_its_file(tmp_path):
    inputs, labels = data.episodes(shape=IMAGE)
    model = make("proto_cosine")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, data.cross_entropy(), run_eagerly=True)
    model.fit(inputs, labels, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, again):
        each.fit(inputs, labels, verbose=0)
    for one, two in zip(model.weights, again.weights, strict=True):
        np.testing.assert_allclose(as_numpy(one), as_numpy(two), atol=1e-6)


def test_files_of_version_0_1_call_the_metric_a_distance():
    config = few_shot.ProtoNet(data.identity(), data.WAYS, "cosine").get_config()
    config["distance"] = config.pop("metric")
    again = few_shot.ProtoNet.from_config(config)
    assert again.get_config()["metric"] == "cosine"


def test_weights_of_episodes_and_of_queries():
    inputs, labels = data.episodes(batch=data.QUERIES)  # As many, so that shapes mislead.
    model = few_shot.ProtoNet(data.identity(), data.WAYS)
    model.compile(
        "sgd", data.cross_entropy(), weighted_metrics=["accuracy"], jit_compile=False
    )
    weights = np.array([1.0, 0.0, 3.0, 0.0], "float32")
    logits = as_numpy(model(inputs))
    losses = as_numpy(
        keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    )
    right = logits.argmax(axis=-1) == labels
    for given in (weights, np.repeat(weights[:, None], data.QUERIES, axis=1)):
        found = model.evaluate(
            inputs, labels, sample_weight=given, verbose=0, return_dict=True
        )
        expected = np.mean(losses * weights[:, None])
        np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
        expected = np.average(right.mean(axis=1), weights=weights)
        np.testing.assert_allclose(found["accuracy"], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["proto", "relation"])
def test_unfrozen_batch_norms_follow_the_policy(name, tmp_path):
    inputs, _ = data.episodes(shape=IMAGE)
    model = make(name, batch_normalization="support")
    model.build([each.shape for each in inputs])
    model.trainable = False
    frozen = as_numpy(model(inputs))
    assert model.effective_batch_normalization == "moving"
    model.trainable = True
    assert model.effective_batch_normalization == "support"
    thawed = as_numpy(model(inputs))
    assert np.abs(thawed - frozen).max() > 1e-3
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(inputs), thawed, atol=1e-5)
    plain = few_shot.ProtoNet(data.identity(), data.WAYS, batch_normalization="support")
    assert plain.effective_batch_normalization is None


@pytest.mark.skipif(not IS_TENSORFLOW, reason="SavedModels are TensorFlow's")
@pytest.mark.parametrize(
    "name", ["proto", pytest.param("relation", marks=pytest.mark.long)]
)
def test_export(name, tmp_path):
    """Labels are not checked in what is served: wrong ones give NaN, and no error."""
    import tensorflow as tf

    inputs, _ = data.episodes(shape=IMAGE)
    model = make(name, batch_normalization="support")
    expected = as_numpy(model(inputs))
    path = nsl_keras.export.save_model(model, tmp_path)
    served = tf.saved_model.load(str(path))
    names = ("support_images", "support_labels", "query_images")
    given = {name: tf.constant(each) for name, each in zip(names, inputs, strict=True)}
    given["support_labels"] = tf.cast(given["support_labels"], "int32")
    serve = served.signatures["serving_default"]
    received = serve(**given)["output_0"]
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)
    assert serve(**{k: v[:0] for k, v in given.items()})["output_0"].shape[0] == 0
    given["support_labels"] = tf.zeros_like(given["support_labels"])
    assert np.all(np.isnan(serve(**given)["output_0"]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        serve(**{**given, "query_images": given["query_images"][..., 1:]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, y, q: (s[:, 1:], y, q), "`support_labels` must have shape"),
        (lambda s, y, q: (s, y[..., None], q), "`support_labels` must have shape"),
        (lambda s, y, q: (s, y, q[..., 1:]), "images of one shape"),
        (lambda s, y, q: (s, y, q[:, 0]), "images of one shape"),
        (lambda s, y, q: (s[:1], y[:1], q), "as many support sets as query sets"),
    ],
)
def test_shapes_that_do_not_fit(change, message):
    inputs, _ = data.episodes()
    model = few_shot.ProtoNet(data.identity(), data.WAYS)
    with pytest.raises(ValueError, match=message):
        model(change(*inputs))
    model(inputs)
    with pytest.raises(ValueError, match=message):
        model(change(*inputs))


def test_backbones_that_do_not_serve():
    inputs, _ = data.episodes()
    image = keras.Input((data.SIZE,))
    several = keras.Model(image, [image, 2 * image])
    with pytest.raises(ValueError, match="`backbone` must have one output"):
        few_shot.ProtoNet(several, data.WAYS)(inputs)
    with pytest.raises(ValueError, match="`backbone` must be a Keras model"):
        few_shot.ProtoNet(keras.ops.relu)
    unknown = keras.Input((None, 2))
    sequences = keras.Model(unknown, keras.layers.Identity()(unknown))
    with pytest.raises(ValueError, match="must have a known shape"):
        few_shot.ProtoNet(sequences).build([(2, 6, None, 2), (2, 6), (2, 4, None, 2)])


@pytest.mark.parametrize(
    "learner",
    [few_shot.ProtoNet, few_shot.NearestCentroid, few_shot.NearestNeighbor],
)
def test_metrics_may_be_objects(learner):
    inputs, _ = data.episodes()
    named, given = (
        learner(data.identity(), data.WAYS, metric)
        for metric in ("euclidean", nsl_keras.key_metrics.Euclidean())
    )
    np.testing.assert_array_equal(given(inputs), named(inputs))
    assert given.get_config()["metric"] == "euclidean"


def test_euclidean_distances_far_from_zero():
    """In float32, where the squares of the features would cancel."""
    (support, labels, queries), _ = data.episodes()
    model = few_shot.ProtoNet(data.identity(), data.WAYS)
    expected = as_numpy(model((support, labels, queries)))
    found = model((support + 1000, labels, queries + 1000))
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("learner", "options", "message"),
    [
        (few_shot.ProtoNet, {"ways": 0}, "`ways` must be a positive integer"),
        (few_shot.ProtoNet, {"metric": "dot"}, "`metric` must be one of"),
        (few_shot.ProtoNet, {"temperature": 0}, "`temperature` must be"),
        (few_shot.ProtoNet, {"learn_temperature": 2}, "`learn_temperature` must be"),
        (few_shot.ProtoNet, {"batch_normalization": "x"}, "`batch_normalization` must"),
        (few_shot.MatchingNet, {"reading_steps": 0}, "`reading_steps` must be"),
        (few_shot.NearestCentroid, {"metric": "x"}, "`metric` must be one of"),
        (few_shot.NearestCentroid, {"normalize": 3}, "`normalize` must be True or False"),
        (few_shot.NearestNeighbor, {"metric": "x"}, "`metric` must be one of"),
        (few_shot.NeighborhoodLearner, {"head": "x"}, "`head` must be one of"),
        (few_shot.NeighborhoodLearner, {"metric": "x"}, "`metric` must be one of"),
        (few_shot.NeighborhoodLearner, {"temperature": -1}, "`temperature` must be"),
        (few_shot.NeighborhoodLearner, {"inner_steps": 0}, "`inner_steps` must be"),
        (few_shot.NeighborhoodLearner, {"scale": 0}, "`scale` must be"),
        (few_shot.NeighborhoodLearner, {"inner_learning_rate": 0}, "`inner_learning_rate`"),
        (few_shot.NeighborhoodLearner, {"learning_rate_form": "x"}, "`learning_rate_form`"),
        (few_shot.RelationNet, {"relation": "x"}, "`relation` must be a Keras model"),
    ],
)
def test_bad_arguments(learner, options, message):
    with pytest.raises(ValueError, match=message):
        learner(data.identity(), **options)


@pytest.mark.parametrize(
    "labels",
    [
        np.full((2, data.QUERIES), data.WAYS),
        np.full((2, data.QUERIES), -1),
        np.full((2, data.QUERIES), 0.7),
        np.full((2, data.QUERIES, 1), 9),
        np.full((2, data.QUERIES, data.WAYS), 0.5),
    ],
)
def test_query_labels_that_are_no_classes(labels):
    inputs, _ = data.episodes()
    model = few_shot.ProtoNet(data.identity(), data.WAYS)
    model.compile("sgd", few_shot.RelationLoss())
    with pytest.raises(ValueError, match=r"`y` must .*Received"):
        model.fit(inputs, labels, verbose=0)
    with pytest.raises(ValueError, match=r"`y` must .*Received"):
        model.evaluate(inputs, labels, verbose=0)


def test_query_labels_of_another_rank():
    inputs, _ = data.episodes()
    model = few_shot.ProtoNet(data.identity(), data.WAYS)
    model.compile("sgd", LOSS)
    with pytest.raises(ValueError, match=r"`y` must have shape .*y.shape=\(2,\)"):
        model.fit(inputs, np.zeros(2), verbose=0)


def test_one_hot_query_labels_train_as_numbers_do():
    inputs, labels = data.episodes()
    losses = []
    for loss, given in (
        (LOSS, labels),
        (LOSS, labels[..., None]),
        (keras.losses.CategoricalCrossentropy(from_logits=True), np.eye(3)[labels]),
    ):
        model = few_shot.ProtoNet(data.identity(), data.WAYS)
        model.compile("sgd", loss)
        losses.append(model.evaluate(inputs, given, verbose=0))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("proto", "scale_down"),
        ("matching_context", "reader"),
        ("matching_context", "support_context"),
        ("neighborhood_cosine", "rate"),
        ("relation", "comparison"),
    ],
)
def test_frozen_parts_stay_frozen_in_files(name, part, tmp_path):
    inputs, _ = data.episodes(shape=IMAGE)
    model = make(name, batch_normalization="support")
    model(inputs)
    before = len(model.trainable_variables)
    getattr(model, part).trainable = False
    expected = as_numpy(model(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert len(again.trainable_variables) == len(model.trainable_variables) < before
    np.testing.assert_allclose(as_numpy(again(inputs)), expected, rtol=1e-5)


@pytest.mark.parametrize("policy", ["support", "transductive"])
def test_dropout_is_off_without_batch_norms_too(policy):
    inputs, _ = data.episodes()
    backbone = keras.Sequential([keras.Input((data.SIZE,)), keras.layers.Dropout(0.5)])
    model = few_shot.ProtoNet(backbone, data.WAYS, batch_normalization=policy)
    np.testing.assert_array_equal(
        as_numpy(model(inputs, training=True)), as_numpy(model(inputs, training=False))
    )


@pytest.mark.parametrize("name", LEARNERS)
def test_numbers_of_shots_may_change(name):
    """TensorFlow takes the size for unknown once it has seen two."""
    model = make(name)
    for shots in (2, 1, 3):
        inputs, _ = data.episodes(shots=shots, shape=IMAGE)
        expected = as_numpy(model(inputs))
        found = model.predict(inputs, verbose=0)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_building_twice_changes_nothing():
    inputs, _ = data.episodes(shape=IMAGE)
    shapes = [each.shape for each in inputs]
    model = make("neighborhood_dense")
    model.build(shapes)
    count = len(model.weights)
    model.build(shapes)
    assert len(model.weights) == count


def test_two_inputs_are_refused():
    inputs, _ = data.episodes()
    with pytest.raises(ValueError, match=r"Inputs must be .*Received"):
        few_shot.ProtoNet(data.identity(), data.WAYS)(inputs[:2])

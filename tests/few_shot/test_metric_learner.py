"""What learners by metric share: policies of batch norms, data, training, errors."""

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from helpers import CROSS_ENTROPY, Batches, as_numpy, refused, stacked

import nsl_keras
from nsl_keras import few_shot

IMAGE = (6, 6, 1)


def iterated(*batches):
    yield from batches


def proto(**options):
    return few_shot.ProtoNet(data.identity(), data.WAYS, **options)


def test_episodes_queries_and_the_order_of_the_support_do_not_matter():
    model = few_shot.NeighborhoodLearner(data.convolutional(), data.WAYS)
    (support, labels, queries), _ = data.episodes(batch=3, shape=IMAGE)
    expected = as_numpy(model((support, labels, queries)))
    order = np.array([3, 0, 5, 1, 4, 2])
    found = model((support[1:2, order], labels[1:2, order], queries[1:2, :1]))
    np.testing.assert_allclose(found, expected[1:2, :1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("policy", ["moving", "support", "transductive"])
@pytest.mark.parametrize("training", [False, True])
def test_batch_normalization_policies(policy, training):
    layer = nsl_keras.layers.BatchNormalization()
    backbone = stacked((data.SIZE,), layer)
    rng = np.random.default_rng(3)
    stored = [rng.uniform(0.5, 2, size=data.SIZE).astype("float32") for _ in range(4)]
    before = 512 * 100  # The last 100 examples weigh as much as a batch of 100.
    layer.set_weights([*stored, np.array(before)])
    model = few_shot.ProtoNet(backbone, data.WAYS, batch_normalization=policy)
    (support, labels, queries), _ = data.episodes()
    support += 1
    found = model((support, labels, queries), training=training)

    def statistics(images, axes):
        return [images.mean(axes, keepdims=True), images.var(axes, keepdims=True)]

    everything = np.concatenate([support, queries], axis=1)
    update = statistics(everything, (0, 1))
    if policy == "moving":
        of_support = of_queries = update if training else stored[2:]
    else:
        of_support, of_queries = statistics(support, 1), statistics(queries, 1)
        if policy == "support":
            of_queries = of_support
        update = statistics(support, (0, 1))
    gamma, beta = stored[:2]
    support, queries = (
        (images - mean) / np.sqrt(variance + layer.epsilon) * gamma + beta
        for images, (mean, variance) in ((support, of_support), (queries, of_queries))
    )
    means = np.eye(data.WAYS)[labels].swapaxes(1, 2) @ support / data.SHOTS
    expected = data.scores(queries, means, "euclidean")
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    *moved, seen = layer.get_weights()[2:]
    count = training * (20 if policy == "moving" else 12)
    assert seen == before + count
    rate = count / (count + 100)
    for new, old, batch in zip(moved, stored[2:], update, strict=True):
        expected = (1 - rate) * old + rate * batch.reshape(-1)
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-5)


def test_frozen_batch_norms_keep_to_their_statistics():
    inputs, _ = data.episodes(shape=IMAGE)
    options = {"batch_normalization": "support"}
    model = few_shot.ProtoNet(data.convolutional(), data.WAYS, **options)
    thawed = as_numpy(model(inputs))
    assert model.effective_batch_normalization == "support"
    model.trainable = False
    assert model.effective_batch_normalization == "moving"
    frozen = as_numpy(model(inputs))
    assert np.abs(thawed - frozen).max() > 1e-3
    np.testing.assert_array_equal(model(inputs, training=True), frozen)
    model.trainable = True
    np.testing.assert_allclose(model(inputs), thawed, atol=1e-6)
    assert proto(**options).effective_batch_normalization is None


def test_dropout_and_noise_are_off_by_episode():
    inputs, _ = data.episodes()
    for norms in ([], [nsl_keras.layers.BatchNormalization()]):
        found = []
        for noise in ([], [keras.layers.Dropout(0.5)]):
            backbone = stacked((data.SIZE,), *norms, *noise, keras.layers.Flatten())
            model = few_shot.ProtoNet(backbone, 3, batch_normalization="support")
            found.append(model(inputs, training=True))
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda s, y, q: (s, y + 1, q), r"support_labels\[0\]=\[1, 2, 3\]"),
        (lambda s, y, q: (s, y % 2, q), r"at least once.*support_labels\[0\]=\[0, 1\]"),
        (lambda s, y, q: (s, y, np.inf * q), "`query_images` must be finite"),
        (lambda s, y, q: (s, y), r"call `adapt`.*Received: input_shape=\[\("),
        (lambda s, y, q: s, r"Inputs must be .*call `adapt`.*: input_shape="),
        (lambda s, y, q: (s[:, 1:], y, q), "Inputs must be"),
        (lambda s, y, q: (s, y, q[..., 1:]), "Inputs must be"),
        (lambda s, y, q: (s[:1], y[:1], q), "Inputs must be"),
        (lambda s, y, q: Batches(((s, y + 1, q), y)), r"support_labels\[0\]=\[1, 2, 3\]"),
    ],
)
def test_arrays_are_checked_before_the_first_step(inputs, message):
    model = proto()
    model.compile("sgd", CROSS_ENTROPY)
    for run in (model.predict, model.fit):
        with refused(message):
            run(inputs(*data.episodes()[0]))


def test_query_labels_that_are_no_classes_and_class_weights():
    (inputs, labels), model = data.episodes(), proto()
    model.compile("sgd", CROSS_ENTROPY)
    for wrong in (np.full((*labels.shape, 1), 9), np.full((*labels.shape, 3), 0.5)):
        with refused(r"`y` must .*Received"):
            model.fit(inputs, wrong, verbose=0)
    with refused("`class_weight` must be None"):
        model.fit(inputs, labels, 1, 1, 0, None, 0.0, None, True, {0: 2.0, 1: 1.0})


def test_support_labels_outside_the_classes_in_a_later_batch():
    network = stacked((6,), keras.layers.Dense(data.WAYS))
    inputs, labels = data.episodes()
    support, given, queries = inputs
    wrong = (support, given + 1, queries)
    for model in (few_shot.ProtoNet(network, data.WAYS), few_shot.MAML(network)):
        model.compile("sgd", CROSS_ENTROPY, run_eagerly=True)
        with pytest.raises(nsl_keras.NonFiniteLossError, match="outside the classes"):
            batches = iterated((inputs, labels), (wrong, labels), (wrong, labels))
            model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)


def test_networks_it_cannot_take(eager):
    inputs, _ = data.episodes()
    image, sequences = keras.Input((data.SIZE,)), data.identity(None, 2)
    logits = keras.layers.Dense(data.WAYS)(image)
    for outputs in ([image, 2 * image], {"logits": logits}, [logits]):
        model = keras.Model(image, outputs)
        for make in (few_shot.ProtoNet, few_shot.MAML):
            with refused(r"must .*one output.*Received"):
                make(model)(inputs)
    # A finetuner makes a new classifier.
    assert few_shot.Finetuner(model, data.WAYS, steps=1)(inputs).shape == (2, 4, 3)
    with refused("of known sizes"):
        few_shot.ProtoNet(sequences).build([(2, 6, None, 2), (2, 6), (2, 4, None, 2)])
    with refused("`loss` must take logits"):
        proto().compile("adam", "sparse_categorical_crossentropy")


@pytest.mark.parametrize(
    ("learner", "options", "message"),
    [
        (few_shot.ProtoNet, {"ways": 0}, "`ways` must be a positive integer"),
        (few_shot.ProtoNet, {"temperature": 0}, "`temperature` must be"),
        (few_shot.ProtoNet, {"batch_normalization": "x"}, "`batch_normalization` must"),
        (few_shot.NearestCentroid, {"metric": "x"}, "`metric` must be one of"),
        (few_shot.NeighborhoodLearner, {"inner_steps": 0}, "`inner_steps` must be"),
        (few_shot.NeighborhoodLearner, {"scale": 0}, "`scale` must be"),
        (few_shot.NeighborhoodLearner, {"inner_learning_rate": 0}, "`inner_learning_rate`"),
        (few_shot.NeighborhoodLearner, {"learning_rate_form": "x"}, "`learning_rate_form`"),
    ],
)
def test_wrong_arguments(learner, options, message):
    with refused(message):
        learner(**{"backbone": data.identity(), **options})


class WithKeywords(few_shot.ProtoNet):
    def __init__(self, backbone, *args, **kwargs):
        super().__init__(backbone, *args, **kwargs)


def test_subclasses_keep_the_arguments_that_they_pass_on():
    own = WithKeywords(data.identity(), data.WAYS, temperature=0.1)
    again = WithKeywords.from_config(own.get_config())
    assert (again.temperature, again.ways) == (0.1, data.WAYS)


def test_images_without_a_last_axis_of_one(eager):
    (support, labels, queries), _ = data.episodes(shape=IMAGE)
    backbone = stacked(IMAGE, keras.layers.Flatten(), keras.layers.Dense(data.WAYS))
    for learner in (few_shot.ProtoNet(backbone, data.WAYS), few_shot.MAML(backbone)):
        found = learner.predict((support[..., 0], labels, queries[..., 0]), verbose=0)
        np.testing.assert_allclose(found, learner((support, labels, queries)), rtol=1e-4)
        model = learner.adapt(support[0, ..., 0], labels[0])
        adapted = model.temperature * model.predict(queries[0, ..., 0], verbose=0)
        np.testing.assert_allclose(adapted, found[0], rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's alone")
def test_xla_is_left_out_by_default_where_it_compiles_each_step():
    assert proto().supports_jit
    assert not proto(batch_normalization="support").supports_jit
    assert not few_shot.NeighborhoodLearner(data.identity(), data.WAYS).supports_jit

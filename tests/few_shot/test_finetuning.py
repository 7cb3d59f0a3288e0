"""Finetuning episodes together is a loop over `fit`, and leaves the model alone."""

import keras
import numpy as np
import pytest
from helpers import IS_TENSORFLOW, assert_all_equal, randomize, values
from keras import ops

import nsl_keras
from nsl_keras import few_shot
from nsl_keras.few_shot import DampenedMomentum, Episode, Finetuner
from nsl_keras.layers import CosineDense, NeuralSimilarityConv2D

DTYPE = "float64" if IS_TENSORFLOW else "float32"
ATOL = 1e-8 if IS_TENSORFLOW else 1e-4
WAYS, SHOTS, QUERIES, EPISODES = 3, 2, 2, 2
eager = pytest.mark.usefixtures("eager")


class TorchDescent(keras.optimizers.SGD):
    """The rule once more, as a Keras optimizer for `fit`."""

    def __init__(self, rate, momentum, dampening, decay):
        super().__init__(rate, momentum)  # Which has the buffers.
        self.rule = (rate, momentum, dampening, decay)

    def update_step(self, gradient, variable, learning_rate):
        rate, momentum, dampening, decay = self.rule
        buffer = self.momentums[self._get_variable_index(variable)]
        gradient = gradient + decay * variable
        later = momentum * buffer + (1 - dampening) * gradient
        self.assign(buffer, ops.where(ops.equal(self.iterations, 0), gradient, later))
        self.assign_sub(variable, rate * buffer)


def network(classes, classifier=keras.layers.Dense, dtype=DTYPE, residual=False):
    """Two neural similarity convolutions with batch norm and pooling, and a classifier."""
    inputs = outputs = keras.Input((6, 6, 2), dtype=dtype)
    for index, similarity in enumerate(("diagonal", "unconstrained")):
        before = outputs
        options = {"padding": "same", "dtype": dtype, "name": f"convolution_{index}"}
        outputs = NeuralSimilarityConv2D(4, 3, similarity=similarity, **options)(before)
        norm = keras.layers.BatchNormalization(dtype=dtype, name=f"norm_{index}")
        outputs = norm(outputs)
        if residual and index:
            outputs = keras.layers.Add(dtype=dtype)([before, outputs])
        outputs = keras.layers.ReLU(dtype=dtype, name=f"relu_{index}")(outputs)
        if not index:
            outputs = keras.layers.MaxPooling2D(2, dtype=dtype, name="pool")(outputs)
    outputs = keras.layers.Flatten(dtype=dtype, name="flat")(outputs)
    return keras.Model(inputs, classifier(classes, dtype=dtype, name="classifier")(outputs))


def make_episodes(count=EPISODES, dtype=DTYPE, shape=(6, 6, 2)):
    rng = np.random.default_rng(1)
    arrays = []
    for each in (SHOTS, QUERIES):
        arrays.append(rng.normal(size=(count, WAYS * each, *shape)).astype(dtype))
        labels = np.repeat(np.arange(WAYS, dtype="int32"), each)
        arrays.append(np.tile(labels, (count, 1)))
    return Episode(*arrays)


RULE = (0.01, 0.9, 0.9, 0.001)


def looped(model, episodes, chosen, steps, policy="support", rule=RULE, start=None):
    """A loop over `fit`: full batches, fresh weights in each episode.

    The steps of an episode are one epoch of repeated batches, which `fit` is faster at.
    The new classifier's kernel is `start`, or zero.
    """
    keras.config.set_floatx(model.get_layer("classifier").dtype)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    logits = []
    for support, labels, queries, _ in zip(*episodes, strict=True):
        config = model.get_config()
        config["layers"][-1]["config"]["units"] = WAYS
        copy = keras.Model.from_config(config)
        for layer in copy.layers:
            if layer.name != "classifier":
                layer.set_weights(model.get_layer(layer.name).get_weights())
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.momentum = 0.0
                layer.trainable = policy != "moving"
        kernel = copy.get_layer("classifier").kernel
        kernel.assign(np.zeros(kernel.shape) if start is None else start)
        for variable in copy.trainable_variables:
            variable.trainable = bool(chosen(variable))
        copy.compile(TorchDescent(*rule), loss, run_eagerly=True)
        repeated = [np.concatenate([each] * steps) for each in (support, labels)]
        copy.fit(*repeated, batch_size=len(support), shuffle=False, verbose=0)
        if policy == "support":
            copy(support, training=True)  # Leaves its statistics behind.
        logits.append(copy(queries, training=policy == "transductive"))
    return np.stack([ops.convert_to_numpy(each) for each in logits])


def similarity_and_classifier(variable):
    return variable.name == "similarity" or "classifier" in variable.path


@eager
@pytest.mark.parametrize("policy", ["support", "transductive", "moving"])
def test_through_the_network_is_a_loop_over_fit(policy):
    model, episodes = randomize(network(7)), make_episodes()
    expected = looped(model, episodes, similarity_and_classifier, 3, policy)
    if policy == "moving":  # A Sequential model, too.
        model = keras.Sequential([model.input, *model.layers[1:]])
    finetuner = Finetuner(model, WAYS, steps=3, batch_normalization=policy)
    np.testing.assert_allclose(finetuner(episodes), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("classifier", [keras.layers.Dense, CosineDense])
def test_classifier_alone_is_a_loop_over_fit(classifier):
    model = randomize(network(7, classifier, "float32"))
    episodes = make_episodes(dtype="float32")
    start = np.random.default_rng(2).normal(size=(36, WAYS)).astype("float32")
    expected = looped(model, episodes, lambda v: "classifier" in v.path, 5, start=start)
    options = {"classifier_initializer": keras.initializers.Constant(start)}
    finetuner = Finetuner(model, WAYS, "classifier", steps=5, **options)
    np.testing.assert_allclose(finetuner(episodes), expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 0.1


@eager
def test_a_convolution_of_a_1x1_map_is_a_classifier():
    """As in `keras.applications.MobileNet`."""
    layers, options = keras.layers, {"activation": "tanh"}
    start, found = keras.initializers.HeNormal(1), []
    for end in (
        [layers.Flatten(), layers.Dense(7, **options)],
        [layers.Conv2D(7, 1, **options), layers.Reshape((7,))],
    ):
        convolution = layers.Conv2D(4, 3, kernel_initializer=start)
        before = [convolution, layers.GlobalAveragePooling2D(keepdims=True)]
        model = keras.Sequential([keras.Input((6, 6, 2)), *before, *end])
        finetuner = Finetuner(model, WAYS, "classifier", 5, DampenedMomentum(1.0))
        found.append(finetuner(make_episodes(dtype="float32")))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    assert np.ptp(found[0]) > 0.5  # So that the activation counts.


@eager
def test_what_lies_before_the_adapted_layers_is_computed_once():
    """A residual connection keeps it from being cut later."""
    model, episodes = randomize(network(7, residual=True)), make_episodes()
    names = ["convolution_1/kernel", "norm_1/gamma", "classifier/kernel"]
    finetuner = Finetuner(model, WAYS, names, 3, DampenedMomentum(0.1))
    cut_layers = [layer.name for layer in finetuner._before.model.layers[1:]]
    assert cut_layers == ["convolution_0", "norm_0", "relu_0", "pool"]
    rule = (0.1, *RULE[1:])
    expected = looped(model, episodes, lambda v: v.path in names, 3, rule=rule)
    np.testing.assert_allclose(finetuner(episodes), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_all_episodes_at_once_is_one_after_the_other(batch_size):
    """A layer after the classifier keeps it from being finetuned in all at once."""
    model = randomize(network(WAYS, CosineDense))
    ending = keras.layers.Activation("linear", dtype=DTYPE)(model.output)
    options = {"variables": "classifier", "steps": 3, "batch_size": batch_size}
    found = [
        Finetuner(each, WAYS, new_classifier=False, **options)(make_episodes())
        for each in (model, keras.Model(model.input, ending))
    ]
    np.testing.assert_allclose(*found, rtol=0, atol=min(ATOL, 1e-5))


@eager
def test_the_model_stays_as_it_is_and_its_weights_are_followed():
    model, episodes = randomize(network(7)), make_episodes(1)
    expected = values(model.variables)
    finetuner = Finetuner(model, WAYS, steps=2)
    before = finetuner(episodes)
    assert_all_equal(model.variables, expected)
    randomize(model, seed=5)
    after = finetuner(episodes)
    assert np.max(np.abs(after - before)) > 1e-2
    again = Finetuner(model, WAYS, steps=2)(episodes)
    np.testing.assert_allclose(after, again, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"variables": similarity_and_classifier},
        {"variables": "classifier", "batch_normalization": "moving"},
        {**few_shot.finetuning_recipe("closer_look"), "epochs": 3},
    ],
)
def test_adapted_models_are_the_networks_of_an_episode(options, tmp_path):
    episodes = make_episodes()
    finetuner = Finetuner(randomize(network(7)), WAYS, **{"steps": 3, **options})
    expected = finetuner(episodes)[1]
    model = finetuner.adapt(episodes.support_images[1], episodes.support_labels[1])
    model.save(tmp_path / "adapted.keras")
    again = keras.saving.load_model(tmp_path / "adapted.keras")
    queries = episodes.query_images[1]
    for each in (model, again):
        found = each.predict(queries, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=10 * ATOL)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="only TensorFlow counts its traces")
@pytest.mark.parametrize("variables", ["classifier", "all"])
def test_episodes_of_other_sizes_are_not_traced_again(variables):
    model = randomize(network(7))
    options = {"variables": variables, "steps": 2}
    finetuner = Finetuner(model, WAYS, **options)
    whole = make_episodes(5)
    for count in range(1, 6):
        support = slice(0, None, count % 2 + 1)
        part = [each[:count] for each in whole[:3]]
        part = [part[0][:, support], part[1][:, support], part[2][:, :count]]
        found = finetuner(part)
    assert finetuner._compiled.experimental_get_tracing_count() <= 3
    expected = Finetuner(model, WAYS, **options)(part)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)


def test_a_new_classifier_is_trained_where_the_old_one_was_frozen():
    model, episodes = randomize(network(7)), make_episodes(1)
    expected = Finetuner(model, WAYS, "classifier", steps=2)(episodes)
    model.get_layer("classifier").trainable = False
    found = Finetuner(model, WAYS, "classifier", steps=2)(episodes)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="trainable=False have none"):
        Finetuner(model, 7, "classifier", new_classifier=False)


def feature_network(features=64):
    """A classifier of vectors, so that the features are the images."""
    inputs = keras.Input((features,), dtype=DTYPE)
    return keras.Model(inputs, keras.layers.Dense(7, dtype=DTYPE)(inputs))


def descended(features, labels, kernel, bias, batches, rate=0.01):
    """A plain loop in NumPy over the batches of one episode."""
    values, buffers = [kernel, bias], [None, None]
    for places in batches:
        places = places[places >= 0]
        given, targets = features[places], np.eye(kernel.shape[1])[labels[places]]
        logits = given @ values[0] + values[1]
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        errors = (shares / shares.sum(axis=1, keepdims=True) - targets) / len(places)
        for index, gradient in enumerate((given.T @ errors, errors.sum(axis=0))):
            gradient = gradient + 0.001 * values[index]
            before = buffers[index]
            buffers[index] = gradient if before is None else 0.9 * before + 0.1 * gradient
        values = [
            value - rate * buffer for value, buffer in zip(values, buffers, strict=True)
        ]
    return values


def test_closer_look_is_a_plain_loop_in_numpy():
    episodes = make_episodes(shape=(8,))
    recipe = few_shot.finetuning_recipe("closer_look")
    finetuner = Finetuner(feature_network(8), WAYS, **recipe)
    kernels, biases, batches = finetuner._draws(episodes.support_images)
    # 100 passes over 6 images, in batches of 4 and 2.
    assert batches.shape == (2, 200, 4)
    sizes = np.sum(batches >= 0, axis=2)
    np.testing.assert_array_equal(sizes, np.tile([4, 2], (2, 100)))
    orders = batches[batches >= 0].reshape(-1, 6)
    assert np.all(np.sort(orders) == np.arange(6)) and np.any(orders != orders[0])
    for limit in (np.abs(kernels).max(), np.abs(biases).max()):
        assert 0.5 / np.sqrt(8) < limit <= 1 / np.sqrt(8)
    atol = 1e-6 if IS_TENSORFLOW else 1e-4
    starts = zip(kernels, biases, batches, strict=True)
    received = zip(*episodes, starts, finetuner(episodes), strict=True)
    for support, labels, queries, _, start, logits in received:
        kernel, bias = descended(support, labels, *start)
        np.testing.assert_allclose(logits, queries @ kernel + bias, rtol=0, atol=atol)


def test_draws_are_an_episodes_own_wherever_it_stands():
    """Also among more episodes than are finetuned at once, and without queries' labels."""
    model, episodes = feature_network(), make_episodes(9, shape=(64,))
    recipe = {**few_shot.finetuning_recipe("closer_look"), "epochs": 2}
    finetuner = Finetuner(model, WAYS, **recipe)
    received = finetuner(episodes)
    np.testing.assert_array_equal(finetuner(episodes), received)
    for place in (1, 8):
        alone = finetuner([array[[place]] for array in episodes[:3]])
        np.testing.assert_allclose(alone[0], received[place], rtol=0, atol=1e-6)
    other = Finetuner(model, WAYS, **recipe, seed=1)(episodes)
    assert np.max(np.abs(other - received)) > 1e-2
    kernels, _, _ = finetuner._draws(episodes.support_images)
    assert len({kernel.tobytes() for kernel in kernels}) == 9


def test_keras_initializers_are_drawn_anew_whatever_their_seed():
    model, episodes = feature_network(), make_episodes(shape=(64,))

    def kernels(initializer, seed=0):
        options = {"classifier_initializer": initializer, "seed": seed}
        finetuner = Finetuner(model, WAYS, "classifier", **options)
        drawn, bias, _ = finetuner._draws(episodes.support_images)
        assert not bias.any()
        return drawn

    drawn, limit = kernels("glorot_uniform"), np.sqrt(6 / (64 + WAYS))
    assert 0.9 * limit < np.abs(drawn).max() <= limit
    assert np.any(drawn[0] != drawn[1])
    same = kernels(keras.initializers.GlorotUniform(seed=7))
    np.testing.assert_array_equal(same, drawn)
    assert np.any(kernels("glorot_uniform", seed=1) != drawn)


@eager
def test_the_variables_of_the_paper_are_the_default():
    plain, episodes = feature_network(), make_episodes(shape=(64,))
    expected = Finetuner(plain, WAYS, "classifier", steps=2)(episodes)
    np.testing.assert_array_equal(Finetuner(plain, WAYS, steps=2)(episodes), expected)
    static, episodes = randomize(network(WAYS)), make_episodes(1)
    # Without a new classifier a model that is frozen as a whole may adapt in all of it.
    for trainable, new_classifier, variables in (
        (True, True, "similarity+classifier"),
        (False, True, "classifier"),
        (False, False, "similarity+classifier"),
    ):
        static.trainable = trainable
        options = {"ways": WAYS, "steps": 2, "new_classifier": new_classifier}
        expected = Finetuner(static, variables=variables, **options)(episodes)
        np.testing.assert_array_equal(Finetuner(static, **options)(episodes), expected)


@eager
def test_similarities_have_their_own_rule():
    model, episodes = randomize(network(WAYS)), make_episodes()
    rule = DampenedMomentum(momentum=0.0, weight_decay=0.0)
    options = {"ways": WAYS, "steps": 2, "new_classifier": False, "rule": rule}
    still = Finetuner(model, similarity_rule=DampenedMomentum(1e-12), **options)(episodes)
    expected = Finetuner(model, variables="classifier", **options)(episodes)
    np.testing.assert_allclose(still, expected, rtol=0, atol=min(ATOL, 1e-5))
    moved = Finetuner(model, similarity_rule=DampenedMomentum(0.1), **options)(episodes)
    assert np.max(np.abs(moved - expected)) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ("classifier", {}),
        ("similarity+classifier", {"batch_size": 4, "batch_normalization": "moving"}),
    ],
)
def test_xla(variables, options):
    model, episodes = randomize(network(7)), make_episodes(2)
    found = [
        Finetuner(model, WAYS, variables, 3, jit_compile=jit_compile, **options)(episodes)
        for jit_compile in (False, True)
    ]
    np.testing.assert_allclose(*found, rtol=0, atol=ATOL)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_non_finite_losses_name_step_and_episode(jit_compile):
    dense = [keras.layers.Dense(4), keras.layers.Dense(9)]
    model = keras.Sequential([keras.Input((6, 6, 2)), keras.layers.Flatten(), *dense])
    episodes = make_episodes(3, "float32")
    finetuner = Finetuner(model, WAYS, "all", 9, jit_compile=jit_compile)
    episodes.support_images[1, 2, 3] = 3e38
    message = r"became nan in step \d of episode 1\."
    with pytest.raises(nsl_keras.NonFiniteLossError, match=message):
        finetuner(episodes)
    diverging = Finetuner(model, WAYS, "classifier", 9, DampenedMomentum(1e30))
    with pytest.raises(nsl_keras.NonFiniteLossError, match=r"step [2-9] of episode 0"):
        diverging(make_episodes(2, "float32"))


@pytest.fixture(name="plain", scope="module")
def _plain():
    return network(7, dtype="float32")


def cosine_network():
    return network(7, CosineDense, "float32")


def ends_in_a_convolution():
    layers = [keras.layers.Conv2D(WAYS, 6), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((6, 6, 2)), *layers])


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (None, {"variables": ["kernels"]}, r"`variables` must match .*classifier/kernel"),
        (None, {"variables": "similarities"}, "`variables` must be one of"),
        (None, {"new_classifier": False}, r"must have `ways` outputs.*=3.*\(None, 7\)"),
        (None, {"batch_normalization": "query"}, "`batch_normalization` must be one of"),
        (None, {"steps": 0}, "`steps` must be"),
        (None, {"seed": -1}, "`seed` must be"),
        (None, {"rule": 0.1}, "`rule` must be a DampenedMomentum. Received: 0.1"),
        (None, {"similarity_rule": 0.1}, "`similarity_rule` must be a DampenedMomentum"),
        (None, {"classifier_initializer": None}, "`classifier_initializer` must be a Ker"),
        (None, {"batch_size": 0}, "`batch_size` must be a positive .*: batch_size=0"),
        (None, {"epochs": 0}, "`epochs` must be a positive .* Received: epochs=0"),
        (None, {"classifier_initializer": "x"}, "initializer identifier: x"),
        (None, {"variables": "similarity"}, "`variables` must hold the kernel of the new"),
        (None, {"batch_size": 4}, '`batch_normalization` must be "moving".*batch_size=4'),
        (None, {"ways": 0}, "`ways` must be"),
        (None, {"jit_compile": "maybe"}, "`jit_compile` must be"),
        (cosine_network, {"variables": "classifier"}, "must not be zero for a CosineDense"),
        (keras.Model, {}, "`model` must be a functional or Sequential"),
        (ends_in_a_convolution, {}, r"must end in a layer with `units`.*conv2d"),
        (
            lambda: few_shot.finetuning_recipe("baseline++"),
            {},
            "`name` must be one of 'zero_start', 'closer_l",
        ),
    ],
)
def test_wrong_arguments(make, arguments, message, plain):
    with pytest.raises(ValueError, match=message):
        Finetuner(make() if make else plain, **{"ways": WAYS} | arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, y, q, _: (s, y + 1, q), "`support_labels` must hold classes 0 to 2"),
        (lambda s, y, q, _: (s, y + 0.5, q), "`support_labels` must hold classes 0 to 2"),
        (lambda s, y, q, _: (s[0], y[0], q[0]), "Inputs must be .support_images, supp"),
        (lambda s, y, q, _: (s, y[:1], q), r"Inputs must be .*Received.*\(1, 6\)"),
        (lambda s, y, q, _: (s, y[:, :1], q), r"Inputs must be .*Received.*\(2, 1\)"),
        (lambda s, y, q, _: (s, y, q[:1]), "Inputs must be .*Received"),
        (lambda s, y, q, _: (s[:0], y[:0], q[:0]), "`episodes` must be .*episodes=0"),
        (lambda s, y, q, _: (s * np.nan, y, q), "`support_images` must be finite"),
        (lambda s, y, q, _: (s, y, q * np.inf), "`query_images` must be finite"),
    ],
)
def test_bad_episodes(change, message, plain):
    with pytest.raises(ValueError, match=message):
        Finetuner(plain, WAYS)(change(*make_episodes()))


def test_operations_after_the_classifier_count():
    """`keras.ops` in a graph are no layers, and are part of the model all the same."""
    support, queries = np.random.default_rng(0).normal(size=(2, 1, 6, 5)).astype("float32")
    labels = np.arange(6)[None] % WAYS

    def logits(scaled):
        inputs = keras.Input((5,))
        model = keras.Model(inputs, scaled(keras.layers.Dense(WAYS)(inputs)))
        return Finetuner(model, WAYS, "classifier", 5)((support, labels, queries))

    by_operation = logits(lambda outputs: outputs * 20.0)
    by_layer = logits(keras.layers.Rescaling(20.0))
    np.testing.assert_allclose(by_operation, by_layer, rtol=1e-5)
    assert np.abs(by_operation - logits(lambda outputs: outputs)).max() > 1

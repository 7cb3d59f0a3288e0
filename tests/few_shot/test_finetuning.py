"""Finetuning episodes together is a loop over `fit`, and leaves the model alone."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from nsl_keras import few_shot
from nsl_keras.few_shot import Episode, Finetuner, finetune

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
DTYPE = "float64" if IS_TENSORFLOW else "float32"
ATOL = 1e-8 if IS_TENSORFLOW else 1e-4
WAYS, SHOTS, QUERIES, EPISODES = 3, 2, 2, 2


class TorchDescent(keras.optimizers.Optimizer):
    """The rule once more, as a Keras optimizer for `fit`."""

    def __init__(self, rate, momentum, dampening, decay):
        super().__init__(learning_rate=rate)
        self.rule = (rate, momentum, dampening, decay)

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.buffers = [
                self.add_variable_from_reference(each, name="buffer") for each in variables
            ]

    def update_step(self, gradient, variable, learning_rate):
        rate, momentum, dampening, decay = self.rule
        buffer = self.buffers[self._get_variable_index(variable)]
        gradient = gradient + decay * variable
        later = momentum * buffer + (1 - dampening) * gradient
        self.assign(buffer, ops.where(ops.equal(self.iterations, 0), gradient, later))
        self.assign_sub(variable, rate * buffer)

    def get_config(self):
        return {}


def network(classes, classifier=None, dtype=DTYPE, normalize=True, residual=False):
    """Two neural similarity convolutions with batch norm and pooling, and a classifier."""
    images = "float32" if dtype == "mixed_bfloat16" else dtype
    inputs = outputs = keras.Input((6, 6, 2), dtype=images)
    for index in range(2):
        before = outputs
        outputs = nsl_keras.layers.NeuralSimilarityConv2D(
            4,
            3,
            padding="same",
            similarity="unconstrained" if index else "diagonal",
            dtype=dtype,
            name=f"convolution_{index}",
        )(outputs)
        if normalize:
            outputs = keras.layers.BatchNormalization(dtype=dtype, name=f"norm_{index}")(
                outputs
            )
        if residual and index:
            outputs = keras.layers.Add(dtype=dtype)([before, outputs])
        outputs = keras.layers.ReLU(dtype=dtype, name=f"relu_{index}")(outputs)
        if not index:
            outputs = keras.layers.MaxPooling2D(2, dtype=dtype, name="pool")(outputs)
    outputs = keras.layers.Flatten(dtype=dtype, name="flat")(outputs)
    classifier = classifier or keras.layers.Dense
    outputs = classifier(classes, dtype=dtype, name="classifier")(outputs)
    return keras.Model(inputs, outputs)


def perturbed(model, seed=0):
    """The model with weights as after some training."""
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        noise = rng.uniform(-0.3, 0.3, size=variable.shape)
        variable.assign(ops.convert_to_numpy(variable) + noise)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.moving_variance.assign(rng.uniform(0.5, 2, size=layer.gamma.shape))
    return model


def make_episodes(count=EPISODES, dtype=DTYPE, seed=1):
    rng = np.random.default_rng(seed)
    images = [
        rng.normal(size=(count, WAYS * each, 6, 6, 2)).astype(dtype)
        for each in (SHOTS, QUERIES)
    ]
    labels = [
        np.tile(np.repeat(np.arange(WAYS, dtype="int32"), each), (count, 1))
        for each in (SHOTS, QUERIES)
    ]
    return Episode(images[0], labels[0], images[1], labels[1])


def looped(model, episodes, chosen, steps, policy, seed=0, rule=(0.01, 0.9, 0.9, 0.001)):
    """A loop over `fit`: full batches, fresh weights in each episode.

    The steps of an episode are one epoch of repeated batches, which `fit` is faster at.
    """
    dtype = model.get_layer("classifier").dtype
    keras.config.set_floatx(dtype)
    config = model.get_config()
    for layer in config["layers"]:
        if layer["config"]["name"] == "classifier":
            layer["config"]["units"] = WAYS
    copy = keras.Model.from_config(config)
    for layer in copy.layers:
        if layer.name != "classifier":
            layer.set_weights(model.get_layer(layer.name).get_weights())
    classifier = copy.get_layer("classifier")
    classifier.kernel.assign(
        keras.initializers.GlorotUniform(seed)(classifier.kernel.shape, dtype)
    )
    for layer in copy.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
            layer.trainable = policy != "moving"
    for variable in copy.trainable_variables:
        variable.trainable = bool(chosen(variable))
    start = copy.get_weights()
    optimizer = TorchDescent(*rule)
    optimizer.build(copy.trainable_variables)
    fresh = [ops.convert_to_numpy(variable) for variable in optimizer.variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    copy.compile(optimizer, loss, jit_compile=False)
    logits = []
    for support, labels, queries, _ in zip(*episodes, strict=True):
        copy.set_weights(start)
        for variable, value in zip(optimizer.variables, fresh, strict=True):
            variable.assign(value)
        repeated = [np.concatenate([each] * steps) for each in (support, labels)]
        copy.fit(*repeated, batch_size=len(support), shuffle=False, verbose=0)
        if policy == "support":
            copy(support, training=True)  # Leaves its statistics behind.
        logits.append(copy(queries, training=policy == "transductive"))
    return np.stack([ops.convert_to_numpy(each) for each in logits])


def similarity_and_classifier(variable):
    return variable.name == "similarity" or "classifier" in variable.path


def classifier_alone(variable):
    return "classifier" in variable.path


@pytest.mark.parametrize("policy", ["support", "transductive", "moving"])
def test_through_the_network_is_a_loop_over_fit(policy):
    model, episodes = perturbed(network(7)), make_episodes()
    expected = looped(model, episodes, similarity_and_classifier, 10, policy)
    received = finetune(model, episodes, steps=10, batch_normalization=policy)
    np.testing.assert_allclose(received, expected, rtol=0, atol=ATOL)


def test_through_the_network_in_float32():
    model, episodes = perturbed(network(7, dtype="float32")), make_episodes(dtype="float32")
    expected = looped(model, episodes, similarity_and_classifier, 10, "support")
    received = finetune(model, episodes, steps=10)
    np.testing.assert_allclose(received, expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="what TensorFlow is slow at")
def test_loops_hold_fused_batch_norms_and_whole_gradients():
    """Neither changes a number, and without either finetuning takes twice the time."""
    import tensorflow as tf

    model, episodes = perturbed(network(7, dtype="float32")), make_episodes(dtype="float32")
    finetuner = Finetuner(model, WAYS, steps=3)
    arrays = [tf.convert_to_tensor(each) for each in episodes[:3]]
    traced = finetuner._compiled.get_concrete_function(
        [tf.convert_to_tensor(source) for source in finetuner._sources], *arrays
    )
    gradients = [
        function
        for function in traced.graph.as_graph_def().library.function
        if any(node.op == "MaxPoolGrad" for node in function.node_def)
    ]
    assert gradients
    for function in gradients:
        assert function.attr["_noinline"].b
        names = [node.op for node in function.node_def]
        assert names.count("FusedBatchNormGradV3") == 2


@pytest.mark.parametrize("classifier", [None, nsl_keras.layers.CosineDense])
def test_classifier_alone_is_a_loop_over_fit(classifier):
    model = perturbed(network(7, classifier, "float32"))
    episodes = make_episodes(dtype="float32")
    expected = looped(model, episodes, classifier_alone, 100, "support")
    received = finetune(model, episodes, "classifier")
    np.testing.assert_allclose(received, expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 0.1


@pytest.mark.parametrize("residual", [False, True])
def test_what_lies_before_the_adapted_layers_is_computed_once(residual):
    model, episodes = perturbed(network(7, residual=residual)), make_episodes(2)
    names = ["convolution_1/kernel", "norm_1/gamma", "classifier/kernel"]

    def chosen(variable):
        return variable.path in names

    finetuner = Finetuner(model, WAYS, names, steps=3, learning_rate=0.1)
    cut_layers = [layer.name for layer in finetuner._before.model.layers[1:]]
    assert cut_layers == ["convolution_0", "norm_0", "relu_0", "pool"]
    expected = looped(model, episodes, chosen, 3, "support", rule=(0.1, 0.9, 0.9, 0.001))
    np.testing.assert_allclose(finetuner(episodes), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("classifier", "variables"),
    [
        (None, "classifier"),
        (None, ["classifier/kernel"]),
        (nsl_keras.layers.CosineDense, "classifier"),
    ],
)
def test_together_is_separately(classifier, variables):
    model = perturbed(network(WAYS, classifier))
    ending = keras.layers.Activation("linear", dtype=DTYPE)(model.output)
    options = {"variables": variables, "steps": 5, "new_classifier": False}
    together = Finetuner(model, WAYS, **options)
    one_by_one = Finetuner(keras.Model(model.input, ending), WAYS, **options)
    assert together._run == together._together
    assert one_by_one._run == one_by_one._separately
    episodes = make_episodes()
    np.testing.assert_allclose(
        together(episodes), one_by_one(episodes), rtol=0, atol=min(ATOL, 1e-5)
    )


def test_episodes_do_not_see_each_other():
    model, episodes = perturbed(network(7, dtype="float32")), make_episodes(dtype="float32")
    for variables in ("classifier", "similarity+classifier"):
        finetuner = Finetuner(model, WAYS, variables, steps=3)
        apart = [
            finetuner(Episode(*(array[i : i + 1] for array in episodes)))
            for i in range(EPISODES)
        ]
        np.testing.assert_allclose(
            finetuner(episodes), np.concatenate(apart), rtol=0, atol=1e-5
        )


def test_sequential_models_and_no_batch_norm():
    functional = perturbed(network(7, normalize=False))
    stack = keras.Sequential([keras.Input((6, 6, 2), dtype=DTYPE), *functional.layers[1:]])
    episodes = make_episodes()
    expected = looped(functional, episodes, similarity_and_classifier, 2, "support")
    for policy in ("support", "moving"):
        received = finetune(stack, episodes, steps=2, batch_normalization=policy)
        np.testing.assert_allclose(received, expected, rtol=0, atol=ATOL)


def test_the_model_stays_as_it_is():
    model = perturbed(network(7))
    values = [ops.convert_to_numpy(each) for each in model.variables]
    finetune(model, make_episodes(1), steps=2)
    finetune(model, make_episodes(1), "classifier", steps=2)
    for variable, value in zip(model.variables, values, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)
    assert model.get_layer("norm_0").momentum == 0.99
    assert model.get_layer("norm_0").input is model.get_layer("convolution_0").output


@pytest.mark.parametrize("variables", ["classifier", "similarity+classifier"])
def test_follows_the_weights_of_the_model(variables):
    model, episodes = perturbed(network(7)), make_episodes(1)
    finetuner = Finetuner(model, WAYS, variables, steps=2)
    before = finetuner(episodes)
    perturbed(model, seed=5)
    after = finetuner(episodes)
    assert np.max(np.abs(after - before)) > 1e-2
    np.testing.assert_allclose(
        after, finetune(model, episodes, variables, steps=2), rtol=0, atol=1e-6
    )


def test_own_classifier():
    model, episodes = perturbed(network(WAYS)), make_episodes(1)
    options = {"new_classifier": False, "learning_rate": 1e-9, "steps": 1}
    (queries,) = ops.convert_to_tensor(episodes.query_images)
    for policy, training in (("moving", False), ("transductive", True)):
        (received,) = finetune(model, episodes, batch_normalization=policy, **options)
        np.testing.assert_allclose(
            received, model(queries, training=training), rtol=0, atol=1e-5
        )


def test_the_new_classifier_is_drawn_by_seed():
    model, episodes = perturbed(network(7)), make_episodes(1)
    first, other = (
        finetune(model, episodes, "classifier", steps=1, seed=seed) for seed in (0, 1)
    )
    assert np.max(np.abs(first - other)) > 1e-2


def test_xla():
    model, episodes = perturbed(network(7)), make_episodes(2)
    for variables in ("classifier", "similarity+classifier"):
        plain, compiled = (
            finetune(model, episodes, variables, steps=3, jit_compile=jit_compile)
            for jit_compile in (False, True)
        )
        np.testing.assert_allclose(plain, compiled, rtol=0, atol=ATOL)


def test_mixed_precision():
    model = network(7, dtype="mixed_bfloat16")
    episodes = make_episodes(1, "float32")
    for variables in ("classifier", "similarity+classifier"):
        logits = finetune(model, episodes, variables, steps=2)
        assert logits.dtype == "float32"
        assert np.isfinite(logits).all()


@pytest.mark.parametrize("variables", ["classifier", "all"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_non_finite_losses_name_step_and_episode(variables, jit_compile):
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
            keras.layers.Dense(9),
        ]
    )
    episodes = make_episodes(3, "float32")
    finetuner = Finetuner(model, WAYS, variables, 9, jit_compile=jit_compile)
    episodes.support_images[1, 2, 3] = 3e38
    with pytest.raises(
        nsl_keras.NonFiniteLossError,
        match=r"became nan in step \d of episode 1 of the batch",
    ):
        finetuner(episodes)
    diverging = Finetuner(model, WAYS, variables, 9, 1e30, jit_compile=jit_compile)
    with pytest.raises(nsl_keras.NonFiniteLossError, match=r"step [2-9] of episode 0"):
        diverging(make_episodes(2, "float32"))


@pytest.mark.parametrize("which", ["support_images", "query_images"])
def test_non_finite_images(which):
    episodes = make_episodes()
    getattr(episodes, which)[1, 2, 3, 4, 0] = np.nan
    with pytest.raises(ValueError, match=rf"`episodes.{which}` must.*\(1, 2, 3, 4, 0\)"):
        finetune(network(7), episodes, steps=1)


def test_bad_arguments():
    model, episodes = network(7), make_episodes()
    with pytest.raises(ValueError, match=r"`variables` must match .*classifier/kernel"):
        Finetuner(model, WAYS, ["kernels"])
    with pytest.raises(ValueError, match="`variables` must be one of"):
        Finetuner(model, WAYS, "similarities")
    with pytest.raises(ValueError, match=r"as many outputs as `ways`.*ways=3.*\(None, 7\)"):
        Finetuner(model, WAYS, new_classifier=False)
    with pytest.raises(ValueError, match="`batch_normalization` must be one of"):
        Finetuner(model, WAYS, batch_normalization="query")
    for argument, value in (
        ("steps", 0),
        ("learning_rate", -1.0),
        ("momentum", 1.5),
        ("weight_decay", -1.0),
        ("seed", -1),
    ):
        with pytest.raises(ValueError, match=f"`{argument}` must be"):
            Finetuner(model, WAYS, **{argument: value})
    with pytest.raises(ValueError, match="`ways` must be"):
        Finetuner(model, 0)
    with pytest.raises(ValueError, match=r"classes 0 to ways - 1 = 1.*between 0 and 2"):
        Finetuner(model, 2)(episodes)
    with pytest.raises(ValueError, match=r"support_labels` must be of shape"):
        Finetuner(model, WAYS)(Episode(*(array[0] for array in episodes)))


def test_models_it_cannot_take():
    class Subclassed(keras.Model):
        def call(self, inputs):
            return inputs

    with pytest.raises(ValueError, match="`model` must be a functional or Sequential"):
        Finetuner(Subclassed(), WAYS)
    convolutional = keras.Sequential(
        [keras.Input((6, 6, 2)), keras.layers.Conv2D(WAYS, 6), keras.layers.Flatten()]
    )
    with pytest.raises(ValueError, match=r"must end in a layer with `units`.*conv2d"):
        Finetuner(convolutional, WAYS, "classifier")
    own = Finetuner(convolutional, WAYS, "classifier", steps=1, new_classifier=False)
    assert own(make_episodes(2, "float32")).shape == (2, WAYS * QUERIES, WAYS)


def test_paper_strategies_on_cnn4():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(60, 16, 16, 3), dtype="uint8")
    sampler = few_shot.EpisodeSampler(images, np.arange(60) // 10, queries=3)
    layer = nsl_keras.layers.NeuralSimilarityConv2D
    static = nsl_keras.backbones.cnn4((16, 16, 3), 9, layer, filters=4)
    layer = functools.partial(layer, predictor="sphere")
    dynamic = nsl_keras.backbones.cnn4((16, 16, 3), 9, layer, filters=4)
    for model, variables in ((static, "similarity+classifier"), (dynamic, "classifier")):
        learner = Finetuner(model, 5, variables, steps=2)
        result = few_shot.evaluate(learner, sampler, episodes=4, batch_size=2)
        assert result.batch_normalization == "support"
        assert result.accuracies.shape == (4,)


def test_a_new_classifier_is_trained_where_the_old_one_was_frozen():
    plain = nsl_keras.backbones.cnn4((16, 16, 3), 9, filters=4)
    frozen = nsl_keras.convert.add_similarity(plain)
    assert not frozen.layers[-1].trainable
    rng = np.random.default_rng(0)
    images = rng.normal(size=(60, 16, 16, 3)).astype("float32")
    sampler = few_shot.EpisodeSampler(images, np.arange(60) // 10, queries=3)
    found = Finetuner(frozen, 5, "classifier", steps=3)(sampler.episodes(2))
    frozen.layers[-1].trainable = True
    expected = Finetuner(frozen, 5, "classifier", steps=3)(sampler.episodes(2))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    frozen.layers[-1].trainable = False
    with pytest.raises(ValueError, match="trainable=False have none"):
        Finetuner(frozen, 9, "classifier", new_classifier=False)

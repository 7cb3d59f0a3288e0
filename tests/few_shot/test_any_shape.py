"""Episodes of signals, text and token numbers, from the sampler to `adapt`."""

import keras
import numpy as np
import pytest
from helpers import CROSS_ENTROPY, IS_TENSORFLOW, as_numpy
from keras import layers

from nsl_keras import few_shot

WAYS, CLASSES, OF_CLASS = 3, 5, 6
LABELS = np.repeat(np.arange(CLASSES), OF_CLASS)
pytestmark = pytest.mark.usefixtures("eager")
RNG = np.random.default_rng(0)
MEANS = RNG.normal(size=(CLASSES, 20, 2))[LABELS]

#: Examples, and the layers from them to features.
KINDS = {
    "signals": (RNG.normal(MEANS, 0.1), [keras.Input((20, 2)), layers.Conv1D(4, 3)]),
    "tokens": (
        # Each class has its own words, with numbers that half precision rounds.
        5000 + 3 * LABELS[:, None] + RNG.integers(3, size=(len(LABELS), 8)),
        [keras.Input((8,), dtype="int32"), layers.Embedding(5020, 16)],
    ),
}
if IS_TENSORFLOW:  # JAX has no text.
    WORDS = ["red", "green", "blue", "black", "white"]
    KINDS["text"] = (
        [f"a {WORDS[label]} {number}" for number, label in enumerate(LABELS)],
        [
            keras.Input((), dtype="string"),
            layers.TextVectorization(20, output_sequence_length=3, vocabulary=WORDS),
            layers.Embedding(20, 8),
        ],
    )


def backbone(kind, *head):
    stack = [type(each).from_config(each.get_config()) for each in KINDS[kind][1][1:]]
    return keras.Sequential([KINDS[kind][1][0], *stack, layers.Flatten(), *head])


def learner_of(name, kind):
    if name == "proto":
        return few_shot.ProtoNet(backbone(kind), WAYS, learn_temperature=True)
    network = backbone(kind, layers.Dense(WAYS, kernel_initializer="zeros"))
    if name == "maml":
        return few_shot.MAML(network, inner_steps=2, inner_learning_rate=1.0)
    return few_shot.Finetuner(network, WAYS, "all", steps=2, learning_rate=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["proto", "maml", "finetuner"])
def test_examples_of_any_shape(name, kind):
    if name != "finetuner":
        keras.config.set_dtype_policy("mixed_bfloat16")
    examples = KINDS[kind][0]
    options = {} if kind == "text" else {"scale": None if kind == "tokens" else 1.0}
    sampler = few_shot.EpisodeSampler(examples, LABELS, WAYS, 2, 4, **options)
    batch = sampler.episodes(2)
    assert batch.support_images.shape == (2, WAYS * 2, *np.shape(examples)[1:])
    if kind == "tokens":
        assert batch.support_images.dtype == examples.dtype
    learner = learner_of(name, kind)
    if name != "finetuner":
        learner.compile(keras.optimizers.Adam(1e-3), CROSS_ENTROPY, run_eagerly=True)
        held_out = batch[:3], batch.query_labels
        learner.fit(sampler.batches(2, 1), validation_data=held_out, verbose=0)
        learner.evaluate(batch[:3], batch.query_labels, verbose=0)
    assert few_shot.evaluate(learner, sampler, 2, batch_size=2).mean > 0.7
    support, labels, queries, expected = sampler.episode(0)
    adapted = learner.adapt([*support], labels)
    if kind == "text":
        queries = keras.ops.convert_to_tensor(queries, "string")
    found = adapted.predict(queries, verbose=0)
    assert found.dtype == "float32"
    assert np.mean(found.argmax(axis=1) == expected) > 0.7
    if kind != "text":
        outputs = learner(tuple(each[None] for each in (support, labels, queries)))
        found = adapted.temperature * found
        np.testing.assert_allclose(found, as_numpy(outputs[0]), 0.01, 0.02)

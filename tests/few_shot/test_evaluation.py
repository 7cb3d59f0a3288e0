"""Accuracies over episodes: which episodes, which interval, which errors."""

import keras
import numpy as np
import pytest
from helpers import refused, stacked
from keras import ops

import nsl_keras
from nsl_keras.few_shot import EpisodeSampler, Evaluation, ProtoNet, compare, evaluate

WAYS, QUERIES = 4, 3


@pytest.fixture(name="sampler")
def _sampler():
    images = np.random.default_rng(0).normal(size=(60, 2, 2, 1)).astype("float32")
    return EpisodeSampler(images, np.arange(60) // 10, WAYS, shots=2, queries=QUERIES)


def by_first_pixel(episode):
    """Some learner that is right by chance, and says the same of the same images."""
    pixels = np.abs(episode.query_images[:, :, 0, 0, 0])
    return np.eye(WAYS)[(10 * pixels).astype(int) % WAYS]


def knowing(wrong):
    """A learner that knows the answers, and gets the first `wrong` queries wrong."""

    def learner(episode):
        labels = np.array(episode.query_labels)
        labels[:, :wrong] = (labels[:, :wrong] + 1) % WAYS
        return ops.convert_to_tensor(np.eye(WAYS)[labels])

    return learner


def test_each_episode_counts_once_however_they_are_batched(sampler, capsys):
    sizes = []

    def learner(episode):
        sizes.append(len(episode.query_images))
        return by_first_pixel(episode)

    whole = evaluate(by_first_pixel, sampler, episodes=7, batch_size=9, verbose=0)
    assert whole.accuracies.shape == (7,) and len(np.unique(whole.accuracies)) > 1
    assert not capsys.readouterr().out
    parts = evaluate(learner, sampler, episodes=7, batch_size=3, verbose=1)
    np.testing.assert_array_equal(parts.accuracies, whole.accuracies)
    assert sizes == [3, 3, 3] and "3/3" in capsys.readouterr().out
    later = evaluate(by_first_pixel, sampler, episodes=4, batch_size=3, start=3)
    np.testing.assert_array_equal(later.accuracies, whole.accuracies[3:])
    assert later.start == 3


def test_keras_models_and_the_policy_that_they_followed(sampler, eager):
    norm = nsl_keras.layers.BatchNormalization()
    backbone = stacked((2, 2, 1), norm, keras.layers.Flatten())
    model = ProtoNet(backbone, WAYS, batch_normalization="support")
    result, batch = evaluate(model, sampler, 6, batch_size=2), sampler.episodes(6)
    nearest = ops.convert_to_numpy(ops.argmax(model(batch[:3]), axis=-1))
    expected = np.mean(nearest == batch.query_labels, axis=1)
    np.testing.assert_allclose(result.accuracies, expected)
    assert result.batch_normalization == "support"
    norm.trainable = False
    assert evaluate(model, sampler, 2).batch_normalization == "moving"


def test_interval():
    # The deviations are 0.1, -0.1, 0.3 and -0.3; their squares sum to 0.2.
    evaluation = Evaluation(np.array([0.6, 0.4, 0.8, 0.2]), batch_normalization="support")
    assert evaluation.mean == pytest.approx(0.5)
    assert evaluation.half_width == pytest.approx(1.96 * np.sqrt(0.2 / 3) / 2)
    assert str(evaluation).endswith("(4 episodes, batch normalization 'support')")


def test_only_the_same_episodes_of_equal_samplers_are_compared(sampler):
    accuracies = np.array([0.6, 0.4])
    for other in (Evaluation(accuracies, start=2), Evaluation(accuracies[:1])):
        with refused("`second` must be an evaluation of the same episodes"):
            compare(Evaluation(accuracies), other)

    def second(seed):
        other = EpisodeSampler(sampler.images, sampler.labels, WAYS, 2, QUERIES, seed)
        return evaluate(knowing(3), other, episodes=4)

    first = evaluate(knowing(0), sampler, episodes=4)
    assert compare(first, second(seed=0)).mean == 0.25
    assert first.mean == 1 and first.batch_normalization is None
    with refused("equal images, labels, ways"):
        compare(first, second(seed=1))


def test_bad_arguments(sampler):
    for argument, value in (("episodes", 1), ("batch_size", 0), ("start", -1)):
        with refused(f"`{argument}` must be"):
            evaluate(knowing(0), sampler, **{argument: value})
    with refused("`sampler` must be an `EpisodeSampler`"):
        evaluate(sampler, knowing(0))
    with refused("`learner` must be"):
        evaluate(None, sampler)
    with refused(r"\(4, 12, 4\)\. Received: .*\(4, 12, 5\)"):
        evaluate(lambda episode: np.zeros((4, 12, 5)), sampler, 8)


def test_logits_that_are_not_finite(sampler):
    logits = np.where(np.arange(4)[:, None, None] == 1, np.nan, np.zeros((4, 12, WAYS)))
    with pytest.raises(nsl_keras.NonFiniteLossError, match="episode 5 are not finite"):
        evaluate(lambda episode: logits, sampler, episodes=4, start=4)

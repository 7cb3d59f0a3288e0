"""The few-shot example, in small: data, trials, resume, table."""

import dataclasses
import os

import keras
import numpy as np
import pytest
from jax_process import run_under_jax

from examples.common import runs
from examples.common.data import Split
from examples.few_shot import data, methods, table, training

DATA = os.environ.get("NSL_KERAS_DATA_DIR")


def parts():
    """Classes of a brightness each: 6 for training, 3 and 3 besides."""
    rng = np.random.default_rng(0)
    found = {}
    for name, first, count in (("train", 0, 6), ("validation", 6, 3), ("test", 9, 3)):
        labels = np.repeat(np.arange(first, first + count), 20)
        noise = rng.integers(0, 15, (len(labels), 16, 16, 1))
        images = 20 * labels[:, None, None, None] + noise
        found[name] = Split(images.astype("uint8"), labels)
    return found


SETTING = training.Setting(
    dataset="tiny",
    backbone="cnn4",
    ways=2,
    shots=2,
    queries=3,
    training_images=60,
    episodes_per_step=2,
    proto_ways=3,
    batch_size=10,
    test_episodes=4,
    rates=(1e-3,),
    trial_share=0.5,
    validation_episodes=2,
    batch_normalization=None,
)


def tiny_training(folder):
    images = data.FewShotData(**parts())
    return training.Training(SETTING, images, folder / "states", False, 0)


@pytest.mark.long
def test_rows_of_every_kind(tmp_path, capsys):
    names = ["finetuning", "nearest_centroid", "meta_static_nsn", "proto_net"]
    run = tiny_training(tmp_path)
    records = training.run_methods(run, names, [0], tmp_path)
    assert records.setting["test_classes"] == 3
    finetuned, meta, centroid, proto = made = records.runs
    # One pretraining serves them all, and meta-learning comes on top of it.
    assert finetuned["training_images"] == centroid["training_images"] == 60
    assert finetuned["seconds"] == centroid["seconds"] < meta["seconds"]
    assert meta["training_images"] == 60 + 60
    for record in made:
        right = np.array(record["right_queries"]) / (2 * 3)
        assert right.shape == (4,)
        assert record["accuracy"] == pytest.approx(right.mean())
        policy = "support" if record is proto else "moving"
        assert record["batch_normalization"] == policy
        assert keras.__version__ == record["versions"]["keras"]

    training.run_methods(run, names, [0], tmp_path)
    assert capsys.readouterr().out.count("finished before") == 4
    assert records.runs == made

    def row_of_the_centroid():
        lines = table.section(records).splitlines()
        return next(line for line in lines if "nearest centroid" in line)

    row = row_of_the_centroid()
    paired = np.subtract(centroid["right_queries"], finetuned["right_queries"]) / 6
    assert f"| {100 * centroid['accuracy']:.2f} ± " in row
    assert f"| {100 * paired.mean():+.2f} ± " in row
    # The published figures are for other images, and stand apart.
    assert "| MAML | not run |" in table.section(records)
    assert "| MAML | 63.15 ± 0.91 |  | 63.15 ± 0.91 | 67.64 ± 0.85 | not" in table.not_run()
    # A second seed of the baseline alone does not change what is paired.
    more = {**finetuned, "seed": 1, "right_queries": [6, 6, 6, 6]}
    records.add(("finetuning", 1), more)
    assert f"| {100 * paired.mean():+.2f} ± " in row_of_the_centroid()


def test_trials_choose_on_validation_classes(tmp_path):
    called, brightest = [], []

    class Trained(training.Training):
        """At a rate of 1e-3 a learner knows the answers, at others it guesses."""

        def run(self, method, rate, images, seed):
            called.append((rate, images, seed))

            def learner(episode):
                brightest.append(episode.query_images.max())
                right = np.eye(2)[episode.query_labels]
                return right if rate == 1e-3 else np.zeros_like(right)

            return learner, {"seconds": 0.0, "training_images": images}

    setting = dataclasses.replace(SETTING, rates=(1e-2, 1e-3, 1e-4))
    run = Trained(setting, data.FewShotData(**parts()), tmp_path / "states", "auto", 0)
    records = training.run_methods(run, ["proto_net"], [3], tmp_path)
    assert called == [(1e-2, 30, 0), (1e-3, 30, 0), (1e-4, 30, 0), (1e-3, 60, 3)]
    # Validation classes are darker than 180, the test's are not.
    assert max(brightest[:3]) < 180 / 255 < max(brightest[3:])
    assert records.folder == tmp_path / "few_shot" / "tiny_cnn4_2way_2shot_tuned"
    assert len(runs.RunRecords(records.folder / "trials").runs) == 3
    (record,) = records.runs
    assert (record["learning_rate"], record["accuracy"]) == (1e-3, 1.0)
    # Trials are not run again, for another seed neither.
    training.run_methods(run, ["proto_net"], [4], tmp_path)
    assert called[4:] == [(1e-3, 60, 4)]


@pytest.mark.parametrize(
    "name", ["matching_net", "relation_net", "maml", "neighborhoods", "proto_net"]
)
def test_learners_have_the_policy_asked_for(name):
    learner = methods.episodic_learner(
        name, "tiny", "cnn4", (32, 32, 3), 2, "transductive", None
    )
    assert learner.batch_normalization == "transductive"


def test_relation_net_pools_twice():
    learner = methods.episodic_learner(
        "relation_net", "tiny", "cnn4", (28, 28, 1), 2, "moving", None
    )
    assert learner.backbone.output_shape == (None, 7, 7, 32)


def test_maml_as_published_for_omniglot():
    def learner(dataset):
        return methods.episodic_learner(
            "maml", dataset, "cnn4", (28, 28, 1), 5, "support", None
        )

    found = learner("omniglot")
    assert (found.inner_steps, found.test_inner_steps) == (1, 3)
    assert found.inner_learning_rate == 0.4
    found = learner("other")
    assert (found.inner_steps, found.test_inner_steps) == (5, 10)
    assert found.inner_learning_rate == 0.01


def test_files_come_back(tmp_path):
    images = data.FewShotData(**parts())
    path = str(tmp_path / "images.npz")
    data.save(images, path)
    again = data.load("tiny", data_file=path)
    np.testing.assert_array_equal(again.test.images, images.test.images)
    assert again.counts == images.counts

    np.savez(path, train_images=images.train.images)
    with pytest.raises(ValueError, match=r"`data_file` must hold .* without train_labels"):
        data.load("tiny", data_file=path)


def test_folders(tmp_path):
    for part, classes in (("train", "ab"), ("val", "c"), ("test", "d")):
        for name in classes:
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            keras.utils.save_img(folder / "1.png", np.full((8, 8, 3), ord(name)))
    images = data.load("mine", str(tmp_path), image_size=16)
    assert images.image_shape == (16, 16, 3)
    assert images.train.labels.tolist() == ["a", "b"]
    assert images.validation.labels.tolist() == ["c"]
    (tmp_path / "val").rename(tmp_path / "valid")
    with pytest.raises(ValueError, match=r"`data_dir` must hold train, .* without val$"):
        data.load("mine", str(tmp_path))


def test_no_class_in_two_parts():
    overlapping = {**parts(), "test": parts()["validation"]}
    with pytest.raises(ValueError, match="`validation` and `test` must have no class"):
        data.FewShotData(**overlapping)


def test_somewhere_the_images_must_be():
    with pytest.raises(ValueError, match="`data_file` or `data_dir` must say"):
        data.load("mine")


@pytest.mark.data
@pytest.mark.skipif(DATA is None, reason="NSL_KERAS_DATA_DIR is not set")
def test_omniglot():
    images = data.load("omniglot", DATA)
    assert images.image_shape == (28, 28, 1)
    assert images.counts["train_classes"] == (964 - 100) * 4
    assert images.counts["validation_classes"] == 100
    assert images.counts["test_classes"] == 659
    assert set(np.unique(images.test.labels, return_counts=True)[1]) == {20}
    # Bright strokes on black.
    assert images.test.images.mean() < 50 and images.test.images.max() > 200


@pytest.mark.long
def test_jax_without_tensorflow_from_the_command_line(tmp_path):
    path = str(tmp_path / "images.npz")
    data.save(data.FewShotData(**parts()), path)
    run_under_jax(
        "examples.few_shot",
        *("--dataset=tiny", "--ways=2", "--shots=2", "--queries=3", "--test_episodes=2"),
        *("--training_images=20", "--episodes_per_step=1", "--method=finetuning"),
        *(f"--data_file={path}", f"--output_dir={tmp_path}", "--verbose=0"),
        f"--state_dir={tmp_path}/states",
    )
    folder = tmp_path / "results" / "few_shot" / "tiny_cnn4_2way_2shot"
    (record,) = runs.RunRecords(folder).runs
    assert record["versions"]["backend"].startswith("jax ")
    assert "--data_file=DATA_FILE" in record["command"]
    assert not (tmp_path / "states").exists() or not list((tmp_path / "states").iterdir())

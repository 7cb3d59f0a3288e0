"""The few-shot example, in small: data, trials, resume, table."""

import dataclasses
import json
import os

import keras
import numpy as np
import pytest
from jax_process import run_under_jax

from examples import few_shot, few_shot_data, few_shot_methods, few_shot_table

DATA = os.environ.get("NSL_KERAS_DATA_DIR")


def parts():
    """Classes of a brightness each: 6 for training, 3 and 3 besides."""
    rng = np.random.default_rng(0)
    found = {}
    for name, first, count in (("train", 0, 6), ("validation", 6, 3), ("test", 9, 3)):
        labels = np.repeat(np.arange(first, first + count), 20)
        noise = rng.integers(0, 15, (len(labels), 16, 16, 1))
        images = 20 * labels[:, None, None, None] + noise
        found[name] = few_shot_data.Part(images.astype("uint8"), labels)
    return found


SETTING = few_shot.Setting(
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


def training(folder, **changes):
    setting = dataclasses.replace(SETTING, **changes)
    data = few_shot_data.FewShotData(**parts())
    return few_shot.Training(setting, data, folder / "states", False, 0)


def test_rows_of_every_kind(tmp_path, capsys):
    methods = ["finetuning", "nearest_centroid", "meta_static_nsn", "proto_net"]
    run = training(tmp_path)
    records = few_shot.run_all(run, methods, [0], tmp_path)
    content = json.loads(records.path.read_text())
    assert content["setting"]["test_classes"] == 3
    finetuned, centroid, meta, proto = content["runs"]
    # One pretraining serves them all, and meta-learning comes on top of it.
    assert finetuned["training_images"] == centroid["training_images"] == 60
    assert finetuned["seconds"] == centroid["seconds"] < meta["seconds"]
    assert meta["training_images"] == 60 + 60
    for record in content["runs"]:
        right = np.array(record["right_queries"]) / (2 * 3)
        assert right.shape == (4,)
        assert record["accuracy"] == pytest.approx(right.mean())
        policy = "support" if record is proto else "moving"
        assert record["batch_normalization"] == policy
        assert keras.__version__ == record["versions"]["keras"]

    few_shot.run_all(run, methods, [0], tmp_path)
    assert capsys.readouterr().out.count("finished before") == 4
    assert json.loads(records.path.read_text()) == content

    table = few_shot_table.section(records.path)
    row = next(line for line in table.splitlines() if "nearest centroid" in line)
    paired = np.subtract(centroid["right_queries"], finetuned["right_queries"]) / 6
    assert f"| {100 * centroid['accuracy']:.2f} ± " in row
    assert f"| {100 * paired.mean():+.2f} ± " in row
    assert "| MAML | 63.15 ± 0.91 | 63.15 ± 0.91 | not run |" in table
    # A second seed of the baseline alone does not change what is paired.
    records.add({**finetuned, "seed": 1, "right_queries": [6, 6, 6, 6]})
    table = few_shot_table.section(records.path)
    row = next(line for line in table.splitlines() if "nearest centroid" in line)
    assert f"| {100 * paired.mean():+.2f} ± " in row


def test_trials_choose_on_validation_classes(tmp_path):
    called, brightest = [], []

    class Trained(few_shot.Training):
        """At a rate of 1e-3 a learner knows the answers, at others it guesses."""

        def run(self, method, rate, images, seed):
            called.append((rate, images, seed))

            def learner(episode):
                brightest.append(episode.query_images.max())
                right = np.eye(2)[episode.query_labels]
                return right if rate == 1e-3 else np.zeros_like(right)

            return learner, {"seconds": 0.0, "training_images": images}

    setting = dataclasses.replace(SETTING, rates=(1e-2, 1e-3, 1e-4))
    run = Trained(
        setting, few_shot_data.FewShotData(**parts()), tmp_path / "states", "auto", 0
    )
    records = few_shot.run_all(run, ["proto_net"], [3], tmp_path)
    assert called == [(1e-2, 30, 0), (1e-3, 30, 0), (1e-4, 30, 0), (1e-3, 60, 3)]
    # Validation classes are darker than 180, the test's are not.
    assert max(brightest[:3]) < 180 / 255 < max(brightest[3:])
    assert records.path.name == "few_shot_tiny_cnn4_2way_2shot_tuned.json"
    (record,) = records.runs
    assert (record["learning_rate"], record["accuracy"]) == (1e-3, 1.0)
    # Trials are not run again, for another seed neither.
    few_shot.run_all(run, ["proto_net"], [4], tmp_path)
    assert called[4:] == [(1e-3, 60, 4)]


@pytest.mark.parametrize(
    "name", ["matching_net", "relation_net", "maml", "neighborhoods", "proto_net"]
)
def test_learners_have_the_policy_asked_for(name):
    learner = few_shot_methods.episodic_learner(
        name, "tiny", "cnn4", (32, 32, 3), 2, "transductive", None
    )
    assert learner.batch_normalization == "transductive"


def test_relation_net_pools_twice():
    learner = few_shot_methods.episodic_learner(
        "relation_net", "tiny", "cnn4", (28, 28, 1), 2, "moving", None
    )
    assert learner.backbone.output_shape == (None, 7, 7, 32)


def test_maml_as_published_for_omniglot():
    def learner(dataset):
        return few_shot_methods.episodic_learner(
            "maml", dataset, "cnn4", (28, 28, 1), 5, "support", None
        )

    found = learner("omniglot")
    assert (found.inner_steps, found.test_inner_steps) == (1, 3)
    assert found.inner_learning_rate == 0.4
    found = learner("other")
    assert (found.inner_steps, found.test_inner_steps) == (5, 10)
    assert found.inner_learning_rate == 0.01


def test_files_come_back(tmp_path):
    data = few_shot_data.FewShotData(**parts())
    path = str(tmp_path / "images.npz")
    few_shot_data.save(data, path)
    again = few_shot_data.load("tiny", data_file=path)
    np.testing.assert_array_equal(again.test.images, data.test.images)
    assert again.counts == data.counts

    np.savez(path, train_images=data.train.images)
    with pytest.raises(ValueError, match=r"`data_file` must hold .* without train_labels"):
        few_shot_data.load("tiny", data_file=path)


def test_folders(tmp_path):
    for part, classes in (("train", "ab"), ("val", "c"), ("test", "d")):
        for name in classes:
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            keras.utils.save_img(folder / "1.png", np.full((8, 8, 3), ord(name)))
    data = few_shot_data.load("mine", str(tmp_path), image_size=16)
    assert data.image_shape == (16, 16, 3)
    assert data.train.labels.tolist() == ["a", "b"]
    assert data.validation.labels.tolist() == ["c"]


def test_no_class_in_two_parts():
    overlapping = {**parts(), "test": parts()["validation"]}
    with pytest.raises(ValueError, match="`validation` and `test` must have no class"):
        few_shot_data.FewShotData(**overlapping)


def test_somewhere_the_images_must_be():
    with pytest.raises(ValueError, match="`data_file` or `data_dir` must say"):
        few_shot_data.load("mine")


@pytest.mark.data
@pytest.mark.skipif(DATA is None, reason="NSL_KERAS_DATA_DIR is not set")
def test_omniglot():
    data = few_shot_data.load("omniglot", DATA)
    assert data.image_shape == (28, 28, 1)
    assert data.counts["train_classes"] == (964 - 100) * 4
    assert data.counts["validation_classes"] == 100
    assert data.counts["test_classes"] == 659
    assert set(np.unique(data.test.labels, return_counts=True)[1]) == {20}
    # Bright strokes on black.
    assert data.test.images.mean() < 50 and data.test.images.max() > 200


def test_jax_without_tensorflow_from_the_command_line(tmp_path):
    path = str(tmp_path / "images.npz")
    few_shot_data.save(few_shot_data.FewShotData(**parts()), path)
    run_under_jax(
        "examples.few_shot",
        *("--dataset=tiny", "--ways=2", "--shots=2", "--queries=3", "--test_episodes=2"),
        *("--training_images=20", "--episodes_per_step=1", "--method=finetuning"),
        *(f"--data_file={path}", f"--output_dir={tmp_path}", "--verbose=0"),
        f"--state_dir={tmp_path}/states",
    )
    path = tmp_path / "results" / "few_shot_tiny_cnn4_2way_2shot.json"
    (record,) = json.loads(path.read_text())["runs"]
    assert record["versions"]["backend"].startswith("jax ")
    assert "--data_file=DATA_FILE" in record["command"]
    assert not (tmp_path / "states").exists() or not list((tmp_path / "states").iterdir())

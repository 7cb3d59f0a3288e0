"""The few-shot example, in small: data, trials, resume, table."""

import dataclasses
import os
import pathlib
import time

import keras
import numpy as np
import pytest
from helpers import run_under_jax

import nsl_keras
from examples.common import runs, stopping, time_limit
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


def tiny_training(folder, **changes):
    images = data.FewShotData(**parts())
    setting = dataclasses.replace(SETTING, **changes)
    return training.Training(setting, images, folder / "states", False, 0)


def lines_of(records):
    return table.section(records).splitlines()


@pytest.mark.long
def test_rows_of_every_kind(tmp_path, capsys):
    names = ["finetuning", "nearest_centroid", "meta_static_normalized", "proto_net"]
    run = tiny_training(tmp_path)
    records = training.run_methods(run, names, [0], tmp_path)
    assert records.setting["test_classes"] == 3
    finetuned, meta, centroid, proto = made = records.runs
    # One pretraining serves them all, and meta-learning comes on top of it.
    assert finetuned["training_images"] == centroid["training_images"] == 60
    assert finetuned["seconds"] == centroid["seconds"] < meta["seconds"]
    assert meta["training_images"] == 60 + 60
    assert meta["inner_rate"] == 0.2
    before, after = meta["support_losses"]
    assert 0.2 < before < 2 and 0 <= after < 5
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
        return next(line for line in lines_of(records) if "nearest centroid" in line)

    row = row_of_the_centroid()
    paired = np.subtract(centroid["right_queries"], finetuned["right_queries"]) / 6
    assert f"| {100 * centroid['accuracy']:.2f} ± " in row
    assert f"| {100 * paired.mean():+.2f} ± " in row
    row = next(line for line in lines_of(records) if "of length 1 |" in line)
    assert "| 0.001, inner 0.2 | " in row and f"{before:.2f} to {after:.2f}" in row
    last = lines_of(records)[-1]
    assert last.startswith("Paired differences: finetuning of the classifier, from zero")
    # The published figures are for other images, and stand apart.
    assert "| MAML | not run |" in table.section(records)
    assert "| MAML | 63.15 ± 0.91 |  | 63.15 ± 0.91 | 67.64 ± 0.85 | not" in table.not_run()
    # A second seed of the baseline alone does not change what is paired.
    more = {**finetuned, "seed": 1, "right_queries": [6, 6, 6, 6]}
    records.add(("finetuning", 1), more)
    assert f"| {100 * paired.mean():+.2f} ± " in row_of_the_centroid()


def test_states_of_finished_methods_go(tmp_path):
    """Those of others, of other seeds too, may be gone on with."""
    setting = dataclasses.replace(SETTING, rates=(1e-3, 2e-3))
    run = training.Training(
        setting, data.FewShotData(**parts()), tmp_path / "mine/states/digest", "auto", 0
    )
    finished = [
        run.state("meta_static_nsn", 2e-3, 60, 1),
        run.state("meta_static_nsn", 1e-3, 30, 0),
        run.state("plain", 2e-3, 60, 1),
    ]
    others = [
        run.state("meta_static_nsn", 2e-3, 60, 0),
        run.state("maml", 2e-3, 60, 1),
        run.state("dynamic", 2e-3, 60, 1),
    ]
    for folder in (*finished, *others):
        folder.mkdir(parents=True)
    run.forget(["meta_static_nsn"], ["1"])
    assert not any(folder.exists() for folder in finished)
    assert all(folder.exists() for folder in others)
    run.forget(["maml", "meta_static_nsn", "dynamic_nsn"], [0, 1])
    assert not run.states.exists()
    assert (tmp_path / "mine/states").exists()


def test_bad_choices_are_told_before_any_training(tmp_path):
    with pytest.raises(ValueError, match=r"`rates` must be different. .*0\.001, 0\.001"):
        dataclasses.replace(SETTING, rates=(1e-3, 1e-3))
    run = tiny_training(tmp_path)
    run.setting = dataclasses.replace(SETTING, proto_ways=20)
    with pytest.raises(ValueError, match=r"`proto_ways` must be at most .*proto_ways=20"):
        training.run_methods(run, ["nearest_centroid", "proto_net"], [0], tmp_path)
    run.setting = dataclasses.replace(SETTING, ways=4)
    with pytest.raises(ValueError, match="`ways` must be at most the number of classes"):
        training.run_methods(run, ["nearest_centroid"], [0], tmp_path)
    assert not (tmp_path / "few_shot").exists()


def test_a_run_that_is_out_of_time_has_no_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_limit, "deadline", time.monotonic)
    with pytest.raises(stopping.OutOfTime):
        training.run_methods(tiny_training(tmp_path), ["finetuning"], [0], tmp_path)
    assert "Stopped after 0 steps" in capsys.readouterr().out
    (records,) = runs.all_of(tmp_path / "few_shot")
    assert not records.runs


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


def test_inner_rates_are_tried_in_turn(tmp_path):
    tried = []

    class Trained(training.Training):
        def run(self, method, rate, images, seed):
            trial = self.setting.rates.index(rate)
            tried.append((rate, methods.inner_rate(method, "tiny", trial)))
            if rate == 1e-2:
                raise nsl_keras.NonFiniteLossError("The loss became nan.")

            def learner(episode):
                right = np.eye(2)[episode.query_labels]
                return right if rate == 3e-3 else np.zeros_like(right)

            found = {"seconds": 0.0, "training_images": images}
            return learner, found | {"inner_rate": tried[-1][1]}

    setting = dataclasses.replace(SETTING, rates=(1e-3, 3e-3, 1e-2))
    run = Trained(setting, data.FewShotData(**parts()), tmp_path / "states", "auto", 0)
    records = training.run_methods(run, ["maml", "meta_static_nsn"], [0], tmp_path)
    expected = [(1e-3, 0.01), (3e-3, 0.03), (1e-2, 0.1), (3e-3, 0.03)]
    assert tried == expected + expected
    assert [record["inner_rate"] for record in records.runs] == [0.03, 0.03]
    trials = runs.RunRecords(records.folder / "trials").runs
    diverged = [each for each in trials if "diverged" in each]
    assert {each["rate"] for each in diverged} == {1e-2}
    assert {each["accuracy"] for each in diverged} == {0.0}
    told = "from zero take inner rates of 0.01, 0.03, 0.1, one with each rate of Adam."
    assert f"The trials of MAML and meta-learned static NSN, learned rates, {told}" in (
        table.section(records)
    )


def test_a_run_that_diverges_is_told_and_not_made_again(tmp_path, capsys):
    class Diverging(training.Training):
        error: Exception = nsl_keras.NonFiniteLossError("The loss became nan.")

        def run(self, method, rate, images, seed):
            raise self.error

    run = Diverging(SETTING, data.FewShotData(**parts()), tmp_path / "states", "auto", 0)
    records = training.run_methods(run, ["meta_static_published"], [0, 1], tmp_path)
    assert all(record["diverged"] == "The loss became nan." for record in records.runs)
    row = next(line for line in lines_of(records) if "as published |" in line)
    assert "| diverged in 2 of 2 runs |" in row
    training.run_methods(run, ["meta_static_published"], [0, 1], tmp_path)
    assert capsys.readouterr().out.count("finished before") == 2
    # Other errors are none of these.
    run.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        training.run_methods(run, ["maml"], [0], tmp_path)


def test_older_runs_keep_their_table(tmp_path):
    setting = {**dataclasses.asdict(SETTING), **data.FewShotData(**parts()).counts}
    del setting["augmentation"], setting["episode_augmentation"]
    records = runs.RunRecords(tmp_path, setting)
    assert "are of an older version" in table.section(records)
    assert "not run" not in table.section(records)
    record = {
        "method": "finetuning",
        "seed": 0,
        "learning_rate": 1e-3,
        "command": "",
        "batch_normalization": "moving",
        "training_images": 60,
        "seconds": 1.0,
        "evaluation_seconds": 1.0,
        "right_queries": [3, 4],
    }
    records.add(("finetuning", 0), record)
    rows = [line for line in lines_of(records) if line.startswith("| finetuning")]
    assert len(rows) == 1 and "full batches from a Glorot initialization |" in rows[0]


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_every_row_makes_a_learner(name):
    row, shape = methods.METHODS[name], (16, 16, 3)
    network = None
    if row.pretrained:
        network = methods.features("cnn4", row.pretrained, shape)
    if row.episodic:
        learner = methods.episodic_learner(
            name, "tiny", "cnn4", shape, 2, row.batch_normalization, network
        )
        assert isinstance(learner, keras.Model)
        return
    learner = methods.pretrained_learner(
        name, network, 2, row.batch_normalization, np.zeros((4, *shape), "float32")
    )
    assert learner.batch_normalization == row.batch_normalization


def test_meta_learned_networks():
    def learner(name):
        network = methods.features("cnn4", "plain", (16, 16, 3))
        return methods.episodic_learner(
            name, "tiny", "cnn4", (16, 16, 3), 2, "moving", network, trial=1
        )

    ours, published = learner("meta_static_nsn"), learner("meta_static_published")
    assert (ours.inner_learning_rate, ours.learning_rate_form) == (0.03, "learned")
    assert (published.inner_learning_rate, published.learning_rate_form) == (0.2, "fixed")
    kernels = [each.model.get_layer("classifier").kernel for each in (ours, published)]
    assert [bool(np.any(kernel)) for kernel in kernels] == [False, True]
    normalized = learner("meta_static_normalized").model
    features = keras.Model(normalized.input, normalized.layers[-2].output)
    images = np.random.default_rng(0).random((3, 16, 16, 3))
    lengths = np.linalg.norm(features.predict(images, verbose=0), axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)


@pytest.mark.parametrize("backbone", ["cnn4", "cnn9"])
def test_plain_networks_of_the_dynamic_ones_size_and_cost(backbone):
    shape = (16, 16, 3)
    dynamic = methods.features(backbone, "dynamic", shape)

    def figures(model):
        cost = nsl_keras.convert.summary(model).multiply_adds
        return sum(int(np.prod(v.shape)) for v in model.trainable_variables), cost

    parameters, cost = figures(dynamic)
    assert figures(methods.features(backbone, "same_parameters", shape))[
        0
    ] == pytest.approx(parameters, rel=0.05)
    assert figures(methods.features(backbone, "same_cost", shape))[1] == pytest.approx(
        cost, rel=0.05
    )


def test_episodes_are_moved_by_seed_and_step():
    run = tiny_training(pathlib.Path("unused"))
    batches = run.sampler("train", 0).batches(2, 3)
    plain = run.sampler("train", 0).batches(2, 3)
    moved = training.AugmentedEpisodes(batches, 0)
    (support, labels, queries), targets = moved[1]
    (expected, same_labels, _), same_targets = plain[1]
    assert support.shape == expected.shape
    assert np.any(support != expected)
    np.testing.assert_array_equal(labels, same_labels)
    np.testing.assert_array_equal(targets, same_targets)
    np.testing.assert_array_equal(moved[1][0][2], queries)
    # The next epoch has other episodes, as without augmentation.
    moved.epoch = plain.epoch = 1
    (later, _, _), targets = moved[1]
    assert np.any(later != support)
    np.testing.assert_array_equal(targets, plain[1][1])


@pytest.mark.long
def test_augmented_settings_have_a_folder_of_their_own(tmp_path):
    run = tiny_training(tmp_path, augmentation=True, episode_augmentation=True)
    records = training.run_methods(run, ["proto_net"], [0], tmp_path)
    assert records.folder.name == "tiny_cnn4_2way_2shot_augmented_augmented_episodes"
    text = table.section(records)
    assert "mirrored in pretraining and in episodes of training." in text


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
    assert len(again.fingerprint) == 12 and images.fingerprint is None

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


def test_no_class_in_two_parts(tmp_path):
    overlapping = {**parts(), "test": parts()["validation"]}
    with pytest.raises(ValueError, match="`validation` and `test` must have no class"):
        data.FewShotData(**overlapping)
    path = tmp_path / "images.npz"
    arrays = {}
    for name, part in overlapping.items():
        arrays |= {f"{name}_images": part.images, f"{name}_labels": part.labels}
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="`data_file` must hold parts without common"):
        data.load("tiny", data_file=str(path))


def test_published_figures_stand_beside_mini_imagenet_alone():
    assert table._is_published(dict(table.PUBLISHED))
    for change in ({"shots": 1}, {"dataset": "pacs"}, {"train_classes": 4}):
        assert not table._is_published({**table.PUBLISHED, **change})


def test_somewhere_the_images_must_be():
    with pytest.raises(ValueError, match="`data_dir` must be a folder with train"):
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

"""One file for each task of a shared network."""

import keras
import numpy as np
import pytest
from helpers import assert_close, normal, randomize, stacked

from nsl_keras import convert, few_shot, layers, predictors


def network(seed=0):
    keras.utils.set_random_seed(seed)
    hidden, norm = keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()
    return stacked((8,), hidden, norm, keras.layers.Dense(4, "relu"), keras.layers.Dense(2))


INPUTS = normal(3, 8)


def task(similarity="unconstrained", block_size=2, seed=0, head=True, **options):
    model = convert.add_similarity(
        network(seed), similarity, block_size=block_size, **options
    )
    model.layers[-1].trainable = head
    return model


def saved(path, model):
    convert.save_task(model, path)
    return path


@pytest.mark.jax
def test_a_task_in_another_copy(tmp_path):
    one, other = task(), task()
    # Names are counted on: "dense_5".
    assert one.weights[0].path != other.weights[0].path
    randomize(one.trainable_variables)
    one.layers[1].trainable = True
    randomize(one.layers[1].variables)
    with pytest.raises(ValueError, match=r"`model` must train the weights of the task"):
        convert.load_task(other, saved(tmp_path / "task", one))
    other.layers[1].trainable = True
    convert.load_task(other, tmp_path / "task")
    assert_close(other(INPUTS), one(INPUTS), 1e-6)
    assert (tmp_path / "task").stat().st_size < 5000


def test_the_temperature_is_part_of_a_task(tmp_path):
    model = few_shot.Finetuner(network(), steps=1).adapt(INPUTS, ["elk", "fox", "fox"])
    one, other = (convert.add_similarity(model) for _ in range(2))
    one.calibrate(3.0)
    convert.load_task(other, saved(tmp_path / "task", one))
    assert other.temperature == 3


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: task(seed=1), "must be one with the frozen weights"),
        (
            lambda: task(block_size=4),
            "must have the similarities, with the kinds and block",
        ),
        (lambda: task("symmetric"), "must have the similarities, with the kinds and block"),
        (network, "must have the similarities, with the kinds and block"),
        (lambda: task(head=False), "must train the weights of the task"),
    ],
)
def test_tasks_of_others(other, message, tmp_path):
    path, model = saved(tmp_path / "task", randomize(task())), other()
    before = model.get_weights()
    with pytest.raises(ValueError, match=rf"`model` {message}.*task.* Received: model"):
        convert.load_task(model, path)
    for one, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, value)


def test_tasks_of_other_predictors(tmp_path):
    def model(**options):
        plain = stacked((8, 8, 3), keras.layers.Conv2D(4, 3))
        recipe = predictors.SimilarityPredictor("cnn", **options)
        return convert.add_similarity(plain, predictor=recipe)

    path = saved(tmp_path / "task", model())
    with pytest.raises(ValueError, match="must have the similarities, with the kinds"):
        convert.load_task(model(residual=False), path)


def test_broken_files(tmp_path):
    model = task()
    path = saved(tmp_path / "task", model)
    whole = path.read_bytes()
    paths = [tmp_path / str(length) for length in (0, 10, 300, len(whole) - 40)]
    for broken in paths:
        broken.write_bytes(whole[: int(broken.name)])
    np.savez(tmp_path / "other.npz", [1, 2])
    for broken in (*paths, tmp_path / "other.npz"):
        with pytest.raises(ValueError, match="`path` must be a whole file that `save_tas"):
            convert.load_task(model, broken)
    with pytest.raises(FileNotFoundError):
        convert.load_task(model, tmp_path / "missing")


def test_a_failed_save_leaves_the_former_file(tmp_path, monkeypatch):
    path = saved(tmp_path / "task", task())
    before = path.read_bytes()

    def fails(file, *values):
        file.write(b"half")
        raise OSError("No space left")

    monkeypatch.setattr(np, "savez_compressed", fails)
    with pytest.raises(OSError, match="No space"):
        convert.save_task(task(), path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_errors(tmp_path):
    model = network()
    model.trainable = False
    with pytest.raises(ValueError, match="`model` must be one with trainable weights"):
        convert.save_task(model, tmp_path / "task")
    with pytest.raises(ValueError, match="`save_task` needs a built"):
        convert.save_task(keras.Sequential([layers.CosineDense(2)]), tmp_path / "task")

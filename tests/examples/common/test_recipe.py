"""Recipes and runs that go on where they stopped, whatever is trained."""

import dataclasses
import time

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from examples.common import data, recipe, stopping

TINY = recipe.Recipe(6, (3, 5), batch_size=8, augmentation="crop_flip")


def tiny_data(count=40):
    rng = np.random.default_rng(0)
    images = rng.random((count, 8, 8, 3)).astype("float32")
    return data.Split(images, rng.integers(0, 4, count))


def tiny_model(trained=TINY):
    """With dropout, whose random numbers have a state too."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            nsl_keras.layers.NeuralSimilarityConv2D(4, 3),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3, seed=0),
            keras.layers.Dense(4),
        ]
    )
    recipe.compile_classifier(model, trained, jit_compile=False)
    return model


def batches():
    return recipe.Batches(tiny_data(), TINY, seed=0)


class Interruption(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.long
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "chunk_steps", lambda steps: 2)
    whole = tiny_model()
    record = recipe.fit(whole, batches(), TINY, tmp_path / "whole")
    assert np.isfinite(record["training_loss"])

    folder = tmp_path / "interrupted"
    first = tiny_model()
    with pytest.raises(KeyboardInterrupt):
        recipe.fit(first, batches(), TINY, folder, [Interruption(1)])
    # Of the two chunks that were trained, the second was not yet on the disk.
    (states,) = folder.iterdir()
    assert sorted(path.name for path in states.iterdir()) == [
        *("epoch_0.state", "epoch_1.state")
    ]
    second = tiny_model()
    recipe.fit(second, batches(), TINY, folder)
    assert int(second.optimizer.iterations) == 6
    differs = False
    for ours, other, stopped in zip(
        second.variables, whole.variables, first.variables, strict=True
    ):
        ours, other, stopped = map(ops.convert_to_numpy, (ours, other, stopped))
        np.testing.assert_array_equal(ours, other)
        differs |= bool(np.max(np.abs(stopped - other)) > 1e-3)
    assert differs


def test_chunks_of_another_length_begin_anew(tmp_path):
    """The second chunk of two steps is not the second one of three."""
    pairs, threes = (recipe.Batches(tiny_data(), TINY, 0, chunk) for chunk in (2, 3))
    with pytest.raises(KeyboardInterrupt):
        recipe.fit(tiny_model(), pairs, TINY, tmp_path, [Interruption(1)])
    model = tiny_model()
    recipe.fit(model, threes, TINY, tmp_path)
    assert int(model.optimizer.iterations) == TINY.steps


def test_a_diverging_run_is_named(tmp_path):
    diverging = dataclasses.replace(TINY, learning_rate=1e30)
    with pytest.raises(nsl_keras.NonFiniteLossError, match="loss is nan"):
        recipe.fit(tiny_model(diverging), batches(), diverging, tmp_path)


def test_a_run_stops_at_its_deadline_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "chunk_steps", lambda steps: 2)
    with pytest.raises(SystemExit) as stopped:
        recipe.fit(tiny_model(), batches(), TINY, tmp_path, deadline=time.monotonic())
    assert stopped.value.code == stopping.OutOfTime.CODE
    assert "Stopped after 0 steps. The same command goes on." in capsys.readouterr().out
    found = recipe.fit(
        tiny_model(), batches(), TINY, tmp_path, deadline=time.monotonic() + 1000
    )
    # Called again after its last step, it trains no more.
    model = tiny_model()
    again = recipe.fit(model, batches(), TINY, tmp_path, deadline=time.monotonic())
    assert again == found
    assert int(model.optimizer.iterations) == 6


def test_each_call_makes_headway(tmp_path, monkeypatch, capsys):
    """Where a call is shorter than a chunk, it makes one."""
    monkeypatch.setattr(recipe, "chunk_steps", lambda steps: 2)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    for number, steps in enumerate((2, 4, 6)):
        model = tiny_model()
        if number < 2:
            with pytest.raises(stopping.OutOfTime):
                recipe.fit(model, batches(), TINY, tmp_path, deadline=1e-9)
            assert f"Stopped after {steps} steps." in capsys.readouterr().out
        else:
            recipe.fit(model, batches(), TINY, tmp_path, deadline=1e-9)
        assert int(model.optimizer.iterations) == steps


def test_loops_on_the_device_need_jax(tmp_path):
    if keras.backend.backend() != "jax":
        with pytest.raises(ValueError, match="`on_device` needs the JAX backend"):
            recipe.fit(tiny_model(), batches(), TINY, tmp_path, on_device=True)


def test_batches_are_passes_over_all_images():
    split = data.Split(np.arange(20.0).reshape(20, 1, 1, 1), np.arange(20))
    short = dataclasses.replace(TINY.scaled(5), batch_size=8, augmentation="none")
    made = recipe.Batches(split, short, seed=0)
    assert len(made) == 5
    seen = np.concatenate([made[index][1] for index in range(5)])
    for start in (0, 20):
        assert sorted(seen[start : start + 20]) == list(range(20))
    assert list(seen[:20]) != list(seen[20:])
    # From the middle: the third batch reaches into the second pass.
    again = recipe.Batches(split, short, seed=0)
    np.testing.assert_array_equal(again[3][1], seen[24:32])
    np.testing.assert_array_equal(again[2][1], seen[16:24])
    assert list(recipe.Batches(split, short, seed=1)[0][1]) != list(seen[:8])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"momentum": 0.9, "nesterov": False, "clipvalue": None}),
        ({"optimizer": "nesterov", "clip": 10.0}, {"nesterov": True, "clipvalue": 10.0}),
        ({"optimizer": "adam"}, {"epsilon": 1e-8}),
        ({"optimizer": "adamw", "weight_decay": 0.1}, {"weight_decay": 0.1}),
    ],
    ids=str,
)
def test_optimizers(changes, expected):
    made = dataclasses.replace(TINY, **changes).make_optimizer()
    assert {name: getattr(made, name) for name in expected} == expected


def test_rates():
    rate = TINY.rates()
    np.testing.assert_allclose(
        [float(rate(n)) for n in (0, 3, 4, 6)], [0.1, 0.1, 0.01, 1e-3]
    )
    falling = dataclasses.replace(TINY, cosine_decay=True).rates()
    np.testing.assert_allclose([float(falling(n)) for n in (0, 3, 6)], [0.1, 0.05, 0])
    assert TINY.scaled(600).rate_drops == (300, 500)
    assert dataclasses.replace(TINY, rate_drops=()).rates() == 0.1


def test_warmup():
    warm = dataclasses.replace(TINY, warmup_steps=4)
    found = [float(warm.rates()(n)) for n in range(7)]
    np.testing.assert_allclose(found, [0.025, 0.05, 0.075, 0.1, 0.01, 0.01, 1e-3])
    assert warm.scaled(600).warmup_steps == 400
    constant = dataclasses.replace(warm, rate_drops=())
    for each in (warm, constant):
        schedule = each.rates()
        config = keras.saving.serialize_keras_object(schedule)
        again = keras.saving.deserialize_keras_object(config)
        assert [float(again(n)) for n in (1, 6)] == [float(schedule(n)) for n in (1, 6)]


@pytest.mark.parametrize(
    ("steps", "chunk"), [(64_000, 500), (42_500, 500), (60, 60), (997, 997)]
)
def test_state_is_saved_at_whole_parts_of_the_training(steps, chunk, capsys):
    assert recipe.chunk_steps(steps) == chunk
    assert ("begins anew" in capsys.readouterr().out) == (steps == 997)

"""Networks of three convolutions: their sizes, the choice of rates, and their table."""

import types

import numpy as np
import pytest

from experiments.common import data, runs
from experiments.small import __main__ as small


def test_a_study_tries_rates_and_is_recorded_once(monkeypatch, tmp_path):
    images, scores = np.zeros((20, 28, 28, 1)), {3e-3: 0.9, 1e-3: 0.8, 1e-2: 0.7, 3e-2: 0.6}
    split, used = data.Split(images, np.arange(20) % 10), []
    found = data.ImageData(split, split, split)
    monkeypatch.setattr(small, "read", lambda _: found)
    monkeypatch.setattr(small, "FLAGS", types.SimpleNamespace(seeds=["0", "1"]))
    monkeypatch.setattr(small, "fit", lambda *given: used.append(given[2:]))
    monkeypatch.setattr(small, "accuracy", lambda *_: scores.get(used[-1][1], 0.1))
    steps = {"dynamic": 3.0, "plain": 1.0}
    timed = lambda *cell: {"step": steps[cell[-1]], "inference": 2.0}  # noqa: E731
    monkeypatch.setattr(small, "times", timed)
    for name in ("dynamic", "plain, equal time") * 2:
        small.study(("mnist", "strides", 5_000), name, tmp_path / "small.jsonl", {})
    # Neighbors of the best rate too, then the seeds; as long with three times the epochs.
    rates = [1e-2, 3e-2, 1e-1, 3e-3, 1e-3, 3e-3, 3e-3]
    wanted = [(epochs, rate) for epochs in (20, 60) for rate in rates]
    assert [each for each in used if each] == wanted
    records = runs.RunRecords(tmp_path / "small.jsonl").runs
    row = "strides, 5,000 | plain, equal time | 4,999 | 0.1 | 60 | 0.003"
    assert f"| mnist, {row} | 90.00 and 90.00 | +0.00 and +0.00 (n = 2) |" in small.table(
        records
    )
    assert small.figures(records).keys() == {"small_parameters", "small_seconds"}
    for network in small.NETWORKS:
        for own in small.CONVOLUTIONS:
            model = small.make("mnist", network, 12_000, own)
            count = sum(np.prod(each.shape) for each in model.trainable_variables)
            size = 12_000 * (int(own[-1]) if own[-2] == "x" else 1)
            assert network == "flattened" or count == pytest.approx(size, rel=0.05)
            maps = model.layers[-2].input.shape[1:3]
            assert maps == ((3, 3) if network == "pooling" else (4, 4))

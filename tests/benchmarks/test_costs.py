"""The picture of costs holds the ratios of its rows."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from benchmarks import costs


def test_rows_become_curves():
    first = next(iter(costs.of_convolutions("channels=2", 2, xla=False)))
    rows = [row | {"median": 3.0} for row in first.rows(rounds=1)]
    assert {row["candidate"] for row in rows} == {"static similarity", "dynamic similarity"}
    figure = costs.picture([*rows, {**rows[0], "case": "batch=8, training"}])
    channels, batch = figure.axes
    assert (channels.get_xlabel(), batch.get_xlabel()) == ("channels", "batch")
    _, *curves = channels.lines
    assert [list(line.get_ydata()) for line in curves[:2]] == [[3.0], [3.0]]

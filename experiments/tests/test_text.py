"""A small transformer with few labels: what is trained of it, and the choice of rates."""

import keras
import numpy as np
import pytest

from experiments.common import runs
from experiments.pretrained import table
from experiments.text import __main__ as text

hub = pytest.importorskip("keras_hub")


def network():
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
    backbone = hub.models.BertBackbone(vocabulary_size=20, max_sequence_length=5, **sizes)
    tokens = backbone.output["sequence_output"]
    return keras.Model(backbone.input, keras.layers.GlobalAveragePooling1D()(tokens))


def test_methods_train_what_they_say(monkeypatch, eager):
    monkeypatch.setattr(text, "network", network)
    monkeypatch.setattr(text, "EPOCHS", 1)
    ids = np.random.default_rng(0).integers(1, 20, (6, 5))
    tokens = {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids > 0}
    few = text.Few(tokens, np.arange(6) % 3, tokens, np.arange(6) % 3)
    monkeypatch.setattr(text, "draw", lambda *_: few)
    found = {name: text.run(name, "clinc150", 2, 0, 1e-2) for name in text.METHODS}
    # Six layers read 5 * 16 + 32 features; the head has 51 numbers.
    width, head = 5 * 16 + 32, 51
    blocks = {size: head + width * (size - 1) // 2 for size in (4, 8, 16)}
    own = [head, head + width, head + 6 * 16, *blocks.values()]
    trained = [each.get("trained") for each in found.values()]
    assert trained[:-4] == [None, *own]
    # In Keras's own shapes.
    assert trained[-3] - head == 4 * (trained[-4] - head) > 4 * width
    everything = text.network().count_params() + head
    # Without what the network computes for a classifier of its own.
    assert head < trained[-2] < trained[-1] <= everything
    assert max(each.get("folded_difference", 0) for each in found.values()) < 1e-5
    assert all(0 <= each["accuracy"] <= 1 for each in found.values())
    assert "| everything | +" in table.table([*found.values()], table.TEXTS).replace(
        "-", "+"
    )


def test_the_chosen_rate_is_inside_of_those_tried(monkeypatch, tmp_path):
    def run(name, place, shots, number, rate):
        score = -abs(np.log10(rate) + 4)
        return {"method": name, "shots": shots, "rate": rate, "accuracy": score}

    monkeypatch.setattr(text, "run", run)
    monkeypatch.setattr(text, "FLAGS", type("Flags", (), {"trials": 2}))
    trials = runs.RunRecords(tmp_path / "text.jsonl", "trials", {})
    assert text.best_rate(trials, "LoRA of rank 1 + head", 3) == 1e-4
    assert {each["rate"] for each in trials.runs} == {3e-5, 1e-4, 3e-4, 1e-3, 3e-3}
    assert text.best_rate(trials, table.BASELINE, 3) == 0

"""A pretrained network with few labels: its weights, and what is trained of it."""

import pickle

import keras
import numpy as np
import pytest

from experiments.pretrained import __main__ as pretrained, efficientnet, table

#: `{"kernel": a view of six floats of shape (3, 2)}`, as PyTorch writes it.
VIEW = (
    b"\x80\x02}(X\x06\x00\x00\x00kernelctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00"
    b"\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06NtQK\x00"
    b"K\x03K\x02\x86K\x01K\x03\x86\x89NtRu."
)


def test_weights_are_read_without_pytorch(tmp_path):
    path, values = tmp_path / "weights.pth", np.arange(6, dtype="float32")
    head, storage = [pickle.dumps(each) for each in (1, 2, {})], np.int64(6).tobytes()
    path.write_bytes(
        b"".join([*head, VIEW, pickle.dumps(["0"]), storage, values.tobytes()])
    )
    (kernel,) = efficientnet.read_weights(path).values()
    np.testing.assert_array_equal(kernel, values.reshape(2, 3).T)
    for others in ([], [VIEW]):
        path.write_bytes(b"".join([*head, *others, pickle.dumps(print)]))
        with pytest.raises(pickle.UnpicklingError, match=r"builtins.print is not"):
            efficientnet.read_weights(path)


def test_training_keeps_statistics_of_batch_norms():
    inputs = keras.Input((3,))
    network = keras.Model(inputs, keras.layers.BatchNormalization()(inputs))
    model = pretrained.with_batch_norms(network, pretrained.FixedStatistics)
    model.compile("sgd", "mse")
    model.fit(np.full((4, 3), 5.0), np.zeros((4, 3)), verbose=0)
    gamma, beta, mean, variance = model.get_weights()
    np.testing.assert_allclose([mean, variance], [np.zeros(3), np.ones(3)])
    assert np.all(gamma < 1) and np.all(beta < 0)


def test_methods_train_what_they_say(monkeypatch, eager):
    inputs = keras.Input((8, 8, 3))
    outputs = keras.layers.DepthwiseConv2D(3, use_bias=False)(inputs)
    outputs = keras.layers.BatchNormalization()(outputs)
    outputs = keras.layers.Conv2D(3, 1, use_bias=False)(outputs)
    outputs = keras.layers.GlobalAveragePooling2D()(outputs)
    network = keras.Model(inputs, outputs)
    monkeypatch.setattr(pretrained, "backbone", lambda: network)
    for name, count in (("EPOCHS", 1), ("FEATURES_EPOCHS", 1), ("ENTRIES", 4)):
        monkeypatch.setattr(pretrained, name, count)
    images = np.random.default_rng(0).uniform(0, 255, (6, 8, 8, 3)).astype("float32")
    few = pretrained.Few(images, np.arange(6) % 3, images, np.arange(6) % 3)
    before = network.get_weights()
    found = {name: method(few, 1e-2) for name, method in pretrained.METHODS.items()}
    # The head has 12 numbers, the batch norm 6, an M 9 or 81, the kernels 27 and 9, the
    # smaller one's LoRA 6 of each rank.
    trained = [each.get("trained") for each in found.values()]
    assert trained[:5] == [None, None, None, 12, 10]
    assert trained[7:] == [12, 18, 21, 39, 93, 27, 99, 54, 18, 36, 99, 15, None]
    assert all(0 <= each["accuracy"] <= 1 for each in found.values())
    assert max(each.get("folded_difference", 0) for each in found.values()) < 1e-4
    for value, start in zip(network.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, start)
    runs = [
        {"method": name, "domain": "blur", "shots": 5, "seed": 0, "rate": 0.1, **record}
        for name, record in found.items()
    ]
    assert "| everything | +" in table.table(runs).replace("| -", "| +")

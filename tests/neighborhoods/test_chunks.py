"""A dictionary in chunks gives the same head, and holds no more than a chunk."""

import keras
import numpy as np
import pytest
from golden_files import gradients
from keras import ops

from nsl_keras.backend import sum_over_chunks
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
DTYPE = "float64" if IS_TENSORFLOW else "float32"
TOLERANCE = 1e-12 if IS_TENSORFLOW else 1e-5
FEATURES, CLASSES, ENTRIES = 5, 3, 8
HEADS = {
    "cosine": lambda: CosineDense(CLASSES, dtype=DTYPE),
    "dense": lambda: keras.layers.Dense(CLASSES, dtype=DTYPE),
    "stack": lambda: keras.Sequential(
        [
            keras.layers.Dense(6, "tanh", dtype=DTYPE),
            keras.layers.Dense(4, use_bias=False, dtype=DTYPE),
            CosineDense(CLASSES, dtype=DTYPE),
        ]
    ),
}


def build_head(kind, chunk_size, **options):
    options = {"dropout": 0.0, "inner_learning_rate": 0.3, **options}
    own = {
        name: options.pop(name) for name in ("metric", "dropout_scope") if name in options
    }
    dictionary = NeighborDictionary(
        ENTRIES, dropout=options.pop("dropout"), seed=1, dtype=DTYPE, **own
    )
    layer = MetaNeighborhoodHead(
        HEADS[kind](), dictionary, chunk_size=chunk_size, dtype=DTYPE, **options
    )
    layer.build((None, FEATURES))
    rng = np.random.default_rng(0)
    for variable in layer.trainable_variables:
        variable.assign(0.4 + 0.5 * rng.normal(size=variable.shape))
    return layer


def results(layer, features):
    """Logits, weights and all gradients, with half of the entries dropped if asked for."""
    cotangent = np.random.default_rng(2).normal(size=(len(features), CLASSES))

    def loss(z):
        return ops.sum(layer(z, training=True) * ops.cast(cotangent, z.dtype))

    z = ops.convert_to_tensor(features, dtype=DTYPE)
    found = gradients(loss, [z], layer.trainable_variables)
    found += [layer.adapted_logits(z), *layer.adapted_weights(z)]
    return [ops.convert_to_numpy(tensor) for tensor in found]


@pytest.mark.parametrize(
    ("kind", "options", "chunk_sizes"),
    [
        ("cosine", {}, (1, 3, 4)),
        ("cosine", {"inner_steps": 2, "learning_rate_form": "diagonal"}, (3,)),
        ("cosine", {"dropout": 0.5, "metric": "euclidean"}, (3, 4)),
        ("dense", {"dropout": 0.5, "dropout_scope": "batch"}, (1, 3)),
        ("stack", {}, (4,)),
        ("stack", {"inner_steps": 2, "learning_rate_form": "fixed"}, (3,)),
    ],
)
def test_chunks_change_nothing(kind, options, chunk_sizes):
    """Chunks that divide the entries, leave a rest, and hold one entry each."""
    features = np.random.default_rng(1).normal(size=(4, FEATURES))
    whole = results(build_head(kind, None, **options), features)
    for chunk_size in chunk_sizes:
        chunked = results(build_head(kind, chunk_size, **options), features)
        assert len(whole) == len(chunked)
        for expected, received in zip(whole, chunked, strict=True):
            scale = max(np.abs(expected).max(), 1e-3)
            np.testing.assert_allclose(received, expected, rtol=0, atol=TOLERANCE * scale)


def test_large_dictionaries_are_summed_in_chunks_by_themselves():
    """The products are cut where no chunk size is given, too."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(1300, FEATURES))
    features = rng.normal(size=(3, FEATURES)).astype("float32")
    found = []
    for chunk_size in (None, 1300):
        keras.utils.set_random_seed(0)
        layer = MetaNeighborhoodHead(CosineDense(4), 1300, chunk_size=chunk_size)
        layer.build((None, FEATURES))
        layer.dictionary.keys.assign(keys)
        found.append(ops.convert_to_numpy(layer(features)))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


def test_sum_of_chunks():
    """Values and gradients of a sum whose terms share a tensor, along both axes."""
    rng = np.random.default_rng(0)
    shared, rows, columns = (rng.normal(size=size) for size in (3, (7, 3), (2, 7)))
    shared, rows, columns = (
        ops.convert_to_tensor(array, dtype=DTYPE) for array in (shared, rows, columns)
    )

    def terms(shared, chunk):
        rows, columns = chunk
        return [ops.matmul(columns, ops.tanh(rows * shared[0])), ops.sum(rows)]

    def value(chunk_size):
        def scalar(shared, rows, columns):
            first, second = sum_over_chunks(
                terms, [shared], [rows, columns], (0, 1), chunk_size
            )
            return ops.sum(first**2) + second**2

        return [
            scalar(shared, rows, columns),
            *gradients(scalar, [shared, rows, columns]),
        ]

    for expected, received in zip(value(7), value(2), strict=True):
        np.testing.assert_allclose(
            received, expected, rtol=1e-5 if not IS_TENSORFLOW else 1e-12
        )


@pytest.mark.parametrize(
    ("dropout_scope", "jit_compile"),
    [("batch", False), ("example", True)],
)
def test_fit_in_chunks(dropout_scope, jit_compile):
    rng = np.random.default_rng(0)
    inputs = keras.Input((FEATURES,))
    layer = MetaNeighborhoodHead(
        CosineDense(CLASSES),
        NeighborDictionary(50, dropout_scope=dropout_scope, seed=0),
        chunk_size=8,
    )
    model = keras.Model(inputs, layer(inputs))
    model.compile(
        optimizer=keras.optimizers.Adam(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    x = rng.normal(size=(30, FEATURES)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    before = [np.array(variable.value) for variable in layer.trainable_variables]
    history = model.fit(x, y, batch_size=12, epochs=4, verbose=0).history["loss"]
    assert history[-1] < history[0]
    for start, variable in zip(before, layer.trainable_variables, strict=True):
        assert np.abs(np.array(variable.value) - start).max() > 1e-4, variable.path


@pytest.mark.skipif(not IS_TENSORFLOW, reason="SavedModel is TensorFlow's")
def test_saved_model_in_chunks(tmp_path):
    import tensorflow as tf

    inputs = keras.Input((FEATURES,))
    layer = MetaNeighborhoodHead(
        HEADS["cosine"](), ENTRIES, chunk_size=3, inner_steps=2, dtype=DTYPE
    )
    model = keras.Model(inputs, layer(inputs))
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    for batch in (1, 6):
        x = np.random.default_rng(0).normal(size=(batch, FEATURES)).astype("float32")
        np.testing.assert_allclose(loaded.serve(x), model(x), rtol=1e-5, atol=1e-6)


def test_the_tape_refuses_chunks():
    head = keras.Sequential([keras.layers.Dense(4), keras.layers.LayerNormalization()])
    layer = MetaNeighborhoodHead(head, ENTRIES, chunk_size=3)
    with pytest.raises(ValueError, match="`chunk_size` must be None on the nested tape"):
        layer.build((None, FEATURES))
    with pytest.raises(ValueError, match="`chunk_size` must be a positive integer"):
        MetaNeighborhoodHead(CosineDense(3), ENTRIES, chunk_size=0)


def test_entries_of_a_batch_are_those_of_the_mask():
    """Computing the kept entries alone gives what masking the others gives."""
    layer = build_head("cosine", None)
    z = np.random.default_rng(1).normal(size=(4, FEATURES)).astype(DTYPE)
    entries = np.array([6, 1, 3])
    kept = np.isin(np.arange(ENTRIES), entries)[None]
    np.testing.assert_allclose(
        layer.adapted_logits(z, entries=entries), layer.adapted_logits(z, kept), rtol=1e-5
    )
    layer.dictionary.dropout, layer.dictionary.dropout_scope = 0.5, "batch"
    drawn = ops.convert_to_numpy(layer.dictionary.draw_entries(training=True))
    assert len(set(drawn)) == ENTRIES - ENTRIES // 2
    assert layer.dictionary.draw_entries(training=False) is None

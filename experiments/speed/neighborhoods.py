"""The Meta-Neighborhoods head, and whole models, against plain heads.

Slow candidates are compared in separate rounds, so that they do not stretch the times of
the rest.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import nsl_keras
from experiments.networks.resnet import resnet_v2
from experiments.speed import measure

BATCH = 128
FEATURES = 256
CLASSES = 10
NEIGHBORS, STACK_NEIGHBORS, STACK_WIDTH = 5000, 1000, 128
#: Entries of the dictionaries on the curve of cost.
SIZES = (100, 1_000, 10_000, 100_000)

DUAL = "Meta-Neighborhoods, dual form"
TAPES = "Meta-Neighborhoods, vectorized nested tapes"
CASE = f"d={FEATURES}, C={CLASSES}, B={BATCH}"


def head(xla: bool) -> Iterator[measure.Comparison]:
    features = tf.random.normal((BATCH, FEATURES))
    plain = cosine_head()
    layers = {
        "CosineDense": plain,
        DUAL: neighborhood_head(),
        f"{DUAL}, one draw of entries a batch": neighborhood_head(dropout_scope="batch"),
    }
    case = f"S={NEIGHBORS}, {CASE}"
    yield from measure.passes(case, layers, features, xla, calls_per_round=5)
    # Both inner loops of this package, for a cosine head and for a stack of layers.
    for title, entries, make_head in (
        ("cosine head", NEIGHBORS, cosine_head),
        (f"3x{STACK_WIDTH} head", STACK_NEIGHBORS, stacked_head),
    ):
        layers = {
            TAPES: neighborhood_head(entries, make_head(), inner_loop="tape"),
            DUAL: neighborhood_head(entries, make_head()),
        }
        case = f"{title}, S={entries}, {CASE}"
        forward, backward = measure.passes(case, layers, features, xla)
        yield forward
        # XLA takes what enters a differentiated `vectorized_map` for constants: each draw
        # of dropout is compiled anew, for seconds.
        yield dataclasses.replace(backward, rounds=2 if xla else 15)
    for entries in SIZES:
        layers = {"CosineDense": plain, DUAL: neighborhood_head(entries)}
        rounds = 5 if entries >= 100_000 else 15
        case = f"dictionary of S={entries}, {CASE}"
        yield from measure.passes(case, layers, features, xla, rounds=rounds)


def neighborhood_head(
    entries: int = NEIGHBORS,
    head: keras.layers.Layer | None = None,
    dropout_scope: str = "example",
    **options: Any,
) -> keras.layers.Layer:
    entries = dictionary(entries, dropout_scope=dropout_scope)
    return nsl_keras.layers.MetaNeighborhoodHead(head or cosine_head(), entries, **options)


def dictionary(entries: int, **options: Any) -> keras.layers.Layer:
    """It leaves half of the entries out in training, none in inference."""
    options |= {"dropout": 0.5, "seed": 0}
    return nsl_keras.layers.NeighborDictionary(entries, **options)


def cosine_head() -> keras.layers.Layer:
    return nsl_keras.layers.CosineDense(CLASSES)


def stacked_head() -> keras.layers.Layer:
    hidden = [keras.layers.Dense(STACK_WIDTH, "relu") for _ in range(3)]
    return keras.Sequential([*hidden, keras.layers.Dense(CLASSES)])


def requests(xla: bool, width: int = 192) -> Iterator[measure.Comparison]:
    """One head of 100 classes in `predict` and in SavedModels, with its neighbors too."""
    ours = "Meta-Neighborhoods"
    for make_head in (keras.layers.Dense, nsl_keras.layers.CosineDense):
        inputs = keras.Input((width,))
        plain = keras.Model(inputs, make_head(100)(inputs))
        model = nsl_keras.MetaNeighborhoodModel(None, make_head(100), NEIGHBORS)
        model.build((None, width))
        served = {
            make_head.__name__: served_by(plain, "serve", width, xla),
            ours: served_by(model, "serve", width, xla),
            f"{ours}, `neighbors`": served_by(model, "neighbors", width, xla),
        }
        for each in (plain, model):
            each.compile(jit_compile=xla)
        many = np.random.default_rng(0).normal(size=(512, width))
        for batch in (1, 64):
            case = f"{make_head.__name__}, S={NEIGHBORS}, d={width}, C=100, B={batch}"
            queries = tf.random.normal((batch, width))
            of_served = [functools.partial(each, queries) for each in served.values()]
            steps = dict(zip(served, of_served, strict=True))
            calls = 50 if batch == 1 else 2
            yield measure.Comparison(f"{case}, SavedModel", steps, calls_per_round=calls)
            steps = {
                make_head.__name__: functools.partial(plain.predict, many, batch, 0),
                ours: functools.partial(model.predict, many, batch, 0),
            }
            yield measure.Comparison(f"{case}, `predict` of 512 examples", steps)


def served_by(
    model: keras.Model, signature: str, width: int, xla: bool
) -> Callable[[tf.Tensor], float]:
    """A signature of a model's SavedModel."""
    with tempfile.TemporaryDirectory() as folder:
        examples = np.ones((2, width), "float32")
        nsl_keras.export.save_model(model, f"{folder}/1", examples=examples)
        loaded = tf.saved_model.load(f"{folder}/1")
    function = tf.function(lambda x: getattr(loaded, signature)(x), jit_compile=xla)
    return functools.partial(measure.digested, function)


BACKBONES = {
    "convnet4": nsl_keras.backbones.convnet4,
    "resnet_v2(29)": functools.partial(resnet_v2, 29),
}


def model(
    xla: bool,
    backbone: str = "resnet_v2(29)",
    neighbors: int = NEIGHBORS,
    classes: int = CLASSES,
    batch: int = BATCH,
) -> Iterator[measure.Comparison]:
    images = tf.random.normal((batch, 32, 32, 3))
    features = BACKBONES[backbone]()
    logits = nsl_keras.layers.CosineDense(classes)(features.output)
    models = {"backbone + CosineDense": keras.Model(features.input, logits)}
    for name, make_head in (
        ("Meta-Neighborhoods", nsl_keras.layers.CosineDense),
        ("Meta-Neighborhoods, Dense", keras.layers.Dense),
    ):
        parts = BACKBONES[backbone](), make_head(classes), dictionary(neighbors)
        models[name] = nsl_keras.MetaNeighborhoodModel(*parts)
        models[name].build((None, *features.input_shape[1:]))
    case = f"{backbone}, {neighbors:,} entries, {classes} classes, batches of {batch}"
    for name, step in measure.OF_MODELS.items():
        yield measure.compared(f"{case}, {name}", models, step, images, xla)


many_classes = functools.partial(model, neighbors=10_000, classes=100, batch=16)

"""Static similarity, and networks of neural similarity, against `Conv2D`.

Every network is the same but for its convolutions.
"""

import functools
from collections.abc import Iterator

import keras
import tensorflow as tf

import nsl_keras
from experiments.common.convolutions import SIMILARITIES
from experiments.few_shot import methods as few_shot
from experiments.neural_similarity import methods
from experiments.speed import measure
from experiments.speed.measure import forward, training_step as train

#: Classes that few-shot networks are trained on.
FEW_SHOT_CLASSES = 64
BATCH = 32
CLASSES = 10


def static(xla: bool) -> Iterator[measure.Comparison]:
    convolutions = {"Conv2D": keras.layers.Conv2D} | {
        f"static {name}": functools.partial(
            nsl_keras.layers.NeuralSimilarityConv2D, similarity=similarity
        )
        for name, similarity in SIMILARITIES.items()
    }
    images, cnn9 = tf.random.normal((BATCH, 32, 32, 3)), nsl_keras.backbones.cnn9
    networks = {name: cnn9(convolution=each) for name, each in convolutions.items()}
    yield measure.compared("CNN-9, training step", networks, train, images, xla)
    networks |= {
        f"folded {name}": nsl_keras.convert.fold(networks[f"static {name}"])
        for name in SIMILARITIES
    }
    options = {"inputs": images, "xla": xla, "calls_per_round": 5}
    yield measure.compared("CNN-9, inference", networks, forward, **options)
    features = tf.random.normal((BATCH, 32, 32, 32))
    layers = {name: each(32, 3, padding="same") for name, each in convolutions.items()}
    for layer in layers.values():
        layer.build(features.shape)
    layers |= {f"folded {name}": layers[f"static {name}"].fold() for name in SIMILARITIES}
    case = "one layer 32x32, 32->32, inference"
    yield measure.compared(case, layers, forward, **options | {"inputs": features})


def network(xla: bool) -> Iterator[measure.Comparison]:
    """Yields comparisons of narrow networks, with what people put in their convolutions."""
    images = tf.random.normal((64, 32, 32, 3))
    options = {"momentum": 0.9, "published": False, "filters": (16, 32, 64)}
    for number, title in (
        ("cost", "narrow CNN-9"),
        ("efficient", "narrow CNN-9, one tap"),
        ("mobile", "narrow MobileNet"),
    ):
        table, shape = methods.TABLES[number], (32, 32, 3)
        networks = {
            method.title: methods.build(table.network, method, shape, CLASSES, **options)
            for method in table.methods.values()
        }
        case = f"{title}, training step, B=64"
        yield measure.compared(case, networks, train, images, xla)
        served = {name: methods.served(model) for name, model in networks.items()}
        case = f"{title}, one image"
        yield measure.compared(case, served, forward, images[:1], xla, calls_per_round=20)
    networks = {}
    names = ("finetuning", "dynamic_nsn", "same_parameters", "squeeze_excite", "condconv")
    for row in (few_shot.METHODS[name] for name in names):
        features = few_shot.features("cnn4", row.network, (32, 32, 3))
        networks[row.title] = few_shot.classifier(features, FEW_SHOT_CLASSES)
    case = "few-shot CNN-4, training step, B=64"
    yield measure.compared(case, networks, train, images, xla)
    if xla:  # What it gains or costs.
        for name in ("finetuning", "dynamic_nsn"):
            title = few_shot.METHODS[name].title
            compiled = {"without XLA": False, "with XLA": True}
            steps = {how: train(networks[title], images, compiled[how]) for how in compiled}
            yield measure.Comparison(f"{case}, {title}", steps)

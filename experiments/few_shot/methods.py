"""The rows of the few-shot table: how each is trained and judged, and published figures."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import nsl_keras
from experiments.common.convolutions import convolutions
from nsl_keras import few_shot


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        title: Its name.
        pretrained: Which classifier of all training classes it starts from, see
            `features`; `None` for a network trained on episodes from the start.
        episodic: Whether it is trained on episodes.
        batch_normalization: Whose statistics batch norms normalize by, in training on
            episodes and in tests.
        learner: What it makes of a pretrained network without further training:
            `"finetuner"`, `"nearest_neighbor"` or `"nearest_centroid"`.
        finetuning: Arguments of `few_shot.Finetuner`.
        inner_rates: Rates of inner steps. The trials take them in turn.
        paper: 5-shot accuracy on Mini-ImageNet by backbone: Table 6 of the paper.
        rebuttal: The same from Table 1 of the authors' rebuttal, the first figures of its
            rows.
    """

    title: str
    pretrained: str | None
    episodic: bool
    batch_normalization: str
    paper: dict[str, str] = dataclasses.field(default_factory=dict)
    rebuttal: dict[str, str] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    learner: str = "finetuner"
    finetuning: dict[str, Any] = dataclasses.field(default_factory=dict)
    inner_rates: tuple[float, ...] = ()


_INNER_RATES = (0.01, 0.03, 0.1)
_CLASSIFIER = {"variables": "classifier"}

METHODS = {
    "finetuning": Method(
        "finetuning of the classifier, from zero",
        "plain",
        False,
        "moving",
        finetuning=_CLASSIFIER,
    ),
    "closer_look": Method(
        "finetuning of the classifier, CloserLookFewShot's recipe",
        "plain",
        False,
        "moving",
        {"cnn4": "49.79 ± 0.79"},
        finetuning=few_shot.finetuning_recipe("closer_look"),
    ),
    "finetuning_glorot": Method(
        "finetuning of the classifier, full batches from a Glorot initialization",
        "plain",
        False,
        "moving",
        finetuning={**_CLASSIFIER, "classifier_initializer": "glorot_uniform"},
    ),
    "nearest_neighbor": Method(
        "nearest neighbour",
        "plain",
        False,
        "moving",
        {"cnn4": "51.04 ± 0.65"},
        learner="nearest_neighbor",
    ),
    "nearest_centroid": Method(
        "nearest centroid", "plain", False, "moving", learner="nearest_centroid"
    ),
    "matching_net": Method("MatchingNet", None, True, "support", {"cnn4": "55.31 ± 0.73"}),
    "proto_net": Method("ProtoNet", None, True, "support", {"cnn4": "68.20 ± 0.66"}),
    "relation_net": Method("RelationNet", None, True, "support", {"cnn4": "65.32 ± 0.70"}),
    "maml": Method(
        "MAML",
        None,
        True,
        "support",
        {"cnn4": "63.15 ± 0.91"},
        {"cnn4": "63.15 ± 0.91", "cnn9": "67.64 ± 0.85"},
        inner_rates=_INNER_RATES,
    ),
    "static_nsn": Method(
        "static NSN",
        "plain",
        False,
        "moving",
        {"cnn4": "65.74 ± 0.68"},
        {"cnn4": "66.91 ± 0.66", "cnn9": "73.63 ± 0.35"},
        finetuning={"variables": "similarity+classifier"},
    ),
    "dynamic_nsn": Method(
        "dynamic NSN",
        "dynamic",
        False,
        "moving",
        {"cnn4": "71.26 ± 0.65", "cnn9": "77.44 ± 0.63"},
        {"cnn4": "67.82 ± 0.71", "cnn9": "78.98 ± 0.60"},
        finetuning=_CLASSIFIER,
    ),
    "dynamic_centroid": Method(
        "dynamic network, nearest centroid",
        "dynamic",
        False,
        "moving",
        learner="nearest_centroid",
    ),
    "same_parameters": Method(
        "plain network with the dynamic one's parameters",
        "same_parameters",
        False,
        "moving",
        finetuning=_CLASSIFIER,
    ),
    "same_parameters_centroid": Method(
        "plain network with the dynamic one's parameters, nearest centroid",
        "same_parameters",
        False,
        "moving",
        learner="nearest_centroid",
    ),
    "same_cost": Method(
        "plain network with the dynamic one's multiply-adds",
        "same_cost",
        False,
        "moving",
        finetuning=_CLASSIFIER,
    ),
    "same_cost_centroid": Method(
        "plain network with the dynamic one's multiply-adds, nearest centroid",
        "same_cost",
        False,
        "moving",
        learner="nearest_centroid",
    ),
    "meta_static_nsn": Method(
        "meta-learned static NSN, learned rates, from zero",
        "plain",
        True,
        "moving",
        inner_rates=_INNER_RATES,
    ),
    "meta_static_published": Method(
        "meta-learned static NSN as published",
        "plain",
        True,
        "moving",
        {"cnn4": "66.21 ± 0.69"},
        {"cnn4": "69.24 ± 0.69", "cnn9": "78.05 ± 0.57"},
        inner_rates=(0.2,),
    ),
    "meta_static_normalized": Method(
        "meta-learned static NSN as published, on features of length 1",
        "plain",
        True,
        "moving",
        inner_rates=(0.2,),
    ),
    "neighborhoods": Method("Meta-Neighborhoods of the support set", None, True, "support"),
}
#: The row that differences are taken to.
BASELINE = "finetuning"
#: The rows of what the paper says of its networks: README has them.
CLAIMS = (
    BASELINE,
    "closer_look",
    "nearest_centroid",
    "static_nsn",
    "dynamic_nsn",
    "same_parameters",
    "same_cost",
    "meta_static_nsn",
    "meta_static_published",
)
#: Rows whose differences are told besides.
PAIRS = (
    ("finetuning", "nearest_centroid"),
    ("dynamic_nsn", "same_parameters"),
    ("dynamic_nsn", "same_cost"),
    ("dynamic_centroid", "same_parameters_centroid"),
    ("dynamic_centroid", "same_cost_centroid"),
    ("meta_static_nsn", "static_nsn"),
)

#: Inner steps in training and in tests, as MAML's authors have them for Omniglot with 5
#: ways, and for Mini-ImageNet (Finn et al. 2017, Appendix A.1).
_MAML = {
    "omniglot": {"inner_steps": 1, "test_inner_steps": 3},
    None: {"inner_steps": 5, "test_inner_steps": 10},
}
#: Their rate for Omniglot.
_OMNIGLOT_INNER_RATE = 0.4

_BACKBONES = {"cnn4": nsl_keras.backbones.cnn4, "cnn9": nsl_keras.backbones.cnn9}
#: Moving statistics that have settled after some hundred steps.
_MOMENTUM = 0.9


def features(backbone: str, kind: str, shape: tuple[int, ...]) -> keras.Model:
    """The network below a classifier, from images to vectors.

    Args:
        backbone: `"cnn4"` or `"cnn9"`.
        kind: `"plain"`; `"dynamic"` for a dynamic diagonal similarity, whose predictors
            start at the identity; `"same_parameters"` and `"same_cost"` for plain networks
            of the width that has its trainable parameters, or its multiply-adds.
        shape: Shape of an image.
    """
    width = None
    if kind in _MEASURES:
        width = plain_width(backbone, kind, tuple(shape))
    convolution = keras.layers.Conv2D
    if kind == "dynamic":
        convolution = convolutions("diagonal", "sphere", _MOMENTUM)
    model = _network(backbone, tuple(shape), width, convolution)
    outputs = model.output
    if len(outputs.shape) > 2:
        outputs = keras.layers.Flatten()(outputs)
    return keras.Model(model.input, outputs, name=f"{kind}_{backbone}")


def _network(
    backbone: str,
    shape: tuple[int, ...],
    width: int | None,
    convolution: Callable[..., keras.layers.Layer],
) -> keras.Model:
    """The backbone; of CNN-9, whose stages widen, `width` is that of the first."""
    filters: Any = width
    if backbone == "cnn9" and width is not None:
        filters = (width, 2 * width, 4 * width)
    return _BACKBONES[backbone](
        shape,
        classes=None,
        filters=filters,
        batch_normalization=functools.partial(
            nsl_keras.layers.BatchNormalization, momentum=_MOMENTUM
        ),
        convolution=convolution,
    )


def _parameters(network: keras.Model) -> int:
    return sum(int(np.prod(each.shape)) for each in network.trainable_variables)


def _multiply_adds(network: keras.Model) -> int:
    return nsl_keras.convert.summary(network).multiply_adds


_MEASURES = {"same_parameters": _parameters, "same_cost": _multiply_adds}


@functools.cache
def plain_width(backbone: str, kind: str, shape: tuple[int, ...]) -> int:
    """The filters of the plain network that is nearest to the dynamic one in a measure."""
    measure = _MEASURES[kind]
    target = measure(features(backbone, "dynamic", shape))

    def of_width(width: int) -> int:
        return measure(_network(backbone, shape, width, keras.layers.Conv2D))

    above = bisect.bisect_left(range(2, 512), target, key=of_width) + 2
    return min((above - 1, above), key=lambda width: abs(of_width(width) - target))


def classifier(
    network: keras.Model, classes: int, initializer: str = "glorot_uniform"
) -> keras.Model:
    """The features' network followed by a dense layer; its weights are shared."""
    layer = keras.layers.Dense(classes, kernel_initializer=initializer, name="classifier")
    outputs = layer(network.output)
    return keras.Model(network.input, outputs, name=f"{network.name}_classifier")


def inner_rate(name: str, dataset: str, trial: int = 0) -> float | None:
    """The rate of a row's inner steps in a trial, or `None`."""
    if (name, dataset) == ("maml", "omniglot"):
        return _OMNIGLOT_INNER_RATE
    rates = METHODS[name].inner_rates
    return rates[trial % len(rates)] if rates else None


def episodic_learner(
    name: str,
    dataset: str,
    backbone: str,
    shape: tuple[int, ...],
    ways: int,
    batch_normalization: str,
    pretrained: keras.Model | None,
    trial: int = 0,
) -> keras.Model:
    """The model of a row that is trained on episodes; see `inner_rate` for the trial."""
    options: dict[str, Any] = {"batch_normalization": batch_normalization}
    rate = inner_rate(name, dataset, trial)
    if rate is not None:
        options["inner_learning_rate"] = rate
    if name.startswith("meta_static"):
        # Frozen but for the similarities; the new classifier is trained with them.
        network = nsl_keras.convert.add_similarity(pretrained, "diagonal")
        if name == "meta_static_normalized":
            outputs = keras.layers.UnitNormalization()(network.output)
            network = keras.Model(network.input, outputs, name=network.name)
        ours = name == "meta_static_nsn"
        return few_shot.MAML(
            classifier(network, ways, "zeros" if ours else "glorot_uniform"),
            "similarity+classifier",
            inner_steps=5,
            learning_rate_form="learned" if ours else "fixed",
            test_extra_steps=20,
            **options,
        )
    network = features(backbone, "plain", shape)
    if name == "maml":
        steps = _MAML.get(dataset, _MAML[None])
        return few_shot.MAML(classifier(network, ways, "zeros"), **steps, **options)
    if name == "relation_net":
        return few_shot.RelationNet(_pooled_twice(network), ways, **options)
    if name == "proto_net":
        return few_shot.ProtoNet(network, ways, **options)
    if name == "matching_net":
        # Cosines by themselves make a soft attention: the scale is learned.
        return few_shot.MatchingNet(
            network, ways, temperature=0.1, learn_temperature=True, **options
        )
    return few_shot.NeighborhoodLearner(network, ways, **options)


def _pooled_twice(network: keras.Model) -> keras.Model:
    """The convolutions of CNN-4 with the first two poolings alone, as RelationNet's."""
    pools = [each for each in network.layers if isinstance(each, keras.layers.MaxPooling2D)]
    left_out = [*pools[2:], *_of_type(network, keras.layers.Flatten)]
    outputs = network.input
    for layer in network.layers[1:]:
        if layer not in left_out:
            outputs = layer(outputs)
    return keras.Model(network.input, outputs, name=f"{network.name}_maps")


def _of_type(network: keras.Model, kind: type) -> list[keras.layers.Layer]:
    return [layer for layer in network.layers if isinstance(layer, kind)]


def loss(name: str) -> keras.losses.Loss:
    """What a row that is trained on episodes is trained with."""
    if name == "relation_net":
        return few_shot.RelationLoss()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def pretrained_learner(
    name: str,
    network: keras.Model,
    ways: int,
    batch_normalization: str,
    training_images: Any,
) -> Callable | keras.Model:
    """What a row makes of a pretrained network, without further training.

    Args:
        name: Its name in `METHODS`.
        network: Pretrained, from images to features.
        ways: Classes of an episode.
        batch_normalization: Policy of batch norms.
        training_images: Images in [0, 1] of training classes, whose mean features
            nearest centroids are centred on.
    """
    row = METHODS[name]
    if row.learner == "nearest_neighbor":
        return few_shot.NearestNeighbor(
            network, ways, batch_normalization=batch_normalization
        )
    if row.learner == "nearest_centroid":
        learner = few_shot.NearestCentroid(
            network, ways, metric="euclidean", batch_normalization=batch_normalization
        )
        if batch_normalization == "moving":
            learner.center_on(training_images)
        return learner
    if "similarity" in row.finetuning["variables"]:
        network = nsl_keras.convert.add_similarity(
            network, "diagonal", freeze_backbone=False
        )
    options = {**row.finetuning, "batch_normalization": batch_normalization}
    return few_shot.Finetuner(classifier(network, ways), ways, **options)

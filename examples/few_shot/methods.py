"""The rows of the few-shot table: how each is trained and judged, and published figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

import nsl_keras
from examples.common.convolutions import convolutions
from nsl_keras import few_shot


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        title: Its name.
        pretrained: Which classifier of all training classes it starts from: `"plain"`,
            `"dynamic"`, or `None` for a network trained on episodes from the start.
        episodic: Whether it is trained on episodes.
        batch_normalization: Whose statistics batch norms normalize by, in training on
            episodes and in tests.
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


METHODS = {
    "finetuning": Method(
        "finetuning of the classifier", "plain", False, "moving", {"cnn4": "49.79 ± 0.79"}
    ),
    "nearest_neighbor": Method(
        "nearest neighbour", "plain", False, "moving", {"cnn4": "51.04 ± 0.65"}
    ),
    "nearest_centroid": Method("nearest centroid", "plain", False, "moving"),
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
    ),
    "static_nsn": Method(
        "static NSN",
        "plain",
        False,
        "moving",
        {"cnn4": "65.74 ± 0.68"},
        {"cnn4": "66.91 ± 0.66", "cnn9": "73.63 ± 0.35"},
    ),
    "dynamic_nsn": Method(
        "dynamic NSN",
        "dynamic",
        False,
        "moving",
        {"cnn4": "71.26 ± 0.65", "cnn9": "77.44 ± 0.63"},
        {"cnn4": "67.82 ± 0.71", "cnn9": "78.98 ± 0.60"},
    ),
    "meta_static_nsn": Method(
        "meta-learned static NSN",
        "plain",
        True,
        "moving",
        {"cnn4": "66.21 ± 0.69"},
        {"cnn4": "69.24 ± 0.69", "cnn9": "78.05 ± 0.57"},
    ),
    "neighborhoods": Method("Meta-Neighborhoods of the support set", None, True, "support"),
}
#: The row that differences are taken to.
BASELINE = "finetuning"

#: Inner steps in training and in tests, and their rate, as MAML's authors have them for
#: Omniglot with 5 ways and for Mini-ImageNet (Finn et al. 2017, Appendix A.1).
_MAML = {
    "omniglot": {"inner_steps": 1, "test_inner_steps": 3, "inner_learning_rate": 0.4},
    None: {"inner_steps": 5, "test_inner_steps": 10, "inner_learning_rate": 0.01},
}

_BACKBONES = {"cnn4": nsl_keras.backbones.cnn4, "cnn9": nsl_keras.backbones.cnn9}
#: Moving statistics that have settled after some hundred steps.
_MOMENTUM = 0.9


def features(backbone: str, kind: str, shape: tuple[int, ...]) -> keras.Model:
    """The network below a classifier, from images to vectors.

    Args:
        backbone: `"cnn4"` or `"cnn9"`.
        kind: `"plain"`, or `"dynamic"` for a dynamic diagonal similarity.
        shape: Shape of an image.
    """
    dynamic = {"similarity": "diagonal", "predictor": "sphere", "momentum": _MOMENTUM}
    model = _BACKBONES[backbone](
        shape,
        classes=None,
        batch_normalization_momentum=_MOMENTUM,
        convolution=convolutions(**(dynamic if kind == "dynamic" else {})),
    )
    outputs = model.output
    if len(outputs.shape) > 2:
        outputs = keras.layers.Flatten()(outputs)
    return keras.Model(model.input, outputs, name=f"{kind}_{backbone}")


def classifier(network: keras.Model, classes: int) -> keras.Model:
    """The features' network followed by a dense layer; its weights are shared."""
    outputs = keras.layers.Dense(classes, name="classifier")(network.output)
    return keras.Model(network.input, outputs, name=f"{network.name}_classifier")


def episodic_learner(
    name: str,
    dataset: str,
    backbone: str,
    shape: tuple[int, ...],
    ways: int,
    batch_normalization: str,
    pretrained: keras.Model | None,
) -> keras.Model:
    """The model of a row that is trained on episodes."""
    options: dict[str, Any] = {"batch_normalization": batch_normalization}
    if name == "meta_static_nsn":
        # Frozen but for the similarities; the new classifier is trained with them.
        network = nsl_keras.convert.add_similarity(pretrained, "diagonal")
        return few_shot.MAML(
            classifier(network, ways),
            "similarity+classifier",
            inner_steps=5,
            inner_learning_rate=0.2,
            test_extra_steps=20,
            **options,
        )
    network = features(backbone, "plain", shape)
    if name == "maml":
        settings = _MAML.get(dataset, _MAML[None])
        return few_shot.MAML(classifier(network, ways), **settings, **options)
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
    if name == "nearest_neighbor":
        return few_shot.NearestNeighbor(
            network, ways, batch_normalization=batch_normalization
        )
    if name == "nearest_centroid":
        learner = few_shot.NearestCentroid(
            network, ways, metric="euclidean", batch_normalization=batch_normalization
        )
        if batch_normalization == "moving":
            learner.center_on(training_images)
        return learner
    if name == "static_nsn":
        static = nsl_keras.convert.add_similarity(
            network, "diagonal", freeze_backbone=False
        )
        return few_shot.Finetuner(
            classifier(static, ways),
            ways,
            "similarity+classifier",
            batch_normalization=batch_normalization,
        )
    return few_shot.Finetuner(
        classifier(network, ways),
        ways,
        "classifier",
        batch_normalization=batch_normalization,
    )

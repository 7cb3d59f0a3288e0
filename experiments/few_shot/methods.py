"""The rows of the few-shot table: how each is trained and judged, and published figures."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import nsl_keras
from experiments.common import rivals
from experiments.common.convolutions import convolutions, depthwise, nearest_width, size_of
from experiments.few_shot import learners
from experiments.few_shot.closer_look import BatchFinetuner
from experiments.networks.cnn import cnn9
from nsl_keras import few_shot

_BACKBONES = {
    "cnn4": nsl_keras.backbones.cnn4,
    "cnn9": nsl_keras.backbones.cnn9,
    "cnn9_paper": functools.partial(cnn9, variant="paper"),
}
#: Moving statistics that have settled after some hundred steps.
_MOMENTUM = 0.9


def features(
    backbone: str,
    kind: str,
    shape: tuple[int, ...],
    width: int | None = None,
    published: bool = False,
) -> keras.Model:
    """The network below a classifier, from images to vectors.

    `"plain"`; `"static"` and `"dynamic"` for a diagonal similarity, `"dynamic_..."` with
    predictors of `_PREDICTORS`; a name of `_RIVALS`; `"same_parameters"` and `"same_cost"`
    for plain networks as wide as the dynamic one's parameters or multiply-adds ask.
    `width` is that of plain networks; `published` predictors are the authors'.
    """
    if kind in _MEASURES:
        width = plain_width(backbone, kind, tuple(shape), published)
    convolution = _RIVALS.get(kind) or convolutions(
        "diagonal" if kind.startswith(("static", "dynamic")) else None,
        momentum=_MOMENTUM,
        published=published,
        **_PREDICTORS.get(kind, {}),
    )
    norm = functools.partial(nsl_keras.layers.BatchNormalization, momentum=_MOMENTUM)
    options = {"batch_normalization": norm, "convolution": convolution}
    if width is not None:  # The stages of CNN-9 widen.
        widths = (width, 2 * width, 4 * width) if backbone != "cnn4" else width
        options["filters"] = widths
    model = _BACKBONES[backbone](shape, classes=None, **options)
    outputs = model.output
    if len(outputs.shape) > 2:
        outputs = keras.layers.Flatten()(outputs)
    return keras.Model(model.input, outputs, name=f"{kind}_{backbone}")


_RIVALS: dict[str, Callable[..., keras.layers.Layer]] = {
    "squeeze_excite": rivals.SqueezeExciteConv2D,
    "condconv": rivals.ConditionalConv2D,
}
_PREDICTORS: dict[str, dict[str, Any]] = {
    "dynamic": {"predictor": "sphere"},
    "dynamic_blocks": {"predictor": "sphere", "downsampling": 2},
    "dynamic_1x1": {"predictor": "sphere", "output_kernel_size": 1},
    "dynamic_depthwise": {"predictor": depthwise},
}
_MEASURES = {"same_parameters": "parameters", "same_cost": "multiply_adds"}


@functools.cache
def plain_width(
    backbone: str, kind: str, shape: tuple[int, ...], published: bool = False
) -> int:
    """The filters of the plain network that is nearest to the dynamic one in a measure."""
    measure = _MEASURES[kind]
    return nearest_width(
        lambda width: size_of(features(backbone, "plain", shape, width))[measure],
        size_of(features(backbone, "dynamic", shape, published=published))[measure],
        range(2, 512),
    )


def classifier(
    network: keras.Model, classes: int, initializer: str = "glorot_uniform"
) -> keras.Model:
    """The features' network followed by a dense layer; its weights are shared."""
    layer = keras.layers.Dense(classes, kernel_initializer=initializer, name="classifier")
    outputs = layer(network.output)
    return keras.Model(network.input, outputs, name=f"{network.name}finetuned")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a learner is made for.

    `images` are uint8, of training classes; `options` have the policy of batch norms, and
    the rate of inner steps where a row has one.
    """

    dataset: str
    ways: int
    images: np.ndarray
    options: dict[str, Any]


def finetuned(
    network: keras.Model,
    task: Task,
    variables: str = "classifier",
    kind: Callable = few_shot.Finetuner,
    **finetuning: Any,
) -> Callable:
    """Finetuning of the classifier, and of a similarity where `variables` names it."""
    if "similarity" in variables and not network.name.startswith("static"):
        network = nsl_keras.convert.add_similarity(
            network, "diagonal", freeze_backbone=False
        )
    made = classifier(network, task.ways)
    return kind(made, task.ways, variables, **finetuning, **task.options)


class HeadFirst(few_shot.Finetuner):
    """Takes 20 steps of 0.05 with the classifier, then its own with the rest alone."""

    def _values_after(self, support: Any, labels: Any) -> list[Any]:
        head = set(map(id, self._copy.layers[-1].variables))
        is_head = [id(each) in head for each in self._after.variables]
        values = self._after.values()

        def moved(new: list[Any], old: list[Any], turn: bool) -> list[Any]:
            triples = zip(new, old, is_head, strict=True)
            return [one if own == turn else other for one, other, own in triples]

        rounds = (True, 20, 0.05), (False, self.steps, self.learning_rate)
        for turn, steps, self.learning_rate in rounds:

            def loss(at: list[Any], _: Any, old: Any = values, turn: bool = turn) -> Any:
                return keras.ops.mean(self._losses(moved(at, old, turn), support, labels))

            values = moved(self._descend(values, loss, steps), values, turn)
        return values


def _learner(learner: Callable, **options: Any) -> Callable[[keras.Model, Task], Any]:
    return lambda network, task: learner(network, task.ways, **options, **task.options)


def nearest_centroid(network: keras.Model, task: Task) -> Callable:
    """Features are centered on the mean ones of training classes."""
    if task.options["batch_normalization"] == "moving":
        found = network.predict(task.images.astype("float32") / 255, verbose=0)
        center = found.mean(axis=0, dtype="float64")
        centered = keras.layers.Normalization(mean=center, variance=np.ones_like(center))
        outputs = centered(network.output)
        network = keras.Model(network.input, outputs, name=network.name)
    return few_shot.NearestCentroid(network, task.ways, metric="euclidean", **task.options)


def maml(network: keras.Model, task: Task) -> keras.Model:
    """Inner steps as its authors have them (Finn et al. 2017, Appendix A.1)."""
    steps, test_steps = (1, 3) if task.dataset == "omniglot" else (5, 10)
    return few_shot.MAML(
        classifier(network, task.ways, "zeros"),
        inner_steps=steps,
        test_inner_steps=test_steps,
        **task.options,
    )


@keras.saving.register_keras_serializable("experiments")
class MetaStatic(few_shot.MAML):
    """MAML whose classifier takes 20 further steps alone at test (Appendix A)."""

    def _values_after(self, support: Any, targets: Any, training: bool) -> list[Any]:
        values = super()._values_after(support, targets, training)
        last = set(map(id, self.model.layers[-1].variables))
        for _ in range(0 if training else 20):
            moved = self._step(values, support, targets)
            triples = zip(self.stateless.variables, moved, values, strict=True)
            values = [new if id(v) in last else old for v, new, old in triples]
        return values


def meta_static(
    network: keras.Model,
    task: Task,
    ours: bool = False,
    normalized: bool = False,
    variables: str = "similarity+classifier",
) -> keras.Model:
    """MAML of similarities, and of the classifier if it is in `variables`.

    Both are meta-learned, on a frozen network.
    """
    network = nsl_keras.convert.add_similarity(network, "diagonal")
    if normalized:
        outputs = keras.layers.UnitNormalization()(network.output)
        network = keras.Model(network.input, outputs, name=network.name)
    return (MetaStatic if "classifier" in variables else few_shot.MAML)(
        classifier(network, task.ways, "zeros" if ours else "glorot_uniform"),
        variables,
        inner_steps=5,
        learning_rate_form="learned" if ours else "fixed",
        **task.options,
    )


def relation_net(network: keras.Model, task: Task) -> keras.Model:
    """On the convolutions of CNN-4 with the first two poolings alone, as its authors'."""
    layers = keras.layers
    pools = [each for each in network.layers if isinstance(each, layers.MaxPooling2D)]
    outputs = network.input
    for layer in network.layers[1:]:
        if isinstance(layer, layers.Flatten):
            break
        if layer not in pools[2:]:
            outputs = layer(outputs)
    maps = keras.Model(network.input, outputs, name=f"{network.name}_maps")
    return learners.RelationNet(maps, task.ways, **task.options)


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table."""

    title: str
    #: A function of a network from images to features and a `Task`.
    learner: Callable[[keras.Model, Task], Callable]
    _: dataclasses.KW_ONLY
    network: str = "plain"
    #: Whether the network has been trained to classify all training classes before.
    pretrained: bool = True
    episodic: bool = False
    #: Training images over the setting's.
    budget: float = 1.0
    #: Rates of inner steps. The trials take them in turn.
    inner_rates: tuple[float, ...] = ()

    @property
    def batch_normalization(self) -> str:
        """Whose statistics batch norms normalize by, in training on episodes and tests."""
        return "moving" if self.pretrained else "support"


_from_scratch = functools.partial(Method, pretrained=False, episodic=True)
_INNER_RATES = (0.01, 0.03, 0.1)
#: Rates and numbers of the steps that adapt a static similarity in a test.
_STEPS = ((0.2, 5), (0.2, 20), (0.05, 20))


def _meta_static(title: str, *inner_rates: float, **options: Any) -> Method:
    learner = functools.partial(meta_static, **options)
    title = f"meta-learned static NSN{title}"
    return Method(title, learner, episodic=True, inner_rates=inner_rates)


def _adapted(
    title: str, rate: float, steps: int, network: str = "plain", **options: Any
) -> Method:
    learner = functools.partial(finetuned, steps=steps, learning_rate=rate, **options)
    return Method(f"{title}, {steps} steps of {rate:g}", learner, network=network)


_M: dict[str, Any] = {"variables": "similarity+classifier"}
#: What could make an adapted static similarity gain.
ADAPTED = {
    **{
        f"{name}_{rate:g}_{steps}": _adapted(title, rate, steps, **options)
        for rate, steps in _STEPS
        for name, title, options in (
            ("head", "classifier alone", {}),
            ("both", "M and classifier", _M),
            ("after", "classifier, then M alone", {**_M, "kind": HeadFirst}),
        )
    },
    "all_0.05_20": _adapted("all weights", 0.05, 20, variables="all"),
    "static_trained_head": _adapted("M trained before, classifier", 0.05, 20, "static"),
    "static_trained": _adapted(
        "M trained before, M and classifier", 0.05, 20, "static", **_M
    ),
    "meta_static_slow": _meta_static(" as published, inner rate 0.02", 0.02),
    "meta_static_alone": _meta_static(", M alone (Eq. 7)", 0.2, variables="similarity"),
}

#: Cosines by themselves make a soft attention: the scale is learned.
_SOFT: dict[str, Any] = {"temperature": 0.1, "learn_temperature": True}
METHODS = {
    "finetuning": Method("finetuning of the classifier, from zero", finetuned),
    "closer_look": Method(
        "finetuning of the classifier, CloserLookFewShot's recipe",
        functools.partial(finetuned, kind=BatchFinetuner),
    ),
    "finetuning_glorot": Method(
        "finetuning of the classifier, full batches from a Glorot initialization",
        functools.partial(
            finetuned, kind=BatchFinetuner, batch_size=None, start="glorot_uniform"
        ),
    ),
    "nearest_neighbor": Method("nearest neighbor", _learner(learners.NearestNeighbor)),
    "nearest_centroid": Method("nearest centroid", nearest_centroid),
    "matching_net": _from_scratch(
        "MatchingNet",
        _learner(learners.MatchingNet, metric="cosine", **_SOFT),
    ),
    "proto_net": _from_scratch("ProtoNet", _learner(few_shot.ProtoNet)),
    "relation_net": _from_scratch("RelationNet", relation_net),
    "maml": _from_scratch(
        "MAML",
        maml,
        inner_rates=_INNER_RATES,
    ),
    "static_nsn": Method(
        "static NSN",
        functools.partial(finetuned, variables="similarity+classifier"),
    ),
    **{
        f"dynamic_{learner}{kind}": Method(
            f"dynamic {title}{what}", make, network=f"dynamic{kind}"
        )
        for kind, what in (
            ("", ""),
            ("_blocks", ", in blocks of 2x2"),
            ("_1x1", ", 1x1 second layer of predictors"),
            ("_depthwise", ", depthwise first layer of predictors"),
        )
        for learner, title, make in (
            ("nsn", "NSN", finetuned),
            ("centroid", "network, nearest centroid", nearest_centroid),
        )
    },
    # For the time of the dynamic one: see the group "network" of `experiments.speed`.
    "longer": Method("plain network, trained 3.3 times as long", finetuned, budget=3.3),
    **{
        f"{network}{suffix}": Method(f"{what}{title}", learner, network=network)
        for network, what in (
            ("same_parameters", "plain network with the dynamic one's parameters"),
            ("same_cost", "plain network with the dynamic one's multiply-adds"),
            ("squeeze_excite", "squeeze-excite network"),
            ("condconv", "CondConv network"),
        )
        for suffix, title, learner in (
            ("", "", finetuned),
            ("_centroid", ", nearest centroid", nearest_centroid),
        )
    },
    "meta_static_nsn": _meta_static(", learned rates, from zero", *_INNER_RATES, ours=True),
    "meta_static_published": _meta_static(" as published", 0.2),
    "meta_static_normalized": _meta_static(
        " as published, on features of length 1", 0.2, normalized=True
    ),
    **ADAPTED,
    "neighborhoods": _from_scratch(
        "Meta-Neighborhoods of the support set", _learner(few_shot.NeighborhoodLearner)
    ),
}

_LEARNERS = ("maml", "proto_net", "relation_net")
for _name in _LEARNERS:
    for _kind in ("static", "dynamic"):
        _title = f"{METHODS[_name].title}, {_kind} network"
        METHODS[f"{_name}_{_kind}"] = dataclasses.replace(
            METHODS[_name], title=_title, network=_kind
        )
#: 5-shot accuracies on Mini-ImageNet with CNN-4 and CNN-9: Table 6, and Table 1 of the
#: authors' rebuttal, whose columns have no heading: read as MAML, ProtoNet, RelationNet.
TABLE_6 = {
    "closer_look": ("49.79", ""),
    "nearest_neighbor": ("51.04", ""),
    "matching_net": ("55.31", ""),
    "proto_net": ("68.20", ""),
    "relation_net": ("65.32", ""),
    "maml": ("63.15", ""),
    "static_nsn": ("65.74", ""),
    "dynamic_nsn": ("71.26", "77.44"),
    "meta_static_published": ("66.21", ""),
}
REBUTTAL = {
    "maml": ("63.15", "67.64"),
    "meta_static_published": ("69.24", "78.05"),
    "maml_static": ("66.91", "73.63"),
    "maml_dynamic": ("67.82", "78.98"),
    "proto_net_static": ("70.30", "75.12"),
    "proto_net_dynamic": ("71.39", "78.72"),
    "relation_net_static": ("67.87", "71.79"),
    "relation_net_dynamic": ("68.90", "72.23"),
}
#: The row that differences are taken to.
BASELINE = "finetuning"
#: Rows whose differences are listed below the table.
PAIRS = (
    ("finetuning", "nearest_centroid"),
    ("dynamic_nsn", "same_parameters"),
    ("dynamic_nsn", "same_cost"),
    ("dynamic_nsn", "longer"),
    ("dynamic_centroid", "same_parameters_centroid"),
    ("dynamic_centroid", "same_cost_centroid"),
    ("meta_static_nsn", "static_nsn"),
    ("static_trained", "static_trained_head"),
    *((f"both_{r:g}_{s}", f"head_{r:g}_{s}") for r, s in _STEPS),
    *((f"after_{r:g}_{s}", "head_0.05_20") for r, s in _STEPS),
    *((f"{name}_{kind}", name) for name in _LEARNERS for kind in ("static", "dynamic")),
)


def inner_rate(name: str, dataset: str, trial: int = 0) -> float | None:
    if name.startswith("maml") and dataset == "omniglot":
        return 0.4  # Its authors'.
    rates = METHODS[name].inner_rates
    return rates[trial % len(rates)] if rates else None


def loss(name: str) -> keras.losses.Loss:
    if name.startswith("relation_net"):
        return learners.RelationLoss()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

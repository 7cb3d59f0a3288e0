"""Rows of the tables of Neural Similarity Learning: methods, recipes, published figures."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.layers import Conv2D, DepthwiseConv2D

import nsl_keras
from experiments.common import rivals
from experiments.common.convolutions import (
    SIMILARITIES,
    convolutions,
    nearest_width,
    size_of,
)
from experiments.common.recipe import Recipe, WarmedUp, compile_classifier
from experiments.networks import cnn, resnet
from experiments.networks.spherenet import self_attention_spherenet
from experiments.neural_similarity.shifts import with_shifts

MakeLayer = Callable[..., keras.layers.Layer]


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of a table: its title, its convolutions, and options of the network."""

    title: str
    #: A function of `momentum`, that of batch norms, and `published`, whether predictors
    #: are the authors', which returns what backbones take as `convolution`.
    convolution: Callable[..., MakeLayer] = convolutions
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: For a plain network that is as large as another: that row, and what is alike,
    #: `"parameters"` or `"multiply_adds"`.
    alike: tuple[str, str] | None = None
    #: Predictors' share of the learning rate, and whether their kernels are penalized.
    predictor_rate: float = 1.0
    predictor_penalty: bool = True
    #: The share of the steps in which the learning rate rises, if not the recipe's; that
    #: of predictors alone.
    warmup: float | None = None
    predictor_warmup: float = 0.0


def _of(title: str, layer: type[keras.layers.Layer], **options: Any) -> Method:
    return Method(title, lambda **_: functools.partial(layer, **options))


_CONVOLUTION = nsl_keras.layers.NeuralSimilarityConv2D
_DEPTHWISE = nsl_keras.layers.NeuralSimilarityDepthwiseConv2D
#: A shift and a 1x1 convolution, once it is folded.
_ONE_TAP = functools.partial(
    nsl_keras.similarities.Sparse, 1, regularizer=keras.regularizers.L1(1e-4)
)


def _nsn(
    name: str,
    predictor: str | None = None,
    what: str = "",
    similarity: Any = None,
    **options: Any,
) -> Method:
    kind = "dynamic" if predictor else "static"
    similarity = similarity or SIMILARITIES[name]
    return Method(
        ", ".join([f"{kind} NSN", name, *([what] if what else [])]),
        functools.partial(convolutions, similarity, predictor=predictor, **options),
    )


_LEARNED_SHAPE: dict[str, Any] = {
    "what": "learned kernel shape",
    "similarity": nsl_keras.similarities.Diagonal(learn_shape=True),
}

#: Of a `"full_sphere"` predictor whose cosines nothing rescales, from the identity nearly.
BOUNDED: dict[str, Any] = {"batch_normalization": False, "start": "published"}


@keras.saving.register_keras_serializable("experiments")
def tenth(values: Any) -> Any:
    return 0.1 * values


@keras.saving.register_keras_serializable("experiments")
def tenth_of_sphere(
    recipe: nsl_keras.predictors.SimilarityPredictor, context: Any
) -> list[keras.layers.Layer]:
    """The layers of `"sphere"`, unless `M` is diagonal, and a tenth of what they return."""
    return [
        *recipe.hidden(context, normalize="input"),
        keras.layers.ReLU(),
        *recipe.output(context),
        keras.layers.Activation(tenth),
    ]


def _uns(what: str, predictor: Any = "sphere", **options: Any) -> Method:
    return _nsn("UNS", predictor, what, downsampling=2, **options)


WARMED_UP = "the first tenth of the steps a warm-up"
#: What could make an unconstrained dynamic similarity underfit: one change in each row.
UNS_METHODS = {
    "cnn_warmup": Method(f"CNN, {WARMED_UP}", warmup=0.1),
    "static_uns": _nsn("UNS"),
    "dynamic_uns_blocks": _uns("in blocks of 2x2 (the default)"),
    "dynamic_uns_slow": dataclasses.replace(
        _uns("a tenth of the rate in predictors"), predictor_rate=0.1
    ),
    "dynamic_uns_free": dataclasses.replace(
        _uns("no weight decay of predictors"), predictor_penalty=False
    ),
    "dynamic_uns_tenth": _uns("a tenth of what predictors return", tenth_of_sphere),
    "dynamic_uns_no_identity": _uns("in blocks, no identity added", residual=False),
    "dynamic_uns_warmup": dataclasses.replace(_uns(WARMED_UP), warmup=0.1),
    "dynamic_uns_predictor_warmup": dataclasses.replace(
        _uns(f"{WARMED_UP} of predictors alone"), predictor_warmup=0.1
    ),
    "dynamic_uns_norms": _uns("batch norms in predictors", batch_normalization=True),
}

METHODS = {
    **UNS_METHODS,
    "cnn": Method("CNN"),
    "cnn_plus": Method("CNN++", options={"plus": True}),
    "static_dns": _nsn("DNS"),
    "dynamic_dns": _nsn("DNS", "sphere"),
    "dynamic_uns": _nsn("UNS", "sphere", downsampling=1),
    "dynamic_dns_cnn": _nsn("DNS", "cnn", "predictor of plain convolutions"),
    "dynamic_dns_full_sphere": _nsn("DNS", "full_sphere", "both layers by angle"),
    # The paper's Section 3.3.1: what is added to the identity is in [-1, 1].
    "dynamic_dns_bounded": _nsn(
        "DNS", "full_sphere", "both layers by angle, bounded", **BOUNDED
    ),
    "dynamic_uns_alone": _nsn(
        "UNS", "sphere", "no identity added", downsampling=1, residual=False
    ),
    # Appendix A: the hidden units of ImageNet's predictors.
    "dynamic_dns_32": _nsn("DNS", "sphere", "predictors of 32 units", width=32),
    "static_dns_joint": _nsn("DNS", **_LEARNED_SHAPE),
    "dynamic_dns_joint": _nsn("DNS", "sphere", **_LEARNED_SHAPE),
    "dynamic_dns_shared": _nsn("DNS", "shared", "one shared predictor"),
    "dynamic_dns_shared_by_size": _nsn(
        "DNS", "shared_by_size", "the same, adaptations shared by maps of equal size"
    ),
    "cnn_parameters": Method(
        "CNN with the parameters of dynamic DNS", alike=("dynamic_dns", "parameters")
    ),
    "cnn_cost": Method(
        "CNN with the multiply-adds of dynamic DNS", alike=("dynamic_dns", "multiply_adds")
    ),
    "squeeze_excite": _of("CNN, squeeze-excite", rivals.SqueezeExciteConv2D),
    "condconv": _of("CNN, CondConv of four kernels", rivals.ConditionalConv2D),
    "eca": _of("CNN, ECA", rivals.ChannelAttentionConv2D),
    "pointwise": Method(
        "1x1 convolutions alone",
        lambda **_: lambda filters, _size, **own: Conv2D(filters, 1, **own),
    ),
    "one_tap": _of("static NSN, M of one entry, L1", _CONVOLUTION, similarity=_ONE_TAP()),
}

MOBILE_METHODS = {
    "cnn": _of("depthwise 3x3", DepthwiseConv2D),
    "pointwise": Method(
        "depthwise 1x1", lambda **_: lambda _size, **own: DepthwiseConv2D(1, **own)
    ),
    "one_tap": _of(
        "depthwise static NSN, M of one entry, L1", _DEPTHWISE, similarity=_ONE_TAP()
    ),
    "one_tap_each": _of(
        "the same with an M of each channel",
        _DEPTHWISE,
        similarity=_ONE_TAP(shared_by="filter"),
    ),
}

# The authors' decay, and their penalty on kernels that are compared by angle.
_PLAIN = {"sphere": False, "l2": 2.5e-4}
_SPHERE = {"sphere": True, "l2": 2.5e-4, "orthogonality": 1e-4}

SPHERENET_METHODS = {
    "cnn": Method("CNN", options={**_PLAIN, "attention": False}),
    "cnn_attention": Method("CNN, self-attention", options=_PLAIN),
    "spherenet": Method("SphereNet", options={**_SPHERE, "attention": False}),
    "spherenet_attention": Method("SphereNet, self-attention", options=_SPHERE),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the paper: its rows, network, recipe, and errors (%) by data set."""

    title: str
    names: Sequence[str]
    errors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    network: str = "cnn9"
    recipe: str = "paper"
    #: Top-5 errors of the same data set, where the paper has them.
    top_5_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    #: Predictors of the rows: the authors' (`"published"`), or the package's own
    #: (`"default"`).
    predictors: str = "published"

    #: The row that differences are taken to.
    baseline = "cnn"

    @property
    def methods(self) -> dict[str, Method]:
        own = {"spherenet": SPHERENET_METHODS, "mobile": MOBILE_METHODS}
        known = own.get(self.network, METHODS)
        return {name: known[name] for name in self.names}


#: Errors of Tables 1 to 4.
_CIFAR10 = {
    **{"cnn": 7.78, "cnn_plus": 7.29, "static_dns": 7.15, "static_uns": 7.38},
    **{"dynamic_dns": 6.85, "dynamic_uns": 6.5, "dynamic_dns_cnn": 7.04},
    **{"static_dns_joint": 6.92, "dynamic_dns_joint": 6.64, "dynamic_dns_shared": 7.20},
}
_CIFAR100 = {
    **{"cnn": 28.95, "cnn_plus": 28.70, "static_dns": 28.35, "static_uns": 28.11},
    **{"dynamic_dns": 27.81, "dynamic_uns": 28.02},
}
_default = functools.partial(Table, predictors="default")
TABLES = {
    "1": Table(
        "Predictor network",
        (
            *("cnn", "dynamic_dns_cnn", "dynamic_dns"),
            *("dynamic_dns_full_sphere", "dynamic_dns_bounded"),
        ),
        {"cifar10": _CIFAR10},
    ),
    "2": Table(
        "Joint learning of kernel shape and similarity",
        ("cnn", "static_dns", "static_dns_joint", "dynamic_dns", "dynamic_dns_joint"),
        {"cifar10": _CIFAR10},
    ),
    "3": Table(
        "Shared and disjoint predictors",
        ("cnn", "dynamic_dns_shared", "dynamic_dns", "dynamic_dns_shared_by_size"),
        {"cifar10": _CIFAR10},
    ),
    "4": Table(
        "CIFAR-10 and CIFAR-100",
        (
            *("cnn", "cnn_plus", "static_dns", "static_uns", "dynamic_dns"),
            *("dynamic_uns", "dynamic_uns_alone"),
        ),
        {"cifar10": _CIFAR10, "cifar100": _CIFAR100},
    ),
    "5": Table(
        "ImageNet",
        ("cnn", "cnn_plus", "dynamic_dns", "dynamic_dns_32"),
        {"imagenet2012": {"cnn": 42.72, "cnn_plus": 42.11, "dynamic_dns": 40.61}},
        network="cnn10",
        recipe="imagenet",
        top_5_errors={"cnn": 19.11, "cnn_plus": 18.98, "dynamic_dns": 18.04},
    ),
    "8": Table(
        "Self-attention as global neural similarity",
        [*SPHERENET_METHODS],
        {"cifar10": dict(zip(SPHERENET_METHODS, (9.14, 9.31, 8.69, 8.24), strict=True))},
        network="spherenet",
        recipe="attention",
    ),
    **{
        f"resnet{depth}": _default(
            f"ResNet-{depth} (the authors' response to the reviews, Table 2)",
            [*errors],
            {"imagenet2012": errors},
            network=f"resnet{depth}",
            recipe="imagenet",
        )
        for depth, errors in {
            18: {"cnn": 31.69, "static_dns": 30.12, "dynamic_dns": 29.68},
            50: {"cnn": 24.77, "static_dns": 23.91, "dynamic_dns": 23.45},
        }.items()
    },
    "shared": _default(
        "Shared and disjoint predictors, those of the package",
        ("cnn", "dynamic_dns", "dynamic_dns_shared", "dynamic_dns_shared_by_size"),
    ),
    "efficient": _default(
        "Efficient networks: convolutions of one tap", ("cnn", "pointwise", "one_tap")
    ),
    "mobile": _default(
        "Efficient networks: depthwise convolutions of one tap",
        [*MOBILE_METHODS],
        network="mobile",
    ),
    "uns": _default(
        "Unconstrained dynamic similarities, taken apart; not in the paper",
        ["cnn", *UNS_METHODS],
    ),
    "cost": _default(
        "Plain networks with the parameters and the multiply-adds of a dynamic one, and "
        "what else people add to convolutions; not in the paper",
        # In order of worth.
        (
            *("cnn", "dynamic_dns", "cnn_cost", "cnn_parameters", "static_dns"),
            *("dynamic_uns", "dynamic_uns_blocks", "squeeze_excite", "condconv", "eca"),
        ),
    ),
}

NETWORKS: dict[str, Callable[..., keras.Model]] = {
    "cnn9": cnn.cnn9,
    "cnn10": cnn.cnn10,
    "mobile": cnn.mobile_net,
    "resnet18": functools.partial(resnet.resnet_v1, 18),
    "resnet50": functools.partial(resnet.resnet_v1, 50),
    "spherenet": self_attention_spherenet,
}


def build(
    network: str,
    method: Method,
    input_shape: tuple[int, ...],
    classes: int,
    momentum: float,
    published: bool = True,
    **options: Any,
) -> keras.Model:
    """The network of one row; `momentum` is that of batch norms."""
    arguments = (input_shape, classes, momentum, published)
    if method.alike:
        options["filters"] = alike_filters(network, method, *arguments, **options)
    options = {**method.options, **options}
    options["batch_normalization"] = functools.partial(
        nsl_keras.layers.BatchNormalization, momentum=momentum
    )
    if network != "spherenet":
        options["convolution"] = method.convolution(momentum=momentum, published=published)
    return NETWORKS[network](input_shape, classes, **options)


def served(network: keras.Model) -> keras.Model:
    """The network as it is served: folded where that is possible, and of one tap."""
    kinds = nsl_keras.layers.SphereConv2D, nsl_keras.layers.GlobalNeuralSimilarity2D
    if any(getattr(x, "predictor", None) or isinstance(x, kinds) for x in network.layers):
        return network
    return with_shifts(nsl_keras.convert.fold(network))


def alike_filters(
    network: str,
    method: Method,
    *arguments: Any,
    filters: Sequence[int] | None = None,
    **options: Any,
) -> list[int]:
    """Filters of the plain network that is nearest in size to the row it is like.

    Those of the stages keep their proportions to one filter of the last.
    """
    other, measure = method.alike
    base = list(filters or (32, 64, 128))

    def size(name: str, widths: list[int]) -> int:
        model = build(network, METHODS[name], *arguments, filters=widths, **options)
        return size_of(model)[measure]

    def scaled(last: int) -> list[int]:
        return [max(1, round(width * last / base[-1])) for width in base]

    return scaled(
        nearest_width(
            lambda last: size("cnn", scaled(last)),
            size(other, base),
            range(base[-1], 8 * base[-1]),
        )
    )


#: The authors' penalty on kernels, gammas and betas, and that on the static unconstrained
#: similarity alone (towards zero, not towards the identity).
PENALTY, SIMILARITY_PENALTY = 5e-4, 5e-3


def _published(steps: int, rate_drops: tuple[int, ...], **changes: Any) -> Recipe:
    recipe = Recipe(
        steps,
        rate_drops,
        augmentation="crop_flip",
        penalty=PENALTY,
        label_smoothing=0.01,
        input_range=(0.0, 255.0),
    )
    return dataclasses.replace(recipe, **changes)


#: "paper": Section 7.1. "code": the authors' published scripts for images. "imagenet":
#: Section 7.1. "attention": the authors' script for Table 8.
RECIPES = {
    "paper": _published(64_000, (34_000, 54_000)),
    "code": _published(42_500, (20_000, 30_000, 37_500)),
    "imagenet": _published(600_000, (200_000, 375_000, 550_000)),
    "attention": _published(
        64_001,
        (34_000, 54_000),
        optimizer="adam",
        learning_rate=1e-3,
        augmentation="flip",
        input_range=(-127.5 / 128, 127.5 / 128),
    ),
}


def trainable(
    backbone: keras.Model,
    recipe: Recipe,
    jit_compile: bool | str = "auto",
    method: Method = METHODS["cnn"],
) -> keras.Model:
    """A compiled model from images in [0, 1] to the backbone's logits, with penalties."""
    if method.warmup is not None:
        steps = round(method.warmup * recipe.steps)
        recipe = dataclasses.replace(recipe, warmup_steps=steps)
    inputs = keras.Input(backbone.input_shape[1:])
    black, white = recipe.input_range
    # Not keras.layers.Rescaling, which looks for TensorFlow on every backend.
    scaled = inputs * (white - black) + black
    # Kernels of predictors are among them.
    names = ("kernel", "gamma", "beta")
    penalized = [each for each in backbone.trainable_variables if each.name in names]
    share: Any = method.predictor_rate
    if method.predictor_warmup:
        share = WarmedUp(share, round(method.predictor_warmup * recipe.steps))
    forms = [x.bilinear_form for x in backbone.layers if hasattr(x, "bilinear_form")]
    networks = [each.network for each in forms if each.network is not None]
    own = [each for network in networks for each in network.trainable_variables]
    if not method.predictor_penalty:
        penalized = [each for each in penalized if id(each) not in map(id, own)]
    recipe.penalize(penalized)
    for form in forms:
        if form.similarity_parameters is not None and isinstance(
            form.similarity, nsl_keras.similarities.Unconstrained
        ):
            penalty = keras.regularizers.L2(SIMILARITY_PENALTY / 2)
            form.similarity_parameters.regularizer = penalty
    model = keras.Model(inputs, backbone(scaled), name=f"{backbone.name}_on_images")
    # AdamW would decay static similarities to zero, away from the identity.
    spared = [each for each in model.trainable_variables if each.name == "similarity"]
    top_5 = backbone.output_shape[-1] > 5
    compile_classifier(model, recipe, spared, top_5=top_5, jit_compile=jit_compile)
    if share != 1:
        with_rate(model.optimizer, own, share)
    return model


def with_rate(optimizer: Any, variables: Sequence[Any], share: Any) -> None:
    """Lets an optimizer, before its first step, move variables at a share of its rate.

    The share is a number or, as a schedule, a function of the step.
    """
    # TensorFlow's optimizers get the variables that Keras's wrap.
    own = {id(each) for variable in variables for each in (variable, variable.value)}
    step = optimizer.update_step

    def update_step(gradient: Any, variable: Any, rate: Any) -> None:
        if id(variable) in own:
            rate = rate * (share(optimizer.iterations) if callable(share) else share)
        step(gradient, variable, rate)

    optimizer.update_step = update_step

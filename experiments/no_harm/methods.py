"""The methods, each used as its docstring shows it, with every default."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

import nsl_keras
from experiments.no_harm import networks
from nsl_keras import convert

PLAIN = "plain"
PLAIN_LONGER = "plain_longer"

#: A function of a convolution, which returns the network with it.
MakeNetwork = Callable[..., keras.Model]
Make = Callable[[MakeNetwork, keras.Model], keras.Model]


class Method(NamedTuple):
    """A way to train a network, and the method that it is compared with."""

    title: str
    #: A function of what makes the network and of the plain network, which it may change.
    make: Make
    #: Whether the plain network is trained before.
    pretrained: bool = False
    #: Whether it needs batch norms in the network.
    batch_norm: bool = False
    baseline: str = PLAIN
    #: The learning rate over the setting's.
    rate: float = 1.0


def with_cosine_head(make_network: MakeNetwork, plain: keras.Model) -> keras.Model:
    classifier = plain.get_layer(networks.CLASSIFIER)
    head = nsl_keras.layers.CosineDense(classifier.units)
    return keras.Model(plain.input, head(classifier.input))


def with_similarity(similarity: str, predictor: Any = None) -> Make:
    """Returns what makes a network with similarities in place of its convolutions.

    `predictor` may be a function of the number of filters.
    """

    def convolution(filters: int, *arguments: Any, **options: Any) -> keras.layers.Layer:
        own = predictor(filters) if callable(predictor) else predictor
        options |= {"similarity": similarity, "predictor": own}
        return nsl_keras.layers.NeuralSimilarityConv2D(filters, *arguments, **options)

    def make(make_network: MakeNetwork, plain: keras.Model) -> keras.Model:
        model = make_network(convolution=convolution)
        own = {variable.path: variable for variable in model.variables}
        for variable in plain.variables:
            own[variable.path].assign(variable)
        return model

    return make


def with_neighbors(head: type[keras.layers.Layer], film: bool = False) -> Make:
    def make(make_network: MakeNetwork, plain: keras.Model) -> keras.Model:
        classifier = plain.get_layer(networks.CLASSIFIER)
        backbone = keras.Model(plain.input, classifier.input)
        if film:
            backbone = convert.add_film(backbone)
        model = nsl_keras.MetaNeighborhoodModel(backbone, head(classifier.units))
        model.build((None, *plain.input_shape[1:]))
        if head is keras.layers.Dense:
            model.head.set_weights(classifier.get_weights())
        return model

    return make


#: For an unconstrained similarity, not the default.
EACH_POSITION = nsl_keras.predictors.SimilarityPredictor(downsampling=1)

PLAIN_METHOD = Method("plain", lambda _, plain: plain)
#: Plain networks: what anyone can do without a similarity or neighbors.
ALTERNATIVES = {
    PLAIN_LONGER: Method(
        "plain, trained twice as long", PLAIN_METHOD.make, pretrained=True
    ),
    "plain_rate": Method("plain, three times the rate", PLAIN_METHOD.make, rate=3.0),
    "plain_cosine": Method("plain, CosineDense head", with_cosine_head),
}
#: Not the default: converted networks are trained as a whole.
WHOLE = {"freeze_backbone": False}
#: A trained network that a method converts is compared with that network trained on.
converted = functools.partial(Method, pretrained=True, baseline=PLAIN_LONGER)
OWN = {
    "static_dns": Method("static DNS", with_similarity("diagonal")),
    "static_uns": Method("static UNS", with_similarity("unconstrained")),
    "dynamic_dns": Method("dynamic DNS", with_similarity("diagonal", "sphere")),
    "dynamic_uns": Method("dynamic UNS", with_similarity("unconstrained", "sphere")),
    "dynamic_uns_positions": Method(
        "dynamic UNS, an M at each position",
        with_similarity("unconstrained", EACH_POSITION),
    ),
    "neighbors_dense": Method(
        "Meta-Neighborhoods, Dense", with_neighbors(keras.layers.Dense)
    ),
    "neighbors_cosine": Method(
        "Meta-Neighborhoods, CosineDense", with_neighbors(nsl_keras.layers.CosineDense)
    ),
    "neighbors_film": Method(
        "Meta-Neighborhoods, CosineDense, iFiLM",
        with_neighbors(nsl_keras.layers.CosineDense, film=True),
        batch_norm=True,
    ),
    "converted_static_dns": converted(
        "converted to static DNS",
        lambda _, plain: convert.add_similarity(plain, "diagonal", **WHOLE),
    ),
    "converted_dynamic_dns": converted(
        "converted to dynamic DNS",
        lambda _, plain: convert.add_similarity(plain, "diagonal", "sphere", **WHOLE),
    ),
    "converted_neighbors": converted(
        "converted to Meta-Neighborhoods",
        lambda _, plain: nsl_keras.MetaNeighborhoodModel.from_classifier(plain),
    ),
}
COMPARED = ALTERNATIVES | OWN
METHODS = {PLAIN: PLAIN_METHOD} | COMPARED

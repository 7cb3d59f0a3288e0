"""How the image classifiers of Meta-Neighborhoods are trained.

Appendix A.2, and the authors' code where the paper is silent: AdamW at 1e-3, whose decay
spares classifier, dictionary and inner rates; gradients clipped to [-10, 10]; the rate
divided by 10 once. Their loader also applies AutoAugment's CIFAR policy, of which the
paper says nothing and which is left out here, and a cutout of 16x16 pixels, to be had with
--augmentation=pad_crop_flip_cutout. Vanilla models trained by SGD have Nesterov momentum,
a penalty on kernels and a rate schedule of their own; the start rate of 0.1 is the usual
one, which neither names.
"""

from __future__ import annotations

import dataclasses

import keras

import nsl_keras
from examples import image_recipe

CLIP = 10.0
#: A decay of 7.5e-5 a step at the rate of 1e-3: Keras multiplies the two.
WEIGHT_DECAY = 0.075
#: Of the squared kernels: TensorFlow's l2_loss, which the authors scale by 2e-4, halves.
SGD_PENALTY = 1e-4


@dataclasses.dataclass(frozen=True)
class Recipe(image_recipe.Schedule):
    """A training; the last fields are those of the dictionary."""

    learning_rate: float = 1e-3
    augmentation: str = "pad_crop_flip"
    num_neighbors: int = 5000
    temperature: float = 0.2
    dictionary_dropout: float = 0.5


_SMALL = {"adamw": (60_000, (40_000,)), "sgd": (60_000, (40_000, 50_000))}
_CIFAR = {"adamw": (160_000, (120_000,)), "sgd": (120_000, (60_000, 80_000, 100_000))}
#: Iterations and rate drops by data set; CIFAR's for all others.
_SCHEDULES = {
    **dict.fromkeys(("digits", "mnist", "mnist_m", "pacs", "svhn_cropped"), _SMALL),
    "cinic10": {
        "adamw": (260_000, (160_000,)),
        "sgd": (240_000, (120_000, 160_000, 200_000)),
    },
    "tiny_imagenet": {
        "adamw": (260_000, (180_000,)),
        "sgd": (260_000, (140_000, 180_000, 220_000)),
    },
}
#: The authors mirror these too; here only what stays a digit.
_AUGMENTATIONS = {
    "digits": "none",
    **dict.fromkeys(("mnist", "mnist_m", "svhn_cropped"), "pad_crop"),
}


def published(dataset: str, optimizer: str = "adamw") -> Recipe:
    """The recipe for a data set, `optimizer` being `"adamw"` or `"sgd"`."""
    iterations, rate_drops = _SCHEDULES.get(dataset, _CIFAR)[optimizer]
    return Recipe(
        iterations,
        rate_drops,
        learning_rate=1e-3 if optimizer == "adamw" else 0.1,
        augmentation=_AUGMENTATIONS.get(dataset, "pad_crop_flip"),
    )


def compile_model(
    model: keras.Model, recipe: Recipe, optimizer: str, jit_compile: bool | str
) -> None:
    """Compiles a model that gives logits, for integer labels."""
    made: keras.optimizers.Optimizer
    if optimizer == "sgd":
        made = keras.optimizers.SGD(
            recipe.rates(), momentum=0.9, nesterov=True, clipvalue=CLIP
        )
        for variable in model.layers[0].trainable_variables:
            if variable.name == "kernel":
                variable.regularizer = keras.regularizers.L2(SGD_PENALTY)
    else:
        made = keras.optimizers.AdamW(
            recipe.rates(), weight_decay=WEIGHT_DECAY, epsilon=1e-8, clipvalue=CLIP
        )
        exempt = (
            model.decay_exempt_variables
            if isinstance(model, nsl_keras.MetaNeighborhoodModel)
            else model.layers[-1].trainable_variables
        )
        made.exclude_from_weight_decay(var_list=exempt)
    model.compile(
        optimizer=made,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=jit_compile,
    )
    # Now, so that a restored state finds its place.
    model.optimizer.build(model.trainable_variables)

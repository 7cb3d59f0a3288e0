"""The networks of the demo, and how they are trained on each data set."""

import dataclasses
import functools

import keras

import nsl_keras
from experiments.common.convolutions import convolutions
from experiments.common.recipe import Recipe, compile_classifier, spared_of


@dataclasses.dataclass(frozen=True)
class Setting:
    """What differs between data sets. Chosen on validation images."""

    filters: tuple[int, int, int, int] = (24, 96, 192, 192)
    epochs: int = 10
    batch_size: int = 128
    learning_rate: float = 1e-3
    num_neighbors: int = 1000
    temperature: float = 0.2
    linear_features: int = 128
    linear_num_neighbors: int = 1000
    linear_temperature: float = 0.2
    augmentation: str = "none"

    def recipe(self, name: str, examples: int) -> Recipe:
        """The published one cuts the rate by 10 after three quarters of the training."""
        # Five times as long takes about the time of Meta-Neighborhoods.
        epochs = self.epochs * (5 if name == "linear_longer" else 1)
        steps = epochs * -(-examples // self.batch_size)
        return Recipe(
            steps,
            (3 * steps // 4,),
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            augmentation=self.augmentation,
            optimizer="adamw",
            # In Keras; the published decay is 7.5e-5 a step at a rate of 1e-3.
            weight_decay=0.075,
        )


SETTINGS = {
    "digits": Setting(
        filters=(16, 32, 64, 64),
        epochs=20,
        batch_size=64,
        learning_rate=1e-2,
        num_neighbors=200,
        temperature=0.1,
        linear_features=32,
    ),
    "mnist": Setting(),
    # More training, on shifted and mirrored images.
    "cifar10": Setting(epochs=30, augmentation="pad_crop_flip"),
}


def build_model(
    name: str, setting: Setting, input_shape: tuple[int, ...], classes: int, seed: int
) -> keras.Model:
    """Returns one of `TITLES`, built: all end in a cosine classifier of logits."""
    if name.startswith("linear"):
        entries, temperature = setting.linear_num_neighbors, setting.linear_temperature
        layers = keras.layers.Flatten(), keras.layers.Dense(setting.linear_features)
        backbone = keras.Sequential(
            [keras.Input(input_shape), *layers], name="linear_features"
        )
    else:
        entries, temperature = setting.num_neighbors, setting.temperature
        backbone = nsl_keras.backbones.convnet4(
            input_shape,
            filters=setting.filters,
            convolution=convolutions(
                "diagonal" if name in ("static", "dynamic") else None,
                "sphere" if name == "dynamic" else None,
            ),
            batch_normalization=functools.partial(
                nsl_keras.layers.BatchNormalization, momentum=0.9
            ),
        )
        if name == "neighborhoods_film":
            backbone = nsl_keras.convert.add_film(backbone)
    head = nsl_keras.layers.CosineDense(classes, name="classifier")
    if "neighborhoods" not in name:
        return keras.Sequential([backbone, head], name=name)
    dictionary = nsl_keras.layers.NeighborDictionary(
        entries, temperature=temperature, seed=seed
    )
    model = nsl_keras.MetaNeighborhoodModel(backbone, head, dictionary, name=name)
    model.build((None, *input_shape))
    return model


def compile_model(model: keras.Model, recipe: Recipe) -> keras.Model:
    # The authors decay no similarity: it would be drawn away from the identity.
    similarities = [v for v in model.trainable_variables if v.name == "similarity"]
    return compile_classifier(
        model, recipe, spared_of(model) + similarities, jit_compile=False
    )

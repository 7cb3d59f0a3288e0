"""The authors' training steps, and their training from images to validation."""

import keras
import numpy as np
import pytest
from golden_backbones import AUTHORS_DECAY, authors_variables, supershallownet
from golden_files import Golden, recipe_weights
from helpers import IS_TENSORFLOW, as_numpy, gradients
from keras import ops

import nsl_keras

pytestmark = [
    pytest.mark.skipif(not IS_TENSORFLOW, reason="float64 needs the TensorFlow backend"),
    pytest.mark.usefixtures("float64"),
]
LOSS = keras.losses.SparseCategoricalCrossentropy


def build(backbone, shape, classes, weights):
    """Our model with the authors' weights, compiled, and its variables by their names."""
    model = nsl_keras.MetaNeighborhoodModel(
        backbone,
        nsl_keras.layers.CosineDense(classes),
        nsl_keras.layers.NeighborDictionary(
            len(weights["k"]),
            temperature=1 / abs(float(weights.pop("alpha_raw"))),
            value_scale=float(weights.pop("gamma")),
            dropout=0.0,
        ),
    )
    model.build((None, *shape))
    head = model.neighborhood
    variables = {
        "w1": head.head.kernel,
        "tau": head.head.learned_scale,
        "k": head.dictionary.keys,
        "v_raw": head.dictionary.raw_values,
        "lr_raw": head.learning_rate.weights[0],
    }
    if isinstance(backbone, keras.layers.Dense):
        variables |= {"W": backbone.kernel, "b": backbone.bias}
    else:
        variables |= authors_variables(model.backbone)
    # The authors have both forms of the rate at once, and use one.
    weights.pop("lr_diag_raw", None)
    assert {name for name in variables if "moving" not in name} == set(weights)
    assert len(model.trainable_variables) == len(weights)
    for name, value in weights.items():
        value = value.T if name.endswith("film.k") else value
        variables[name].assign(np.reshape(value, variables[name].shape))
    return model, variables


def steps(golden, model, count):
    """Trains one step on each batch with the authors' AdamW, and checks the loss."""
    meta = golden.meta
    optimizer = keras.optimizers.AdamW(
        learning_rate=meta["lr"],
        # The authors subtract wd * w a step, Keras learning_rate * weight_decay * w.
        weight_decay=np.float64(meta["wd"] / meta["lr"]),
        # Keras would make float32 numbers of Python's floats.
        beta_1=np.float64(0.9),
        beta_2=np.float64(0.999),
        epsilon=np.float64(1e-8),
        clipvalue=10.0,
    )
    optimizer.exclude_from_weight_decay(var_list=model.decay_exempt_variables)
    model.compile(optimizer, LOSS(from_logits=True), run_eagerly=True, metrics=["accuracy"])
    for step in range(count):
        x, y = golden["in.x"][step].astype("float64"), golden["in.labels"][step]
        loss = model.fit(x, y, batch_size=len(x), verbose=0).history["loss"][0]
        golden.check(f"out64.meta_loss_step{step}", np.array(loss), "float64")
        yield step


@pytest.mark.parametrize("name", ["mn_adamw_steps", "mn_adamw_steps_clipped"])
def test_training_steps(name):
    golden = Golden(name)
    weights = {key[2:]: golden[key] for key in golden.arrays if key.startswith("w.")}
    (size, features), classes = weights["W"].shape, weights["w1"].shape[1]
    backbone = keras.layers.Dense(features)
    model, variables = build(backbone, (size,), classes, weights)

    x = golden["in.x"][0].astype("float64")
    names = [name for name in variables if f"grad64.meta_loss.{name}" in golden]
    found = gradients(
        lambda x: LOSS(from_logits=True)(golden["in.labels"][0], model(x)),
        [ops.convert_to_tensor(x)],
        [variables[name] for name in names],
    )[1:]
    for name, gradient in zip(names, found, strict=True):
        golden.check(f"grad64.meta_loss.{name}", gradient, "float64")

    for step in steps(golden, model, len(golden["in.x"])):
        for name in golden.meta["updated"]:
            golden.check(f"after64_{step + 1}.{name}", variables[name], "float64")


class AuthorsStatistics:
    """The moving statistics of the authors, from those of Keras's batch norm.

    Theirs average the mean from zero and divide by the weights so far, and average the
    unbiased variance.
    """

    def __init__(self, layer):
        self.layer, self.steps, self.total = layer, 0, 0.0
        self.kept = self.of_keras()
        self.variance = self.kept[1]

    def of_keras(self):
        return np.array([as_numpy(each) for each in self.layer.non_trainable_variables])

    def update(self, batch):
        """Takes in the batch that Keras has just seen."""
        momentum = self.layer.momentum
        before, self.kept = self.kept, self.of_keras()
        mean, variance = (self.kept - momentum * before) / (1 - momentum)
        count = batch * np.prod(self.layer.input.shape[1:-1])
        self.steps += 1
        self.total = AUTHORS_DECAY * self.total + (1 - AUTHORS_DECAY) * mean
        self.variance = AUTHORS_DECAY * self.variance + (1 - AUTHORS_DECAY) * (
            variance * count / (count - 1)
        )

    def assign(self):
        self.layer.moving_mean.assign(self.total / (1 - AUTHORS_DECAY**self.steps))
        self.layer.moving_variance.assign(self.variance)


@pytest.mark.parametrize("film", ["", "_film"])
def test_training_and_validation(film):
    golden = Golden(f"mn_pipeline_supershallow{film}")
    meta, shape = golden.meta, golden["in.x"].shape[2:]
    backbone = supershallownet(shape)
    if film:
        size = meta["film_dict_size"]
        backbone = nsl_keras.convert.add_film(backbone, dictionary_size=size)
    model, variables = build(backbone, shape, meta["C"], recipe_weights(meta))
    statistics = [
        AuthorsStatistics(layer)
        for layer in model.backbone.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    *_, images = golden["in.x"].astype("float64")
    for _ in steps(golden, model, len(golden["in.x"]) - 1):
        for each in statistics:
            each.update(len(images))

    # Keras's moving statistics are others: validation needs the authors'.
    for each in statistics:
        each.assign()
    for name, variable in variables.items():
        value, expected = as_numpy(variable), golden[f"after64.{name}"]
        if name.endswith("film.k"):
            value = value.T
        if name == "conv1.W":
            value = value[..., :6, :6]
        golden.check(f"after64.{name}", value.reshape(expected.shape), "float64")
    labels, options = golden["in.labels"][-1], {"verbose": 0, "return_dict": True}
    found = model.evaluate(images, labels, batch_size=meta["B"], **options)
    for key in ("loss", "accuracy"):
        golden.check(f"out64.val_{key}", np.array(found[key]), "float64")

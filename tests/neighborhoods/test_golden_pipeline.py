"""The authors' training from images to validation, through `fit` and `evaluate`."""

import keras
import numpy as np
import pytest
from golden_backbones import AUTHORS_DECAY, authors_variables, supershallownet
from golden_files import Golden, recipe_weights

import nsl_keras

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="float64 needs the TensorFlow backend",
)


def build(golden, inner_loop):
    """Our model with the fixture's weights, and its variables by the authors' names."""
    meta = golden.meta
    weights = recipe_weights(meta)
    backbone = supershallownet(golden["in.x"].shape[2:])
    if meta["modulate"] == "all":
        backbone = nsl_keras.convert.add_film(
            backbone, dictionary_size=meta["film_dict_size"]
        )
    model = nsl_keras.MetaNeighborhoodModel(
        backbone,
        nsl_keras.layers.CosineDense(meta["C"]),
        nsl_keras.layers.NeighborDictionary(
            meta["S"],
            temperature=1 / float(weights.pop("alpha_raw")),
            value_scale=float(weights.pop("gamma")),
            dropout=0.0,
        ),
        inner_loop=inner_loop,
    )
    model.build((None, *golden["in.x"].shape[2:]))
    head = model.neighborhood
    variables = authors_variables(model.backbone) | {
        "w1": head.head.kernel,
        "tau": head.head.learned_scale,
        "k": head.dictionary.keys,
        "v_raw": head.dictionary.raw_values,
        "lr_raw": head.rate.raw_rates[0],
    }
    # The authors have both forms of the rate at once, and use one.
    weights.pop("lr_diag_raw")
    statistics = {name for name in variables if "moving" in name}
    assert set(variables) - statistics == set(weights)
    assert len(model.trainable_variables) == len(weights)
    for name, value in weights.items():
        shape = tuple(variables[name].shape)
        variables[name].assign(value if shape == value.shape else value.T)
    return model, variables


class AuthorsStatistics:
    """The moving statistics of the authors, from those of Keras's batch norm.

    Theirs average the mean from zero and divide by the weights so far, and average the
    unbiased variance.
    """

    def __init__(self, layer):
        self.layer = layer
        self.steps = 0
        self.total = 0.0
        self.kept = self.of_keras()
        self.variance = self.kept[1]

    def of_keras(self):
        layer = self.layer
        return np.array([layer.moving_mean.value, layer.moving_variance.value])

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

    @property
    def mean(self):
        return self.total / (1 - AUTHORS_DECAY**self.steps)

    def assign(self):
        self.layer.moving_mean.assign(self.mean)
        self.layer.moving_variance.assign(self.variance)


@pytest.mark.parametrize(
    ("name", "inner_loop"),
    [("mn_pipeline_supershallow", "dual"), ("mn_pipeline_supershallow_film", "tape")],
)
def test_training_and_validation(name, inner_loop):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    golden = Golden(name)
    meta = golden.meta
    model, variables = build(golden, inner_loop)
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
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    normalizations = [
        layer
        for layer in model.backbone.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    statistics = [AuthorsStatistics(layer) for layer in normalizations]
    images, labels = golden["in.x"].astype("float64"), golden["in.labels"]
    for step, (x, y) in enumerate(zip(images[:-1], labels[:-1], strict=True)):
        history = model.fit(x, y, batch_size=len(x), verbose=0).history
        golden.check(f"out64.meta_loss_step{step}", np.array(history["loss"][0]), "float64")
        for each in statistics:
            each.update(len(x))

    # Keras's moving statistics are others: validation needs the authors'.
    for each in statistics:
        each.assign()
    for name, variable in variables.items():
        value = np.array(variable.value)
        expected = golden[f"after64.{name}"]
        if name.endswith("film.k"):
            value = value.T
        if name == "conv1.W":
            value = value[..., :6, :6]
        golden.check(f"after64.{name}", value.reshape(expected.shape), "float64")
    found = model.evaluate(
        images[-1], labels[-1], batch_size=meta["B"], verbose=0, return_dict=True
    )
    for key in ("loss", "accuracy"):
        golden.check(f"out64.val_{key}", np.array(found[key]), "float64")

"""MAXL (Liu, Davison and Johns, NeurIPS 2019): auxiliary labels from a second network.

A generator `g` splits each class into five, and a multi-task network learns the classes and
the generator's soft labels of the parts, both by a focal loss `F`:

    L(theta)  = F(y, primary(x)) + F(g(x, y), auxiliary(x))
    theta'    = theta - rate * dL/dtheta
    generator : F(y, primary(x) at theta') + 0.2 sum_k m_k log m_k

where `m` is the batch mean of `g(x, y)`: the last term spreads the labels over the parts.
Losses and the 0.2 are those of the authors' code. It trains both networks by SGD, at 0.01
(the step ahead too) and 0.001, in turn, an epoch each. Here the rate of the step ahead is
the 0.1 that Meta-Neighborhoods (A.2) names, that of the generator 0.01 with a momentum of
0.9, both constant; the multi-task network has the recipe of the other rows; and each step
trains both networks, the generator first.
"""

from typing import Any

import keras
from keras import ops

PARTS = 5
ENTROPY_WEIGHT = 0.2


def focal(labels: Any, probabilities: Any) -> Any:
    """The mean of `-sum_k y_k (1 - p_k)^2 log p_k`."""
    terms = labels * ops.square(1 - probabilities) * ops.log(probabilities + 1e-20)
    return -ops.mean(ops.sum(terms, axis=-1))


def losses(labels: Any, parts: Any, primary: Any, auxiliary: Any) -> tuple[Any, Any]:
    """The loss of the classes, and that of both tasks."""
    classes = ops.one_hot(labels, primary.shape[-1], dtype=primary.dtype)
    of_classes = focal(classes, ops.softmax(primary))
    return of_classes, of_classes + focal(parts, ops.softmax(auxiliary))


class Maxl(keras.Model):
    """A multi-task network and the generator of its auxiliary labels; TensorFlow alone.

    The network gives logits of the classes and of their parts, the generator those of the
    parts; it learns through a step of the `lookahead_rate`.
    """

    def __init__(
        self, multi_task: keras.Model, generator: keras.Model, lookahead_rate: float = 0.1
    ) -> None:
        super().__init__()
        self.multi_task, self.generator = multi_task, generator
        self.lookahead_rate = lookahead_rate
        sgd = keras.optimizers.SGD(0.01, momentum=0.9, weight_decay=5e-4)
        self.generator_optimizer = sgd
        self.generator_optimizer.build(generator.trainable_variables)
        self.built = True

    @property
    def decay_exempt_variables(self) -> list:
        """Both heads, as in the other rows."""
        heads = self.multi_task.layers[-2:]
        return [each for head in heads for each in head.trainable_variables]

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.multi_task(inputs, training=training)[0]

    def generated(self, images: Any, labels: Any) -> Any:
        """Soft labels of the parts of each image's own class."""
        logits = self.generator(images, training=True)
        classes = logits.shape[-1] // PARTS
        own = ops.repeat(ops.one_hot(labels, classes), PARTS, axis=-1)
        return ops.softmax(ops.where(own > 0, logits, -1e9), axis=-1)

    def loss_at(self, weights: list, images: Any, labels: Any, parts: Any) -> tuple:
        others = [each.value for each in self.multi_task.non_trainable_variables]
        (primary, auxiliary), _ = self.multi_task.stateless_call(
            weights, others, images, training=True
        )
        return losses(labels, parts, primary, auxiliary)

    def generator_loss(self, images: Any, labels: Any) -> Any:
        """The loss of the classes after a step, plus how unevenly the parts are used."""
        import tensorflow as tf

        parts = self.generated(images, labels)
        weights = [each.value for each in self.multi_task.trainable_variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            _, both = self.loss_at(weights, images, labels, parts)
        stepped = [
            weight - self.lookahead_rate * gradient
            for weight, gradient in zip(weights, tape.gradient(both, weights), strict=True)
        ]
        after, _ = self.loss_at(stepped, images, labels, parts)
        shares = ops.mean(parts, axis=0)
        return after + ENTROPY_WEIGHT * ops.sum(shares * ops.log(shares + 1e-20))

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        images, labels, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.generator_loss(images, labels)
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(loss, variables), variables)
        parts = self.generated(images, labels)
        with tf.GradientTape() as tape:
            primary, auxiliary = self.multi_task(images, training=True)
            _, both = losses(labels, parts, primary, auxiliary)
            both = sum(self.multi_task.losses, both)
        variables = self.multi_task.trainable_variables
        self.optimizer.apply(tape.gradient(both, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(both)
        return self.compute_metrics(images, labels, primary)


def maxl(
    features: keras.Model, head: keras.layers.Layer, _dictionary: dict, _seed: int
) -> Maxl:
    """A row of Table 1; the generator has an untrained copy of the features."""
    parts = PARTS * head.units
    inputs = keras.Input(features.input_shape[1:])
    found = features(inputs)
    outputs = [head(found), keras.layers.Dense(parts, name="auxiliary")(found)]
    generator = keras.Sequential(
        [keras.models.clone_model(features), keras.layers.Dense(parts, name="parts")]
    )
    generator.build(features.input_shape)
    return Maxl(keras.Model(inputs, outputs), generator)

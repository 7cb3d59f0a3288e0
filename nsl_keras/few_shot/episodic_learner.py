"""Base of all models of episodes: inputs, checks and training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import graphs, validation
from nsl_keras.backend import Tensor, variable_scope, wide_dtype
from nsl_keras.few_shot.adapting import Adapting
from nsl_keras.few_shot.stateless import POLICIES
from nsl_keras.training.checks import CheckedModel
from nsl_keras.training.data import as_inputs


class EpisodicLearner(Adapting, CheckedModel):
    """Base of the models from `(support_images, support_labels, query_images)` to logits.

    A subclass writes `call` and `_adapt`, `build_weights` if it has weights of its own,
    and sets `ways` there at the latest.
    """

    #: int, the number of classes of an episode; `None` before the model is built.
    ways: Any = None
    #: The shape of the outputs for one query; `None` before the model is built.
    outputs_shape: Any = None
    #: Keras would take the labels of an episode for one-hot labels.
    weighs_classes = False

    def __init__(self, network: Any, batch_normalization: str, **kwargs: Any) -> None:
        is_layer = isinstance(network, keras.layers.Layer)
        validation.require(is_layer, self.network_argument, "a Keras model", network)
        # With a mixed policy Keras would round all variables that a learner reads.
        kwargs["dtype"] = network.variable_dtype
        super().__init__(autocast=False, **kwargs)
        self.batch_normalization = validation.one_of(
            batch_normalization, POLICIES, "batch_normalization"
        )

    def compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        """Configures training, as in Keras; the loss of a classifier must take logits."""
        # Keras would ask for the learner's policy, which is not mixed.
        scales = kwargs.get("auto_scale_loss", True)
        if scales and self.network.dtype_policy.name == "mixed_float16":
            optimizer = keras.optimizers.get(optimizer)
            if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        super().compile(optimizer, *args, **kwargs)

    def build(self, input_shape: Any) -> None:
        if not self.built:
            support, *_ = episode_shapes(input_shape, () if self.classifies else None)
            output = self._output_of(support[2:])
            self._outputs_dtype = wide_dtype(output.dtype)
            self.build_weights(tuple(output.shape[1:]))

    def build_weights(self, shape: tuple[int, ...]) -> None:
        """Creates what depends on the shape of the network's output, without batch axis."""

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        batch, queries = input_shape[2][:2]
        return (batch, queries, *self.outputs_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            self.network_argument: keras.saving.serialize_keras_object(self.network),
            "batch_normalization": self.batch_normalization,
        }

    def _checked(self, x: Any, y: Any = None) -> Any:
        return as_inputs(super()._checked(x, y))

    @functools.wraps(keras.Model.predict)
    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().predict(self._checked(x), *args, **kwargs)

    def _check_data(self, x: Any, y: Any = None) -> None:
        arrays = x if isinstance(x, (tuple, list)) else ()
        shapes = [tuple(np.shape(each)) for each in arrays] or np.shape(x)
        episode_shapes(shapes, () if self.classifies else self.outputs_shape)
        images, labels, queries = x
        validation.require_finite(images, "support_images")
        validation.require_finite(queries, "query_images")
        self.ensure_built(np.shape(images)[2:], np.shape(labels)[2:])
        if not self.classifies:
            validation.require_finite(labels, "support_labels")
            validation.require_finite(y, "y")
            shape = (*np.shape(queries)[:2], *self.outputs_shape)
            demand = f"of the shape of the outputs, {shape}"  # Keras would broadcast it.
            validation.require(y is None or np.shape(y) == shape, "y", demand, np.shape(y))
            return
        for episode, row in enumerate(ops.convert_to_numpy(labels)):
            found = np.unique(row)
            are_all = np.array_equal(found, np.arange(self.ways))
            demand = f"the classes 0 to {self.ways - 1}, each at least once"
            name = f"support_labels[{episode}]"
            validation.require(are_all, name, demand, found.tolist())
        if y is not None:
            y = ops.convert_to_numpy(y)
            validation.require_class_labels(y.reshape(-1, *y.shape[2:]), self.ways)

    def ensure_built(self, shape: Any, label_shape: Any = ()) -> None:
        if not self.built:
            images, labels = (None, None, *shape), (None, None, *label_shape)
            with variable_scope(self):
                self.build((images, labels, images))

    def _output_of(self, shape: tuple[int | None, ...]) -> keras.KerasTensor:
        network, images = self.network, (None, *shape)
        found = graphs.symbols_of(network)[1] if graphs.is_graph(network) else None
        if found is None or isinstance(found, keras.KerasTensor):  # Else a list or dict.
            symbol = keras.KerasTensor(images, keras.config.floatx())
            found = graphs.output_spec(network, symbol)
        is_known = isinstance(found, keras.KerasTensor) and None not in found.shape[1:]
        demand = f"a model with one output of known sizes for inputs of shape {images}"
        validation.require(is_known, self.network_argument, demand, found)
        return found

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Tensor:
        """Returns the loss; `sample_weight` has a weight per episode or per query."""
        if sample_weight is not None:
            # Keras would broadcast weights of episodes along another axis, and divide by
            # too small a sum. A loss has all axes of the outputs but the last.
            if len(y_pred.shape) == len(np.shape(sample_weight)) == 2:
                y, y_pred = y[..., None], y_pred[..., None]
            shape = ops.shape(y_pred)[:-1]
            aligned = (shape[0], -1, *[1] * len(shape))[: len(shape)]
            sample_weight = ops.broadcast_to(ops.reshape(sample_weight, aligned), shape)
        return super().compute_loss(x, y, y_pred, sample_weight, training=training)


def one_hot(labels: Tensor, ways: int, dtype: str | None = None) -> Tensor:
    """Returns one-hot labels; `-inf` for unknown ones, otherwise left out in silence."""
    labels = ops.cast(labels, "int32")
    found = ops.one_hot(labels, ways, dtype=dtype)
    known = ops.logical_and(labels >= 0, labels < ways)
    return found + ops.log(ops.cast(known, found.dtype))[..., None]


def episode_shapes(
    input_shape: Sequence[Sequence[int | None]], label_shape: tuple[int, ...] | None = None
) -> tuple[tuple[int | None, ...], ...]:
    """Returns the shapes of an episode's inputs, checked; `label_shape=None` allows any."""
    if len(input_shape) == 3 and all(
        isinstance(each, (tuple, list)) and len(each) >= 2 for each in input_shape
    ):
        support, labels, query = shapes = tuple(map(tuple, input_shape))
        if (
            validation.fits(labels[:2], support[:2])
            and validation.fits(support[:1], query[:1])
            and support[2:] == query[2:]
            and label_shape in (None, labels[2:])
        ):
            return shapes
    of_labels = ", ".join(("batch, support examples", *map(str, label_shape or ())))
    raise ValueError(
        "Inputs must be (support_images, support_labels, query_images), of shapes (batch, "
        f"support examples, ...), ({of_labels}) and (batch, queries, ...), with examples "
        "of one shape. To classify single examples, call `adapt` with the support set. "
        f"Received: input_shape={input_shape}"
    )

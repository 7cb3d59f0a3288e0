"""Keras models under `tf.distribute`: steps that on many replicas equal one device's.

Two things stand in the way of `fit` under `MultiWorkerMirroredStrategy` in Keras 3.15
(keras-team/keras issue 20585). Before the first step the model is built on a batch that is
reduced over the replicas, where the first one's would do; and what a step returns is
reduced along an axis that scalars do not have. The first is in `_maybe_symbolic_build`,
the only private method of Keras that is overridden here; the second goes by overriding
`make_train_function` and `make_test_function`, which are public.

On one replica all is Keras's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def replicas_in_sync() -> int:
    """Returns the number of replicas of the current `tf.distribute` strategy."""
    count: int = tf.distribute.get_strategy().num_replicas_in_sync
    return count


class ReplicatedSteps(keras.Model):
    """A Keras model with a step that is right on several replicas.

    The loss of a batch is the mean over its examples, wherever they are. Keras takes the
    mean of the replicas' means: another one where a batch does not divide.
    """

    def make_train_function(self, force: bool = False) -> Any:
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return super().make_train_function(force)
        if self.train_function is None or force:
            _require_mean_losses(self)
            self.train_function = _over_replicas(self, _keeping_statistics(self))
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = _over_replicas(self, self.test_step)
        return self.test_function

    def train_step(self, data: Any) -> Any:
        """One step of a replica, on its share of a batch."""
        if replicas_in_sync() == 1:
            return super().train_step(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight, training=True)
            descended = self.optimizer.scale_loss(loss * share_of_examples(x))
        variables = self.trainable_variables
        gradients = gradients_of_replicas(
            self.optimizer, tape.gradient(descended, variables)
        )
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        track_loss(self, loss, x)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # Overrides Keras's, which means the batch over the replicas only to see its shape.
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
            return
        if iterator is not None:
            _, _, batches = next(iter(iterator))
            data_batch = next(batches)
        with strategy.scope():
            self._symbolic_build(
                data_batch=keras.tree.map_structure(
                    lambda value: _first_local(strategy, value), data_batch
                )
            )


def _first_local(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """What the first replica of this process has of a distributed value."""
    return None if value is None else strategy.experimental_local_results(value)[0]


def _over_replicas(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that runs a step on all replicas, for Keras's loops.

    Several steps an execution are several calls: under a strategy they save no time.
    """
    strategy = model.distribute_strategy

    @tf.autograph.experimental.do_not_convert
    def on_batch(batch: Any) -> Any:
        logs = strategy.run(step, args=(keras.tree.map_structure(_or_none, batch),))
        results = model.get_metrics_result()
        if isinstance(logs, dict) and set(logs) == set(results):
            return results  # Of all examples, where the replicas' are of their own.
        return keras.tree.map_structure(
            lambda value: strategy.reduce("MEAN", value, axis=None), logs
        )

    if not model.run_eagerly:
        on_batch = tf.function(
            on_batch, reduce_retracing=True, jit_compile=model.jit_compile
        )

    def function(iterator: Any) -> Any:
        logs = None
        for _, batch in zip(range(model.steps_per_execution), iterator, strict=False):
            logs = on_batch(batch)
        if logs is None:
            raise StopIteration
        return logs

    return function


def _or_none(value: Any) -> Any:
    """`None` for what data sets have in its place."""
    return None if isinstance(value, tf.experimental.Optional) else value


def _keeping_statistics(model: Any) -> Callable[[Any], Any]:
    """Returns a training step after which no statistic is of an empty batch.

    A last batch may leave a replica without examples. Means over them are NaN, and so
    would be the moving statistics of batch norms that are not synchronized.
    """

    def step(data: Any) -> Any:
        statistics = [
            variable
            for variable in model.non_trainable_variables
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        before = [tf.identity(variable.value) for variable in statistics]
        logs = model.train_step(data)
        if statistics:
            empty = _sum_over_replicas(tf.cast(_examples(data) == 0, "int32")) > 0
        for variable, old in zip(statistics, before, strict=True):
            new = tf.convert_to_tensor(variable.value)
            lost = empty & tf.reduce_any(tf.math.is_nan(new))
            variable.assign(tf.where(lost, old, new))
        return logs

    return step


def _examples(x: Any) -> Any:
    """The number of examples of a replica's share of a batch."""
    return tf.shape(next(each for each in keras.tree.flatten(x) if each is not None))[0]


def _sum_over_replicas(tensor: Any) -> Any:
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)


def share_of_examples(x: Any) -> Any:
    """Returns how many examples this replica has, as a multiple of the replicas' mean.

    Keras means a loss over a replica's examples, and over replicas. With this factor it
    is the mean over all examples. It is 1 where a batch divides.
    """
    if replicas_in_sync() == 1:
        return 1.0
    own = tf.cast(_examples(x), "float32")
    everywhere = _sum_over_replicas(own)
    return tf.math.divide_no_nan(own * replicas_in_sync(), everywhere)


def gradients_of_replicas(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns what a replica gives its optimizer, which sums over the replicas.

    Optimizers clip, and look for float16's overflows, before they sum. To those that do,
    the first replica gives the sum, and the others zeros. Where the sum is not finite
    they give NaN, so that all replicas find the overflow and none goes its own way.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    looks = inner is not optimizer or any((inner.clipnorm, inner.clipvalue, inner.global_clipnorm))
    if replicas_in_sync() == 1 or not looks:
        return list(gradients)
    first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
    return [
        None
        if gradient is None
        else _sum_over_replicas(tf.convert_to_tensor(gradient))
        * tf.cast(first, gradient.dtype)
        for gradient in gradients
    ]


def track_loss(model: Any, loss: Any, x: Any) -> None:
    """Feeds the reported loss, which Keras has scaled by the number of replicas."""
    for metric in model.metrics:
        if metric.name == "loss":
            metric.update_state(loss * replicas_in_sync(), sample_weight=_examples(x))


def _require_mean_losses(model: Any) -> None:
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("mean", "sum_over_batch_size"):
            raise ValueError(
                "`loss` must be the mean over the examples on several replicas "
                '(reduction="sum_over_batch_size"): elsewhere replicas would not add up to '
                f"one device. Received: loss={loss!r} with reduction={reduction!r}"
            )

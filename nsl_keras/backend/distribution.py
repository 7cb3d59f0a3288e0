"""Keras models under `tf.distribute`: steps that on many replicas equal one device's.

Two things stand in the way of `fit` under `MultiWorkerMirroredStrategy` in Keras 3.15
(keras-team/keras issue 20585). Before the first step the model is built on a batch that is
reduced over the replicas, where the first one's would do; and what a step returns is
reduced along an axis that scalars do not have. The first is in `_maybe_symbolic_build`,
the only private method of Keras that is overridden here; the second goes by overriding
`make_train_function` and `make_test_function`, which are public.

An example: a batch of 7 on two processes of two replicas each. The parts do not divide, so
they are gathered, and replica `r` of 4 takes the examples from `7 r // 4` to
`7 (r + 1) // 4`: 1, 2, 2 and 2 of them. Its mean loss counts 4/7 or 8/7 times, and the mean
over the replicas, which Keras takes, is the mean over the 7. Of a batch of 3 each replica
computes all, and metrics count what the first one finds.

On one replica all is Keras's own.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from nsl_keras.backend import cluster


def replicas_in_sync() -> int:
    """Returns the number of replicas of the current `tf.distribute` strategy."""
    count: int = tf.distribute.get_strategy().num_replicas_in_sync
    return count


def start_workers(timeout: float) -> tf.distribute.Strategy:
    """Returns the strategy of the workers in `TF_CONFIG`, once all are there."""
    cluster.wait_for_workers(cluster.read(), timeout)
    return tf.distribute.MultiWorkerMirroredStrategy()


def on_all_replicas(examples: Any) -> Any:
    """Returns how many examples a batch has, of which a replica has so many."""
    share, context = _share.get(), tf.distribute.get_replica_context()
    if share is not None:
        times = share.times
    else:
        times = 1 if context is None else context.num_replicas_in_sync
    return tf.cast(examples, "float32") * tf.cast(times, "float32")


def is_first_process(model: keras.Model) -> bool:
    """Whether this process is the first of those that train the model, or the only one."""
    resolver = getattr(model.distribute_strategy, "cluster_resolver", None)
    if resolver is None or resolver.task_type in (None, "chief"):
        return True
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_type == "worker" and resolver.task_id == 0 and not has_chief


class Share(NamedTuple):
    """What a replica has of a batch that does not divide.

    Attributes:
        weight: The number of its examples, as a multiple of the mean over the replicas.
        counted: How many of its examples, from the first on, metrics count.
        times: How many times its examples the batch has.
    """

    weight: Any
    counted: Any
    times: Any


#: The share that the step under way has; `None` where all replicas have the same number.
_share: contextvars.ContextVar[Share | None] = contextvars.ContextVar("share", default=None)

# How a batch reaches the replicas: in equal parts; or whole, to take a part each; or, where
# it has fewer examples than there are replicas, whole, and all of them take all of it.
EQUAL, UNEQUAL, SAME = "equal", "unequal", "same"


class ReplicatedSteps(keras.Model):
    """A Keras model whose steps are right on several replicas.

    The loss of a batch is the mean over its examples, wherever they are. Keras takes the
    mean of the replicas' means: another one where a batch does not divide.
    """

    train_function: Any
    test_function: Any
    predict_function: Any

    def make_train_function(self, force: bool = False) -> Any:
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return super().make_train_function(force)
        if self.train_function is None or force:
            self.train_function = _over_replicas(self, self.train_step)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = _over_replicas(self, self.test_step)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return super().make_predict_function(force)
        if self.predict_function is None or force:
            self.predict_function = _predicting(self)
        return self.predict_function

    def train_step(self, data: Any) -> Any:
        """One step of a replica, on its share of a batch."""
        if replicas_in_sync() == 1:
            return super().train_step(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight, training=True)
            scaled_loss = self.optimizer.scale_loss(weighed(loss))
        self.descend(tape.gradient(scaled_loss, self.trainable_variables))
        self.track_loss(loss, x)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> Any:
        """One step of a replica, on its share of a batch."""
        if replicas_in_sync() == 1:
            return super().test_step(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(x, y, y_pred, sample_weight, training=False)
        self.track_loss(loss, x)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Updates the metrics with the examples of this replica that count."""
        found: dict[str, Any] = super().compute_metrics(
            *(counted(each) for each in (x, y, y_pred, sample_weight))
        )
        return found

    def descend(self, gradients: Sequence[Any]) -> None:
        """Takes the optimizer's step down a replica's gradients of a `weighed` loss."""
        if not self.trainable_variables:
            return  # Everything is frozen: `fit` goes on, as Keras's does.
        self.optimizer.apply_gradients(
            zip(
                _for_optimizer(self.optimizer, gradients),
                self.trainable_variables,
                strict=True,
            )
        )

    def track_loss(self, loss: Any, x: Any) -> None:
        """Feeds the reported loss, which Keras has scaled by the number of replicas."""
        share = _share.get()
        examples = tf.shape(_first(x))[0] if share is None else share.counted
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss * replicas_in_sync(), sample_weight=examples)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # Overrides Keras's, which means the batch over the replicas only to see its shape.
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
            return
        _require_mean_losses(self)
        _require_no_accumulation(self.optimizer)
        if iterator is not None:
            _, _, batches = next(iter(iterator))
            data_batch = _mapped(
                lambda value: strategy.experimental_local_results(value)[0], next(batches)
            )
        with strategy.scope():
            self._symbolic_build(data_batch=data_batch)


def weighed(loss: Any) -> Any:
    """Returns a replica's mean loss, weighed by the number of the replica's examples."""
    share = _share.get()
    return loss if share is None else loss * tf.cast(share.weight, loss.dtype)


def counted(tensors: Any) -> Any:
    """Returns the examples, in nested tensors of a replica's share, that metrics count."""
    share = _share.get()
    if share is None:
        return tensors
    return _mapped(lambda each: each[: share.counted], tensors)


def _for_optimizer(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns what a replica gives its optimizer, which sums over the replicas.

    Optimizers clip gradients, and look for float16's overflows, before they sum. To those
    that do the first replica gives the sum, and the others give zeros; or NaN, where the
    sum is not finite, so that all replicas find the overflow and none goes its own way.
    """
    if replicas_in_sync() == 1 or not _looks_at_gradients(optimizer):
        return list(gradients)
    context = tf.distribute.get_replica_context()
    found = [gradient for gradient in gradients if gradient is not None]
    summed = iter(
        context.all_reduce(
            tf.distribute.ReduceOp.SUM, list(map(tf.convert_to_tensor, found))
        )
    )
    first = tf.equal(context.replica_id_in_sync_group, 0)
    return [
        None if gradient is None else next(summed) * tf.cast(first, gradient.dtype)
        for gradient in gradients
    ]


def _looks_at_gradients(optimizer: Any) -> bool:
    clips = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or any(clips)


def _over_replicas(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that runs a step on all replicas, for Keras's loops.

    Several steps an execution are several calls: under a strategy they save no time.
    """
    strategy = model.distribute_strategy

    def on_replica(batch: Any, dealt: str) -> Any:
        part, share = (batch, None) if dealt == EQUAL else _part_of(batch, dealt)
        token = _share.set(share)
        try:
            return step(part)
        finally:
            _share.reset(token)

    @tf.autograph.experimental.do_not_convert
    def on_batch(batch: Any, dealt: str) -> Any:
        logs = strategy.run(on_replica, args=(batch, dealt))
        results = model.get_metrics_result()
        if isinstance(logs, dict) and set(logs) == set(results):
            return results  # Of all examples, where the replicas' are of their own.
        return _mapped(lambda value: strategy.reduce("MEAN", value, axis=None), logs)

    if not model.run_eagerly:
        on_batch = tf.function(
            on_batch, reduce_retracing=True, jit_compile=model.jit_compile
        )

    def function(iterator: Any) -> Any:
        logs = None
        for _, batch in zip(range(model.steps_per_execution), iterator, strict=False):
            logs = on_batch(*_dealt(strategy, batch))
        if logs is None:
            raise StopIteration
        return logs

    return function


def _predicting(model: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function from batches to their predictions, for Keras's loop."""
    strategy = model.distribute_strategy

    @tf.autograph.experimental.do_not_convert
    def on_batch(batch: Any) -> Any:
        return strategy.run(model.predict_step, args=(batch,))

    if not model.run_eagerly:
        on_batch = tf.function(
            on_batch, reduce_retracing=True, jit_compile=model.jit_compile
        )

    def of_batch(batch: Any) -> Any:
        whole, dealt = _dealt(strategy, batch)
        if dealt == EQUAL:
            return _mapped(functools.partial(_gathered, strategy), on_batch(whole))
        outputs = on_batch(_mapped(functools.partial(_filled_up, strategy), whole))
        examples = len(_first(whole))
        return _mapped(lambda each: _gathered(strategy, each)[:examples], outputs)

    def function(batches: Sequence[Any]) -> Any:
        found = map(of_batch, batches)
        return keras.tree.map_structure(lambda *each: tf.concat(each, 0), *found)

    return function


def _dealt(strategy: tf.distribute.Strategy, batch: Any) -> tuple[Any, str]:
    """Returns a batch, and how it reaches the replicas.

    What `train_on_batch` and its kin are given is whole. A distributed batch that does not
    divide is gathered, so that the graphs of all processes are traced for the same shapes:
    where one is traced once more than another, collectives do not meet.
    """
    batch = _mapped(lambda each: each, batch)
    if not isinstance(_first(batch), tf.distribute.DistributedValues):
        return _mapped(tf.convert_to_tensor, batch), SAME
    sizes = _sizes(strategy, _first(batch))
    if len(set(sizes)) == 1:
        return batch, EQUAL
    whole = _mapped(lambda each: _gathered(strategy, each, sizes), batch)
    return whole, UNEQUAL if sum(sizes) >= len(sizes) else SAME


def _sizes(strategy: tf.distribute.Strategy, first: Any) -> list[int]:
    """Returns how many examples each replica has of a batch, in any process."""
    local = [len(each) for each in strategy.experimental_local_results(first)]
    replicas = strategy.num_replicas_in_sync
    if len(local) == replicas:
        return local
    waiting = iter(local)
    own = strategy.experimental_distribute_values_from_function(
        lambda context: tf.one_hot(
            context.replica_id_in_sync_group, replicas, on_value=float(next(waiting))
        )
    )
    summed = strategy.reduce("SUM", own, axis=None)
    return [int(size) for size in summed.numpy()]


def _gathered(
    strategy: tf.distribute.Strategy, value: Any, sizes: Sequence[int] | None = None
) -> Any:
    """Returns what all replicas have, in the order of the data.

    Args:
        strategy: The strategy.
        value: A distributed value.
        sizes: How many examples each replica has; `None` where all have as many.
    """
    local = strategy.experimental_local_results(value)
    replicas = strategy.num_replicas_in_sync
    if len(local) == replicas:
        return tf.concat(local, 0)
    dtype = wide = local[0].dtype
    # Collectives do not know all of them.
    if dtype.is_integer or dtype.is_bool:
        wide = tf.int64
    elif dtype == tf.bfloat16:
        wide = tf.float32
    value = strategy.run(lambda each: tf.cast(each, wide), args=(value,))
    parts = tf.split(strategy.gather(value, axis=0), sizes or replicas)
    # Gathered by process, while data are dealt to the first replica of each process, then
    # to the second of each.
    parts = [part for first in range(len(local)) for part in parts[first :: len(local)]]
    return tf.cast(tf.concat(parts, 0), dtype)


def _part_of(batch: Any, dealt: str) -> tuple[Any, Share]:
    """Returns the part of a gathered batch that this replica takes, and its share."""
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    place = tf.convert_to_tensor(context.replica_id_in_sync_group)
    total = tf.shape(_first(batch))[0]
    if dealt == SAME:
        return batch, Share(1.0, tf.where(place == 0, total, 0), 1)
    start, stop = place * total // replicas, (place + 1) * total // replicas
    return _mapped(lambda each: each[start:stop], batch), Share(
        replicas * (stop - start) / total, stop - start, total / (stop - start)
    )


def _filled_up(strategy: tf.distribute.Strategy, whole: Any) -> Any:
    """Returns a gathered batch in equal parts, its last example repeated."""
    replicas = strategy.num_replicas_in_sync
    size = -(-len(whole) // replicas)
    repeated = tf.repeat(whole[-1:], size * replicas - len(whole), axis=0)
    parts = tf.split(tf.concat([whole, repeated], 0), replicas)
    local = len(strategy.extended.worker_devices)
    # As `_gathered` orders them.
    order = [part for first in range(local) for part in range(replicas)[first::local]]
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[order.index(context.replica_id_in_sync_group)]
    )


def _first(tensors: Any) -> Any:
    """Returns the first of nested tensors."""
    return next(each for each in keras.tree.flatten(tensors) if each is not None)


def _mapped(function: Callable[[Any], Any], tensors: Any) -> Any:
    """Maps nested tensors; what a data set has in place of `None` becomes it."""

    def mapped(each: Any) -> Any:
        return None if isinstance(each, tf.experimental.Optional) else function(each)

    return keras.tree.map_structure(mapped, tensors, none_is_leaf=False)


def _require_no_accumulation(optimizer: Any) -> None:
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps:
        raise ValueError(
            "`gradient_accumulation_steps` must be None on several replicas: Keras's "
            "optimizers accumulate on one alone. Take larger batches. "
            f"Received: gradient_accumulation_steps={steps}"
        )


def _require_mean_losses(model: Any) -> None:
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("mean", "sum_over_batch_size"):
            raise ValueError(
                "`loss` must be the mean over the examples on several replicas "
                '(reduction="sum_over_batch_size"): others do not add up over them. '
                f"Received: loss={loss!r} with reduction={reduction!r}"
            )

"""Keras models under `tf.distribute`: steps on several replicas that equal one device's.

Two faults of Keras 3.15 make `fit` fail under `MultiWorkerMirroredStrategy`
(keras-team/keras issue 20585). Before the first step it builds the model on a batch that is
reduced over the replicas; and it reduces the results of a step along an axis that scalars
do not have. `_maybe_symbolic_build`, the only private method of Keras that is overridden
here, avoids the first, and `make_train_function` and `make_test_function` the second.

An example: a batch of 7 on two processes of two replicas each. The parts do not divide, so
they are gathered, and replica `r` of 4 takes the examples from `7 r // 4` to
`7 (r + 1) // 4`: 1, 2, 2 and 2 of them. Its mean loss counts 4/7 or 8/7 times, and the mean
over the replicas, which Keras takes, is the mean over the 7. For a batch of 3, every
replica processes the whole batch, and metrics count only the first replica's results.

On one replica everything is Keras's own.
"""

from __future__ import annotations

import contextvars
import faulthandler
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf


def replicas_in_sync() -> int:
    """Returns the number of replicas of the current `tf.distribute` strategy."""
    count: int = tf.distribute.get_strategy().num_replicas_in_sync
    return count


def start_workers(timeout: float) -> tf.distribute.Strategy:
    """Returns the strategy of the workers in `TF_CONFIG`, once all are there.

    TensorFlow waits for them without a limit, in a call that neither signals nor other
    threads of Python can interrupt. The timer of `faulthandler` can end the process.
    """
    text = os.environ.get("TF_CONFIG", "")
    try:
        config = json.loads(text)
        workers, index = config["cluster"]["worker"], config["task"]["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            "The environment variable `TF_CONFIG` must hold the addresses of all workers "
            "and the number of this one, as "
            '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, '
            f'"task": {{"type": "worker", "index": 0}}}}. Received: TF_CONFIG={text!r}'
        ) from error
    sys.stderr.write(
        f"Worker {index} waits for {', '.join(workers)}: within {timeout:g} seconds all "
        "of them must start, or this process ends.\n"
    )
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        faulthandler.cancel_dump_traceback_later()


def on_all_replicas(examples: Any) -> Any:
    """Returns the number of examples of a batch, from the number on this replica."""
    share, context = _share.get(), tf.distribute.get_replica_context()
    times = 1 if context is None else context.num_replicas_in_sync
    times = times if share is None else share.times
    return tf.cast(examples, "float32") * tf.cast(times, "float32")


def is_first_process(model: keras.Model) -> bool:
    """Whether this process is the first of those that train the model, or the only one."""
    resolver = getattr(model.distribute_strategy, "cluster_resolver", None)
    if resolver is None or resolver.task_type in (None, "chief"):
        return True
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_type == "worker" and resolver.task_id == 0 and not has_chief


def variable_scope(model: keras.Model) -> Any:
    """Returns the scope of the strategy under which a model was made."""
    strategy = getattr(model, "distribute_strategy", tf.distribute.get_strategy())
    return strategy.scope()


class Share(NamedTuple):
    """The share of a replica in a batch that does not divide.

    Attributes:
        weight: This replica's example count, divided by the mean count per replica.
        counted: The number of its examples, from the first on, that metrics count.
        times: The example count of the global batch, divided by this replica's.
    """

    weight: Any
    counted: Any
    times: Any


#: The share of the current step; `None` where all replicas have the same number.
_share: contextvars.ContextVar[Share | None] = contextvars.ContextVar("share", default=None)

# How a batch reaches the replicas: in equal parts; whole, and each takes a part of it; or,
# where it has fewer examples than there are replicas, whole, and each takes all of it.
EQUAL, UNEQUAL, SAME = "equal", "unequal", "same"


class ReplicatedSteps(keras.Model):
    """A Keras model whose steps are right on several replicas.

    The loss of a batch is the mean over its examples, wherever they are. Keras takes the
    mean of the replicas' means, which differs where a batch does not divide.
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
        self.descend(tape, loss)
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

    def descend(self, tape: tf.GradientTape, loss: Any) -> None:
        """Takes the optimizer's step down the gradients of a replica's mean loss.

        The loss is weighed by the number of the replica's examples.
        """
        if not self.trainable_variables:
            return  # Everything is frozen.
        share = _share.get()
        weight = tf.cast(1.0 if share is None else share.weight, loss.dtype)
        gradients = tape.gradient(
            loss,
            self.trainable_variables,
            output_gradients=self.optimizer.scale_loss(weight),
        )
        if replicas_in_sync() > 1:
            gradients = _for_optimizer(self.optimizer, gradients)
        self.optimizer.apply(gradients, self.trainable_variables)

    def track_loss(self, loss: Any, x: Any) -> None:
        """Feeds the reported loss, which Keras has scaled by the number of replicas."""
        share = _share.get()
        examples = tf.shape(_first(x))[0] if share is None else share.counted
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss * replicas_in_sync(), sample_weight=examples)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # Keras's own takes the mean of the batch over the replicas, to see its shape.
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
            return
        _require_sums_over_replicas(self)
        if iterator is not None:
            _, _, batches = next(iter(iterator))
            data_batch = _mapped(
                lambda value: strategy.experimental_local_results(value)[0], next(batches)
            )
        with strategy.scope():
            self._symbolic_build(data_batch=data_batch)


def counted(tensors: Any) -> Any:
    """Returns the examples, in nested tensors of a replica's share, that metrics count."""
    share = _share.get()
    if share is None:
        return tensors
    return _mapped(lambda each: each[: share.counted], tensors)


def _for_optimizer(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients for a replica's optimizer, which sums over the replicas.

    Optimizers clip gradients, and look for float16's overflows, before they sum. For those
    that do, the first replica returns the sum and the others zeros; or NaN where the sum is
    not finite, so that all replicas find the overflow.
    """
    clips = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not (is_scaled or any(clips)):
        return list(gradients)
    context = tf.distribute.get_replica_context()
    first = tf.equal(context.replica_id_in_sync_group, 0)
    found = [tf.convert_to_tensor(each) for each in gradients if each is not None]
    summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, found))
    return [
        None if gradient is None else next(summed) * tf.cast(first, gradient.dtype)
        for gradient in gradients
    ]


def _over_replicas(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that runs a step on all replicas, for Keras's loops.

    With several steps per execution it calls the graph several times.
    """
    strategy = model.distribute_strategy

    def on_replica(batch: Any, dealt: str) -> Any:
        part, share = (batch, None) if dealt == EQUAL else _part_of(batch, dealt)
        token = _share.set(share)
        try:
            return step(part)
        finally:
            _share.reset(token)

    def on_batch(batch: Any, dealt: str) -> Any:
        logs = strategy.run(on_replica, args=(batch, dealt))
        results = model.get_metrics_result()
        if isinstance(logs, dict) and set(logs) == set(results):
            return results  # Of all examples; the replicas' logs are of their own.
        return _mapped(lambda value: strategy.reduce("MEAN", value, axis=None), logs)

    run = _in_graph(model, on_batch)

    def function(iterator: Any) -> Any:
        logs = None
        for _, batch in zip(range(model.steps_per_execution), iterator, strict=False):
            logs = run(*_dealt(strategy, batch))
        if logs is None:
            raise StopIteration
        return logs

    return function


def _predicting(model: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function from batches to their predictions, for Keras's loop."""
    strategy = model.distribute_strategy
    run = _in_graph(model, lambda batch: strategy.run(model.predict_step, args=(batch,)))

    def of_batch(batch: Any) -> Any:
        batch, dealt = _dealt(strategy, batch)
        if dealt == EQUAL:
            return _mapped(functools.partial(_gathered, strategy), run(batch))
        # Each replica predicts all of it.
        return _mapped(
            lambda each: strategy.experimental_local_results(each)[0], run(batch)
        )

    def function(batches: Sequence[Any]) -> Any:
        found = map(of_batch, batches)
        return keras.tree.map_structure(lambda *each: tf.concat(each, 0), *found)

    return function


def _in_graph(model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as the model is compiled: as a graph, or eager."""
    function = tf.autograph.experimental.do_not_convert(function)
    if model.run_eagerly:
        return function
    return tf.function(function, reduce_retracing=True, jit_compile=model.jit_compile)


def _dealt(strategy: tf.distribute.Strategy, batch: Any) -> tuple[Any, str]:
    """Returns a batch, and how it reaches the replicas.

    `train_on_batch` and its like pass whole batches. A distributed batch that does not
    divide is gathered, so that all processes trace their graphs for the same shapes: where
    one traces once more than another, their collectives do not meet.
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
    """Returns the number of examples of each replica, in any process."""
    local = [len(each) for each in strategy.experimental_local_results(first)]
    if len(local) == strategy.num_replicas_in_sync:
        return local
    own = strategy.run(lambda each: tf.shape(each, "int64")[:1], args=(first,))
    sizes: list[int] = strategy.gather(own, axis=0).numpy().tolist()
    return sizes


def _gathered(
    strategy: tf.distribute.Strategy, value: Any, sizes: Sequence[int] | None = None
) -> Any:
    """Returns the examples of all replicas in the order of the data.

    Args:
        strategy: The strategy.
        value: A distributed value.
        sizes: The number of examples of each replica; `None` where all are equal.
    """
    local = strategy.experimental_local_results(value)
    replicas = strategy.num_replicas_in_sync
    if len(local) == replicas:
        return tf.concat(local, 0)
    dtype = local[0].dtype
    # Collectives do not support all of them.
    wide = {"bfloat16": tf.float32}.get(dtype.name, dtype)
    if dtype.is_integer or dtype.is_bool:
        wide = tf.int64
    value = strategy.run(lambda each: tf.cast(each, wide), args=(value,))
    parts = tf.split(strategy.gather(value, axis=0), sizes or replicas)
    # They are gathered by process, while data go to the first replica of each process,
    # then to the second of each.
    parts = [part for first in range(len(local)) for part in parts[first :: len(local)]]
    return tf.cast(tf.concat(parts, 0), dtype)


def _part_of(batch: Any, dealt: str) -> tuple[Any, Share]:
    """Returns this replica's part of a gathered batch, and its share."""
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


def _first(tensors: Any) -> Any:
    """Returns the first of nested tensors."""
    return next(each for each in keras.tree.flatten(tensors) if each is not None)


def _mapped(function: Callable[[Any], Any], tensors: Any) -> Any:
    """Maps nested tensors; placeholders for `None` in data sets become `None`."""

    def mapped(each: Any) -> Any:
        return None if isinstance(each, tf.experimental.Optional) else function(each)

    return keras.tree.map_structure(mapped, tensors, none_is_leaf=False)


def _require_sums_over_replicas(model: Any) -> None:
    """Raises for losses and optimizers that do not add up over the replicas."""
    # Mixed precision wraps the optimizer.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps:
        raise ValueError(
            "`gradient_accumulation_steps` must be None on several replicas, since Keras's "
            "optimizers accumulate on each by itself. Use larger batches. "
            f"Received: gradient_accumulation_steps={steps}"
        )
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("mean", "sum_over_batch_size"):
            raise ValueError(
                "`loss` must be the mean over the examples on several replicas "
                '(reduction="sum_over_batch_size"). '
                f"Received: loss={loss!r} with reduction={reduction!r}"
            )

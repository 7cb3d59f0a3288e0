"""Functions of TensorFlow that the package needs beyond `keras.ops`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

Function: TypeAlias = Callable[..., Any]
Tensors: TypeAlias = Sequence[Any]
GradientTape = tf.GradientTape


# Derivatives.


def gradients_of(function: Function, at: Tensors) -> tuple[list[Any], Any]:
    """Returns the differentiable gradients of a scalar, and the auxiliary output.

    The function takes a list of tensors and returns the scalar and an auxiliary output.
    """
    at = [tf.convert_to_tensor(tensor) for tensor in at]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(at)
        value, auxiliary = function(at)
    gradients = tape.gradient(value, at)
    if gradients and all(gradient is None for gradient in gradients):
        raise RuntimeError(
            "The inner steps must be recorded by a gradient tape, but none is recording. "
            "On TensorFlow, `keras.remat`, `keras.RematScope` and `tf.recompute_grad` stop "
            "all tapes: apply them to the backbone alone, not to a head or a model that "
            "is finetuned, or use the JAX backend. Forward-mode derivatives of several "
            "inner steps need a dictionary of at most 512 entries."
        )
    pairs = zip(at, gradients, strict=True)
    return [tf.zeros_like(x) if dx is None else dx for x, dx in pairs], auxiliary


def gradients_of_columns(function: Function, at: Any) -> list[Any]:
    """Returns the gradients of the sum of each column of an output."""
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(at)
        columns = tf.unstack(function(at), axis=-1)
    return [
        tape.gradient(column, at, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        for column in columns
    ]


# Loops.


def vectorized_map(function: Function, elements: Any) -> Any:
    """Applies a function to all elements of a batch at once; the batch may be empty."""
    if keras.tree.flatten(elements)[0].shape[0] == 1:
        # Eagerly, `tf.vectorized_map` traces the function in each call.
        alone = function(keras.tree.map_structure(lambda each: each[0], elements))
        return keras.tree.map_structure(lambda each: each[None], alone)
    count = tf.shape(keras.tree.flatten(elements)[0])[0]

    def of_one_or_more(array: Any) -> Any:
        # On no elements TensorFlow's own shapes do not match (2.21).
        zeros = [[0, 0]] * (array.shape.rank - 1)
        return tf.pad(array, [[0, tf.maximum(1 - count, 0)], *zeros])

    found = tf.vectorized_map(function, keras.tree.map_structure(of_one_or_more, elements))
    return keras.tree.map_structure(lambda each: each[:count], found)


def map_elements(function: Function, elements: Tensors, outputs: Tensors) -> list[Any]:
    """Applies a function to each element of a batch, in a loop of the graph."""
    # `keras.ops.map` runs the function once more to see what it returns, and with it
    # draws random numbers, which move the seeds.
    signature = [tf.TensorSpec(each.shape, each.dtype) for each in outputs]
    return tf.map_fn(function, list(elements), fn_output_signature=signature)


def sum_in_loop(
    terms: Function, shared: Tensors, start: Tensors, chunks: Tensors
) -> list[Any]:
    """Adds what a function returns for each chunk; see `sum_over_chunks`."""

    def sums(shared: Tensors, chunks: Tensors) -> Any:
        def add(sums: list[Any], chunk: Tensors) -> list[Any]:
            return _added(sums, terms(*shared, *chunk))

        zeros = [tf.zeros_like(each) for each in start]
        return tf.foldl(add, list(chunks), zeros, parallel_iterations=1)

    found = _recomputed(sums, terms, lambda upstream, _: upstream, shared, chunks)
    return _added(start, found)


def map_in_loop(function: Function, shared: Tensors, chunks: Tensors) -> Any:
    """Applies a function to chunk after chunk; see `map_chunks`."""

    def outputs(shared: Tensors, chunks: Tensors) -> Any:
        return tf.map_fn(
            lambda chunk: function(*shared, *chunk),
            list(chunks),
            parallel_iterations=1,
            fn_output_signature=chunks[0].dtype,
        )

    def at(upstream: Tensors, index: Any) -> list[Any]:
        return [upstream[0][index]]

    return _recomputed(outputs, function, at, shared, chunks)


def _recomputed(
    loop: Function,
    function: Function,
    upstream_of: Function,
    shared: Tensors,
    chunks: Tensors,
) -> Any:
    """Returns `loop(shared, chunks)`; its gradient is a loop as well.

    TensorFlow's gradient of a loop would keep what the function, which the loop applies to
    `(*shared, *chunk)`, computes of every chunk. `upstream_of(upstream, index)` returns the
    gradient with respect to the function's outputs for one chunk.
    """
    number = len(shared)

    @tf.custom_gradient
    def looped(*tensors: Any) -> tuple[Any, Function]:
        shared, chunks = tensors[:number], tensors[number:]

        def gradient(*upstream: Any) -> list[Any]:
            def add_gradients(index: Any, of_shared: Any, of_chunks: Any) -> Any:
                at = [*shared, *(chunk[index] for chunk in chunks)]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(at)
                    outputs = tf.nest.flatten(function(*at))
                outer = list(upstream_of(upstream, index))
                found = tape.gradient(outputs, at, outer, tf.UnconnectedGradients.ZERO)
                pairs = zip(of_chunks, found[number:], strict=True)
                written = [array.write(index, each) for array, each in pairs]
                return index + 1, _added(of_shared, found[:number]), written

            count = keras.ops.shape(chunks[0])[0]
            _, of_shared, of_chunks = tf.while_loop(
                lambda index, *_: index < count,
                add_gradients,
                (
                    tf.constant(0),
                    [tf.zeros_like(each) for each in shared],
                    [tf.TensorArray(each.dtype, count) for each in chunks],
                ),
                parallel_iterations=1,
                maximum_iterations=count,
            )
            return [*of_shared, *(array.stack() for array in of_chunks)]

        return loop(shared, chunks), gradient

    return looped(*shared, *chunks)


def _added(tensors: Tensors, others: Tensors) -> list[Any]:
    return [one + other for one, other in zip(tensors, others, strict=True)]


# Graphs.


def compiled(function: Function, jit_compile: bool) -> Function:
    """Returns the function as a graph, compiled by XLA if `jit_compile` is true.

    A second shape of an argument makes a graph for every size of the axes that differ.
    """
    return tf.function(function, jit_compile=jit_compile, reduce_retracing=True)


def not_inlined(function: Function) -> Function:
    """Returns the function as a graph that is not inlined into other graphs.

    Use it for gradients in the body of a loop, whose graph contains a cycle: there
    TensorFlow does not match a pooling with its gradient, and cannot use the oneDNN kernel,
    which is several times as fast on CPUs. TensorFlow has no public name for the attribute.
    """
    return tf.function(function, experimental_attributes={"_noinline": True})


def outside_traces() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operations run at once, in graphs too.

    `fit` builds unbuilt layers inside the graph of its step.
    """
    return tf.init_scope()


def update_before(
    model: keras.Model, update: Callable[[], None], arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Assigns variables of a model by `update()`, before its function of a batch runs.

    Returns the function's arguments. The function reads the variables itself.
    """
    update()
    return arguments


# Serving.


def largest(tensor: Any, k: int) -> tuple[Any, Any]:
    """Returns the `k` largest entries along the last axis, and their indices."""
    return keras.ops.top_k(tensor, k)


def require_shapes(tensors: Any, specs: Any) -> Any:
    """Returns tensors, in any structure, whose shapes are checked in the graph."""
    return keras.tree.map_structure(
        lambda tensor, spec: tf.ensure_shape(tensor, spec.shape), tensors, specs
    )


# Devices.


def on_cpu() -> bool:
    """Returns whether TensorFlow computes on a CPU."""
    return not tf.config.list_logical_devices("GPU")


def replicas_in_sync() -> int:
    """Returns the number of replicas of the current `tf.distribute` strategy."""
    count: int = tf.distribute.get_strategy().num_replicas_in_sync
    return count


class ReplicatedModel(keras.Model):
    """A Keras model that trains under `tf.distribute.MultiWorkerMirroredStrategy`.

    In Keras 3.15 two faults make `fit` fail there (keras-team/keras issue 20585). That of
    `_maybe_symbolic_build` also makes `fit` fail under `MirroredStrategy` if the first
    batch does not divide among the replicas.
    """

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        results: dict[str, Any] = super().compute_metrics(x, y, y_pred, sample_weight)
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync
        if replicas > 1 and replicas > len(strategy.extended.worker_devices):
            # Keras averages over workers along an axis that results do not have.
            results = {name: tf.expand_dims(each, 0) for name, each in results.items()}
        return results

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # Keras averages the first batch over the replicas, to see its shape.
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync > 1 and iterator is not None:
            *_, batches = next(iter(iterator))
            data_batch = keras.tree.map_structure(
                lambda each: strategy.experimental_local_results(each)[0], next(batches)
            )
            iterator = None
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)

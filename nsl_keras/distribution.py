"""Training on several replicas: GPUs of one machine, or many machines.

On TensorFlow, `MetaNeighborhoodModel` and the few-shot learners work under
`tf.distribute.MirroredStrategy` and `MultiWorkerMirroredStrategy`, with plain `fit`,
`evaluate` and `predict`, and compute what one device computes. `distribute`
gives any other Keras model the same steps. On JAX, `keras.distribution` distributes every
model.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backend import ReplicatedSteps, Tensor, start_workers, variable_scope

__all__ = ["DistributedModel", "distribute", "multi_worker_strategy"]


@keras.saving.register_keras_serializable("nsl_keras")
class DistributedModel(ReplicatedSteps):
    """A Keras model, with training steps that are right on several replicas.

    It calls the given model and shares its layers and weights. Compile and train it
    instead of that model. On TensorFlow, under a `tf.distribute` strategy:

    * `fit`, `evaluate` and `predict` run under `MultiWorkerMirroredStrategy`, where those
      of `keras.Model` fail.
    * The loss of a batch is the mean over its examples. An uneven batch, even one with
      fewer examples than replicas, gives the same loss as on one device. `keras.Model`
      takes the mean of the replicas' means.
    * Gradients are clipped, and checked for float16 overflow, after they are summed over
      the replicas.
    * `fit` reports the losses and metrics of all replicas. As in Keras, the losses of
      single outputs are plain means over replicas, even if their batches differ in size.
    * `steps_per_execution` works, but saves no time.

    Losses of masked sequences, or with `ignore_class`, are still averaged per replica, then
    over replicas.

    Args:
        model: A functional, Sequential or subclassed model with the `train_step`,
            `test_step`, `predict_step`, `compute_loss` and `compute_metrics` of
            `keras.Model`. Make it in the scope of the strategy.
        **kwargs: `name` and `trainable` of `keras.Model`.

    Attributes:
        model: The given model. Saved by itself, it loads without this package.

    Input shape:
        Same as the model.

    Output shape:
        Same as the model.

    Raises:
        ValueError: If `model` is not a Keras model, or overrides one of those methods; in
            `fit` and `evaluate` on several replicas, for a loss that is not the mean over
            the examples.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model = nsl_keras.distribution.DistributedModel(network)
    >>> model.compile("sgd", "mean_squared_error")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    >>> model.predict(np.ones((3, 4)), verbose=0).shape
    (3, 2)

    Reference:
        keras-team/keras issue 20585, of `fit` under `MultiWorkerMirroredStrategy`.
    """

    def __init__(self, model: keras.Model, **kwargs: Any) -> None:
        if not isinstance(model, keras.Model):
            raise ValueError(f"`model` must be a Keras model. Received: model={model!r}")
        kind = type(model)
        own = [
            name for name in _STEPS if getattr(kind, name) is not getattr(keras.Model, name)
        ]
        if own:
            raise ValueError(
                "`model` must have the steps of keras.Model: its own would not be called. "
                f"Received: model {model.name!r} of type {kind.__name__!r} with "
                f"its own {', '.join(own)}"
            )
        # Without autocast: inputs reach the model as they are.
        options = {"name": model.name, "dtype": model.dtype_policy, "autocast": False}
        super().__init__(**options | kwargs)
        self.model = model
        if model.built:
            self.built = True
        if hasattr(model, "output_names"):
            # Losses and metrics of several outputs are given by these names.
            self.output_names = model.output_names

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        # Keras passes `training` on to the layers called here.
        return self.model(inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return self.model.compute_output_shape(input_shape)

    @functools.wraps(keras.Model.export)
    def export(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.export(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        model = keras.saving.serialize_keras_object(self.model)
        return {**super().get_config(), "model": model}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> DistributedModel:
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        return cls(**{**config, "model": model})


#: The methods that the wrapper replaces.
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def distribute(model: keras.Model) -> keras.Model:
    """Returns a model over the same layers that trains on several replicas as on one.

    The two share weights. Compile the returned model, in the strategy's scope.

    Args:
        model: Any Keras model, made in the scope of the strategy; see `DistributedModel`.

    Returns:
        A `DistributedModel`; or `model` itself, if it is a model of this package, whose
        steps are right already.

    Raises:
        ValueError: See `DistributedModel`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> network = keras.Sequential([
    ...     keras.Input((8, 8, 1)),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(4, 3),
    ...     keras.layers.Flatten(),
    ...     keras.layers.Dense(2),
    ... ])
    >>> model = nsl_keras.distribution.distribute(network)
    >>> model.weights[0] is network.weights[0]
    True
    >>> model.compile("sgd", "mean_squared_error")
    """
    if isinstance(model, ReplicatedSteps):
        return model
    with variable_scope(model):
        return DistributedModel(model)


def multi_worker_strategy(timeout: float = 300.0) -> Any:
    """Returns a `tf.distribute.MultiWorkerMirroredStrategy` whose workers have all started.

    Call it in each worker, before anything else of TensorFlow. The environment variable
    `TF_CONFIG` holds the addresses of all workers and the number of this one:

        {"cluster": {"worker": ["host1:12345", "host2:12345"]},
         "task": {"type": "worker", "index": 0}}

    TensorFlow waits for missing workers without a limit, in a call that nothing can
    interrupt. If some workers have not started in time, the process exits with status 1
    and a message on the standard error stream. When a worker ends later, the others end
    within seconds, with an error that names it.

    Args:
        timeout: float above 0, the seconds in which all workers must have started.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: If `TF_CONFIG` is missing or malformed.
        RuntimeError: On JAX, which has `keras.distribution` instead.

    Example:

    >>> import os
    >>> import nsl_keras
    >>> os.environ["TF_CONFIG"] = "{}"
    >>> nsl_keras.distribution.multi_worker_strategy()
    Traceback (most recent call last):
        ...
    ValueError: The environment variable `TF_CONFIG` must hold the addresses ...
    >>> del os.environ["TF_CONFIG"]
    """
    return start_workers(validation.positive_number(timeout, "timeout"))

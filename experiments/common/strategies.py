"""Where a command trains: on one device, on all GPUs of a machine, or on many machines.

    python -m experiments.demo --strategy=mirrored                   # all GPUs
    TF_CONFIG=... python -m experiments.demo --strategy=multiworker  # on each machine

What is trained is the same. On several machines all commands read and write below the same
`--output_dir` and `--state_dir`, a folder that all of them see; the first worker writes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import types
from typing import Any

import keras
from absl import flags

import nsl_keras

FLAGS = flags.FLAGS
flags.DEFINE_enum(
    "strategy",
    "none",
    ["none", "mirrored", "multiworker"],
    "One device; all GPUs of this machine; or the workers that TF_CONFIG names.",
)
flags.DEFINE_integer(
    "logical_devices", None, "Split the CPU into so many devices, to try out `mirrored`."
)
flags.DEFINE_float(
    "worker_timeout", 300.0, "Seconds in which all workers must have started."
)


#: In place of a `tf.distribute` strategy on one device, on either backend.
ONE_DEVICE = types.SimpleNamespace(num_replicas_in_sync=1, scope=contextlib.nullcontext)


def _chosen() -> str:
    """What the flags ask for, in a command."""
    return FLAGS.strategy if FLAGS.is_parsed() else "none"


def strategy() -> Any:
    """The strategy that the flags ask for; call it before anything else of TensorFlow."""
    return ONE_DEVICE if _chosen() == "none" else _made()


@functools.cache
def _made() -> Any:
    if _chosen() == "multiworker":
        return nsl_keras.distribution.multi_worker_strategy(FLAGS.worker_timeout)
    import tensorflow as tf

    if FLAGS.logical_devices:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * FLAGS.logical_devices
        )
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return tf.distribute.MirroredStrategy([device.name for device in devices])


def replicated(model: keras.Model) -> keras.Model:
    """The model to compile: under a strategy, one whose steps are right on replicas."""
    several = strategy().num_replicas_in_sync > 1
    return nsl_keras.distribution.distribute(model) if several else model


def network_of(model: keras.Model) -> keras.Model:
    """The model that `replicated` was given."""
    distributed = isinstance(model, nsl_keras.distribution.DistributedModel)
    return model.model if distributed else model


def wait_for_workers() -> None:
    """Returns once all workers are here: what the first one wrote is then on the disk."""
    if _chosen() == "multiworker":
        import tensorflow as tf

        ones = strategy().run(lambda: tf.constant(1.0))
        strategy().reduce("SUM", ones, axis=None)


def is_first_worker() -> bool:
    """Whether this process writes files."""
    if _chosen() != "multiworker":
        return True
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0

r"""Trains Meta-Neighborhoods on scikit-learn's digits with Ray Train, on many workers.

    pip install ".[tensorflow,ray]" scikit-learn                      # in a clone
    python -m examples.distributed.ray_train --workers=2              # on this machine
    python -m examples.distributed.ray_train --workers=8 --gpu \
        --address=auto --storage=/shared/runs                         # on a cluster

Ray starts the workers and writes their TF_CONFIG. Two workers end with the same weights as
one worker, because each takes its share of the same batches. On a cluster, run
`ray start --head` on one machine and `ray start --address=HEAD:6379` on all others, and
install this package on all machines. --storage must be a folder that all machines see, or
an address such as s3://bucket/folder.
"""

from __future__ import annotations

import os
import pathlib
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 2, "Processes that train.", lower_bound=1)
flags.DEFINE_bool("gpu", False, "Give each worker a GPU.")
flags.DEFINE_string("address", None, "Of a running Ray cluster; None starts a local one.")
flags.DEFINE_integer("epochs", 2, "Passes over the digits.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Examples of a step, of all workers together.")
flags.DEFINE_string("storage", "runs/ray", "Where Ray keeps what workers report.")

WEIGHTS = "model.weights.h5"


def train(config: dict) -> dict:
    """Trains in this process, with the other workers that TF_CONFIG names, if any.

    Args:
        config: `epochs`, `batch_size`, and `weights`, the file to write or `None`.

    Returns:
        What `fit` reported last.
    """
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import nsl_keras
    from nsl_keras import layers

    if "TF_CONFIG" in os.environ:
        scope = tf.distribute.MultiWorkerMirroredStrategy().scope()
    else:
        scope = keras.name_scope("one_device")
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = digits.images[..., None].astype("float32") / 16, digits.target
    rest = len(x) % config["batch_size"]  # Batches must divide among the workers.
    x, y = x[rest:], y[rest:]
    with scope:
        backbone = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.NeuralSimilarityConv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(32),
            ]
        )
        dictionary = layers.NeighborDictionary(50, dropout=0.0)
        head = layers.CosineDense(10)
        model = nsl_keras.MetaNeighborhoodModel(backbone, head, dictionary)
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    options = {"batch_size": config["batch_size"], "epochs": config["epochs"]}
    history = model.fit(x, y, **options, shuffle=False, verbose=0).history
    if config["weights"] is not None:
        model.save_weights(config["weights"])
    return {name: values[-1] for name, values in history.items()}


def train_and_report(config: dict) -> None:
    """What each worker of Ray runs; the first one hands over the weights."""
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        first = ray.train.get_context().get_world_rank() == 0
        weights = str(pathlib.Path(folder) / WEIGHTS) if first else None
        reported = train({**config, "weights": weights})
        checkpoint = ray.train.Checkpoint.from_directory(folder) if first else None
        ray.train.report(reported, checkpoint=checkpoint)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    # Workers import `examples` from where this command was called.
    ray.init(
        FLAGS.address,
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
        include_dashboard=None if FLAGS.address else False,
    )
    storage = FLAGS.storage
    if "://" not in storage:
        storage = str(pathlib.Path(storage).expanduser().resolve())
    result = TensorflowTrainer(
        train_and_report,
        train_loop_config={"epochs": FLAGS.epochs, "batch_size": FLAGS.batch_size},
        scaling_config=ScalingConfig(num_workers=FLAGS.workers, use_gpu=FLAGS.gpu),
        # Where a worker ends, Ray starts all of them again.
        run_config=RunConfig(
            storage_path=storage, failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    reported = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    print(f"{FLAGS.workers} workers: {reported}")
    print(f"Wrote {result.checkpoint.path}/{WEIGHTS}")
    ray.shutdown()


if __name__ == "__main__":
    app.run(main)

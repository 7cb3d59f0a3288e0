"""A first training as a newcomer writes it, and what is recorded of it."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Collection
from typing import Any

import keras
import numpy as np

import nsl_keras
from experiments.common import runs
from experiments.common.data import Split
from experiments.no_harm.data import DATASETS, Images
from experiments.no_harm.methods import METHODS, PLAIN_METHOD, Method
from experiments.no_harm.networks import BATCH_NORMS, NETWORKS, Network


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs have in common; `batch_norm` is a name of `BATCH_NORMS`."""

    #: What is pretrained has had as many before.
    epochs: int = 5
    batch_size: int = 32
    learning_rate: float = 1e-3
    #: Training images that are evaluated in training mode too.
    compared_images: int = 512
    batch_norm: str = "keras"


class Cell:
    """A network on images with a seed, which all methods are trained on."""

    def __init__(
        self, setting: Setting, images: Images, network: Network, seed: int
    ) -> None:
        self.setting, self.images, self.seed = setting, images, seed
        self.make_network = functools.partial(
            network.make,
            images.train.images.shape[1:],
            images.classes,
            batch_norm=BATCH_NORMS[setting.batch_norm],
        )

    def run(self, method: Method) -> dict[str, Any]:
        if method is PLAIN_METHOD:
            return self._pretrained[0]
        weights = self._pretrained[1] if method.pretrained else None
        plain = self._initial()
        if weights is not None:
            plain.set_weights(weights)
        model = method.make(self.make_network, plain)
        return self._train(model, method.pretrained, method.rate)

    @functools.cached_property
    def _pretrained(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The record and the weights of the plain network after its training."""
        plain = self._initial()
        return self._train(plain), plain.get_weights()

    def _initial(self) -> keras.Model:
        keras.utils.set_random_seed(self.seed)
        return self.make_network()

    def _train(
        self, model: keras.Model, pretrained: bool = False, rate: float = 1.0
    ) -> dict[str, Any]:
        setting, (train, test, _) = self.setting, self.images
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(setting.learning_rate * rate)
        model.compile(optimizer, loss, metrics=["accuracy"])
        first_epoch = setting.epochs if pretrained else 0
        compared = train.take(setting.compared_images)
        record: dict[str, Any] = {"parameters": model.count_params()}
        accuracies, by_mode, times = [], {}, []
        for epoch in range(setting.epochs):
            generator = np.random.default_rng([self.seed, first_epoch + epoch])
            order = generator.permutation(len(train.labels))
            start = time.process_time()
            images, labels = train.images[order], train.labels[order]
            options = {"batch_size": setting.batch_size, "shuffle": False, "verbose": 0}
            try:
                losses = model.fit(images, labels, **options).history["loss"]
            except nsl_keras.NonFiniteLossError as error:
                record["failed"] = f"epoch {epoch + 1}: {error}"
                losses = [None]
            times.append(time.process_time() - start)
            record["training_loss"] = losses[-1]
            accuracies.append(accuracy(model, test))
            if epoch in (0, setting.epochs - 1):
                found = accuracies_by_mode(model, compared, setting.batch_size)
                by_mode = {"first_epoch": found} | by_mode | {"last_epoch": found}
        # Processor time: what else the machine does moves the other. The first epoch traces
        # the step, where there are others.
        steps = -(-len(train.labels) // setting.batch_size)
        return record | {
            "test_accuracy": accuracies,
            "by_mode": by_mode,
            "seconds_per_step": statistics.median(times[1:] or times) / steps,
            "training_seconds": sum(times),
        }


def accuracy(model: keras.Model, split: Split) -> float:
    logits = model.predict(split.images, batch_size=250, verbose=0)
    return float(np.mean(logits.argmax(axis=-1) == split.labels))


def accuracies_by_mode(
    model: keras.Model, split: Split, batch_size: int
) -> dict[str, float]:
    """Accuracies on the same images, in training mode and in inference mode.

    No state changes. In training mode batch norms normalize by batches as large as those
    of the training; a dictionary is complete in both modes.
    """
    logits = []
    for first in range(0, len(split.images), batch_size):
        batch = split.images[first : first + batch_size]
        with keras.StatelessScope():
            if isinstance(model, nsl_keras.MetaNeighborhoodModel):
                features = model.features(batch, training=True)
                outputs = model.neighborhood(features, training=False)
            else:
                outputs = model(batch, training=True)
        logits.append(keras.ops.convert_to_numpy(outputs))
    right = np.concatenate(logits).argmax(axis=-1) == split.labels
    return {"training": float(np.mean(right)), "inference": accuracy(model, split)}


def run_cell(
    records: runs.RunRecords,
    setting: Setting,
    cell: tuple[int, str, str],
    methods: Collection[str] = METHODS,
    data_dir: str | None = None,
) -> None:
    """Makes the runs of a seed, an image set and a network, none of them twice."""
    seed, dataset, network = cell
    keys: list[runs.Key] = [
        (dataset, network, name, seed)
        for name, method in METHODS.items()
        if name in methods and (NETWORKS[network].batch_norm or not method.batch_norm)
    ]
    if all(map(records.holds, keys)):
        return
    images = DATASETS[dataset].load(seed, data_dir)
    trained = Cell(setting, images, NETWORKS[network], seed)

    def run(dataset: str, network: str, name: str, seed: int) -> dict:
        start = time.process_time()
        names = {"dataset": dataset, "network": network, "method": name, "seed": seed}
        record = names | trained.run(METHODS[name])
        seconds = time.process_time() - start
        accuracy = 100 * record["test_accuracy"][-1]
        print(f"{accuracy:.2f} %, {seconds:.0f} seconds of a core", flush=True)
        return record | {"core_seconds": seconds} | runs.about("no_harm")

    runs.run_all(records, keys, run)
    keras.utils.clear_session()

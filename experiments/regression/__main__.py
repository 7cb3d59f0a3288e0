r"""Regression with kNN, a plain network and Meta-Neighborhoods: Table 2.

    python -m experiments.regression                             # scikit-learn's diabetes
    python -m experiments.regression --dataset=gom --data_dir=folder_of_the_uci_file
    python -m experiments.regression --data_file=data.npz        # arrays x and y

The protocol of Section 4.3 and Appendix B of Meta-Neighborhoods (Shan et al., NeurIPS
2020): 5-fold cross-validation, AdamW at 1e-3, batches of 128, training stopped after 10
epochs without a lower validation loss, 1000 dictionary entries in the space of the inputs,
or, with --features, of the last layer's inputs; then only the last layer is adapted.
Where the text leaves it open: everything is chosen in each fold, on a validation part of
its training data; means and variances are those of the rest of them.
"""

import functools
import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from absl import flags
from sklearn.neighbors import KNeighborsRegressor

import nsl_keras
from experiments.common import command, recipe, runs
from experiments.common.data import fingerprint
from experiments.regression import data, table

FLAGS = flags.FLAGS
flags.DEFINE_enum("dataset", "diabetes", data.DATASETS, "Data set.")
flags.DEFINE_string("data_dir", None, "Folder of the UCI files.")
flags.DEFINE_string("data_file", None, "An .npz file of x and y, instead.")
flags.DEFINE_integer("folds", 5, "Number of folds.", lower_bound=2)
flags.DEFINE_list("layers", ["2", "3", "4", "5"], "Dense layers to choose from.")
flags.DEFINE_list("units", ["32", "64", "128", "256"], "Their units to choose from.")
flags.DEFINE_list("decays", ["0", "1", "10"], "Weight decays to choose from, as in Keras.")
flags.DEFINE_list("temperatures", ["0.1", "0.5"], "Temperatures to choose from.")
flags.DEFINE_integer("num_neighbors", 1000, "Dictionary entries.", lower_bound=1)
flags.DEFINE_bool("features", False, "Entries in the space of the last layer's inputs.")
flags.DEFINE_float("key_deviation", 0.05, "Standard deviation of keys at the start.")
flags.DEFINE_integer("epochs", 1000, "Epochs at most.", lower_bound=1)
flags.DEFINE_integer("patience", 10, "Epochs without a lower validation loss.")
#: Share of a fold's training data that is for choices, and the seed of folds and weights.
VALIDATION_SHARE, SEED = 0.2, 0
#: Steps between states, at least: a step takes some milliseconds.
STEPS_KEPT = 100
#: Names of the records of networks, and of kNN.
PARTS = ("fold", "knn")
flags.DEFINE_multi_enum("method", [], list(PARTS), "Networks, kNN; both by default.")
NEIGHBOR_COUNTS = (1, 2, 3, 5, 8, 12, 20, 30, 50)


def error(model: Any, part: data.Part) -> float:
    """The mean squared error of a model of Keras or scikit-learn."""
    options = {"batch_size": 1024, "verbose": 0} if isinstance(model, keras.Model) else {}
    return float(np.mean((model.predict(part.x, **options) - part.y) ** 2))


def knn(fold: data.Fold) -> dict:
    """The best number of neighbors by validation error, uniform weights.

    With that number the examples of the validation part count as neighbors, too.
    """
    counts = [k for k in NEIGHBOR_COUNTS if k <= len(fold.train.x)]
    fitted = {k: KNeighborsRegressor(k).fit(fold.train.x, fold.train.y) for k in counts}
    errors = {k: error(fitted[k], fold.validation) for k in counts}
    best = min(errors, key=errors.__getitem__)
    both = map(np.concatenate, zip(fold.train, fold.validation, strict=True))
    test = error(KNeighborsRegressor(best).fit(*both), fold.test)
    return {"k": best, "validation_mse": errors[best], "test_mse": test}


def make(fold: data.Fold, choice: dict) -> keras.Model:
    """A multilayer perceptron, with a dictionary where a temperature is chosen."""
    hidden = [
        keras.layers.Dense(choice["units"], "relu") for _ in range(choice["layers"] - 1)
    ]
    last = keras.layers.Dense(fold.train.y.shape[1])
    model = keras.Sequential([*hidden, last])
    if "temperature" in choice:
        dictionary = nsl_keras.layers.NeighborDictionary(
            FLAGS.num_neighbors,
            temperature=choice["temperature"],
            key_initializer=keras.initializers.RandomNormal(stddev=FLAGS.key_deviation),
            seed=SEED,
        )
        parts = (keras.Sequential(hidden), last) if FLAGS.features else (None, model)
        model = nsl_keras.MetaNeighborhoodModel(*parts, dictionary, task="regression")
    model.build((None, fold.train.x.shape[1]))
    if "temperature" in choice:
        # "Uniform distribution in the same range of the regression labels".
        start = np.random.default_rng(SEED).uniform(
            fold.train.y.min(axis=0), fold.train.y.max(axis=0), dictionary.values.shape
        )
        dictionary.assign(values=start)
    return model


@functools.lru_cache(maxsize=1)
def _order(epoch: int, examples: int) -> np.ndarray:
    return np.random.default_rng([SEED, epoch]).permutation(examples)


class Batches(keras.utils.PyDataset):
    """The examples in an order that the epoch gives."""

    def __init__(self, part: data.Part, batch_size: int = 128) -> None:
        super().__init__()
        self.part, self.batch_size, self.epoch = part, batch_size, 0

    def __len__(self) -> int:
        return -(-len(self.part.x) // self.batch_size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        order = _order(self.epoch, len(self.part.x))
        chosen = order[index * self.batch_size :][: self.batch_size]
        return self.part.x[chosen], self.part.y[chosen]


def train(fold: data.Fold, choice: dict, state: pathlib.Path) -> tuple[keras.Model, dict]:
    """Trains to the lowest validation loss; what is finished below `state` is kept."""
    place = state / "_".join(map(str, choice.values()))
    keras.backend.clear_session()
    keras.utils.set_random_seed(SEED)
    model = make(fold, choice)
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=choice["decay"])
    if isinstance(model, nsl_keras.MetaNeighborhoodModel):
        # Of the network, as in the plain one; not of dictionary and rates.
        parts = [model.head, *([model.backbone] if model.backbone else [])]
        network = {id(v) for part in parts for v in part.trainable_variables}
        spared = [v for v in model.trainable_variables if id(v) not in network]
        optimizer.exclude_from_weight_decay(var_list=spared)
    model.compile(optimizer, "mean_squared_error")
    batches = Batches(fold.train)
    stopping = keras.callbacks.EarlyStopping(
        patience=FLAGS.patience, restore_best_weights=True
    )
    epochs = -(-STEPS_KEPT // len(batches))
    backup = nsl_keras.callbacks.TrainingBackup(
        place, [stopping], epochs, delete_checkpoint=False
    )
    history = model.fit(
        batches,
        shuffle=False,
        epochs=FLAGS.epochs,
        validation_data=tuple(fold.validation),
        validation_batch_size=1024,
        callbacks=[backup, stopping, recipe.StopInTime(batches)],
        verbose=0,
    )
    losses = history.history["val_loss"]
    record = {**choice, "epochs": len(losses), "validation_mse": float(min(losses))}
    return model, record


def best(trials: list[tuple[keras.Model, dict]]) -> tuple[keras.Model, dict]:
    return min(trials, key=lambda each: each[1]["validation_mse"])


def run_fold(fold: data.Fold, state: pathlib.Path) -> dict:
    """Chooses on the validation part, then looks at the test part once a method."""

    def trained(choices: Iterable[dict], kind: str) -> list[tuple[keras.Model, dict]]:
        return [train(fold, each, state / kind) for each in choices]

    decays = list(map(float, FLAGS.decays))
    sizes = itertools.product(map(int, FLAGS.layers), map(int, FLAGS.units))
    first = [{"layers": n, "units": units, "decay": decays[0]} for n, units in sizes]
    plain = trained(first, "vanilla")
    size = {key: best(plain)[1][key] for key in ("layers", "units")}
    others = [{**size, "decay": decay} for decay in decays[1:]]
    plain += trained(others, "vanilla")
    choices = [
        {**size, "decay": decay, "temperature": temperature}
        for temperature, decay in itertools.product(map(float, FLAGS.temperatures), decays)
    ]
    ours = trained(choices, "neighborhoods")
    found: dict[str, dict] = {}
    for name, trials in (("vanilla", plain), ("neighborhoods", ours)):
        model, record = best(trials)
        found[name] = {
            **record,
            "parameters": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
            "test_mse": error(model, fold.test),
            "trials": [each for _, each in trials],
        }
    unadapted = keras.ops.convert_to_numpy(model(fold.test.x, adapt=False))
    found["neighborhoods"] |= {
        "inner_rate": float(keras.ops.convert_to_numpy(model.inner_learning_rates[0])),
        "test_mse_unadapted": float(np.mean((unadapted - fold.test.y) ** 2)),
    }
    return found


def main(_arguments: list[str]) -> None:
    found = data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.data_file)
    sizes = {"examples": len(found.x), "features": found.x.shape[1]}
    sizes["outputs"] = found.y.shape[1]
    print(f"{found.name}: {sizes}")
    names = (
        *("folds", "layers", "units", "decays", "temperatures"),
        *("num_neighbors", "epochs", "patience"),
    )
    protocol = {name: FLAGS[name].value for name in names}
    protocol |= {"validation_share": VALIDATION_SHARE, "seed": SEED}
    # Older records have neither.
    changed = {
        name: FLAGS[name].value
        for name in ("features", "key_deviation")
        if FLAGS[name].value != FLAGS[name].default
    }
    protocol |= changed
    folds = data.folds(found, FLAGS.folds, VALIDATION_SHARE, SEED)
    setting = {"data": found.name, **sizes, "protocol": protocol}
    if FLAGS.data_file:
        setting["data_file"] = fingerprint({"x": found.x, "y": found.y})
    records = runs.RunRecords(
        runs.results_folder(FLAGS.output_dir) / "regression.jsonl",
        "_".join([found.name, *(f"{name}_{changed[name]}" for name in changed)]),
        setting,
        states=runs.states_folder(FLAGS.state_dir, setting),
    )

    def run(name: str, number: int) -> dict:
        record = {"fold": number, **runs.about("regression")}
        if name == "knn":
            return {**record, "knn": knn(folds[number])}
        return record | run_fold(folds[number], records.state((name, number)))

    runs.run_all(records, runs.every(FLAGS.method or PARTS, range(FLAGS.folds)), run)
    print(f"\n{table.table([records])}\n\nWrote {records.path}")


if __name__ == "__main__":
    command.run(main)

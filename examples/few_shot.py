r"""Few-shot learning: Table 6 of Neural Similarity Learning, with today's baselines.

    python -m examples.few_shot --data_file=cifar_fs.npz --dataset=cifar_fs --seeds=0,1
    python -m examples.few_shot --dataset=omniglot --data_dir=~/tensorflow_datasets \
        --shots=1 --method=maml --method=proto_net
    python -m examples.few_shot --dataset=mini_imagenet --data_dir=FOLDER_OF_IMAGES

Networks are trained on the training classes, judged on episodes of the test classes, and
all choices are made on the validation classes: the paper trains its networks on training
and validation classes together, here they stay apart. Every method gets the same number
of training images and the same trials: with several --rates, each is tried for
--trial_share of the images, and the best on validation episodes is taken. A meta-learned
static network starts from the pretrained one, and then has as many images again. ProtoNet
is trained with --proto_ways classes an episode, as its authors do, and fewer episodes.

Finished runs are kept in --output_dir/results/few_shot_*.json (those of several --rates in
one that ends in _tuned) and not run again; an interrupted one goes on from its last saved
state. `make results` prints the tables. Runs with TensorFlow, and with JAX
(KERAS_BACKEND=jax) where no TensorFlow is installed: write Omniglot to a file once with
--write_data_file=omniglot.npz, and read it with --data_file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import app, flags, logging

from examples import (
    few_shot_data,
    few_shot_methods,
    few_shot_table,
    image_data,
    image_recipe,
    run_records,
)
from nsl_keras import few_shot

FLAGS = flags.FLAGS

#: Sampler seeds of validation and test episodes: the same for all methods and seeds.
VALIDATION_SEED, TEST_SEED = 1_000_001, 1_000_002


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs of a table have in common."""

    dataset: str
    backbone: str
    ways: int
    shots: int
    queries: int
    training_images: int
    episodes_per_step: int
    #: Classes of an episode in ProtoNet's training.
    proto_ways: int
    batch_size: int
    test_episodes: int
    rates: Sequence[float]
    trial_share: float
    validation_episodes: int
    #: Instead of each method's own policy.
    batch_normalization: str | None


def define_flags() -> None:
    flags.DEFINE_string("dataset", "cifar_fs", "omniglot, or a name for your own images.")
    flags.DEFINE_string("data_dir", None, "Folder of images, or of tfds' prepared copies.")
    flags.DEFINE_string("data_file", None, "Images from an .npz file.")
    flags.DEFINE_string("write_data_file", None, "Write the images to a file, and stop.")
    flags.DEFINE_integer("image_size", 84, "Pixels of images from folders.", lower_bound=16)
    flags.DEFINE_enum("backbone", "cnn4", ["cnn4", "cnn9"], "The network.")
    flags.DEFINE_multi_enum(
        "method", [], list(few_shot_methods.METHODS), "Rows; all where none is given."
    )
    flags.DEFINE_integer("ways", 5, "Classes of an episode.", lower_bound=2)
    flags.DEFINE_integer("shots", 5, "Support images of a class.", lower_bound=1)
    flags.DEFINE_integer("queries", 15, "Query images of a class.", lower_bound=1)
    flags.DEFINE_list("seeds", ["0"], "Seeds of training, separated by commas.")
    flags.DEFINE_integer("training_images", 400_000, "Budget of a method and seed.")
    flags.DEFINE_integer("episodes_per_step", 4, "Episodes of a step.", lower_bound=1)
    flags.DEFINE_integer(
        "proto_ways", 20, "Classes of an episode in ProtoNet's training.", lower_bound=2
    )
    flags.DEFINE_integer(
        "batch_size", 64, "Images of a step in pretraining.", lower_bound=1
    )
    flags.DEFINE_integer("test_episodes", 600, "Episodes of a test.", lower_bound=2)
    flags.DEFINE_multi_float("rates", [1e-3], "Rates of Adam tried for each method.")
    flags.DEFINE_float("trial_share", 0.25, "Images of a trial, as a share of the budget.")
    flags.DEFINE_integer("validation_episodes", 100, "Episodes that judge a trial.")
    flags.DEFINE_enum(
        "batch_normalization",
        None,
        ["support", "transductive", "moving"],
        "Instead of each row's own policy.",
    )
    flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
    flags.DEFINE_string("state_dir", "runs/unfinished", "Where unfinished runs are kept.")
    flags.DEFINE_bool("jit_compile", None, "Compile steps with XLA; None: Keras decides.")
    flags.DEFINE_integer("verbose", 2, "Progress: 0 silent, 1 a bar, 2 a line a chunk.")


class Training:
    """Trains and judges the methods of one setting on one data set."""

    def __init__(
        self,
        setting: Setting,
        data: few_shot_data.FewShotData,
        states: pathlib.Path,
        jit_compile: bool | str,
        verbose: int,
    ) -> None:
        self.setting, self.data, self.states = setting, data, states
        self.jit_compile, self.verbose = jit_compile, verbose
        classes, labels = np.unique(data.train.labels, return_inverse=True)
        self.classes = len(classes)
        self.images = image_data.Split(data.train.images, labels)

    def policy(self, method: str) -> str:
        """The batch norms' policy of a method."""
        own = few_shot_methods.METHODS[method].batch_normalization
        return self.setting.batch_normalization or own

    def sampler(
        self, part: str, seed: int, ways: int | None = None
    ) -> few_shot.EpisodeSampler:
        """Episodes of a part's classes, of the test's ways unless others are given."""
        chosen, setting = getattr(self.data, part), self.setting
        return few_shot.EpisodeSampler(
            chosen.images,
            chosen.labels,
            ways or setting.ways,
            setting.shots,
            setting.queries,
            seed,
        )

    def run(
        self, method: str, rate: float, images: int, seed: int
    ) -> tuple[Callable, dict]:
        """Trains a method; returns the learner, and what the training took."""
        row = few_shot_methods.METHODS[method]
        found: dict = {"seconds": 0.0, "training_images": 0}
        network = None
        if row.pretrained:
            network, pretraining = self._pretrained(row.pretrained, rate, images, seed)
            found = {key: found[key] + pretraining[key] for key in found}
        keras.utils.set_random_seed(seed)
        if row.episodic:
            proto = method == "proto_net"
            ways = self.setting.proto_ways if proto else self.setting.ways
            learner = few_shot_methods.episodic_learner(
                method,
                self.setting.dataset,
                self.setting.backbone,
                self.data.image_shape,
                ways,
                self.policy(method),
                network,
            )
            training = self._fit_episodes(method, learner, ways, rate, images, seed)
            if proto:
                learner = few_shot.ProtoNet(
                    learner.backbone,
                    self.setting.ways,
                    batch_normalization=self.policy(method),
                )
            return learner, {key: found[key] + training[key] for key in found}
        return (
            few_shot_methods.pretrained_learner(
                method,
                network,
                self.setting.ways,
                self.policy(method),
                self.images.images.astype("float32") / 255,
            ),
            found,
        )

    def _pretrained(
        self, kind: str, rate: float, images: int, seed: int
    ) -> tuple[keras.Model, dict]:
        """A network trained to classify all training classes; kept for the next method."""
        keras.utils.set_random_seed(seed)
        network = few_shot_methods.features(
            self.setting.backbone, kind, self.data.image_shape
        )
        model = few_shot_methods.classifier(network, self.classes)
        folder = self.states / f"{kind}_{rate:g}_{images}_{seed}"
        weights, record = folder / "trained.weights.h5", folder / "trained.json"
        if not record.exists():
            recipe = _recipe(images, self.setting.batch_size, rate)
            batches = _Uint8Batches(self.images, recipe, seed)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            training = self._fit(model, batches, recipe, loss, folder)
            model.save_weights(weights)
            record.write_text(json.dumps(training))
        model.load_weights(weights)
        return network, json.loads(record.read_text())

    def _fit_episodes(
        self,
        method: str,
        learner: keras.Model,
        ways: int,
        rate: float,
        images: int,
        seed: int,
    ) -> dict:
        setting = self.setting
        support, queries = ways * setting.shots, ways * setting.queries
        # As many images a step, whatever the ways.
        episodes = max(1, setting.episodes_per_step * setting.ways // ways)
        recipe = _recipe(images, episodes * (support + queries), rate)
        shape = self.data.image_shape
        learner.build(((None, support, *shape), (None, support), (None, queries, *shape)))
        batches = self.sampler("train", seed, ways).batches(
            episodes, image_recipe.chunk_steps(recipe.iterations)
        )
        folder = self.states / f"{method}_{rate:g}_{images}_{seed}"
        return self._fit(learner, batches, recipe, few_shot_methods.loss(method), folder)

    def _fit(
        self,
        model: keras.Model,
        batches: keras.utils.PyDataset,
        recipe: image_recipe.Schedule,
        loss: keras.losses.Loss,
        folder: pathlib.Path,
    ) -> dict:
        model.compile(
            optimizer=keras.optimizers.Adam(
                keras.optimizers.schedules.CosineDecay(
                    recipe.learning_rate, recipe.iterations
                )
            ),
            loss=loss,
            metrics=["accuracy"],
            jit_compile=self.jit_compile,
        )
        model.optimizer.build(model.trainable_variables)
        found = image_recipe.fit(model, batches, recipe, folder, verbose=self.verbose)
        return {
            "seconds": found["seconds"],
            "training_images": recipe.iterations * recipe.batch_size,
        }


class _Uint8Batches(image_recipe.Batches):
    """Batches of images that are kept as uint8."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        images, labels = super().__getitem__(index)
        return images / np.float32(255), labels


def _recipe(images: int, images_per_step: int, rate: float) -> image_recipe.Schedule:
    """Adam, for about so many images: a number of steps that states are saved between."""
    steps = max(1, round(images / images_per_step))
    if steps > 100:
        steps = 100 * round(steps / 100)
    return image_recipe.Schedule(steps, (), rate, images_per_step, "none")


def chosen_rate(training: Training, method: str, trials: run_records.RunRecords) -> float:
    """The rate with the best accuracy on validation episodes, for a part of the budget."""
    setting = training.setting
    if len(setting.rates) == 1:
        return setting.rates[0]
    images = round(setting.trial_share * setting.training_images)
    for rate in setting.rates:
        name = f"{method} at {rate:g}"
        if trials.holds(name, 0):
            continue
        print(f"\nTrial: {name}", flush=True)
        learner, _ = training.run(method, rate, images, seed=0)
        evaluation = few_shot.evaluate(
            learner,
            training.sampler("validation", VALIDATION_SEED),
            setting.validation_episodes,
            batch_size=10,
        )
        trials.add({"method": name, "seed": 0, "accuracy": evaluation.mean})
    accuracies = {run["method"]: run["accuracy"] for run in trials.runs}
    return max(
        setting.rates,
        key=lambda rate: accuracies[f"{method} at {rate:g}"],
    )


def record_of(training: Training, method: str, rate: float, seed: int) -> dict:
    """Trains a method with one seed, and judges it on the test episodes."""
    setting = training.setting
    learner, record = training.run(method, rate, setting.training_images, seed)
    start = time.perf_counter()
    evaluation = few_shot.evaluate(
        learner,
        training.sampler("test", TEST_SEED),
        setting.test_episodes,
        batch_size=10,
    )
    queries = setting.ways * setting.queries
    return {
        "method": method,
        "seed": seed,
        "learning_rate": rate,
        "batch_normalization": evaluation.batch_normalization,
        **record,
        "evaluation_seconds": round(time.perf_counter() - start, 1),
        "accuracy": evaluation.mean,
        "half_width": evaluation.half_width,
        "right_queries": np.round(evaluation.accuracies * queries).astype(int).tolist(),
        "command": run_records.command("few_shot"),
        "versions": run_records.versions(),
        "devices": keras.distribution.list_devices(),
    }


def run_all(
    training: Training, methods: Sequence[str], seeds: Sequence[int], folder: pathlib.Path
) -> run_records.RunRecords:
    """Runs every method with every seed that is not in the results file yet.

    Args:
        training: What runs them.
        methods: Their names.
        seeds: Seeds of training.
        folder: Where the results file, and that of the trials, are written.
    """
    setting = training.setting
    content = {
        **dataclasses.asdict(setting),
        **training.data.counts,
        "image_shape": training.data.image_shape,
    }
    name = f"few_shot_{setting.dataset}_{setting.backbone}"
    name += f"_{setting.ways}way_{setting.shots}shot"
    if setting.batch_normalization:
        name += f"_{setting.batch_normalization}"
    if len(setting.rates) > 1:
        name += "_tuned"
    records = run_records.RunRecords(folder / f"{name}.json", content)
    trials = run_records.RunRecords(folder / f"{name}_trials.json", content)
    for seed in seeds:
        for method in methods:
            run = f"{few_shot_methods.METHODS[method].title}, seed {seed}"
            if records.holds(method, seed):
                print(f"\n{run}: finished before", flush=True)
                continue
            rate = chosen_rate(training, method, trials)
            print(f"\n{run}", flush=True)
            records.add(record_of(training, method, rate, seed))
    return records


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    logging.set_verbosity(logging.ERROR)  # Else TensorFlow's notes drown the progress.
    data = few_shot_data.load(
        FLAGS.dataset, FLAGS.data_dir, FLAGS.data_file, FLAGS.image_size
    )
    if FLAGS.write_data_file:
        few_shot_data.save(data, FLAGS.write_data_file)
        print(f"Wrote {FLAGS.write_data_file}")
        return
    names = [field.name for field in dataclasses.fields(Setting)]
    setting = Setting(**{name: getattr(FLAGS, name) for name in names})
    # Two settings never go on with each other's states.
    text = json.dumps([dataclasses.asdict(setting), data.counts], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    states = pathlib.Path(FLAGS.state_dir).expanduser() / f"few_shot_{digest}"
    training = Training(
        setting,
        data,
        states,
        "auto" if FLAGS.jit_compile is None else FLAGS.jit_compile,
        FLAGS.verbose,
    )
    results = pathlib.Path(FLAGS.output_dir).expanduser() / "results"
    methods = FLAGS.method or list(few_shot_methods.METHODS)
    records = run_all(training, methods, [int(seed) for seed in FLAGS.seeds], results)
    shutil.rmtree(states, ignore_errors=True)
    print(f"\n{few_shot_table.section(records.path)}\n")
    print(f"Wrote {records.path}")


if __name__ == "__main__":
    define_flags()
    app.run(main)

"""Trains the few-shot learners of a setting, and judges them on the same episodes."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import options, recipe, runs, tables
from experiments.common.data import PARTS, Split, without_validation
from experiments.few_shot import data, methods
from nsl_keras import few_shot

FLAGS = flags.FLAGS

#: Sampler seeds of validation and test episodes: the same for all methods and seeds.
VALIDATION_SEED, TEST_SEED = 1_000_001, 1_000_002


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs of a table have in common, by flags."""

    dataset: str
    backbone: str
    ways: int
    shots: int
    queries: int
    training_images: int
    episodes_per_step: int
    proto_ways: int
    batch_size: int
    test_episodes: int
    rates: Sequence[float]
    trial_share: float
    validation_episodes: int
    augmentation: bool = False
    #: Records from before there was the flag have none.
    published: bool | None = None
    #: `"paper"` for the CNN-9 of the paper's Table 7; `None` for the authors' code's.
    variant: str | None = None

    def __post_init__(self) -> None:
        # They identify the trials.
        if len(set(self.rates)) < len(self.rates):
            raise ValueError(f"`rates` must be different. Received: rates={self.rates}")
        if self.variant and self.backbone != "cnn9":
            raise ValueError(
                "`variant` must be left out for backbones other than 'cnn9'. Received: "
                f"variant={self.variant!r}, backbone={self.backbone!r}"
            )
        if self.published and len(self.rates) > 1:
            raise ValueError(
                "`rates` must be one with --published, which leaves no classes to choose "
                f"by. Received: rates={self.rates}"
            )

    @property
    def network(self) -> str:
        return f"{self.backbone}_{self.variant}" if self.variant else self.backbone

    @property
    def name(self) -> str:
        name = f"{self.dataset}_{self.network}_{self.ways}way_{self.shots}shot"
        if self.augmentation:
            name += "_augmented"
        if self.published:
            name += "_published"
        return f"{name}_tuned" if len(self.rates) > 1 else name


class Training:
    def __init__(
        self, setting: Setting, images: data.FewShotData, states: pathlib.Path
    ) -> None:
        self.setting, self.data, self.states = setting, images, states
        both = without_validation(images) if setting.published else images
        self.train = both.train

    def trained_on(self, method: str) -> Split:
        """Images for a method: MAML's are of the training classes, also as published."""
        return self.data.train if methods.METHODS[method].inner_rates else self.train

    def sampler(self, split: Split, seed: int, ways: int | None = None) -> Any:
        """Episodes of a part's classes, of the test's ways unless others are given."""
        sizes = ways or self.setting.ways, self.setting.shots, self.setting.queries
        examples = split.images, split.labels
        return few_shot.EpisodeSampler(*examples, *sizes, seed, scale=1 / 255)

    def forget(self, names: Sequence[str]) -> None:
        """Deletes the states of finished methods, trials and pretraining included."""
        trained = {*names, *(methods.METHODS[name].network for name in names)}
        for folder in self.states.glob("*_*_*_*"):
            if folder.name.rsplit("_", 3)[0].partition("-")[0] in trained:
                runs.remove_state(folder)

    def run(
        self, method: str, rate: float, images: int, seed: int
    ) -> tuple[Callable, dict]:
        """Trains a method; returns the learner, and what the training took."""
        row, setting = methods.METHODS[method], self.setting
        images = round(row.budget * images)
        own = self._pretrained(method, rate, images, seed) if row.pretrained else None
        keras.utils.set_random_seed(seed)
        untrained: dict = {"seconds": 0.0, "training_images": 0}
        network, found = own or (self._features(row.network), untrained)
        given: dict = {"batch_normalization": row.batch_normalization}
        trial = setting.rates.index(rate)
        inner_rate = methods.inner_rate(method, setting.dataset, trial)
        if inner_rate is not None:
            found["inner_rate"] = given["inner_learning_rate"] = inner_rate
        split = self.trained_on(method)
        task = methods.Task(setting.dataset, setting.ways, split.images, given)
        if not row.episodic:
            return row.learner(network, task), found
        is_proto_net = method.startswith("proto_net")
        ways = setting.proto_ways if is_proto_net else setting.ways
        learner = row.learner(network, dataclasses.replace(task, ways=ways))
        training = self._fit_episodes(method, learner, ways, rate, images, seed)
        if is_proto_net:
            learner = row.learner(learner.backbone, task)
        sums = {key: found[key] + training[key] for key in ("seconds", "training_images")}
        return learner, found | training | sums

    def _features(self, kind: str) -> keras.Model:
        shape, published = self.data.image_shape, bool(self.setting.published)
        return methods.features(self.setting.network, kind, shape, published=published)

    def _recipe(
        self, images: int, images_per_step: int, rate: float, augmentation: bool = False
    ) -> recipe.Recipe:
        """Adam, for about so many images, in steps that states are saved between."""
        steps = max(1, round(images / images_per_step))
        if steps > 100:
            steps = 100 * round(steps / 100)
        return recipe.Recipe(
            steps,
            learning_rate=rate,
            batch_size=images_per_step,
            augmentation="pad_crop_flip" if augmentation else "none",
            optimizer="adam",
            epsilon=1e-7,
            cosine_decay=not self.setting.published,
        )

    def _pretrained(
        self, method: str, rate: float, images: int, seed: int
    ) -> tuple[keras.Model, dict]:
        """A network trained to classify all training classes; kept for the next method."""
        keras.utils.set_random_seed(seed)
        kind, split = methods.METHODS[method].network, self.trained_on(method)
        classes, labels = np.unique(split.labels, return_inverse=True)
        network = self._features(kind)
        model = methods.classifier(network, len(classes))
        trained = self._recipe(
            images, self.setting.batch_size, rate, self.setting.augmentation
        )
        chunk = recipe.chunk_steps(trained.steps, FLAGS.save_every)
        batches = recipe.Batches(Split(split.images, labels), trained, seed, chunk)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Once it is finished, its state gives the next method the network.
        folder = self.states / f"{kind}-{len(classes)}_{rate}_{images}_{seed}"
        return network, _fit(model, batches, trained, loss, folder)

    def _fit_episodes(
        self, method: str, learner: Any, ways: int, rate: float, images: int, seed: int
    ) -> dict:
        setting = self.setting
        support, queries = ways * setting.shots, ways * setting.queries
        # As many images a step, whatever the ways.
        episodes = max(1, setting.episodes_per_step * setting.ways // ways)
        trained = self._recipe(images, episodes * (support + queries), rate)
        shape = self.data.image_shape
        learner.build(((None, support, *shape), (None, support), (None, queries, *shape)))
        batches = self.sampler(self.trained_on(method), seed, ways).batches(
            episodes, recipe.chunk_steps(trained.steps, FLAGS.save_every)
        )
        folder = self.states / f"{method}_{rate}_{images}_{seed}"
        return _fit(learner, batches, trained, methods.loss(method), folder)


def _fit(
    model: Any, batches: Any, trained: recipe.Recipe, loss: Any, folder: pathlib.Path
) -> dict:
    optimizer = trained.make_optimizer()
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=options.jit_compile())
    model.optimizer.build(model.trainable_variables)
    found = recipe.fit(model, batches, trained, folder, FLAGS.verbose)
    del found["training_loss"]
    return found | {"training_images": trained.steps * trained.batch_size}


def chosen_rate(training: Training, method: str, trials: runs.RunRecords) -> float:
    """The rate with the best accuracy on validation episodes, for a part of the budget."""
    setting = training.setting
    if len(setting.rates) == 1:
        return setting.rates[0]
    images = round(setting.trial_share * setting.training_images)

    def trial(method: str, rate: str) -> dict:
        record = {"method": method, "rate": float(rate), "seed": 0}
        try:
            learner, found = training.run(method, float(rate), images, seed=0)
            sampler = training.sampler(training.data.validation, VALIDATION_SEED)
            episodes = setting.validation_episodes
            evaluation = few_shot.evaluate(learner, sampler, episodes, 10, verbose=0)
        except nsl_keras.NonFiniteLossError as error:
            return record | {"accuracy": 0.0, "diverged": str(error)}
        if "inner_rate" in found:
            record["inner_rate"] = found["inner_rate"]
        return record | {"accuracy": evaluation.mean}

    runs.run_all(trials, [(method, str(rate)) for rate in setting.rates], trial)
    return tables.best_rate(tables.of_method(trials.runs, method))


def record_of(training: Training, method: str, rate: float, seed: int) -> dict:
    setting = training.setting
    record = recipe.first_record("few_shot", method, seed) | {"learning_rate": rate}
    sampler = training.sampler(training.data.test, TEST_SEED)
    try:
        learner, found = training.run(method, rate, setting.training_images, seed)
        if isinstance(learner, few_shot.MAML):
            found["support_losses"] = support_losses(learner, sampler)
        start = time.perf_counter()
        episodes = setting.test_episodes
        evaluation = few_shot.evaluate(learner, sampler, episodes, 10, verbose=0)
    except nsl_keras.NonFiniteLossError as error:
        # A result too: the published inner rate is one that steps may diverge at.
        return record | {"diverged": str(error)}
    queries = setting.ways * setting.queries
    return {
        **record,
        "batch_normalization": evaluation.batch_normalization,
        **found,
        **recipe.peak_memory(),
        "evaluation_seconds": round(time.perf_counter() - start, 1),
        "accuracy": evaluation.mean,
        "half_width": evaluation.half_width,
        "right_queries": np.round(evaluation.accuracies * queries).astype(int).tolist(),
    }


def support_losses(learner: few_shot.MAML, sampler: few_shot.EpisodeSampler) -> list[float]:
    """The mean loss on the support sets of ten episodes, before and after the steps."""
    episodes = sampler.episodes(10)
    images, labels = episodes.support_images, episodes.support_labels
    network = learner.stateless
    unadapted = [network.outputs(network.values(), each)[0] for each in images]
    adapted = learner.predict((images, labels, images), batch_size=10, verbose=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pair = (keras.ops.stack(unadapted), adapted)
    return [round(float(loss(labels, each)), 4) for each in pair]


def run_methods(
    training: Training, names: Sequence[str], seeds: Sequence[int], results: pathlib.Path
) -> runs.RunRecords:
    """Runs every method with every seed that has no record yet."""
    for part in PARTS:
        # Too few classes are an error before the training, not after it.
        training.sampler(getattr(training.data, part), 0)
    classes, ways = len(np.unique(training.train.labels)), training.setting.proto_ways
    if ways > classes and any(name.startswith("proto_net") for name in names):
        raise ValueError(
            f"`proto_ways` must be at most the number of training classes, {classes}. "
            f"Received: proto_ways={ways}"
        )
    setting = {
        **dataclasses.asdict(training.setting),
        **training.data.counts,
        "image_shape": training.data.image_shape,
        "data_file": training.data.fingerprint,
    }
    name = training.setting.name
    records = runs.RunRecords(results / "few_shot.jsonl", name, setting)
    trials = runs.RunRecords(results / "few_shot_tuning.jsonl", name, setting)

    def run(method: str, seed: int) -> dict:
        rate = chosen_rate(training, method, trials)
        return record_of(training, method, rate, seed)

    runs.run_all(records, runs.every(names, seeds), run)
    return records

r"""Trains the image classifiers of Meta-Neighborhoods: Table 1 and Appendices A.3 to A.6.

Every method and seed sees the same batches, and is evaluated once, after the last step;
models with a dictionary before adaptation too, and those of A.3 on validation images in
training. A.3 and A.4 are drawn, as in the paper's Figures 7 and 8.

    python -m experiments.image_classification --steps=300      # scikit-learn's digits
    python -m experiments.image_classification --dataset=cifar10 --backbone=resnet29 \
        --data_dir=~/tensorflow_datasets --seeds=0,1,2 --nohold_out
    python -m experiments.image_classification --experiment=A.5 --dataset=cifar10 \
        --method=neighborhoods --method=neighborhoods_3 --steps=3000

--dataset is any image set of tensorflow-datasets, or one that common/image_folders.py reads
from --data_dir; --dataset=imagenet --stream reads "imagenet_resized/64x64" while training,
which tensorflow-datasets prepares below --data_dir. With --experiment=A.9 models are
trained on coarse classes only.
"""

import dataclasses

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, image_training, options, runs
from experiments.common.data import ImageData, Split
from experiments.common.pictures import SHOWN
from experiments.common.recipe import Recipe
from experiments.image_classification import features, methods, pictures, table

FLAGS = flags.FLAGS
_EXPERIMENTS, _BACKBONES = list(methods.EXPERIMENTS), list(methods.BACKBONES)
flags.DEFINE_enum("experiment", "table_1", _EXPERIMENTS, "Table 1, or an appendix.")
flags.DEFINE_enum("backbone", "convnet4", _BACKBONES, "Network before the head.")
flags.DEFINE_integer("num_neighbors", None, "Entries, instead of the published number.", 1)
flags.DEFINE_bool("figures", False, "Draw the trained models of the first seed.")
flags.DEFINE_string("model_dir", "runs/models", "Where models that can be drawn are kept.")


def recipes_from_flags(train_examples: int) -> dict[str, Recipe]:
    """The recipe for each optimizer: the same share of the published steps."""
    published = {
        name: methods.published(FLAGS.dataset, name) for name in methods.OPTIMIZERS
    }
    steps = image_training.steps_from_flags(published["adamw"], train_examples)
    changes = image_training.recipe_changes_from_flags()
    changes |= options.changes("augmentation")
    batch = options.changes("batch_size", "augmentation")
    recipes = {}
    for optimizer, each in published.items():
        own = max(1, round(steps * each.steps / published["adamw"].steps))
        # The other flags are for what AdamW trains; the rows of SGD are SGD's.
        by_adamw = {"adamw": changes, "dictionary_sgd": {**changes, "optimizer": optimizer}}
        own_changes = by_adamw.get(optimizer, batch)
        recipes[optimizer] = dataclasses.replace(each.scaled(own), **own_changes)
    return recipes


def with_coarse_labels(found: ImageData) -> ImageData:
    listed = methods.COARSE_CLASSES.get(FLAGS.dataset)
    if listed is None:
        raise ValueError(
            "`dataset` must be one with coarse classes for A.9: "
            f"{', '.join(methods.COARSE_CLASSES)}. "
            f"Received: dataset={FLAGS.dataset!r}"
        )
    coarse = np.array(listed.split(), "int64")
    fine = np.array(found.class_names)
    names = ["/".join(fine[coarse == number]) for number in range(coarse.max() + 1)]
    return found.changed(lambda s: Split(s.images, coarse[s.labels]), class_names=names)


def main(_arguments: list[str]) -> None:
    experiment = methods.EXPERIMENTS[FLAGS.experiment]
    names = image_training.chosen_methods(experiment.names, FLAGS.experiment)
    # 32x32 as in the paper (A.1) but for digits and ImageNet.
    size = {"digits": None, "imagenet": 64}.get(FLAGS.dataset, 32)
    resized = {"imagenet": "imagenet_resized/64x64"}.get(FLAGS.dataset)
    fine = image_training.load_images(size, prepared=resized)
    if fine is None:
        return
    recipes = recipes_from_flags(image_training.training_examples(fine))
    found = with_coarse_labels(fine) if experiment.coarse else fine
    sgd = ("steps", "rate_drops", "learning_rate")
    entries = FLAGS.num_neighbors or methods.published_num_neighbors(
        FLAGS.dataset, experiment.coarse
    )
    setting = image_training.setting_of(
        found,
        recipes["adamw"],
        backbone=FLAGS.backbone,
        coarse=experiment.coarse,
        # The published one, of which experiments take shares.
        dictionary={"num_neighbors": entries, "temperature": 0.2, "dropout": 0.5},
        sgd={name: getattr(recipes["nesterov"], name) for name in sgd},
    )
    dataset = f"{FLAGS.dataset}_coarse" if experiment.coarse else FLAGS.dataset
    place = image_training.setting_name(FLAGS.backbone, dataset, recipes["adamw"])
    # Of a setting, as the records are: another one's would take their place.
    models = runs.states_folder(f"{FLAGS.model_dir}/{place}", setting)

    def make(name: str, seed: int, trained: Recipe) -> keras.Model:
        model = methods.build(
            methods.METHODS[name],
            FLAGS.backbone,
            found.image_shape,
            len(found.class_names),
            setting["dictionary"],
            seed,
            setting["filters"],
        )
        return methods.compile_model(model, trained, options.jit_compile())

    def finish(model: keras.Model, record: dict) -> None:
        own = recipes[methods.METHODS[record["method"]].optimizer]
        if own is not recipes["adamw"]:
            record["recipe"] = {**dataclasses.asdict(own), "drop": own.drop}
        if isinstance(model, nsl_keras.MetaNeighborhoodModel):
            rates = [keras.ops.ravel(rate) for rate in model.inner_learning_rates]
            record["inner_rate"] = float(keras.ops.mean(keras.ops.concatenate(rates)))
            if not FLAGS.stream:
                shown = found.test.take(SHOWN)
                record["rising_cosines"] = features.rising_share(model, shown)
        if experiment.coarse:
            for key, classes in (("induction", fine), ("coarse_induction", found)):
                record[f"{key}_accuracy"] = pictures.induction_accuracy(model, classes)
        if experiment.coarse or isinstance(model, nsl_keras.MetaNeighborhoodModel):
            name = f"{record['method']}_{record['seed']}.keras"
            with runs.replacing(models / name) as scratch:
                model.save(scratch)

    rows = image_training.Rows(
        "image_classification",
        names,
        methods.BASELINE,
        lambda name: recipes[methods.METHODS[name].optimizer],
        make,
        finish,
        methods.multiply_adds,
        lambda records: table.section(records, [FLAGS.experiment]),
        curves=experiment.figure is pictures.in_training,
    )
    made = image_training.make_runs(rows, place, setting, found)
    if FLAGS.tune:
        return
    figures = {}
    if experiment.figure:
        titles = {name: each.title for name, each in experiment.methods.items()}
        figures[FLAGS.experiment] = experiment.figure(setting, made.runs, titles)
    if FLAGS.figures:
        trained = {
            name: keras.saving.load_model(path)
            for name in names
            if (path := models / f"{name}_{FLAGS.seeds[0]}.keras").exists()
        }
        draw = pictures.of_subcategories if experiment.coarse else pictures.of_neighbors
        figures |= draw(trained, fine)
    runs.write_figures(
        runs.results_folder(FLAGS.output_dir) / "figures",
        {f"{place}_{name}": each for name, each in figures.items() if each is not None},
    )


if __name__ == "__main__":
    command.run(main)

r"""Trains the image networks of Neural Similarity Learning: Tables 1 to 5 and 8.

Also those of the authors' response to the reviews. Every method and seed sees the same
batches, and is evaluated once, after the last step. Table "cost" is none of the paper's: it
sets dynamic similarities beside plain networks with as many parameters or multiply-adds.

    python -m experiments.neural_similarity --steps=300       # scikit-learn's digits
    python -m experiments.neural_similarity --table=4 --dataset=cifar10 \
        --data_dir=~/tensorflow_datasets --seeds=0,1,2 --nohold_out
    python -m experiments.neural_similarity --table=cost --filters=16,32,64 \
        --dataset=cifar10 --train_size=10000 --epochs=30 --augmentation=pad_crop_flip \
        --input=standardized --optimizer=adam --cosine_decay --step_times \
        --seeds=0,1,2 --tune    # the same with --tuned then trains at the best rates
"""

import dataclasses

import keras
from absl import flags

from experiments.common import command, image_training, options, recipe
from experiments.common.convolutions import size_of
from experiments.neural_similarity import methods, table

FLAGS = flags.FLAGS
flags.DEFINE_enum("table", "4", sorted(methods.TABLES), "Table of the paper.")
flags.DEFINE_enum("variant", "code", ["code", "paper"], "Which CNN-9: see backbones.cnn9.")
flags.DEFINE_enum("schedule", None, sorted(methods.RECIPES), "Instead of the table's.")


def recipe_from_flags(
    chosen: methods.Table, train_examples: int
) -> tuple[recipe.Recipe, float]:
    """The recipe, and the momentum of batch norms that suits its length."""
    published = methods.RECIPES[FLAGS.schedule or chosen.recipe]
    steps = image_training.steps_from_flags(published, train_examples)
    changes = image_training.recipe_changes_from_flags()
    # Mirror images of digits are no digits.
    if FLAGS.augmentation or FLAGS.dataset in ("digits", "mnist"):
        changes["augmentation"] = FLAGS.augmentation or "none"
    # Moving statistics with the published 0.999 need thousands of steps.
    momentum = 0.9 if steps < published.steps else 0.999
    return dataclasses.replace(published.scaled(steps), **changes), momentum


def main(_arguments: list[str]) -> None:
    chosen = methods.TABLES[FLAGS.table]
    names = image_training.chosen_methods(chosen.methods, f"table {FLAGS.table}")
    found = image_training.load_images(streamed_size=224)
    if found is None:
        return
    trained, momentum = recipe_from_flags(chosen, image_training.training_examples(found))
    variant = FLAGS.variant if chosen.network == "cnn9" else None
    setting = image_training.setting_of(
        found,
        trained,
        network=chosen.network,
        variant=variant,
        batch_normalization_momentum=momentum,
        predictors=chosen.predictors,
    )
    given = {"variant": variant, "filters": setting["filters"]}

    def make(name: str, _seed: int, trained: recipe.Recipe) -> keras.Model:
        own = chosen.methods[name]
        backbone = methods.build(
            chosen.network,
            own,
            found.image_shape,
            len(found.class_names),
            momentum,
            chosen.predictors == "published",
            **{key: value for key, value in given.items() if value is not None},
        )
        return methods.trainable(backbone, trained, options.jit_compile(), own)

    def served_size(model: keras.Model) -> dict[str, int]:
        return size_of(methods.served(model.layers[-1]))

    def finish(model: keras.Model, record: dict) -> None:
        record["served_parameters"] = served_size(model)["parameters"]

    rows = image_training.Rows(
        "neural_similarity",
        names,
        chosen.baseline,
        lambda name: trained,
        make,
        finish,
        lambda model: served_size(model)["multiply_adds"],
        lambda records: table.section(records, [FLAGS.table]),
    )
    network = chosen.network + ("_paper" if FLAGS.variant == "paper" else "")
    network += "" if chosen.predictors == "published" else "_default"
    place = image_training.setting_name(network, FLAGS.dataset, trained)
    image_training.make_runs(rows, place, setting, found)


if __name__ == "__main__":
    command.run(main)

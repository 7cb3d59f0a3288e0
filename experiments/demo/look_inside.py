"""Pictures of the inside of a Meta-Neighborhoods model, of scikit-learn's digits.

    python -m experiments.demo.look_inside    # under a minute

A linear feature map, a cosine classifier, and a dictionary of learned neighbours: the
model whose neighbours do most (see experiments/demo). A second one learns only whether a
digit is even, and is asked for the digit (sub-categories). Writes
--output_dir/results/figures/digits_*.png: the feature map (PCA and t-SNE), prototypes
before and after finetuning, sub-categories of both models, and one prediction taken apart.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, data, pictures, recipe, runs
from nsl_keras import MetaNeighborhoodModel, visualize

FLAGS = flags.FLAGS


def features() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(32)]
    )


def train(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> None:
    """Trains by the recipe of the demo."""
    steps = FLAGS.epochs * -(-len(images) // 64)
    trained = recipe.Recipe(
        steps,
        (3 * steps // 4,),
        learning_rate=1e-2,
        batch_size=64,
        optimizer="adamw",
        weight_decay=0.075,
    )
    recipe.compile_classifier(model, trained, recipe.spared_of(model))
    model.fit(images, labels, batch_size=64, epochs=FLAGS.epochs, verbose=0)


def with_neighbors(images: np.ndarray, labels: np.ndarray) -> MetaNeighborhoodModel:
    model = MetaNeighborhoodModel(
        features(),
        nsl_keras.layers.CosineDense(int(labels.max()) + 1),
        nsl_keras.layers.NeighborDictionary(FLAGS.num_neighbors, temperature=0.1, seed=0),
    )
    model.build((None, 8, 8, 1))
    train(model, images, labels)
    return model


def without_neighbors(images: np.ndarray, labels: np.ndarray) -> keras.Model:
    """Trains the same network without a dictionary; returns its feature map."""
    backbone, head = features(), nsl_keras.layers.CosineDense(int(labels.max()) + 1)
    train(keras.Sequential([backbone, head]), images, labels)
    return backbone


def main(_arguments: list[str]) -> None:
    keras.utils.set_random_seed(0)
    found = data.load("digits", train_examples=FLAGS.train_examples)
    train_x, train_y, test = found.train.images, found.train.labels, found.test
    names = found.class_names
    model = with_neighbors(train_x, train_y)
    figures = {
        "feature_map": visualize.plot_feature_map(
            model, train_x, train_y, class_names=names
        ),
        "feature_map_tsne": visualize.plot_feature_map(
            model, train_x, train_y, method="tsne", class_names=names
        ),
        "prototype_cosines": visualize.plot_prototype_cosines(
            model, test.images, test.labels
        ),
        "adaptation": visualize.plot_adaptation(
            model,
            test.images[pictures.most_changed(model, test)],
            images=train_x,
            class_names=names,
        ),
    }
    # What neither of these models is told: which even, which odd digit it is.
    for name, of_kind in (("", with_neighbors), ("_without", without_neighbors)):
        figures[f"subcategories{name}"] = visualize.plot_subcategories(
            of_kind(train_x, train_y % 2),
            train_x,
            train_y,
            test.images,
            test.labels,
            rows=[int(np.argmax(test.labels == digit)) for digit in (0, 3, 5, 8)],
            class_names=names,
        )
    runs.write_figures(
        runs.results_folder(FLAGS.output_dir) / "figures",
        {f"digits_{name}": figure for name, figure in figures.items()},
    )


if __name__ == "__main__":
    flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
    flags.DEFINE_integer("epochs", 20, "Epochs of training.", lower_bound=1)
    flags.DEFINE_integer("num_neighbors", 200, "Dictionary size.", lower_bound=1)
    flags.DEFINE_integer(
        "train_examples", None, "Number of training images.", lower_bound=1
    )
    command.run(main)

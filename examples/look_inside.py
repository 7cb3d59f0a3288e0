"""Pictures of the inside of a Meta-Neighborhoods model, of scikit-learn's digits.

    python -m examples.look_inside --output_dir=results/figures    # under a minute

A linear feature map, a cosine classifier, and a dictionary of learned neighbours: the
model whose neighbours do most (see examples/demo.py). A second one learns
only whether a digit is even, and is asked for the digit (sub-categories). Writes
digits_*.png: the feature map (PCA and t-SNE), prototypes before and after finetuning,
sub-categories of both models, and single predictions taken apart.
"""

from __future__ import annotations

import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import app, flags

import nsl_keras
from examples import image_data
from nsl_keras import MetaNeighborhoodModel, visualize

FLAGS = flags.FLAGS


def features() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(32)]
    )


def train(model: keras.Model, exempt: list, images: np.ndarray, labels: np.ndarray) -> None:
    """Trains by the recipe of examples/demo.py."""
    steps = FLAGS.epochs * -(-len(images) // 64)
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([3 * steps // 4], [1e-2, 1e-3])
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.075, epsilon=1e-8)
    optimizer.exclude_from_weight_decay(var_list=exempt)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(images, labels, batch_size=64, epochs=FLAGS.epochs, verbose=0)


def with_neighbors(images: np.ndarray, labels: np.ndarray) -> MetaNeighborhoodModel:
    model = MetaNeighborhoodModel(
        nsl_keras.layers.CosineDense(int(labels.max()) + 1),
        features(),
        num_neighbors=FLAGS.num_neighbors,
        temperature=0.1,
        seed=0,
    )
    model.build((None, 8, 8, 1))
    train(model, model.decay_exempt_variables, images, labels)
    return model


def without_neighbors(images: np.ndarray, labels: np.ndarray) -> keras.Model:
    """Trains the same network without a dictionary; returns its feature map."""
    backbone, head = features(), nsl_keras.layers.CosineDense(int(labels.max()) + 1)
    train(keras.Sequential([backbone, head]), [], images, labels)
    return backbone


def most_changed(model: MetaNeighborhoodModel, test: image_data.Split) -> int:
    """The example that adaptation puts right with the largest change of its true logit."""
    before, after = (
        keras.ops.convert_to_numpy(model(test.images, adapt=adapt))
        for adapt in (False, True)
    )
    true = np.arange(len(test.labels)), test.labels
    wrong = before.argmax(axis=1) != test.labels
    right = after.argmax(axis=1) == test.labels
    return int(np.argmax((after - before)[true] + 1e3 * (wrong & right)))


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    keras.utils.set_random_seed(0)
    data = image_data.load("digits", train_examples=FLAGS.train_examples)
    train_x, train_y, test = data.train.images, data.train.labels, data.test
    names = data.class_names
    model = with_neighbors(train_x, train_y)
    figures = {
        "feature_map": visualize.feature_map(model, train_x, train_y, class_names=names),
        "feature_map_tsne": visualize.feature_map(
            model, train_x, train_y, method="tsne", class_names=names
        ),
        "prototype_cosines": visualize.prototype_cosines(model, test.images, test.labels),
        "adaptation": visualize.adaptation(
            model,
            test.images[most_changed(model, test)],
            images=train_x,
            class_names=names,
        ),
    }
    # What neither of these models is told: which even, which odd digit it is.
    for name, of_kind in (("", with_neighbors), ("_without", without_neighbors)):
        figures[f"subcategories{name}"] = visualize.subcategories(
            of_kind(train_x, train_y % 2),
            train_x,
            train_y,
            test.images,
            test.labels,
            rows=[int(np.argmax(test.labels == digit)) for digit in (0, 3, 5, 8)],
            class_names=names,
        )
    folder = pathlib.Path(FLAGS.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = folder / f"digits_{name}.png"
        figure.savefig(path, dpi=110)
        print(f"Wrote {path}")


if __name__ == "__main__":
    flags.DEFINE_string("output_dir", "results/figures", "Folder of the pictures.")
    flags.DEFINE_integer("epochs", 20, "Epochs of training.", lower_bound=1)
    flags.DEFINE_integer("num_neighbors", 200, "Dictionary size.", lower_bound=1)
    flags.DEFINE_integer(
        "train_examples", None, "Number of training images.", lower_bound=1
    )
    app.run(main)

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Meta-Neighborhoods: watch the neighbours
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/nsl-keras/nsl_keras/blob/main/examples/notebooks/neighbors.ipynb)
#
# A `MetaNeighborhoodModel` keeps a small dictionary of learned neighbours: feature vectors,
# each with the probabilities of its classes. For every input it finds the most similar entries,
# finetunes a copy of its last layer on them by one small step, and predicts with that copy.
#
# First on two spirals, where you can see the entries move. Then on crops of photographs,
# beside the same networks without neighbours. No GPU and no download is needed.

# %% [markdown]
# ## Setup
#
# Where the package is missing, this cell installs it: from the clone that the notebook lies
# in, from a wheel beside it, or from the repository. Elsewhere it does nothing.

# %%
import importlib.util
import pathlib

if importlib.util.find_spec("nsl_keras") is None:
    source = "git+https://github.com/nsl-keras/nsl_keras"
    clone = pathlib.Path("../..").resolve()
    wheels = sorted(pathlib.Path().glob("nsl_keras-*.whl"))
    if (clone / "nsl_keras").is_dir():
        source = clone.as_uri()
    elif wheels:
        source = wheels[-1].resolve().as_uri()
    # %pip install -q "nsl_keras[tensorflow,examples] @ {source}"

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_images

import nsl_keras

# %matplotlib inline
SHORT = "NSL_KERAS_SHORT" in os.environ  # A few steps only, for the tests.
keras.utils.set_random_seed(0)


def compile_model(model, rate):
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


# %% [markdown]
# ## Two spirals
#
# A linear classifier draws one straight line through the plane, and gets little more than
# half of the points right. With neighbours the classifier is still linear, but the line is
# moved for each point.


# %%
def spirals(count, seed):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    share = rng.uniform(0.08, 1, count)
    angle = 4 * np.pi * share + np.pi * labels
    points = 3 * share[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (points + rng.normal(scale=0.06, size=points.shape)).astype("float32"), labels


points, spiral = spirals(1000, seed=0)
test_points, test_spiral = spirals(1000, seed=1)

linear = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
with_neighbors = nsl_keras.MetaNeighborhoodModel(
    None,  # The points are the features.
    keras.layers.Dense(2),
    nsl_keras.layers.NeighborDictionary(
        100, metric="euclidean", temperature=0.1, fixed_values=True, dropout=0.0, seed=0
    ),
    inner_learning_rate=1.0,
)
with_neighbors.build((None, 2))
with_neighbors.dictionary.assign(keys=np.random.default_rng(0).normal(size=(100, 2)))


class Watch(keras.callbacks.Callback):
    """Keeps the places of the entries, and the classes that the model predicts."""

    def __init__(self, epochs):
        super().__init__()
        self.epochs, self.seen = epochs, []
        axis = np.linspace(-3.4, 3.4, 90, dtype="float32")
        self.grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)

    def look(self, epoch):
        if epoch in self.epochs:
            regions = self.model.predict(self.grid, batch_size=2048, verbose=0).argmax(
                axis=1
            )
            keys = np.array(keras.ops.convert_to_numpy(self.model.dictionary.keys))
            self.seen.append((epoch, keys, regions.reshape(90, 90)))

    def on_train_begin(self, logs=None):
        self.look(0)

    def on_epoch_end(self, epoch, logs=None):
        self.look(epoch + 1)


EPOCHS = 2 if SHORT else 100
watch = Watch((0, EPOCHS // 10, EPOCHS // 4, EPOCHS))
for model in (linear, with_neighbors):
    compile_model(model, 0.03)
    callbacks = [watch] if model is with_neighbors else []
    model.fit(points, spiral, batch_size=100, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    found = np.mean(model.predict(test_points, verbose=0).argmax(axis=1) == test_spiral)
    print(
        f"{'linear' if model is linear else 'with neighbours':16}{100 * found:6.1f} % of new points"
    )

# %% [markdown]
# The entries (circles, and squares for the other class) move until they line the spirals, and
# the plane is divided accordingly.

# %%
figure, axes = plt.subplots(1, len(watch.seen), figsize=(11, 3), layout="constrained")
classes = keras.ops.convert_to_numpy(with_neighbors.dictionary.values).argmax(axis=1)
for axis, (epoch, keys, regions) in zip(axes, watch.seen):
    extent = (-3.4, 3.4, -3.4, 3.4)
    axis.imshow(regions, origin="lower", extent=extent, cmap="cividis", alpha=0.35)
    axis.scatter(*test_points.T, c=test_spiral, s=1, cmap="cividis")
    for label, marker in enumerate("os"):
        axis.plot(*keys[classes == label].T, f"k{marker}", markersize=4, mfc="white")
    axis.set(title=f"epoch {epoch}", xticks=[], yticks=[], xlim=extent[:2], ylim=extent[2:])

# %% [markdown]
# ## Photographs
#
# Two photographs that come with scikit-learn, under CC BY 2.0 (china.jpg by danielbuechele,
# flower.jpg by vultilion), are divided into six places each. An image is a crop of 16 by 16
# pixels; its class is the place that it is from.

# %%
NAMES = [f"{photo} {place}" for photo in ("china", "flower") for place in range(1, 7)]
SIZE, TILE = 16, 213


def crops(count, seed):
    """`count` random crops of each place, and their classes."""
    rng = np.random.default_rng(seed)
    images = []
    for photo in load_sample_images().images:
        for place in range(6):
            row, column = TILE * (place // 3), TILE * (place % 3)
            for y, x in rng.integers(0, TILE - SIZE, (count, 2)):
                images.append(photo[row + y :, column + x :][:SIZE, :SIZE])
    labels = np.repeat(np.arange(12), count)
    order = rng.permutation(len(images))
    return np.array(images, "float32")[order] / 255, labels[order]


train_x, train_y = crops(50 if SHORT else 500, seed=0)
test_x, test_y = crops(150, seed=1)
figure, axes = plt.subplots(2, 12, figsize=(12, 2.6), layout="constrained")
for label, column in enumerate(axes.T):
    for axis, image in zip(column, train_x[train_y == label]):
        axis.imshow(image)
        axis.set_axis_off()
    column[0].set_title(NAMES[label], fontsize=8)

# %% [markdown]
# ## With and without neighbours
#
# Two backbones: a single linear layer, and four convolutions. Each is trained with and
# without neighbours, by the same recipe, from two seeds. The head is `CosineDense`, with which
# neighbours gain most on weak features.


# %%
def linear_backbone():
    layers = [keras.Input((SIZE, SIZE, 3)), keras.layers.Flatten(), keras.layers.Dense(32)]
    return keras.Sequential(layers)


def convolutional_backbone():
    return nsl_keras.backbones.convnet4((SIZE, SIZE, 3), filters=(16, 32, 32, 32))


def train(backbone, neighbors, seed):
    keras.utils.set_random_seed(seed)
    head = nsl_keras.layers.CosineDense(12)
    if neighbors:
        dictionary = nsl_keras.layers.NeighborDictionary(240, temperature=0.1, seed=seed)
        model = nsl_keras.MetaNeighborhoodModel(backbone(), head, dictionary)
    else:
        model = keras.Sequential([backbone(), head])
    model.build((None, SIZE, SIZE, 3))
    compile_model(model, 3e-3)
    history = model.fit(
        train_x,
        train_y,
        batch_size=64,
        epochs=1 if SHORT else 10,
        validation_data=(test_x, test_y),
        verbose=0,
    )
    return model, history.history


trained = {
    (backbone.__name__.split("_")[0], neighbors, seed): train(backbone, neighbors, seed)
    for backbone in (linear_backbone, convolutional_backbone)
    for neighbors in (False, True)
    for seed in range(1 if SHORT else 2)
}

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
for axis, name in zip(axes, ("linear", "convolutional")):
    for (backbone, neighbors, seed), (model, history) in trained.items():
        if backbone == name:
            axis.plot(
                100 * np.array(history["val_accuracy"]),
                color="tab:orange" if neighbors else "tab:blue",
                label=("with neighbours" if neighbors else "without") if not seed else None,
            )
            if neighbors:
                axis.plot(
                    100 * np.array(history["val_unadapted_accuracy"]),
                    ":",
                    color="tab:orange",
                    label=None if seed else "before adaptation",
                )
    axis.set(title=f"{name} features", xlabel="epoch", ylabel="test accuracy, %")
    axis.legend(fontsize=8)

for name in ("linear", "convolutional"):
    last = {
        neighbors: [
            100 * history["val_accuracy"][-1]
            for (backbone, with_them, _), (_, history) in trained.items()
            if (backbone, with_them) == (name, neighbors)
        ]
        for neighbors in (False, True)
    }
    gains = np.subtract(last[True], last[False])
    print(
        f"{name} features: plain {np.mean(last[False]):.1f} %, with neighbours "
        f"{np.mean(last[True]):.1f} %, by seed {', '.join(f'{gain:+.1f}' for gain in gains)}"
    )

# %% [markdown]
# On linear features, which do not separate textures, the neighbours gained with every seed. On
# convolutional features, which do, they gained nothing. Before adaptation (dotted) the head is
# worse, since training counts on the step: compare with the network without neighbours.
#
# ## Look at the neighbours
#
# Entries are feature vectors, not images, but we can find the training images nearest to them.
# A row is an entry: the probabilities of its classes, then the images.

# %%
model, _ = trained["linear", True, 0]
looked_at = model.neighbors(test_x[:200], k=1).indices[:, 0]
entries = np.argsort(-np.bincount(looked_at, minlength=240))[:6]
figure = nsl_keras.visualize.plot_learned_neighbors(
    model, train_x[:1000], entries=entries, class_names=NAMES
)

# %% [markdown]
# And one prediction in parts: before and after the step, and what each of the entries adds.

# %%
before = keras.ops.convert_to_numpy(model(test_x[:200], adapt=False)).argmax(axis=1)
after = model.predict(test_x[:200], verbose=0).argmax(axis=1)
mended = np.flatnonzero((before != test_y[:200]) & (after == test_y[:200]))
print(f"of 200 test images the step mends {len(mended)}; one of them:")
figure = nsl_keras.visualize.plot_adaptation(
    model, test_x[mended[0] if len(mended) else 0], images=train_x[:1000], class_names=NAMES
)

# %% [markdown]
# ## Where to go from here
#
# * With your own trained classifier: `MetaNeighborhoodModel.from_classifier(model)`, then
#   `initialize_from` to fill the dictionary with real examples.
# * `model.inner_rates` are the learned lengths of the step. If they are near zero, neighbours
#   did not help.
#
# Notebook 2 of 5. Before: [Add similarity, train, fold](https://github.com/nsl-keras/nsl_keras/blob/main/examples/notebooks/fold.ipynb). Next: [Few-shot learning](https://github.com/nsl-keras/nsl_keras/blob/main/examples/notebooks/few_shot.ipynb).

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
# # Add similarity to a trained network, train it, fold it back
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/nsl-keras/nsl_keras/blob/main/examples/notebooks/fold.ipynb)
#
# A network was trained on sharp photographs. The camera at work is out of focus. There is
# one labelled picture of each class from that camera, and latency must not grow.
#
# Here you give each convolution of the trained network a *similarity*: a small matrix `M`
# between kernel and image that all filters share. You train `M` alone, fold it into the
# kernels, and compare with what you would do without this package: train the classifier
# again, or all weights.
#
# No GPU and no download is needed. To see the same on CIFAR-10, set `IMAGES` below.

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
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_sample_images

import nsl_keras

# %matplotlib inline
IMAGES = "photographs"  # Or "cifar10": downloads 170 MB, and takes longer without a GPU.
SHORT = "NSL_KERAS_SHORT" in os.environ  # A few steps only, for the tests.
keras.utils.set_random_seed(0)

# %% [markdown]
# ## The data
#
# Scikit-learn comes with two photographs, under CC BY 2.0 (china.jpg by danielbuechele,
# flower.jpg by vultilion). Each is divided into 24 places. An image is a crop of 24 by 24
# pixels, its class the place that it is from: 48 classes. The camera at work blurs.


# %%
def crops(count, seed):
    """`count` random crops of each place of the photographs, and their classes."""
    rng = np.random.default_rng(seed)
    images = []
    for photo in load_sample_images().images:
        for place in range(24):
            row, column = 106 * (place // 6), 106 * (place % 6)
            for y, x in rng.integers(0, 106 - 24, (count, 2)):
                images.append(photo[row + y :, column + x :][:24, :24])
    return np.array(images), np.repeat(np.arange(48), count)


def photographs():
    """Images to train on, to test on, and to draw the labelled blurred ones from."""
    return crops(10 if SHORT else 100, seed=0), crops(25, seed=1), crops(10, seed=2)


def cifar10():
    (images, labels), (test_images, test_labels) = keras.datasets.cifar10.load_data()
    labels, test_labels = labels[:, 0], test_labels[:, 0]
    test = test_images[:2000], test_labels[:2000]
    return (images[:20000], labels[:20000]), test, (images[20000:], labels[20000:])


def blur(images):
    return gaussian_filter(images, (0, 1.2, 1.2, 0))


loaded = {"photographs": photographs, "cifar10": cifar10}[IMAGES]()
(train_x, train_y), (test_x, test_y), (pool_x, pool_y) = [
    (images.astype("float32") / 255, labels) for images, labels in loaded
]
blurred_x = blur(test_x)
CLASSES = len(np.unique(train_y))
print("training", train_x.shape, "test", test_x.shape)

figure, axes = plt.subplots(2, 10, figsize=(9, 2), layout="constrained")
for column, number in zip(axes.T, range(12, len(test_x), len(test_x) // 10)):
    for axis, images in zip(column, (test_x, blurred_x)):
        axis.imshow(images[number])
        axis.set_axis_off()

# %% [markdown]
# ## The trained network
#
# Any functional or Sequential Keras model will do. This one is small and plain.


# %%
def compile_model(model, rate):
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def accuracy(model, images, labels):
    return 100 * np.mean(model.predict(images, verbose=0).argmax(axis=1) == labels)


trained = keras.Sequential([keras.Input(train_x.shape[1:])])
for filters in (16, 32, 64):
    name = f"convolution_{filters}"
    trained.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False, name=name))
    trained.add(keras.layers.BatchNormalization(momentum=0.9))
    trained.add(keras.layers.ReLU())
    if filters > 16:
        trained.add(keras.layers.MaxPooling2D())
trained.add(keras.layers.GlobalAveragePooling2D())
trained.add(keras.layers.Dense(CLASSES))

compile_model(trained, 3e-3)
trained.fit(train_x, train_y, batch_size=64, epochs=1 if SHORT else 12, verbose=0)
before_sharp = accuracy(trained, test_x, test_y)
before = accuracy(trained, blurred_x, test_y)
print(f"sharp images {before_sharp:.1f} %, blurred images {before:.1f} %")

# %% [markdown]
# ## Add a similarity
#
# `add_similarity` returns a copy in which every convolution has an `M`. It starts as the
# identity, so that the copy computes exactly what the network does. Only `M` is trained:
#
# * `"diagonal"`: nine numbers a layer, one factor for each place of the kernel;
# * `"unconstrained"`: 9 by 9 numbers a layer, which mix the places of the kernel.

# %%
similar = nsl_keras.convert.add_similarity(trained, similarity="diagonal")
assert np.array_equal(similar(test_x[:50]), trained(test_x[:50]))
print(nsl_keras.convert.summary(similar))

# %% [markdown]
# ## Train it, beside the plain ways
#
# One blurred image of each class is labelled. Everything is done with three draws of them, to
# see how much the draw matters. Do not train `M` faster than 1e-3: at 1e-2 an unconstrained
# one can ruin a pretrained network.

# %%
# Rate and epochs: longer training of the plain ways overfits to these few images.
WAYS = {
    "the classifier again": (1e-3, 60),
    "all weights": (3e-4, 60),
    "M, diagonal": (1e-3, 300),
    "M, unconstrained": (1e-3, 300),
}


def starting_point(way):
    """A copy of the trained network, frozen but for what `way` names."""
    if way.startswith("M"):
        return nsl_keras.convert.add_similarity(trained, similarity=way.split(", ")[1])
    copy = keras.models.clone_model(trained)
    copy.set_weights(trained.get_weights())
    if way == "the classifier again":
        for layer in copy.layers[:-1]:
            layer.trainable = False
    return copy


found = {way: [] for way in WAYS}
models = {}
for draw in range(1 if SHORT else 3):
    rng = np.random.default_rng(draw)
    chosen = [rng.choice(np.flatnonzero(pool_y == label)) for label in range(CLASSES)]
    few_x, few_y = blur(pool_x[chosen]), pool_y[chosen]
    for way, (rate, epochs) in WAYS.items():
        keras.utils.set_random_seed(draw)
        models[way] = starting_point(way)
        compile_model(models[way], rate)
        epochs = 2 if SHORT else epochs
        models[way].fit(few_x, few_y, batch_size=48, epochs=epochs, verbose=0)
        blurred = accuracy(models[way], blurred_x, test_y)
        found[way].append((blurred, accuracy(models[way], test_x, test_y)))

print(f"{'trained':22}{'numbers':>8}  blurred, %     sharp, %")
print(f"{'nothing':22}{0:8,}  {before:10.1f}{before_sharp:13.1f}")
for way, pairs in found.items():
    count = sum(int(np.prod(weight.shape)) for weight in models[way].trainable_variables)
    (blurred, sharp), spread = np.mean(pairs, axis=0), np.std(pairs, axis=0)
    print(
        f"{way:22}{count:8,}  {blurred:10.1f} ± {spread[0]:.1f}{sharp:7.1f} ± {spread[1]:.1f}"
    )

# %%
figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
for number, (way, pairs) in enumerate(found.items()):
    color = "tab:orange" if way.startswith("M") else "tab:blue"
    axis.barh(number, np.mean(pairs, axis=0)[0], color=color)
    axis.plot([blurred for blurred, _ in pairs], [number] * len(pairs), "k.", markersize=4)
axis.axvline(before, color="black", linestyle="--", linewidth=1)
axis.text(before, -0.75, " nothing trained", va="center", fontsize=9)
axis.set_yticks(range(len(found)), found)
axis.set_xlabel("accuracy on blurred images, %: mean, and a dot for each draw")
axis.invert_yaxis()
# %%
best_m = max((np.mean(found[way], axis=0)[0], way) for way in found if way.startswith("M"))
best_plain = max((np.mean(found[way], axis=0)[0], way) for way in found if way[0] != "M")
print(
    f"M gained {best_m[0] - before:+.1f} points ({best_m[1]}). That is "
    f"{best_m[0] - best_plain[0]:+.1f} points to the best plain way ({best_plain[1]})."
)

# %% [markdown]
# On the photographs a few numbers a layer undo a good part of the blur: the 243 of the
# unconstrained `M` nearly as much as a new classifier of 3,120. Both plain ways gained more, so
# compare with them first. `M` is for many variants of one network (27 or 243 numbers for each
# camera), or where the classifier must stay.
#
# ## Look at it
#
# The masks of the three layers. Above 1, a place of the kernel counts for more than before.

# %%
figure = nsl_keras.visualize.plot_similarities(models["M, diagonal"])

# %% [markdown]
# ## Fold it back
#
# `fold` multiplies `M` into the kernels. The result is a plain Keras model of the same size
# as the one we began with, and its file loads without this package.

# %%
folded = nsl_keras.convert.fold(models["M, diagonal"])
difference = np.abs(
    folded.predict(test_x, verbose=0) - models["M, diagonal"].predict(test_x, verbose=0)
)
print([type(layer).__name__ for layer in folded.layers][:3], "...")
print(f"parameters: {trained.count_params():,} before, {folded.count_params():,} folded")
print(f"largest difference of the logits: {difference.max():.1e}")
assert difference.max() < 1e-3
assert all(type(layer).__module__.startswith("keras") for layer in folded.layers)

# %% [markdown]
# ## Where to go from here
#
# * Give `add_similarity` your own network, or one of `keras.applications`.
# * `layers=[...]` and `freeze_backbone=False` are the first arguments to try.
# * Export the folded model: `folded.export("model.onnx", format="onnx")`, or
#   `folded.export("model.tflite", format="litert")`.
#
# Notebook 1 of 5. Next: [Learned neighbours](https://github.com/nsl-keras/nsl_keras/blob/main/examples/notebooks/neighbors.ipynb).

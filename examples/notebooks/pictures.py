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
# # What dynamic similarity and learned kernel shapes see in a picture
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/nsl-keras/nsl_keras/blob/main/examples/notebooks/pictures.ipynb)
#
# In a dynamic layer a small network predicts, at every pixel, how much each place of the kernel
# counts. In a layer that learns its kernel's shape, places that do not help drop out. Here you
# see both.
#
# The task is to remove noise from a photograph. The network is trained on crops of one
# photograph and tested on another, beside a plain network that is trained for as long. No GPU
# and no download is needed.

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
plt.rcParams["figure.dpi"] = 72
keras.utils.set_random_seed(0)

# %% [markdown]
# ## The pictures
#
# Two photographs that come with scikit-learn, under CC BY 2.0: china.jpg by danielbuechele
# for training, flower.jpg by vultilion for the test.

# %%
SIZE, NOISE = 32, 0.15
china, flower = (photo.astype("float32") / 255 for photo in load_sample_images().images)
rng = np.random.default_rng(0)
clean = np.array(
    [
        china[y:, x:][:SIZE, :SIZE]
        for y, x in zip(
            rng.integers(0, 427 - SIZE, 64 if SHORT else 1500),
            rng.integers(0, 640 - SIZE, 64 if SHORT else 1500),
        )
    ]
)
noisy = (clean + rng.normal(scale=NOISE, size=clean.shape)).astype("float32")

pictures = {"china": china[None, :384, :512], "flower": flower[None, :384, :512]}
if SHORT:
    pictures = {name: picture[:, 160:256, 192:320] for name, picture in pictures.items()}
noise = np.random.default_rng(1).normal(scale=NOISE, size=pictures["china"].shape)
noisy_pictures = {
    name: (picture + noise).astype("float32") for name, picture in pictures.items()
}


def cleaned(model, name):
    return keras.ops.convert_to_numpy(model(noisy_pictures[name]))


def decibels(model, name):
    """Peak signal-to-noise ratio of a cleaned picture: more is better."""
    return -10 * np.log10(np.mean((cleaned(model, name) - pictures[name]) ** 2))


# %% [markdown]
# ## A plain network
#
# It predicts what to add to the noisy picture.


# %%
def denoiser(filters=12, **options):
    """Three convolutions; with options, two of them have a similarity."""
    kind = nsl_keras.layers.NeuralSimilarityConv2D if options else keras.layers.Conv2D
    inputs = keras.Input((None, None, 3))
    outputs = inputs
    for name in ("first", "second"):
        layer = kind(filters, 5, padding="same", activation="relu", name=name, **options)
        outputs = layer(outputs)
    outputs = keras.layers.Conv2D(3, 3, padding="same", name="third")(outputs)
    return keras.Model(inputs, keras.layers.Add()([inputs, outputs]))


def train(model, rate, epochs):
    model.compile(keras.optimizers.Adam(rate), "mse")
    model.fit(noisy, clean, batch_size=32, epochs=1 if SHORT else epochs, verbose=0)
    return model


keras.utils.set_random_seed(0)
plain = train(denoiser(), 3e-3, 8)

# %% [markdown]
# ## A dynamic network
#
# Two networks continue from the same weights, for as long: the plain network, and a copy whose
# two large convolutions have a predictor. Before training, the copy computes the same.
# Predictors add parameters, so a third network is a plain one with as many.

# %%
longer = keras.models.clone_model(plain)
longer.set_weights(plain.get_weights())
dynamic = nsl_keras.convert.add_similarity(
    plain,
    predictor=nsl_keras.predictors.SimilarityPredictor(width=8),
    layers=["first", "second"],
    freeze_backbone=False,
)
assert np.allclose(dynamic(noisy[:8]), plain(noisy[:8]), atol=1e-5)
wide = train(denoiser(filters=25), 3e-3, 8)
for model in (longer, dynamic, wide):
    keras.utils.set_random_seed(0)
    train(model, 1e-3, 4)
print(nsl_keras.convert.summary(dynamic))

# %%
rows = {
    "plain, 8 epochs": plain,
    "plain, 12 epochs": longer,
    "plain and as large, 12 epochs": wide,
    "dynamic in the last 4 of 12 epochs": dynamic,
}
quality = {
    name: np.array([decibels(model, picture) for picture in pictures])
    for name, model in rows.items()
}
print(f"{'':36}{'parameters':>12}{'china, dB':>12}{'flower, dB':>12}")
for name, model in rows.items():
    print(
        f"{name:36}{model.count_params():12,}{quality[name][0]:12.2f}{quality[name][1]:12.2f}"
    )
for other in list(rows)[1:3]:
    gains = quality["dynamic in the last 4 of 12 epochs"] - quality[other]
    print(
        f"dynamic against {other}: {gains[0]:+.2f} dB on china, {gains[1]:+.2f} dB on flower"
    )

# %% [markdown]
# On the photograph that the networks were trained on, the dynamic one is best. On the other one
# it is not: part of the gain is memorized. This is from one seed.
#
# ## What it sees
#
# The diagonal of `M` at every pixel, for the first layer: the factors of the kernel's centre and
# of places around it. White is 1, as in a plain convolution.

# %%
layer = dynamic.get_layer("first")
taps = {"centre": 12, "two above": 2, "two below": 22, "two left": 10, "two right": 14}
figure, axes = plt.subplots(2, 6, figsize=(13, 3.8), layout="constrained")
for row, (name, picture) in zip(axes, noisy_pictures.items()):
    masks = 1 + keras.ops.convert_to_numpy(layer.bilinear_form.network(picture))[0]
    spread = np.quantile(np.abs(masks - 1), 0.99)
    row[0].imshow(pictures[name][0])
    row[0].set_ylabel(name)
    row[0].set(xticks=[], yticks=[])
    for axis, (place, tap) in zip(row[1:], taps.items()):
        drawn = axis.imshow(masks[..., tap], cmap="RdBu", vmin=1 - spread, vmax=1 + spread)
        axis.set_title(place)
        axis.set_axis_off()
    figure.colorbar(drawn, ax=row)

# %% [markdown]
# And where in the picture the kernel changes: the distance of `M` from the identity, as the root
# of its mean square over all 25 places, in each of the two layers.

# %%
figure, axes = plt.subplots(2, 3, figsize=(10, 5), layout="constrained")
inside = keras.Model(dynamic.input, dynamic.get_layer("first").output)
for row, (name, picture) in zip(axes, noisy_pictures.items()):
    row[0].imshow(np.clip(picture[0], 0, 1))
    row[0].set_title(f"{name}, with noise")
    seen = {"first": picture, "second": inside(picture)}
    for axis, (which, inputs) in zip(row[1:], seen.items()):
        network = dynamic.get_layer(which).bilinear_form.network
        change = keras.ops.convert_to_numpy(network(inputs))[0]
        axis.imshow(np.sqrt(np.mean(change**2, axis=-1)), cmap="viridis")
        axis.set_title(f"{which} layer")
for axis in axes.flat:
    axis.set_axis_off()

# %% [markdown]
# Edges and evenly lit areas get different kernels.
#
# ## The same place, before and after

# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 3), layout="constrained")
window = (slice(10, 90), slice(20, 120)) if SHORT else (slice(120, 240), slice(180, 330))
shown = {
    "clean": pictures["flower"],
    "with noise": noisy_pictures["flower"],
    "plain": cleaned(longer, "flower"),
    "dynamic": cleaned(dynamic, "flower"),
}
for axis, (title, picture) in zip(axes, shown.items()):
    axis.imshow(np.clip(picture[0][window], 0, 1))
    axis.set_title(title)
    axis.set_axis_off()

# %% [markdown]
# ## Learned kernel shapes
#
# With `learn_shape=True` each place of the kernel has a number that starts at 1. Places whose
# number falls below a threshold drop out of the kernel, for all filters of the layer at once. A
# threshold near 1 removes places soon.

# %%
keras.utils.set_random_seed(0)
shaped = train(denoiser(learn_shape=True, shape_threshold=0.99), 3e-3, 8)
for name in ("first", "second"):
    shape = keras.ops.convert_to_numpy(shaped.get_layer(name).learned_shape)
    print(f"{name} layer: {int(shape.sum())} of 25 places remain")
difference = decibels(shaped, "flower") - decibels(plain, "flower")
print(f"on the other photograph: {difference:+.2f} dB to the plain network, 8 epochs both")
figure = nsl_keras.visualize.plot_similarities(shaped)

# %% [markdown]
# Masks are the diagonals of `M`, shapes the places that remain: the centre stays, and places at
# the rim drop out.
#
# ## Where to go from here
#
# * `convert.summary` prints what predictors cost. Before you keep them, compare with a plain
#   network of as many multiply-adds.
# * `SimilarityPredictor(pooled=True)` predicts one `M` for a whole image.
#
# Notebook 5 of 5. Before: [From `fit` to a served model](https://github.com/nsl-keras/nsl_keras/blob/main/examples/notebooks/serving.ipynb). Then decide: [which method when](https://github.com/nsl-keras/nsl_keras/blob/main/docs/which_method.md).

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
# # First steps with nsl_keras
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/nsl-keras/nsl_keras/blob/main/examples/notebooks/first_steps.ipynb)
#
# `nsl_keras` brings two published ideas to Keras 3, as layers and models that you train
# with `model.fit`:
#
# * **Neural similarity**: a convolution that learns *how* to compare its kernel with the
#   image, not only the kernel.
# * **Meta-Neighborhoods**: a classifier that keeps a small learned dictionary of typical
#   examples and, before each prediction, adjusts its last layer to those most like the
#   input.
#
# Here you train both on small images of handwritten digits, look at what they learned,
# and save the result. No GPU is needed, and all of it runs in about a minute.

# %% [markdown]
# ## Setup
#
# On Colab the package has to be installed first. Where it is there already, this cell
# does nothing.

# %%
import importlib.util

if importlib.util.find_spec("nsl_keras") is None:
    print("Installing nsl_keras ...")
    # %pip install -q "nsl_keras[tensorflow,examples] @ git+https://github.com/nsl-keras/nsl_keras"

# %% [markdown]
# The seed fixes the weights that the models start from and the order of the images.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Quiets TensorFlow's start-up notes.

import pathlib
import tempfile

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nsl_keras

# %matplotlib inline
keras.utils.set_random_seed(0)
tf.get_logger().setLevel("ERROR")  # And its notes later on.

# %% [markdown]
# ## The data
#
# Scikit-learn comes with 1,797 scans of handwritten digits, 8 by 8 pixels each, so there
# is nothing to download. We scale the pixels to lie between 0 and 1 and split the images
# in three: one part to train on, one to watch the training with, and one that is set
# aside until the models are trained.

# %%
digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
labels = digits.target

rest_x, test_x, rest_y, test_y = train_test_split(
    images, labels, test_size=500, stratify=labels, random_state=0
)
train_x, validation_x, train_y, validation_y = train_test_split(
    rest_x, rest_y, test_size=250, stratify=rest_y, random_state=0
)
print("train", train_x.shape, "validation", validation_x.shape, "test", test_x.shape)

figure, axes = plt.subplots(1, 10, figsize=(8, 1.2))
for digit, axis in enumerate(axes):
    axis.imshow(train_x[train_y == digit][0].squeeze(), cmap="gray_r")
    axis.set_title(digit)
    axis.set_axis_off()

# %% [markdown]
# ## Part 1: neural similarity
#
# An ordinary 3x3 convolution multiplies each of the nine pixels that it sees by the
# weight in the same place, and adds up. `NeuralSimilarityConv2D` puts a matrix *M*
# between the two, shared by all filters of the layer, and learns it along with the
# kernel:
#
# * `similarity="diagonal"` learns nine numbers: how much each place counts;
# * `similarity="unconstrained"` learns a 9x9 matrix: which weight meets which pixel, too.
#
# The layer takes the arguments of `Conv2D` and stands where a `Conv2D` would stand. *M*
# starts as the identity, so an untrained layer is an ordinary convolution.
#
# (Batch norm gets a shorter memory than Keras's default, because there are so few steps.)


# %%
def small_convnet(*, predictor=None):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            nsl_keras.layers.NeuralSimilarityConv2D(
                16,
                3,
                padding="same",
                similarity="diagonal",
                predictor=predictor,
                name="first",
            ),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            nsl_keras.layers.NeuralSimilarityConv2D(
                32, 3, padding="same", similarity="unconstrained", name="second"
            ),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


convnet = small_convnet()
convnet.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
convnet_history = convnet.fit(
    train_x,
    train_y,
    batch_size=64,
    epochs=10,
    validation_data=(validation_x, validation_y),
    verbose=2,
)

# %% [markdown]
# This is what was learned. The diagonal *M* of the first layer is drawn as a 3x3 mask
# over its kernel, the *M* of the second as a matrix with one row for each weight and one
# column for each pixel. Before the training they were a mask of ones and a diagonal of
# ones.

# %%
nsl_keras.visualize.plot_similarities(convnet)

# %% [markdown]
# Once trained, *M* can be multiplied into the kernel: `fold()` returns a plain
# `keras.layers.Conv2D` with the same output. The similarity then costs nothing more when
# you use the model.

# %%
similarity_layer = convnet.get_layer("first")
plain_layer = similarity_layer.fold()

difference = np.abs(similarity_layer(test_x) - plain_layer(test_x)).max()
print(type(plain_layer))
print(f"largest difference of the outputs: {difference:.1e}")
np.testing.assert_allclose(similarity_layer(test_x), plain_layer(test_x), atol=1e-4)

# %% [markdown]
# ### A similarity that depends on the image
#
# With a predictor the layer is *dynamic*: a small network looks at the image and predicts
# another *M* at every pixel. Such a layer cannot be folded, and computes more.
#
# `predictor="sphere"` is the short way to one. As an object, the predictor still takes its
# size and padding from the layer it serves, and we can give its batch norms the shorter
# memory, too.

# %%
predictor = nsl_keras.predictors.SimilarityPredictor(momentum=0.9)
dynamic_convnet = small_convnet(predictor=predictor)
dynamic_convnet.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
dynamic_history = dynamic_convnet.fit(
    train_x,
    train_y,
    batch_size=64,
    epochs=10,
    validation_data=(validation_x, validation_y),
    verbose=2,
)

# %% [markdown]
# The predictor gives what *M* adds to the identity, nine numbers for each pixel. Below,
# to the right of the digit, is the weight of the kernel's centre and of its four direct
# neighbours at every pixel. Red is below 1, where that place counts for less than in an
# ordinary convolution, and blue is above it. (Below 0 the weight's sign is turned round.)

# %%
image = test_x[:1]
masks = 1 + predictor(image).numpy()
places = {"centre": 4, "above": 1, "below": 7, "left": 3, "right": 5}
spread = np.abs(masks - 1).max()

figure, axes = plt.subplots(1, 6, figsize=(9, 1.9), layout="constrained")
axes[0].imshow(image[0].squeeze(), cmap="gray_r")
axes[0].set_title("image")
for axis, (place, tap) in zip(axes[1:], places.items()):
    drawn = axis.imshow(masks[0, ..., tap], cmap="RdBu", vmin=1 - spread, vmax=1 + spread)
    axis.set_title(place)
figure.colorbar(drawn, ax=axes)
for axis in axes:
    axis.set_axis_off()

# %% [markdown]
# ## Part 2: Meta-Neighborhoods
#
# A `MetaNeighborhoodModel` has three parts:
#
# * a **backbone**, any Keras model from images to feature vectors;
# * a **head**, the last layer, from features to one number (logit) for each class;
# * a **dictionary** of learned neighbours: entries that look like the features of an
#   image together with its class, but are invented by the training.
#
# For each image it finds the entries most like it, trains a copy of the head on them for
# one small step, and predicts with that copy. How long the step is, the *inner rate*, is
# learned along with everything else.
#
# Compile and fit it as you would any other model. One thing is special: weight decay pulls
# weights towards zero, which is good for the backbone, but the head and the dictionary
# should be spared. So we tell the optimizer which variables to leave alone. (The model has
# to be built before that: it has no variables earlier.)


# %%
def train_with_neighbors(backbone):
    model = nsl_keras.MetaNeighborhoodModel(
        backbone,
        nsl_keras.layers.CosineDense(10),
        nsl_keras.layers.NeighborDictionary(200, seed=0),
    )
    model.build((None, 8, 8, 1))
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.075)
    optimizer.exclude_from_weight_decay(var_list=model.decay_exempt_variables)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        train_x,
        train_y,
        batch_size=64,
        epochs=10,
        validation_data=(validation_x, validation_y),
        verbose=2,
    )
    return model, history.history


# %% [markdown]
# First a small convolutional backbone. `fit` reports two accuracies: `accuracy` is that of
# the model, `unadapted_accuracy` that of the head as it is, before it has looked at the
# neighbours.

# %%
convnet4 = nsl_keras.backbones.convnet4((8, 8, 1), filters=(16, 32, 64, 64))
convolutional_model, convolutional_history = train_with_neighbors(convnet4)

# %% [markdown]
# Then a much weaker one, a single linear layer on the pixels.

# %%
linear = keras.Sequential(
    [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(32)]
)
model, linear_history = train_with_neighbors(linear)

# %% [markdown]
# Do the models use their neighbours? Compare the two lines in each picture, and the inner
# rates (they started at 0.05).
#
# With the convolutions you will probably see one line only, and a lower rate: the training
# has shortened the step until it makes no difference, and left is an ordinary classifier,
# good enough for these easy digits. With the linear features the training has made the
# step longer, and the head counts on it: as it is, it does worse.
#
# That does not say yet that neighbours beat a model trained without them. The demo in the
# repository, `python -m examples.demo`, compares such twins.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for axis, trained, history, name in (
    (axes[0], convolutional_model, convolutional_history, "convolutions"),
    (axes[1], model, linear_history, "linear features"),
):
    axis.plot(history["val_accuracy"], label="with neighbours")
    axis.plot(history["val_unadapted_accuracy"], "--", label="head as it is")
    rate = float(trained.inner_rates[0])
    axis.set_title(f"{name}: inner rate {rate:.3f}")
    axis.set_xlabel("epoch")
    axis.set_ylabel("validation accuracy")
    axis.set_ylim(0.6, 1)
    axis.legend()

# %% [markdown]
# The test images have taken no part in these trainings. We go on with the second model,
# the one that uses its neighbours.

# %%
model.evaluate(test_x, test_y, verbose=0, return_dict=True)

# %% [markdown]
# ### Looking at the neighbours
#
# `neighbors` tells which entries of the dictionary an image looks at most: their numbers,
# their shares of the attention (all 200 shares add up to 1), and the class probabilities
# that each entry stands for.

# %%
neighbors = model.neighbors(test_x[:1], k=5)

print(f"a test image of the digit {test_y[0]} looks at")
for entry, weight, value in zip(
    neighbors.indices[0], neighbors.weights[0], neighbors.values[0]
):
    print(
        f"  entry {entry:3d}, attention {weight:.3f}: "
        f"stands for the digit {value.argmax()} with probability {value.max():.2f}"
    )

# %% [markdown]
# Entries are feature vectors, not images, but we can ask which training images come
# closest. Each row is an entry, one for each digit: on the left the class probabilities it
# has learned, on the right the training images most like it.

# %%
nsl_keras.visualize.plot_learned_neighbors(
    model, train_x, class_names=[str(name) for name in digits.target_names]
)

# %% [markdown]
# ## Keeping the model
#
# A `.keras` file holds the whole model, optimizer included, so that you can go on
# training later. In another program `import nsl_keras` first: that is how Keras learns of
# the package's layers.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
model.save(folder / "digits.keras")

reloaded = keras.saving.load_model(folder / "digits.keras")
np.testing.assert_allclose(
    reloaded.predict(test_x, verbose=0), model.predict(test_x, verbose=0), atol=1e-3
)
print("The reloaded model gives the same predictions.")

# %% [markdown]
# To serve predictions, export a TensorFlow SavedModel instead. It needs neither Keras nor
# this package to run, and lies in a numbered folder as serving systems expect. It takes a
# batch of images and returns logits; the largest is the predicted class. Beside `serve`
# there is `unadapted`, the head as it is.

# %%
path = nsl_keras.export.save_model(model, folder / "digits", version=1)
print(sorted(file.name for file in path.iterdir()))

served = tf.saved_model.load(path)
logits = served.serve(tf.constant(test_x)).numpy()
np.testing.assert_allclose(logits, model.predict(test_x, verbose=0), atol=1e-3)
unadapted_logits = served.unadapted(tf.constant(test_x)).numpy()

agreeing = (unadapted_logits.argmax(axis=1) == logits.argmax(axis=1)).sum()
print(f"{agreeing} of {len(logits)} predictions are the same without the neighbours")
print("predicted", logits[:10].argmax(axis=1))
print("correct  ", test_y[:10])

# %% [markdown]
# ## Where to go from here
#
# * Put `NeuralSimilarityConv2D` into a model of your own, in place of a `Conv2D`.
# * Give `MetaNeighborhoodModel` your own backbone: anything that returns one feature vector
#   for each input.
# * Read `help(nsl_keras.MetaNeighborhoodModel)`: it names every argument, and where in the
#   paper it comes from.
# * Run `python -m examples.demo` in the repository, which trains such models side by side
#   with plain ones, over several seeds.

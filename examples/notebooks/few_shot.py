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
# # Few-shot learning in ten minutes
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/nsl-keras/nsl_keras/blob/main/examples/notebooks/few_shot.ipynb)
#
# Five classes that the network has never seen, one labelled image of each: which is which?
# Such a task is an *episode*. Here you train several learners on the same images, and judge
# them on the same episodes of other classes:
#
# * nearest centroid on the pixels, and on the features of a plain classifier: the baselines,
#   without any learning on episodes;
# * `ProtoNet`, which learns features for nearest centroids;
# * `NeighborhoodLearner`, which for each query finetunes a head on the support images that it
#   attends to (Meta-Neighborhoods);
# * `Finetuner`, which in each episode finetunes a similarity and a new classifier (Neural
#   Similarity Learning's static strategy).
#
# No GPU and no download is needed. To see the same on CIFAR-100, set `IMAGES` below.

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
from nsl_keras import few_shot

# %matplotlib inline
IMAGES = "photographs"  # Or "cifar100": downloads 170 MB, and takes longer without a GPU.
SHORT = "NSL_KERAS_SHORT" in os.environ  # A few steps only, for the tests.
keras.utils.set_random_seed(0)

# %% [markdown]
# ## Classes
#
# Scikit-learn comes with two photographs, under CC BY 2.0 (china.jpg by danielbuechele,
# flower.jpg by vultilion). Each is divided into 60 places. An image is a crop of 24 by 24
# pixels, its class the place that it is from: 120 classes, many of them much alike. Two
# thirds of the classes are for training, the others for the test.


# %%
def photographs():
    rng = np.random.default_rng(0)
    images = [
        photo[row + y :, column + x :][:24, :24]
        for photo in load_sample_images().images
        for row in range(0, 6 * 64, 64)
        for column in range(0, 10 * 64, 64)
        for y, x in rng.integers(0, 64 - 24, (30, 2))
    ]
    return np.array(images), np.repeat(np.arange(120), 30)


def cifar100():
    (images, labels), _ = keras.datasets.cifar100.load_data()
    return images, labels[:, 0]


images, labels = {"photographs": photographs, "cifar100": cifar100}[IMAGES]()
classes = len(np.unique(labels))
train, test = few_shot.split_classes(
    labels, [2 * classes // 3, classes - 2 * classes // 3], seed=0
)
train_images, train_labels = few_shot.select_classes(images, labels, train)
test_images, test_labels = few_shot.select_classes(images, labels, test)
print(train_images.shape, train_images.dtype, test_images.shape)

# %% [markdown]
# ## Episodes
#
# Five ways, one shot, ten queries a class. Episode number `i` is a function of the sampler's
# seed and `i`: every learner gets the same ones. Images of type uint8 come out in [0, 1].

# %%
episodes = few_shot.EpisodeSampler(train_images, train_labels, shots=1, queries=10, seed=1)
others = few_shot.EpisodeSampler(test_images, test_labels, shots=1, queries=10, seed=2)

episode = others.episode(0)
figure, axes = plt.subplots(5, 7, figsize=(7, 5), layout="constrained")
axes[0, 0].set_title("support")
axes[0, 1].set_title("queries ...")
for label, row in enumerate(axes):
    queries = episode.query_images[episode.query_labels == label]
    for axis, image in zip(row, [episode.support_images[label], *queries]):
        axis.imshow(image)
        axis.set_axis_off()

# %% [markdown]
# ## Baselines: nearest centroid
#
# On the pixels, and on the features of a plain classifier of the training classes. Neither is
# trained on episodes.


# %%
def network(classes=None, **options):
    return nsl_keras.backbones.cnn4(
        images.shape[1:], classes=classes, filters=32, **options
    )


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
classifier = network(classes=len(train))
classifier.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
_, numbered = np.unique(train_labels, return_inverse=True)
history = classifier.fit(
    train_images / 255.0, numbered, batch_size=64, epochs=1 if SHORT else 15, verbose=0
)
print(f"classifier, training accuracy {history.history['accuracy'][-1]:.2f}")

pixels = keras.Sequential([keras.Input(images.shape[1:]), keras.layers.Flatten()])
features = keras.Model(classifier.input, classifier.layers[-2].output)
learners = {
    "pixels, nearest centroid": few_shot.NearestCentroid(pixels, metric="euclidean"),
    "plain features, nearest centroid": few_shot.NearestCentroid(features),
}

# %% [markdown]
# ## Learners that train on episodes
#
# They are Keras models: `compile`, then `fit` on batches of episodes.

# %%
for name, kind in (
    ("ProtoNet", few_shot.ProtoNet),
    ("NeighborhoodLearner", few_shot.NeighborhoodLearner),
):
    keras.utils.set_random_seed(0)
    learner = kind(network(), ways=5)
    learner.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    steps = 3 if SHORT else 150
    history = learner.fit(episodes.batches(batch_size=4, steps=steps), verbose=0)
    print(f"{name}: accuracy on training episodes {history.history['accuracy'][-1]:.2f}")
    learners[name] = learner

# %% [markdown]
# ## A similarity finetuned in each episode
#
# The plain classifier gets a similarity at the identity. In each episode it is finetuned
# together with a new classifier. For comparison, the new classifier is finetuned alone.

# %%
similar = nsl_keras.convert.add_similarity(classifier, similarity="diagonal")
steps = 2 if SHORT else 30
learners["new classifier, finetuned"] = few_shot.Finetuner(
    classifier, 5, "classifier", steps=steps, batch_normalization="moving"
)
learners["similarity + new classifier, finetuned"] = few_shot.Finetuner(
    similar, 5, "similarity+classifier", steps=steps, batch_normalization="moving"
)

# %% [markdown]
# ## Judge them
#
# On the same episodes, with 95 % intervals over episodes. Differences are paired by episode,
# which makes their intervals narrower. The papers take 600 episodes.

# %%
count = 4 if SHORT else 200
found = {
    name: few_shot.evaluate(learner, others, episodes=count, verbose=0)
    for name, learner in learners.items()
}
plain = found["plain features, nearest centroid"]
for name, evaluation in found.items():
    difference = (
        "" if evaluation is plain else f"  to plain: {few_shot.compare(evaluation, plain)}"
    )
    print(f"{name:40}{evaluation}{difference}")

# %%
figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
for number, (name, evaluation) in enumerate(found.items()):
    color = "tab:blue" if number in (0, 1, 4) else "tab:orange"
    axis.barh(
        number,
        100 * evaluation.mean,
        xerr=100 * evaluation.half_width,
        color=color,
        capsize=3,
    )
axis.axvline(20, color="black", linestyle="--", linewidth=1)
axis.set_yticks(range(len(found)), found)
axis.invert_yaxis()
axis.set_xlabel("accuracy on queries, %, with 95 % interval (dashed: chance)")

methods = ("NeighborhoodLearner", "similarity + new classifier, finetuned")
for name in methods:
    gained = few_shot.compare(found[name], plain)
    verdict = (
        "gained"
        if gained.mean > gained.half_width
        else ("lost" if gained.mean < -gained.half_width else "made no clear difference")
    )
    print(f"{name} {verdict} against nearest centroids of plain features: {gained}")

# %% [markdown]
# On the photographs neither method gained anything over the plain nearest centroid. It needs
# no training on episodes, so begin with it.
#
# ## Where to go from here
#
# * More shots: `EpisodeSampler(..., shots=5)`.
# * Your own images:
#   [the guide](https://github.com/nsl-keras/nsl_keras/blob/main/docs/guides/few_shot.md) reads
#   a folder.
# * Other learners: `few_shot.MAML`, `MatchingNet` and `RelationNet`.
#
# Notebook 3 of 5. Before: [Learned neighbours](https://github.com/nsl-keras/nsl_keras/blob/main/examples/notebooks/neighbors.ipynb). Next: [From `fit` to a served model](https://github.com/nsl-keras/nsl_keras/blob/main/examples/notebooks/serving.ipynb).

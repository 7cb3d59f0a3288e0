"""Makes and serves a classifier of new classes, from five photos per class.

FOLDER and OTHERS (to judge by) contain a subfolder per class. The network is a name of
keras.applications, or a `.keras` file from pixels in 0 to 255 to features.

    python examples/few_shot_own_photos.py --photos=FOLDER --backbone=efficientnetv2b0 \\
        --judge=OTHERS --classify A.jpg B.jpg
"""

import argparse
import inspect
import pathlib
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import nsl_keras


def pretrained(name):
    """A network from pixels in 0 to 255 to features, with its own preprocessing."""
    if name.endswith(".keras"):
        return keras.saving.load_model(name)
    makers = filter(inspect.isfunction, vars(keras.applications).values())
    make = {each.__name__.lower(): each for each in makers}.get(name.lower())
    if make is None:
        raise SystemExit(f"keras.applications has no {name}")
    preprocess_input = sys.modules[make.__module__].preprocess_input
    network = make(include_top=False, pooling="avg")
    pixels = keras.Input((224, 224, 3))
    return keras.Model(pixels, network(preprocess_input(1.0 * pixels)))


def finetuner(features, ways):
    model = keras.Sequential([features, keras.layers.Dense(ways)])
    return nsl_keras.few_shot.Finetuner(model)


def main():
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    parser.add_argument("--photos", required=True, help="folder with a subfolder per class")
    parser.add_argument("--backbone", required=True, help="name or file of the network")
    parser.add_argument("--judge", default=None, help="folder like that of --photos")
    parser.add_argument("--classify", nargs="*", default=[], help="photos to name")
    parser.add_argument("--output", default=None, help="folder; by default a new one")
    args = parser.parse_args()
    for path in (args.photos, args.judge or args.photos, *args.classify):
        if not pathlib.Path(path).exists():
            parser.error(f"no such file or folder: {path}")
    output = pathlib.Path(args.output or tempfile.mkdtemp())
    if (output / "served").exists():
        parser.error(f"{output} has a served model already: name another --output")
    output.mkdir(parents=True, exist_ok=True)
    features = pretrained(args.backbone)
    *size, channels = features.input_shape[1:]
    colors = "grayscale" if channels == 1 else "rgb"
    options = {"image_size": size, "color_mode": colors, "shuffle": False, "verbose": False}
    read = keras.utils.image_dataset_from_directory
    dataset = read(args.photos, **options)
    photos, labels = (np.concatenate(part) for part in zip(*dataset, strict=True))
    print(f"{len(photos)} photos of the classes {', '.join(dataset.class_names)}")
    found = features.predict(photos, verbose=0)
    # Each photo in turn is the one to classify, from the features of all others.
    learner = finetuner(keras.Input(found.shape[1:]), len(dataset.class_names))
    right = 0
    for own in np.eye(len(photos), dtype=bool):
        logits = learner((found[None, ~own], labels[None, ~own], found[None, own]))
        right += np.sum(logits[0].argmax(axis=-1) == labels[own])
    print(f"leaving one photo out at a time: {right} of {len(photos)} right")
    learner = finetuner(features, len(dataset.class_names))
    classifier = learner.adapt(photos, labels, dataset.class_names)
    classifier.save(output / "classifier.keras")
    any_size = keras.Input((None, None, channels), dtype="uint8")
    resize = [any_size, keras.layers.Rescaling(1.0), keras.layers.Resizing(*size)]
    serve = {"preprocessing": keras.Sequential(resize), "examples": photos.astype("uint8")}
    nsl_keras.export.save_model(classifier, path := output / "served" / "1", **serve)
    served = tf.saved_model.load(str(path)).signatures["classify"]
    for file in args.classify or dataset.file_paths[:1]:
        photo = tf.io.decode_image(tf.io.read_file(file), channels, expand_animations=False)
        answer = served(inputs=photo[None])
        name, share = answer["class"][0].numpy(), answer["probabilities"].numpy().max()
        print(f"{file}: {name.decode()}, {share:.0%}")
    if args.judge:
        others = read(args.judge, class_names=dataset.class_names, **options)
        judged, truths = (np.concatenate(part) for part in zip(*others, strict=True))
        right = classifier.predict(judged, verbose=0).argmax(axis=1) == truths
        print(f"{len(judged)} other photos: {np.mean(right):.1%} right")
    print(f"{output} has classifier.keras and served/1")


if __name__ == "__main__":
    main()

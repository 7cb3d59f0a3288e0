"""A classifier of new classes from five photos of each, saved and exported.

FOLDER holds a subfolder of photos for each class. Without it the script takes images of the
digits 7, 8 and 9, and a network trained on 0 to 6. For photographs take a network of Keras
whose inputs are pixels from 0 to 255; it is downloaded the first time.

    python examples/few_shot_own_photos.py          # 15 seconds on one core
    python examples/few_shot_own_photos.py --photos=FOLDER --backbone=EfficientNetV2B0
"""

import argparse
import pathlib
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import nsl_keras

NEW = (7, 8, 9)
DIGITS = load_digits()
IMAGES = DIGITS.images[..., None].astype("float32") * 255 / 16


def make_photos(folder):
    for digit in NEW:
        (folder / str(digit)).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(IMAGES[digit == DIGITS.target][:5]):
            keras.utils.save_img(folder / f"{digit}/{number}.png", image, scale=False)
    return folder


def digits_features(epochs):
    """A small CNN without its classifier, trained on the digits 0 to 6."""
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(7),
    ]
    network = keras.Sequential(layers)
    network.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    known = DIGITS.target < NEW[0]
    network.fit(IMAGES[known], DIGITS.target[known], epochs=epochs, verbose=0)
    return keras.Model(network.inputs, network.layers[-2].output)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", default=None, help="by default a new folder of digits")
    parser.add_argument("--backbone", default="digits", help="or a keras.applications name")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", default=None, help="folder; by default a new one")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    output = pathlib.Path(args.output or tempfile.mkdtemp())
    output.mkdir(parents=True, exist_ok=True)
    folder = args.photos or make_photos(output / "photos")
    if args.backbone == "digits":
        features, colors = digits_features(args.epochs), "grayscale"
    else:
        make, colors = getattr(keras.applications, args.backbone), "rgb"
        features = make(include_top=False, pooling="avg", input_shape=(224, 224, 3))
    size = features.input_shape[1:3]
    read = keras.utils.image_dataset_from_directory
    dataset = read(folder, image_size=size, color_mode=colors, shuffle=False, verbose=False)
    photos, labels = (np.concatenate(part) for part in zip(*dataset, strict=True))
    class_names = dataset.class_names
    print(f"{len(photos)} photos of the classes {', '.join(class_names)}")

    # The nearest class mean trains nothing. Each photo in turn is the one to classify.
    learner = nsl_keras.few_shot.NearestCentroid(features, len(class_names))
    right = 0
    for photo, rest in enumerate(~np.eye(len(photos), dtype=bool)):
        episode = photos[None, rest], labels[None, rest], photos[None, [photo]]
        right += learner.predict(episode, verbose=0).argmax() == labels[photo]
    print(f"each photo from the others: {right} of {len(photos)} right")

    classifier = learner.adapt(
        photos, labels, class_names
    )  # A Keras model of single images.
    classifier.save(output / "classifier.keras")
    nsl_keras.export.save_model(classifier, output / "served" / "1")
    print("saved classifier.keras and exported served/1 to", output)
    if not args.photos and args.backbone == "digits":
        others = [i for each in NEW for i in np.flatnonzero(each == DIGITS.target)[5:]]
        given = classifier.predict(IMAGES[others], verbose=0).argmax(axis=1)
        share = np.mean(given == DIGITS.target[others] - NEW[0])
        print(f"all other images of these digits: {100 * share:.1f} % right")
    print("Look at the accuracies. Take photos as varied as those you will classify.")


if __name__ == "__main__":
    main()

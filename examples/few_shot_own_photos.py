"""Makes and serves a classifier of new classes, from five photos per class.

FOLDER contains a subfolder of photos per class. The network is a name of
keras.applications, or a `.keras` file from pixels in 0 to 255 to features. Pass `--crops=_`
for crops named `PHOTO_CROP.jpg`. To try the program, use `digits`: pixels are the features.

    python examples/few_shot_own_photos.py --photos=FOLDER --backbone=efficientnetv2b0
    python examples/few_shot_own_photos.py --backbone=digits
"""

import argparse
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import LeaveOneGroupOut

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


def pretrained(name, weights):
    """A network from pixels in 0 to 255 to features, with its own preprocessing."""
    if name.endswith(".keras"):
        return keras.saving.load_model(name)
    for module in vars(keras.applications).values():
        found = {each.lower(): each for each in dir(module)}
        if hasattr(module, "preprocess_input") and name.lower() in found:
            make = getattr(module, found[name.lower()])
            network = make(weights=weights, include_top=False, pooling="avg")
            pixels = keras.Input((224, 224, 3))
            return keras.Model(pixels, network(module.preprocess_input(1.0 * pixels)))
    raise SystemExit(f"keras.applications has no {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", default=None, help="folder with a subfolder per class")
    parser.add_argument("--backbone", required=True, help="see above")
    parser.add_argument("--weights", default="imagenet", help="a file, if not ImageNet's")
    parser.add_argument("--crops", default="/", help="what follows the picture in names")
    parser.add_argument("--output", default=None, help="folder; by default a new one")
    args = parser.parse_args()
    if (args.backbone == "digits") == bool(args.photos):
        parser.error("--photos and a network for photographs, or --backbone=digits alone")
    output = pathlib.Path(args.output or tempfile.mkdtemp())
    output.mkdir(parents=True, exist_ok=True)
    folder = args.photos or make_photos(output / "photos")
    if args.backbone == "digits":
        features = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    else:
        features = pretrained(args.backbone, args.weights)
    *size, channels = features.input_shape[1:]
    colors = "grayscale" if channels == 1 else "rgb"
    read = keras.utils.image_dataset_from_directory
    dataset = read(folder, image_size=size, color_mode=colors, shuffle=False, verbose=False)
    photos, labels = (np.concatenate(part) for part in zip(*dataset, strict=True))
    print(f"{len(photos)} photos of the classes {', '.join(dataset.class_names)}")
    # The nearest class mean trains nothing. Each picture in turn is the one to classify.
    learner = nsl_keras.few_shot.NearestCentroid(features, len(dataset.class_names))
    paths = [pathlib.Path(path).with_suffix("") for path in dataset.file_paths]
    pictures = [str(p.with_name(p.name.rsplit(args.crops, 1)[0])) for p in paths]
    right = 0
    for rest, own in LeaveOneGroupOut().split(photos, groups=pictures):
        episode = photos[None, rest], labels[None, rest], photos[None, own]
        right += np.sum(learner.predict(episode, verbose=0)[0].argmax(-1) == labels[own])
    of = f"each of {len(set(pictures))} pictures from the others: {right}"
    print(f"{of} of {len(photos)} right, and fewer in new scenes")
    classifier = learner.adapt(photos, labels, dataset.class_names)
    classifier.save(output / "classifier.keras")
    any_size = keras.Input((None, None, photos.shape[-1]), dtype="uint8")
    pixels = keras.ops.cast(any_size, "float32")  # Else `Resizing` may round.
    resize = keras.Model(any_size, keras.layers.Resizing(*size)(pixels))
    path, photos = output / "served" / "1", photos.astype("uint8")
    nsl_keras.export.save_model(classifier, path, preprocessing=resize, examples=photos)
    served = tf.saved_model.load(str(path)).signatures["classify"](inputs=photos[:1])
    print(f"{output} has classifier.keras and served/1: {served['class'][0].numpy()!r}")
    if not args.photos:
        others = [i for each in NEW for i in np.flatnonzero(each == DIGITS.target)[5:]]
        found = classifier.classify(IMAGES[others])["class"]
        share = np.mean(found == DIGITS.target[others].astype(str))
        print(f"all other images: {share:.1%} right")


if __name__ == "__main__":
    main()

"""Pictures of trained image classifiers, and of their neighbours."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from experiments.common.data import ImageData, Split
from nsl_keras import MetaNeighborhoodModel, visualize
from nsl_keras.training.data import predict
from nsl_keras.visualize.reading import attention_of

#: Examples that a map or a picture shows; more hide each other.
SHOWN = 2000
#: Of these the nearest training images are sought for pictures of sub-categories.
QUERIES = 1000


def of_neighbors(models: Mapping[str, keras.Model], data: ImageData) -> dict[str, object]:
    """Figures 4, 5 and 9 of the paper, and one prediction of each adapting model."""
    figures: dict[str, object] = {}
    train, test = data.train.take(SHOWN), data.test.take(SHOWN)
    names = data.class_names
    for name, model in models.items():
        if not isinstance(model, MetaNeighborhoodModel):
            continue
        figures[f"{name}_feature_map"] = visualize.plot_feature_map(
            model, train.images, train.labels, method="tsne", class_names=names
        )
        figures[f"{name}_prototype_cosines"] = visualize.plot_prototype_cosines(
            model, test.images, test.labels
        )
        figures[f"{name}_entries"] = visualize.plot_learned_neighbors(
            model, test.images, class_names=names
        )
        figures[f"{name}_adaptation"] = of_adaptation(model, data, test)
    return figures


def of_adaptation(model: MetaNeighborhoodModel, data: ImageData, test: Split) -> object:
    """The prediction of some test images that adaptation changed most, taken apart."""
    image, shown = test.images[most_changed(model, test)], data.train.take(SHOWN).images
    return visualize.plot_adaptation(
        model, image, images=shown, class_names=data.class_names
    )


def of_subcategories(
    models: Mapping[str, keras.Model], data: ImageData
) -> dict[str, object]:
    """Figure 6: test images and the training images nearest to them, by fine labels."""
    return {
        f"{name}_subcategories": visualize.plot_subcategories(
            model if isinstance(model, MetaNeighborhoodModel) else model.layers[0],
            data.train.images[: 5 * SHOWN],
            data.train.labels[: 5 * SHOWN],
            data.test.images[:QUERIES],
            data.test.labels[:QUERIES],
            class_names=data.class_names,
        )
        for name, model in models.items()
    }


def most_changed(model: MetaNeighborhoodModel, test: Split) -> int:
    """The example that adaptation puts right with the largest change of its true logit.

    If it puts none right, that with the largest change.
    """
    before = predict(lambda batch: model(batch, adapt=False), model, test.images)
    after = model.predict(test.images, verbose=0)
    true = np.arange(len(test.labels)), test.labels
    wrong = before.argmax(axis=1) != test.labels
    right = after.argmax(axis=1) == test.labels
    return int(np.argmax((after - before)[true] + 1e3 * (wrong & right)))


def induction_accuracy(model: keras.Model, data: ImageData, neighbors: int = 5) -> float:
    """How well nearest training images find the classes of data, coarse or fine.

    Images are described by their attention over the dictionary, or by the features of a
    plain model, and compared by their cosine (Appendix A.9, which does not name the number
    of neighbours).
    """
    from sklearn.neighbors import KNeighborsClassifier

    classifier = KNeighborsClassifier(neighbors, metric="cosine")
    classifier.fit(_descriptions(model, data.train.images), data.train.labels)
    return float(classifier.score(_descriptions(model, data.test.images), data.test.labels))


def _descriptions(model: keras.Model, images: np.ndarray) -> np.ndarray:
    if isinstance(model, MetaNeighborhoodModel):
        return attention_of(model, images)
    return model.layers[0].predict(images, verbose=0)

"""Makes a Keras model from a few labeled examples: `adapt`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import graphs, validation
from nsl_keras.copying import copied, paired_variables
from nsl_keras.few_shot.calibration import SEEN, fitted_temperature, held_out_parts
from nsl_keras.few_shot.class_logits import ClassLogits
from nsl_keras.few_shot.episodes import as_classes
from nsl_keras.few_shot.stateless import StatelessModel, batch_norms, statistics_of
from nsl_keras.training.data import gather, with_text


class Adapting:
    """Gives a learner `adapt`; a subclass writes `_adapt`."""

    #: The name of the argument and attribute that is the learner's network.
    network_argument = "model"
    ways: Any
    batch_normalization: str
    #: Whether the number of classes is that of a network's outputs.
    ways_are_fixed = True
    #: Whether labels are classes, and not the targets of a regression.
    classifies = True

    @property
    def network(self) -> Any:
        """The model that the learner was given."""
        return getattr(self, self.network_argument)

    @property
    def effective_batch_normalization(self) -> str | None:
        """`batch_normalization`; `"moving"` if all norms are frozen; `None` without any."""
        trainable = [each.trainable for each in batch_norms(self)]
        policy = self.batch_normalization if any(trainable) else "moving"
        return policy if trainable else None

    def adapt(
        self, x: Any, y: Any = None, class_names: Sequence[str] | None = None
    ) -> keras.Model:
        """Returns a Keras model that classifies single examples into new classes.

        Its outputs are the learner's logits for queries, with `x` as the support set,
        divided by the `temperature` of a last `ClassLogits`. The temperature is fitted to
        examples that the learner classifies from the rest of `x`, a fifth of each class at
        a time; or, with a single example of each class, to the support set itself. A `MAML`
        with an `inner_loss` returns the adapted network. The model shares no weights with
        the learner. To load its file, import nsl_keras.

        Args:
            x: Array or list of the support examples; or a data set of batches `(examples,
                labels)`, for example of `keras.utils.image_dataset_from_directory`.
            y: Array of class numbers or names, or with an `inner_loss` targets; `None` if
                `x` is a data set.
            class_names: Names of the classes; labels are these names, or numbers that count
                them from 0. `None` takes the names from the data set, or sorts the labels.

        Returns:
            A built, uncompiled `keras.Sequential`; from a `NeighborhoodLearner`, a
            `MetaNeighborhoodModel` whose `neighbors` are support examples.

        Raises:
            ValueError: For bad examples, labels or names; for another number of classes
                than a network of fixed `ways` has; for logits that are not finite; and for
                `batch_normalization="transductive"`.

        Example:

        >>> import numpy as np
        >>> import nsl_keras
        >>> backbone = nsl_keras.backbones.convnet4((8, 8, 1))
        >>> learner = nsl_keras.few_shot.NearestCentroid(backbone)
        >>> images = np.random.default_rng(0).normal(size=(4, 8, 8, 1))
        >>> model = learner.adapt(images, ["owl", "elk", "owl", "elk"])
        >>> model.class_names, model.predict(images, verbose=0).argmax(axis=1).tolist()
        (('elk', 'owl'), [1, 0, 1, 0])
        """
        if class_names is None:
            class_names = getattr(x, "class_names", None)
        examples, labels = gather(np.stack(x) if isinstance(x, (list, tuple)) else x, y)
        for each in getattr(self.network, "inputs", None) or ():
            is_text = np.asarray(examples).dtype.kind in "OSU"
            shape, own = np.shape(examples), tuple(each.shape)
            # Keras adds a last axis of size 1.
            fits = validation.fits(shape, own) or validation.fits((*shape, 1), own)
            demand = (
                f"examples as the network takes them, of shape {own}; images in files come "
                "from `keras.utils.image_dataset_from_directory(folder, image_size=...)`"
            )
            fits = fits and is_text == (each.dtype == "string")
            validation.require(fits, "x", demand, examples if is_text else shape)
        demand = "given, unless `x` is a data set that yields labels"
        validation.require(labels is not None, "y", demand, labels)
        validation.require_finite(examples, "x")
        policy = self.effective_batch_normalization
        demand = (
            '"support" or "moving" for `adapt`, whose model takes single examples and '
            "knows no statistics of other queries"
        )
        validation.require(policy != "transductive", "batch_normalization", demand, policy)
        classes = None
        if self.classifies:
            labels, names = _number_labels(labels, class_names, len(examples))
            # Given names are counted from 0.
            are_numbers = class_names is None and isinstance(names[0], int)
            classes = ClassLogits([*map(str, names)], labels=names if are_numbers else None)
        self.ensure_built(examples.shape[1:], labels.shape[1:])
        if classes and self.ways_are_fixed:
            demand = f"labels of {self.ways} classes, the `ways` of the learner"
            validation.require(len(names) == self.ways, "y", demand, names)
        examples = with_text(examples)
        model, learner, known = self._adapt(examples, labels, classes)
        if classes:
            classes.calibrate(_temperature(learner, known, labels))
        model(examples[:1])  # Or Keras exports no model to ONNX.
        return model

    def ensure_built(self, shape: Any, label_shape: Any = ()) -> None:
        """Builds the learner, unless it is built, for shapes of examples and labels."""

    def _adapt(
        self, images: Any, labels: np.ndarray, classes: ClassLogits | None
    ) -> tuple[keras.Model, Any, Any]:
        """Returns the model of a support set, a learner of equal logits, and its examples.

        The model ends in `classes`, or without it predicts the targets of a regression.
        """
        raise NotImplementedError


def adapted_copy(
    model: keras.Model, policy: str, examples: Any, values: dict[int, Any] | None = None
) -> list[Any]:
    """Returns an input, and a copy that computes what a model computes in an episode.

    Batch norms of the copy follow the `policy`, `"support"` (the examples) or `"moving"`.
    `values` maps ids of variables to new values.
    """
    new = {id(each): each for each in model.variables} | (values or {})
    stateless = StatelessModel(model, model.variables, policy)
    if norms := stateless.norms():
        _, found = stateless.outputs([*new.values()], examples)
        new |= zip(map(id, statistics_of(norms)), found, strict=True)
    copy = copied(model)
    for variable, own in paired_variables(model, copy):
        # All of them, because Keras's file merges LoRA's kernels. By NumPy: on JAX, a model
        # that predicts may delete arrays that it shares.
        own.assign(ops.convert_to_numpy(new[id(variable)]))
    shape, dtype = tuple(examples.shape[1:]), None
    if graphs.is_graph(model):
        dtype = model.inputs[0].dtype
        if len(model.inputs[0].shape) == len(shape) + 2:  # As Keras, which adds an axis.
            shape = (*shape, 1)
    return [keras.Input(shape, dtype=dtype), copy]


def _temperature(learner: Any, examples: Any, labels: np.ndarray) -> float:
    examples = np.asarray(ops.convert_to_numpy(examples))

    def logits_of(support: Any, queries: Any) -> np.ndarray:
        sets = examples[support], labels[support], examples[queries]
        logits = learner(tuple(with_text(each[None]) for each in sets))
        return ops.convert_to_numpy(logits)[0]

    parts = held_out_parts(labels)
    found = [logits_of(~part, part) for part in parts] or [logits_of(..., ...)]
    if not parts:
        return fitted_temperature(found[0], labels, SEEN)
    held_out = np.concatenate([labels[part] for part in parts])
    return fitted_temperature(np.concatenate(found), held_out)


def _number_labels(
    labels: Any, class_names: Sequence[str] | None, examples: int
) -> tuple[np.ndarray, list[Any]]:
    """Returns labels from 0 on, and the names or numbers of the classes."""
    labels = as_classes(labels, "y")
    validation.require_one_per_example(labels, examples, "y")
    found = np.unique(labels).tolist()
    names = found if class_names is None else [*class_names]
    by_name = class_names is None or labels.dtype.kind == "U"
    classes = names if by_name else [*range(len(names))]
    missing = [each for each in classes if each not in found]
    demand = (
        "labels of two or more classes, and an example of each class; with `class_names` "
        f"{class_names!r} these names, or numbers that count them from 0 (missing: "
        f"{missing or 'none'})"
    )
    fits = found == sorted(classes) and 1 < len(found) == len({*names})
    validation.require(fits, "y", demand, found)
    return np.array([*map(classes.index, labels.tolist())], "int32"), names

"""Makes a Keras model from a few labeled examples: `adapt`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.few_shot.calibration import SEEN, fitted_temperature, held_out_parts
from nsl_keras.few_shot.class_logits import ClassLogits
from nsl_keras.few_shot.classes import as_classes
from nsl_keras.few_shot.functional import effective_policy
from nsl_keras.training.data import gather, with_text


class Adaptation(NamedTuple):
    """What a learner made of a support set.

    Attributes:
        model: A model from single examples to logits, which ends in a `ClassLogits`; or to
            the outputs of a regression.
        learner: A learner of episodes with the same logits.
        examples: The support set, as this learner takes it.
    """

    model: keras.Model
    learner: Any
    examples: np.ndarray


class Adapting:
    """Gives a learner `adapt`; a subclass writes `_adapted`."""

    #: The name of the argument and attribute that is the learner's network.
    wraps = "model"
    ways: Any
    batch_normalization: str
    #: Whether the number of classes is that of a network's outputs.
    ways_are_fixed = True
    #: Whether labels are classes, and not the targets of a regression.
    classifies = True

    @property
    def network(self) -> keras.Model:
        """The model that the learner was given."""
        network: keras.Model = getattr(self, self.wraps)
        return network

    @property
    def effective_batch_normalization(self) -> str | None:
        """The policy that batch norms follow as their `trainable` flags are now.

        `batch_normalization`; or `"moving"` if none is trainable; `None` without any.
        """
        return effective_policy(self, self.batch_normalization)

    def adapt(
        self, x: Any, y: Any = None, class_names: Sequence[str] | None = None
    ) -> keras.Model:
        """Returns a Keras model that classifies single examples into new classes.

        Its outputs are the learner's logits for queries, with `x` as the support set,
        divided by a temperature: their softmax gives calibrated probabilities. The model
        has the attributes `class_names` and `temperature`, of a last `ClassLogits`. The
        temperature is fitted to examples of `x` that the learner classifies from the rest:
        one example per class is held out at a time, or a fifth of them if there are more
        than five. If every class has a single example, the temperature is fitted to the
        support set itself, with a target of 0.92. A `MAML` with an `inner_loss` returns the
        adapted network. The model shares no weights with the learner. Import nsl_keras
        before you load its `.keras` file, folded (`convert.fold`) or not.

        Args:
            x: Array or list of the support examples; or a data set of batches `(examples,
                labels)`, for example of `keras.utils.image_dataset_from_directory`.
            y: Array of labels, numbers or names of the classes; with an `inner_loss`
                targets; `None` if `x` is a data set.
            class_names: Names of the classes. Labels are then these names, or numbers that
                count them from 0. `None` takes the names from the data set, or the labels
                themselves, in ascending order.

        Returns:
            A built model, not compiled: a `keras.Sequential` or, from a
            `NeighborhoodLearner`, a `MetaNeighborhoodModel`, whose `neighbors` are support
            examples.

        Raises:
            ValueError: For bad examples, labels or names; if the network fixes the number
                of classes, for more or fewer than `ways`; for logits that are not finite;
                and for `batch_normalization="transductive"`.

        Example:

        >>> import numpy as np
        >>> import nsl_keras
        >>> backbone = nsl_keras.backbones.convnet4((8, 8, 1))
        >>> learner = nsl_keras.few_shot.NearestCentroid(backbone)
        >>> images = np.random.default_rng(0).normal(size=(6, 8, 8, 1))
        >>> model = learner.adapt(images, ["fox", "owl", "owl", "fox", "elk", "elk"])
        >>> model.predict(images, verbose=0).argmax(axis=1).tolist()
        [1, 2, 2, 1, 0, 0]
        >>> model.class_names
        ('elk', 'fox', 'owl')
        """
        files = (
            "examples as the network takes them. To read images from files, pass "
            "`keras.utils.image_dataset_from_directory(folder, image_size=...)`"
        )
        validation.require(not isinstance(x, (str, os.PathLike)), "x", files, x)
        if class_names is None:
            class_names = getattr(x, "class_names", None)
        if isinstance(x, (list, tuple)):
            shapes = {np.shape(each) for each in x}
            validation.require(len(shapes) == 1, "x", "examples of one shape", shapes)
            x = np.stack(x)
        examples, labels = gather(x, y)
        demand = "given, unless `x` is a data set that yields labels"
        validation.require(labels is not None, "y", demand, labels)
        validation.require(len(examples), "x", "one example or more", examples)
        validation.finite(examples, "x")
        is_text = np.asarray(examples).dtype.kind in "OSU"
        inputs = getattr(self.network, "inputs", None)
        takes_text = not inputs or inputs[0].dtype == "string"
        validation.require(takes_text or not is_text, "x", files, x)
        head = None
        if self.classifies:
            labels, names = _numbered(labels, class_names, len(examples))
            head = ClassLogits(names)
        self._build_for(examples.shape[1:], labels.shape[1:])
        policy = self.effective_batch_normalization
        demand = (
            '"support" or "moving" for `adapt`, whose model takes single examples and '
            "knows no statistics of other queries"
        )
        validation.require(policy != "transductive", "batch_normalization", demand, policy)
        if head and self.ways_are_fixed and len(names) != self.ways:
            raise ValueError(
                f"`y` must have {self.ways} classes, the `ways` of the learner. "
                f"Received: {len(names)} classes"
            )
        examples = with_text(examples)
        adaptation = self._adapted(examples, labels, head)
        if head:
            head.calibrate(_temperature(adaptation, labels))
        adaptation.model(examples[:1])  # Or Keras exports no model to ONNX.
        return adaptation.model

    def _build_for(
        self, shape: tuple[int | None, ...], label_shape: tuple[int, ...] = ()
    ) -> None:
        """Builds the learner for examples and labels of these shapes."""

    def _adapted(
        self, images: Any, labels: np.ndarray, head: ClassLogits | None
    ) -> Adaptation:
        """Returns what the learner makes of a support set; `head` ends the model.

        Without a head, the labels are the targets of a regression.
        """
        raise NotImplementedError


def _temperature(adaptation: Adaptation, labels: np.ndarray) -> float:
    """Returns the temperature of a learner's logits, from a support set alone."""
    _, learner, examples = adaptation

    def scores(support: Any, queries: Any) -> np.ndarray:
        sets = examples[support], labels[support], examples[queries]
        logits = learner(tuple(with_text(each[None]) for each in sets))
        return ops.convert_to_numpy(logits)[0]

    parts = held_out_parts(labels)
    logits = np.concatenate([scores(~part, part) for part in parts] or [scores(..., ...)])
    validation.finite(logits, "logits")
    if not parts:
        return fitted_temperature(logits, labels, SEEN)
    held_out = np.concatenate([labels[part] for part in parts])
    # The target of Platt (1999).
    return fitted_temperature(logits, held_out, doubt=1 / (len(held_out) + 2))


def _numbered(
    labels: Any, class_names: Sequence[str] | None, examples: int
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns labels from 0 on, and the names of the classes."""
    given = as_classes(labels, "y")
    found, numbers = np.unique(given, return_inverse=True)
    names = [*map(str, found.tolist() if class_names is None else class_names)]
    validation.one_per_example(given, examples, "y")
    if class_names is not None:
        known = names if given.dtype.kind == "U" else [*range(len(names))]
        unknown = [label for label in found.tolist() if label not in known]
        if unknown:
            raise ValueError(
                "`y` must hold names of `class_names`, or numbers that count them from 0. "
                f"Received: the labels {unknown}, and class_names={class_names!r}"
            )
        numbers = np.array([known.index(label) for label in given.tolist()])
    validation.require(len(names) > 1, "y", "labels of two or more classes", names)
    missing = [name for number, name in enumerate(names) if number not in numbers]
    if missing:
        raise ValueError(
            f"`y` must hold an example of each class. Received: no example of {missing}"
        )
    return numbers.astype("int32"), tuple(names)

"""Makes a Keras model from a few labeled examples: `adapt`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.few_shot.calibration import SEEN, fitted_temperature, held_out_parts
from nsl_keras.few_shot.classes import as_classes
from nsl_keras.few_shot.functional import effective_policy
from nsl_keras.neighborhoods.head import Neighbors
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training.data import gather, with_text


class AdaptedClassifier(keras.Model):
    """A model that keeps the names of its classes, and its temperature, in its config."""

    class_names: tuple[str, ...] | None = None
    temperature: float = 1.0

    def calibrate(self, temperature: float) -> None:
        """Divides the logits by a temperature from now on."""
        self.temperature = temperature

    def get_config(self) -> dict[str, Any]:
        names = self.class_names and [*self.class_names]
        own = {"class_names": names, "temperature": self.temperature}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        names, temperature = config.pop("class_names"), config.pop("temperature")
        model = super().from_config(config, custom_objects)
        model.class_names, model.temperature = names and tuple(names), temperature
        return model


@keras.saving.register_keras_serializable("nsl_keras")
class AdaptedModel(AdaptedClassifier, keras.Sequential):
    """A network, and a head made from a support set."""

    def calibrate(self, temperature: float) -> None:
        super().calibrate(temperature)
        dtype = self.outputs[0].dtype
        self.add(keras.layers.Rescaling(1 / temperature, dtype=dtype, name="calibration"))


@keras.saving.register_keras_serializable("nsl_keras")
class AdaptedNeighborhoods(AdaptedClassifier, MetaNeighborhoodModel):
    """Meta-Neighborhoods whose dictionary is a support set."""

    def call(self, inputs: Any, training: bool | None = None, adapt: bool = True) -> Any:
        return super().call(inputs, training=training, adapt=adapt) / self.temperature

    def neighbors_of_batch(
        self, inputs: Any, k: int, by: str = "attention", effects: bool = False
    ) -> Neighbors:
        found = super().neighbors_of_batch(inputs, k, by, effects)
        changes = found.output_changes
        return found._replace(
            output_changes=None if changes is None else changes / self.temperature,
            before=found.before / self.temperature,
            after=found.after / self.temperature,
        )

    def _without_adaptation(self) -> keras.Model:
        plain = super()._without_adaptation()
        outputs = plain.outputs[0] / self.temperature
        return keras.Model(plain.input, outputs, name=plain.name)


class Adapting:
    """Gives a learner `adapt`; a subclass writes `_adapted`."""

    ways: Any
    batch_normalization: str
    #: Whether the number of classes is that of a network's outputs.
    ways_are_fixed = True
    #: Whether labels are classes, and not the targets of a regression.
    classifies = True

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
        divided by a `temperature`: their softmax gives calibrated probabilities. The
        temperature is fitted to examples of `x` that the learner classifies from the rest:
        one example per class is held out at a time, or a fifth of them if there are more
        than five. If every class has a single example, the temperature is fitted to the
        support set itself, with a target of 0.92. A `MAML` with an `inner_loss` returns the
        adapted network. The model shares no weights with the learner. Import nsl_keras
        before you load its `.keras` file.

        Args:
            x: Array or list of the support examples; or a data set of batches `(examples,
                labels)`, for example of `keras.utils.image_dataset_from_directory`.
            y: Array of labels, numbers or names of the classes; with an `inner_loss`
                targets; `None` if `x` is a data set.
            class_names: Names of the classes. Labels are then these names, or numbers that
                count them from 0. `None` takes the names from the data set, or the labels
                themselves, in ascending order.

        Returns:
            A built model, not compiled, with the attributes `class_names` and
            `temperature`. A `NeighborhoodLearner` returns a `MetaNeighborhoodModel`, whose
            `neighbors` are support examples.

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
        >>> model.predict(images, verbose=0).argmax(axis=1).tolist(), model.class_names
        ([1, 2, 2, 1, 0, 0], ('elk', 'fox', 'owl'))
        """
        if class_names is None:
            class_names = getattr(x, "class_names", None)
        if isinstance(x, (str, os.PathLike)):
            raise ValueError(
                "`x` must hold examples. To read images from a folder, pass "
                "`keras.utils.image_dataset_from_directory(folder, image_size=...)`. "
                f"Received: x={x!r}"
            )
        if isinstance(x, (list, tuple)):
            shapes = {np.shape(each) for each in x}
            if len(shapes) != 1:
                raise ValueError(
                    f"`x` must hold examples of one shape. Received: shapes {shapes}"
                )
            x = np.stack(x)
        examples, labels = gather(x, y)
        demand = "given, unless `x` is a data set that yields labels"
        validation.require(labels is not None, "y", demand, labels)
        validation.finite(examples, "x")
        examples = with_text(examples)
        names = ways = None
        if self.classifies:
            labels, names = _numbered(labels, class_names, len(examples))
            ways = len(names)
        self._build_for(examples.shape[1:], np.shape(labels)[1:])
        policy = self.effective_batch_normalization
        demand = (
            '"support" or "moving" for `adapt`, whose model takes single examples and '
            "knows no statistics of other queries"
        )
        validation.require(policy != "transductive", "batch_normalization", demand, policy)
        if self.ways_are_fixed and ways != self.ways:
            raise ValueError(
                f"`y` must have {self.ways} classes, the `ways` of the learner. "
                f"Received: {ways} classes"
            )
        model, learner, support = self._adapted(examples, labels, ways)
        model.class_names = names
        if self.classifies:
            model.calibrate(_temperature(learner, support, labels))
        model(examples[:1])  # Keras exports no model to ONNX that was never called.
        return model

    def _build_for(
        self, shape: tuple[int | None, ...], label_shape: tuple[int, ...] = ()
    ) -> None:
        """Builds the learner for examples and labels of these shapes."""

    def _adapted(self, images: np.ndarray, labels: np.ndarray, ways: Any) -> Any:
        """Returns a model for a support set, a learner, and examples for the learner.

        The learner of episodes gives the same logits as the model. The examples are those
        of the support set as this learner takes them. `ways` is `None` for targets.
        """
        raise NotImplementedError


def _temperature(learner: Any, examples: np.ndarray, labels: np.ndarray) -> float:
    """Returns the temperature of a learner's logits, from a support set alone."""

    def scores(support: Any, queries: Any) -> np.ndarray:
        sets = examples[support], labels[support], examples[queries]
        logits = learner(tuple(each[None] for each in sets))
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
    missing = [name for number, name in enumerate(names) if number not in numbers]
    if missing:
        raise ValueError(
            f"`y` must hold an example of each class. Received: no example of {missing}"
        )
    if len(names) < 2:
        raise ValueError(
            f"`y` must hold two or more classes. Received: the class {names[0]!r} alone"
        )
    return numbers.astype("int32"), tuple(names)

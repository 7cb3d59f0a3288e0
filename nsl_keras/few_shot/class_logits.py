"""The last layer of an adapted classifier: names of classes, and a temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.few_shot.calibration import fitted_temperature
from nsl_keras.few_shot.episodes import as_classes
from nsl_keras.training.data import as_inputs, gather


@keras.saving.register_keras_serializable("nsl_keras")
class ClassLogits(keras.layers.Layer):
    """Logits of named classes, divided by a temperature: `outputs = inputs / temperature`.

    It ends the classifiers that `adapt` returns. The temperature is a weight, so that
    `calibrate` also changes models whose functions are traced.

    Args:
        class_names: Names of the classes, in the order of the logits.
        temperature: float above 0.
        labels: The numbers that stand for the classes in data; `None` counts from 0.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        `(..., classes)`.

    Output shape:
        Same as the input, in float32 or wider.

    Raises:
        ValueError: If `temperature` is not above 0; at build, unless each logit has a name.

    Example:

    >>> import keras
    >>> from nsl_keras import few_shot
    >>> layer = few_shot.ClassLogits(["elk", "owl"])
    >>> layer.calibrate(2.0)
    >>> logits = layer(keras.ops.convert_to_tensor([[4.0, 2.0]]))
    >>> keras.ops.convert_to_numpy(logits).tolist(), layer.class_names
    ([[2.0, 1.0]], ('elk', 'owl'))

    Reference:
        On Calibration of Modern Neural Networks (Guo et al., ICML 2017), Section 4.2,
        "Temperature scaling".
    """

    #: The layer before this one is the classifier, for `graphs.ending`.
    only_scales = True

    def __init__(
        self,
        class_names: Sequence[str],
        temperature: float = 1.0,
        labels: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        fits = not isinstance(class_names, str) and len({*class_names}) == len(class_names)
        demand = "a sequence of different names"
        validation.require(fits, "class_names", demand, class_names)
        self.class_names = tuple(class_names)
        self.labels = None if labels is None else [*map(int, labels)]
        numbers: Any = self.labels or class_names
        fits = len({*numbers}) == len(numbers) == len(class_names)
        validation.require(fits, "labels", "None, or a number for each name", labels)
        temperature = validation.positive_number(temperature, "temperature")
        start = keras.initializers.Constant(temperature)
        options: dict[str, Any] = {"trainable": False, "autocast": False}
        # Here, because it has no input shape to wait for.
        self.divisor = self.add_weight((), start, "float32", name="temperature", **options)

    def build(self, input_shape: Any) -> None:
        fits = input_shape[-1] in (None, len(self.class_names))
        demand = f"{input_shape[-1]} names, one for each logit"
        validation.require(fits, "class_names", demand, self.class_names)

    @property
    def temperature(self) -> float:
        """The number by which logits are divided."""
        return float(self.divisor)

    def calibrate(self, temperature: float) -> None:
        """Divides the logits by another temperature from now on."""
        self.divisor.assign(validation.positive_number(temperature, "temperature"))

    def call(self, inputs: Tensor) -> Tensor:
        inputs = at_least_float32(inputs)
        return inputs / ops.cast(self.divisor, inputs.dtype)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "class_names": [*self.class_names],
            "temperature": self.temperature,
            "labels": self.labels,
        }


class NamesClasses(keras.Model):
    """Private mixin of models whose attribute `classes` is a `ClassLogits`."""

    classes: Any
    class_names = property(attrgetter("classes.class_names"))
    temperature = property(attrgetter("classes.temperature"))

    def calibrate(self, x: Any, y: Any = None) -> None:
        """Fits the temperature to labeled examples, or sets it to a number.

        Call this after you train or change the model, which spoils its calibration. Pass
        examples that were neither given to `adapt` nor trained on, or the probabilities
        become too large.

        Args:
            x: Held-out examples as for `predict`, or a data set of batches `(examples,
                labels)`; or the temperature itself, a float above 0.
            y: Array of labels: names, or the numbers that `adapt` was given, which count
                the names from 0 if it was given names. `None` if `x` is a data set or a
                temperature.

        Raises:
            ValueError: If a label is no class, logits are not finite, or the temperature is
                not above 0.

        Example:

        >>> import numpy as np
        >>> import nsl_keras
        >>> backbone = nsl_keras.backbones.convnet4((8, 8, 1))
        >>> images = np.random.default_rng(0).normal(size=(4, 8, 8, 1))
        >>> learner = nsl_keras.few_shot.NearestCentroid(backbone)
        >>> model = learner.adapt(images[:2], ["elk", "owl"])
        >>> model.calibrate(images[2:], ["elk", "owl"])
        >>> model.calibrate(1.5)
        >>> model.temperature
        1.5
        """
        if np.isscalar(x):
            return self.classes.calibrate(x)
        x, y = gather(x, y)
        labels, names = as_classes(y, "y"), self.class_names
        numbers = self.classes.labels or range(len(names))
        classes = np.array(names if labels.dtype.kind == "U" else numbers)
        matches = labels[:, None] == classes
        demand = f"names in {names}, or numbers in {[*numbers]}"
        validation.require(matches.any(axis=1).all(), "y", demand, np.unique(labels))
        logits = self.temperature * self.predict(as_inputs(x), verbose=0)
        validation.require_one_per_example(labels, len(logits), "y")
        self.classes.calibrate(fitted_temperature(logits, matches.argmax(axis=1)))

    def classify(self, x: Any, **options: Any) -> dict[str, np.ndarray]:
        """Predicts class names and probabilities, as a SavedModel's signature `classify`.

        Args:
            x: Examples as for `predict`, or text in a NumPy array.
            **options: `batch_size`, `steps` and `verbose` of `keras.Model.predict`.

        Returns:
            A dict of NumPy arrays: `class`, the most probable name of each example, and
            `probabilities` of shape `(n, classes)`, in the order of `class_names`.

        Example:

        >>> import numpy as np
        >>> import nsl_keras
        >>> backbone = nsl_keras.backbones.convnet4((8, 8, 1))
        >>> images = np.random.default_rng(0).normal(size=(2, 8, 8, 1))
        >>> learner = nsl_keras.few_shot.NearestCentroid(backbone)
        >>> model = learner.adapt(images, ["owl", "elk"])
        >>> model.classify(images)["class"].tolist()
        ['owl', 'elk']
        """
        logits = self.predict(as_inputs(x), **{"verbose": 0, **options})
        found = named_classes(logits, self.class_names, np.take)
        return {name: ops.convert_to_numpy(each) for name, each in found.items()}


def named_classes(logits: Any, names: Any, take: Callable[..., Any]) -> dict[str, Any]:
    """Returns what `classify` returns; `take` is NumPy's or, in a graph, TensorFlow's."""
    places = ops.argmax(logits, axis=-1)
    return {"class": take(names, places), "probabilities": ops.softmax(logits)}


@keras.saving.register_keras_serializable("nsl_keras")
class AdaptedModel(NamesClasses, keras.Sequential):
    """What `adapt` returns: a network, and the `ClassLogits` of new classes."""

    classes = property(lambda self: self.layers[-1])

"""A model that finetunes its head on learned neighbours, trained with `fit`."""

from __future__ import annotations

import collections
import functools
import inspect
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import data as datasets
from nsl_keras import rewiring, validation
from nsl_keras.backend import GradientTape, Tensor, counted, variable_scope, weighed
from nsl_keras.neighborhoods.dictionary import NeighborDictionary, require_same_length
from nsl_keras.neighborhoods.explain import Neighbors
from nsl_keras.neighborhoods.head import MetaNeighborhoodHead, with_dictionary
from nsl_keras.neighborhoods.splitting import split_classifier
from nsl_keras.training.checks import (
    CheckedModel,
    finite_examples,
    loss_of_logits,
    mark_non_finite,
)

UNADAPTED = "unadapted_"

#: Parameters that stand for any others.
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Predictions(NamedTuple):
    """Outputs of the finetuned head and of the head as it is."""

    adapted: Tensor
    unadapted: Tensor


@keras.saving.register_keras_serializable("nsl_keras")
class MetaNeighborhoodModel(CheckedModel):
    """Backbone, then a head finetuned per example on a learned dictionary of neighbours.

    For features `z = backbone(x)`, dictionary `{(k_j, v_j)}` and head weights `phi`,

        phi_z = phi - rate * d/dphi sum_j softmax_j(sim(z, k_j) / T) L(f_phi(k_j), v_j)
        model(x) = f_{phi_z}(z)

    and all of backbone, head, keys, values and rate are trained on the loss of
    `model(x)`, through the finetuning. On TensorFlow the training step is a
    `GradientTape` (outer loss) around the tape of the inner loop; on JAX the same
    mathematics runs through Keras's own step.

    `fit` and `evaluate` report the compiled metrics, and the same metrics before
    adaptation under names that begin with `unadapted_`. They say what the finetuning
    does: the paper finds them far below (Appendix A.5); where they are equal, training has
    switched the inner step off (`inner_rates` near zero). They are no baseline: that is
    the plain model under the same recipe.

    The published weight decay spares dictionary, head and rates: tell the optimizer with
    `optimizer.exclude_from_weight_decay(var_list=model.decay_exempt_variables)`. Keras
    saves no such list: to train a loaded model further, compile it again. The authors
    subtract `d * w` a step, Keras's AdamW `learning_rate * weight_decay * w`: the
    published decay of 7.5e-5 at rate 1e-3 is `weight_decay=0.075`.

    Args:
        backbone: Keras layer or model from inputs to features of shape `(batch,
            features)`, or `None` where the inputs are the features. Several inputs come as
            a list or dict, as for any Keras model. The paper leaves out a last ReLU, so
            that keys and features are alike.
        head: Keras layer or model from features to logits, or to a regression's outputs;
            see `MetaNeighborhoodHead`.
        dictionary: `NeighborDictionary`, whose arguments set metric, temperature, values
            and dropout; or int, the number of entries of a dictionary of defaults.
        inner_steps: int, the number of inner steps.
        inner_learning_rate: float above 0, the start value of the inner rate.
        learning_rate_form: `"scalar"`, `"diagonal"` or `"fixed"`.
        chunk_size: int or `None`, the number of entries computed at once; see
            `MetaNeighborhoodHead`.
        task: `"classification"`, with the cross-entropy as inner loss and probabilities
            as values; or `"regression"`, with the squared error and free values.
        inner_loop: `"auto"`, `"dual"` or `"tape"`; see `MetaNeighborhoodHead`. On
            TensorFlow train a tape without `jit_compile`: XLA compiles it anew every step.
        **kwargs: `name`, `dtype`, `trainable` of `keras.Model`.

    Call arguments:
        inputs: Batch of inputs; a list or dict of them where the backbone has several.
        training: bool, training mode of backbone and dictionary.
        adapt: bool; if false, the head predicts as it is.

    Input shape:
        That of the backbone; `(batch, features)` without one.

    Output shape:
        `(batch, classes)`, logits: compile with a loss that has `from_logits=True`. In
        regression `(batch, outputs)`: compile with any loss of a regression.

    Raises:
        ValueError: For arguments outside the ranges above; for a classifier's loss that
            takes probabilities, at `compile`; for NaN or infinite inputs, labels outside
            the classes, multi-label targets, and a regression's targets that are not
            finite or of another shape, at `fit` and `evaluate` with arrays. Other
            data sets are checked inside the step where the backend can
            (`tf.errors.InvalidArgumentError`); elsewhere `fit` raises
            `NonFiniteLossError` at the first loss that is not finite. `predict` raises
            nothing: an example with NaN or infinite inputs gets NaN outputs there.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> backbone = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(32)])
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     backbone, nsl_keras.layers.CosineDense(10), dictionary=50)
    >>> model.compile(
    ...     optimizer="adam",
    ...     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ...     metrics=["accuracy"])
    >>> images = np.random.default_rng(0).normal(size=(16, 8, 8, 1)).astype("float32")
    >>> history = model.fit(images, np.arange(16) % 10, verbose=0)
    >>> sorted(history.history)
    ['accuracy', 'loss', 'unadapted_accuracy']
    >>> model.predict(images, verbose=0).shape
    (16, 10)

    The dictionary's own arguments are given with it:

    >>> dictionary = nsl_keras.layers.NeighborDictionary(
    ...     50, metric="euclidean", temperature=2.0, dropout=0.25, seed=0)
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     backbone, nsl_keras.layers.CosineDense(10), dictionary)
    >>> model.num_neighbors, model.dictionary.temperature
    (50, 2.0)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2, Eq. (1)-(3), Algorithm
        1. One inner step of a learned scalar rate, the temperature of 0.2 and the dropout
        of half the entries are those of Appendix A.2; the start of the rate at 0.05 and
        those of keys and values are the authors' code's. The 1,000 entries are those of
        the paper's regressions; its image sets have 5,000 and 10,000.
    """

    def __init__(
        self,
        backbone: keras.layers.Layer | None,
        head: keras.layers.Layer,
        dictionary: NeighborDictionary | int = 1000,
        inner_steps: int = 1,
        inner_learning_rate: float = 0.05,
        learning_rate_form: str = "scalar",
        chunk_size: int | None = None,
        task: str = "classification",
        inner_loop: str = "auto",
        **kwargs: Any,
    ) -> None:
        # `fit` and `evaluate` go past `__call__`: inputs must not be rounded there alone.
        super().__init__(autocast=False, **kwargs)
        if backbone is not None and not isinstance(backbone, keras.layers.Layer):
            raise ValueError(
                "`backbone` must be a Keras layer or model, or None. "
                f"Received: backbone={backbone!r}"
            )
        self.backbone = backbone
        self.neighborhood = MetaNeighborhoodHead(
            head,
            dictionary,
            inner_steps=inner_steps,
            inner_learning_rate=inner_learning_rate,
            learning_rate_form=learning_rate_form,
            chunk_size=chunk_size,
            task=task,
            inner_loop=inner_loop,
            dtype=self.dtype_policy,
            name="neighborhood",
        )
        self.inner_steps = self.neighborhood.inner_steps
        self.inner_learning_rate = self.neighborhood.inner_learning_rate
        self.learning_rate_form = self.neighborhood.learning_rate_form
        self.chunk_size = self.neighborhood.chunk_size
        self.task = self.neighborhood.task
        self.inner_loop = self.neighborhood.inner_loop
        self._unadapted_metrics = UnadaptedMetrics()

    @property
    def head(self) -> keras.layers.Layer:
        """The head that is finetuned, as it is before."""
        return self.neighborhood.head

    @property
    def dictionary(self) -> NeighborDictionary:
        """The dictionary of neighbours."""
        return self.neighborhood.dictionary

    @property
    def num_neighbors(self) -> int:
        """The number of dictionary entries `S`."""
        return self.dictionary.num_neighbors

    @classmethod
    def from_classifier(
        cls,
        model: keras.Model,
        dictionary: NeighborDictionary | int = 1000,
        **options: Any,
    ) -> MetaNeighborhoodModel:
        """Makes a model of a trained classifier: its last dense layer is the head.

        The rest is the backbone; a softmax at the end is left out. All is copied, with its
        weights, and `model` stays as it is. Before the dictionary is trained, a small
        `inner_learning_rate` predicts what `model` predicts; `initialize_from` gives the
        dictionary real examples.

        Args:
            model: A functional or Sequential model, for example from `keras.applications`,
                of one input or several, that ends in `Dense` (or `CosineDense`), with or
                without a softmax; with `task="regression"` a trained regressor, that ends
                in a linear layer.
            dictionary: `NeighborDictionary`, or the number of its entries.
            **options: Further arguments of `MetaNeighborhoodModel`.

        Returns:
            A built `MetaNeighborhoodModel`, not compiled.

        Raises:
            ValueError: If `model` is subclassed or not built, has several outputs, does
                not end in a dense layer, or ends in another activation.

        Example:

        >>> import keras
        >>> import nsl_keras
        >>> trained = keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=4)
        >>> model = nsl_keras.MetaNeighborhoodModel.from_classifier(trained, 50)
        >>> tuple(model(keras.ops.ones((2, 32, 32, 3))).shape)
        (2, 4)
        """
        task = options.get("task", "classification")
        backbone, head = split_classifier(model, softmax=task != "regression")
        made = cls(backbone, head, dictionary, **options)
        made.build(model.input_shape)
        return made

    def with_backbone(self, backbone: keras.layers.Layer) -> MetaNeighborhoodModel:
        """Returns a copy of this model on another backbone of as many features.

        Head, dictionary and inner rates are copied with their weights; the backbone is
        taken as it is. The new model is not compiled.

        Args:
            backbone: A built backbone, for example one that `nsl_keras.convert` made.

        Raises:
            ValueError: If this model is not built, or the features are others.
        """
        validation.built(self, "with_backbone")
        made = type(self).from_config({**self.get_config(), "backbone": backbone})
        made.build(self.get_build_config()["input_shape"])
        made.neighborhood.set_weights(self.neighborhood.get_weights())
        return made

    def count_head_multiply_adds(self) -> int | None:
        """Returns the multiply-adds of attention, finetuning and head, for one example.

        Raises:
            ValueError: If the model is not built yet.
        """
        validation.built(self, "count_head_multiply_adds")
        return self.neighborhood.count_multiply_adds(self.dictionary.keys.shape)

    def build(self, input_shape: Any) -> None:
        if self.built:
            return
        features = self._feature_shape(input_shape)
        if len(features) != 2:
            origin = "inputs" if self.backbone is None else "`backbone`"
            raise ValueError(
                f"Features must have shape (batch, features): the {origin} must be "
                "flattened or pooled (Flatten, GlobalAveragePooling2D). "
                f"Received: features of shape {features}"
            )
        self.neighborhood.build(features)
        rewiring.pass_on_frozen(self)

    def _feature_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """The shape of the features, of a backbone that is built on the way."""
        if self.backbone is None:
            return tuple(input_shape)
        inputs = self._symbolic_inputs(input_shape)
        # On symbolic inputs: a `call` of the backbone's own may have neither a `build`
        # nor a `compute_output_shape`.
        if self.backbone.built:
            outputs = self.backbone.compute_output_spec(inputs)
        else:
            outputs = self.backbone(inputs)
        if isinstance(outputs, (list, tuple)) and len(outputs) == 1:
            (outputs,) = outputs  # Of `keras.Model(inputs, [outputs])`: it gives a tensor.
        if not hasattr(outputs, "shape"):
            raise ValueError(
                "`backbone` must have one output. Received: backbone "
                f"{self.backbone.name!r} with {len(tree.flatten(outputs))} outputs"
            )
        return tuple(outputs.shape)

    def _symbolic_inputs(self, input_shape: Any) -> Any:
        """Symbolic tensors of these shapes, of the dtypes that the backbone declares."""
        if self.backbone is None:
            return keras.KerasTensor(input_shape, self.compute_dtype)
        if isinstance(input_shape, dict) and rewiring.is_graph(self.backbone):
            input_shape = self._shapes_by_name(input_shape)
        inputs = tree.map_shape_structure(keras.KerasTensor, input_shape)
        declared = getattr(self.backbone, "inputs", None) or []
        found = tree.flatten(inputs)
        if len(found) != len(declared):
            return inputs
        typed = [
            keras.KerasTensor(each.shape, its.dtype)
            for each, its in zip(found, declared, strict=True)
        ]
        return tree.pack_sequence_as(inputs, typed)

    def _shapes_by_name(self, shapes: dict[str, Any]) -> Any:
        """The shapes that a functional backbone takes, in its own structure, as it does."""
        own = getattr(self.backbone, "input", None)
        if isinstance(own, dict):
            return {name: shapes[name] for name in own if name in shapes}
        names = [tensor.name for tensor in tree.flatten(own)]
        if not set(names) <= set(shapes):
            return shapes
        return tree.pack_sequence_as(own, [shapes[name] for name in names])

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return self.neighborhood.compute_output_shape(self._feature_shape(input_shape))

    def call(self, inputs: Any, training: bool | None = None, adapt: bool = True) -> Tensor:
        features = self.features(inputs, training=training)
        return self.neighborhood(features, training=training, adapt=adapt)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "call" in vars(cls) and "predictions" not in vars(cls):
            raise ValueError(
                "A subclass of `MetaNeighborhoodModel` with a `call` of its own must have "
                "`predictions` of its own too, which `fit` and `evaluate` use. "
                f"Received: class {cls.__name__!r}"
            )

    def predictions(self, inputs: Any, training: bool | None = None) -> Predictions:
        """Returns the predictions of a batch after and before adaptation.

        `fit` and `evaluate` use them, `predict` and a call the same by way of `call`: a
        subclass that computes something else overrides both.
        """
        features = self.features(inputs, training=training)  # MN Algorithm 1, line 5.
        return Predictions(
            self.neighborhood(features, training=training),
            self.neighborhood(features, adapt=False),
        )

    def features(self, inputs: Any, training: bool | None = None) -> Tensor:
        """Returns the features `z` of a batch, of shape `(batch, features)`."""
        if self.backbone is None:
            return inputs
        return self.backbone(inputs, training=training)

    def initialize_from(
        self,
        x: Any,
        y: Any = None,
        seed: int | None = None,
        batch_size: int = 128,
        steps: int | None = None,
        verbose: Any = "auto",
    ) -> None:
        """Sets the dictionary's entries to examples, drawn at random without replacement.

        Keys become the features of the drawn examples. Values become the labels, smoothed
        by 1 % towards uniform so that they can still learn, or a regression's targets. The
        classes come in equal shares (where one has too few examples, the others fill up),
        or in those of fixed one-hot values. With a backbone, do this once it is trained.

        Args:
            x: Inputs, as for `fit`: an array, a list or dict of arrays for a backbone of
                several inputs, a `tf.data.Dataset`, a `keras.utils.PyDataset`, or a
                generator of batches `(x, y)`. A data set is read once, to its end; the
                features of all its examples are held in memory.
            y: Array of labels or targets, as for `fit`; `None` where a data set has them.
            seed: int or `None`, the seed of the draw.
            batch_size: int, the number of examples computed at once; data sets come in
                batches of their own.
            steps: int or `None`, the number of batches to read of a data set.
            verbose: 0 for silence, 1 for a progress bar, 2 for a line at the end, as for
                `predict`; `"auto"` for a bar where it takes longer than two seconds.

        Raises:
            ValueError: For fewer examples than entries, labels outside the classes,
                classes without an example, targets of another shape or none at all; for
                NaN, infinities, all-zero features under the cosine metric, and where given
                values are fixed; for a data set without an end, without `steps`. A
                generator without an end needs `steps` too: nothing tells it from others.

        Example:

        >>> import keras
        >>> import numpy as np
        >>> import nsl_keras
        >>> model = nsl_keras.MetaNeighborhoodModel(
        ...     None, keras.layers.Dense(3), dictionary=6)
        >>> x = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")
        >>> model.initialize_from(x, np.arange(30) % 3, seed=0)
        >>> values = keras.ops.convert_to_numpy(model.dictionary.values)
        >>> np.bincount(values.argmax(axis=1)).tolist()  # Classes in equal shares.
        [2, 2, 2]
        """
        if not datasets.is_in_memory(x):
            datasets.refuse_targets(x, y)
            parts = [
                (self._features_in_memory(inputs), datasets.require_targets(targets))
                for inputs, targets in datasets.batches(x, None, steps, verbose)
            ]
            features, targets = (
                np.concatenate(arrays) for arrays in zip(*parts, strict=True)
            )
            self.dictionary.initialize_from(features, targets, seed)
            return
        x, y = datasets.arrays_of(x), np.asarray(datasets.require_targets(y))
        require_same_length(range(datasets.length_of(x)), y, "x")
        self._check_data(x, y)
        drawn = self.dictionary.draw_examples(y, seed)
        features = np.concatenate(
            [
                self._features_in_memory(batch)
                for batch, _ in datasets.batches(
                    datasets.take(x, drawn), batch_size, None, verbose
                )
            ]
        )
        self.dictionary.assign_examples(features, y[drawn])

    def _features_in_memory(self, x: Any) -> np.ndarray:
        """The features of a batch of arrays, which builds the model first."""
        self._check_data(x)
        batch = self._built_for(x)
        return ops.convert_to_numpy(self.features(batch, training=False))

    def _built_for(self, x: Any) -> Any:
        """Returns arrays as tensors, for the built model."""
        batch = datasets.as_tensors(x)
        if not self.built:
            self._build_for(batch)
        return batch

    def _build_for(self, batch: Any) -> None:
        """Builds the model for a batch, whatever its size."""
        self.build(tree.map_structure(lambda each: (None, *each.shape[1:]), batch))

    def neighbors(
        self,
        x: Any,
        k: int = 5,
        batch_size: int = 32,
        steps: int | None = None,
        verbose: Any = "auto",
    ) -> Neighbors:
        """Returns the dictionary entries that moved each prediction, and by how much.

        They are those with the largest attention weights. What an entry adds to the
        outputs is defined at `output_changes` of the result; over all entries (`k =
        num_neighbors`) it sums to `model(x) - model(x, adapt=False)`, up to the error of
        the integral that defines it (see `nsl_keras.neighborhoods.explain.Neighbors`).

        Args:
            x: Inputs, as for `predict`: an array, a list or dict of arrays for a backbone
                of several inputs, a `tf.data.Dataset`, a `keras.utils.PyDataset`, or a
                generator of batches.
            k: int, the number of entries; at most `num_neighbors`.
            batch_size: int, the number of examples computed at once; each takes the
                memory of several in a prediction. Data sets come in batches of their own.
            steps: int or `None`, the number of batches to take of a data set.
            verbose: 0 for silence, 1 for a progress bar, 2 for a line at the end, as for
                `predict`; `"auto"` for a bar where it takes longer than two seconds.

        Returns:
            `Neighbors(indices, weights, values, output_changes)` of NumPy arrays: entry
            numbers and attention weights of shape `(n, k)`; class probabilities or
            targets of the entries, and what each adds to the logits or outputs, of shape
            `(n, k, outputs)`; the heaviest entry first.

        Raises:
            ValueError: If `k` is not in `1..num_neighbors`, and for data of another kind,
                without an example, or a data set without an end where there are no `steps`.

        Example:

        >>> import keras
        >>> import numpy as np
        >>> import nsl_keras
        >>> model = nsl_keras.MetaNeighborhoodModel(
        ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
        >>> x = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
        >>> found = model.neighbors(x, k=20)
        >>> found.output_changes.shape
        (4, 20, 3)
        >>> change = keras.ops.convert_to_numpy(model(x) - model(x, adapt=False))
        >>> np.allclose(found.output_changes.sum(axis=1), change, atol=1e-5)
        True
        """
        batches = []
        for inputs, _ in datasets.batches(x, batch_size, steps, verbose):
            features = self.features(self._built_for(inputs), training=False)
            found = self.neighborhood.neighbors(features, k)
            batches.append([ops.convert_to_numpy(tensor) for tensor in found])
        return Neighbors(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))

    @property
    def decay_exempt_variables(self) -> list[Any]:
        """Head, dictionary and inner rates, which the authors do not decay.

        Raises:
            ValueError: If the model is not built yet.
        """
        validation.built(self, "decay_exempt_variables")
        return self.neighborhood.trainable_variables

    @property
    def inner_rates(self) -> list[Tensor]:
        """The learning rates of the inner step as they stand, one per adapted variable.

        Raises:
            ValueError: If the model is not built yet.
        """
        validation.built(self, "inner_rates")
        return self.neighborhood.rate.rates()

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        **options: Any,
    ) -> None:
        """Configures training, as `keras.Model.compile` does.

        Args:
            optimizer: Optimizer, or its name.
            loss: Loss of the adapted outputs; in classification one that takes logits.
            loss_weights: As in `keras.Model.compile`.
            metrics: Metrics of the outputs after adaptation, and before it.
            weighted_metrics: Those that use sample weights.
            **options: Further arguments of `keras.Model.compile`.

        Raises:
            ValueError: If a classifier's loss takes probabilities (`from_logits=False`).
        """
        if self.task == "classification":
            loss_of_logits(loss)
        super().compile(optimizer, loss, loss_weights, metrics, weighted_metrics, **options)
        self._unadapted_metrics = UnadaptedMetrics(metrics, weighted_metrics)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The loss, the compiled metrics, and their copies before adaptation."""
        return [*super().metrics, *self._unadapted_metrics.metrics]

    def get_metrics_result(self) -> dict[str, Any]:
        """Results by name. A metric may have several: those before adaptation are told."""
        copies = {id(metric) for metric in self._unadapted_metrics.metrics}
        results = {}
        for metric in self.metrics:
            result = metric.result()
            if not isinstance(result, dict):
                result = {metric.name: result}
            elif id(metric) in copies:
                result = {f"{UNADAPTED}{key}": value for key, value in result.items()}
            results.update(result)
        return results

    def _check_data(self, x: Any, y: Any = None) -> None:
        if not datasets.is_in_memory(x):
            return
        x = datasets.arrays_of(x)
        for name, leaf in tree.flatten_with_path(x):
            path = "".join(f"[{part!r}]" for part in name)
            validation.finite(leaf, f"x{path}")
        if datasets.is_array(y):
            if not self.built:
                with variable_scope(self):
                    self._build_for(x)
            outputs = self.dictionary.num_values
            if self.task == "classification":
                validation.class_labels(y, outputs)
            else:
                validation.targets(y, outputs)

    def train_step(self, *arguments: Any) -> Any:
        """One step of MN Algorithm 1: `data` on TensorFlow, `(state, data)` on JAX."""
        if keras.backend.backend() == "jax":
            return super().train_step(*arguments)  # By way of compute_loss_and_updates.
        x, y, sample_weight = self._checked_batch(*arguments)
        if self.jit_compile and self.neighborhood.active_inner_loop == "tape":
            warnings.warn(
                "XLA compiles the gradient of a vectorized nested tape anew at every "
                'step. Compile with jit_compile=False, or use a head that `inner_loop="'
                'dual"` treats.',
                stacklevel=2,
            )
        with GradientTape() as outer_tape:
            # The inner tape, of the gradients on the dictionary, runs in here.
            predictions = self.predictions(x, training=True)
            loss = self.compute_loss(  # MN Eq. (2)
                x, y, predictions.adapted, sample_weight, training=True
            )
            scaled_loss = self.optimizer.scale_loss(weighed(loss))
        # MN Algorithm 1, line 10.
        self.descend(outer_tape.gradient(scaled_loss, self.trainable_variables))
        self.track_loss(loss, x)
        return self.compute_metrics(x, y, predictions, sample_weight)

    def test_step(self, *arguments: Any) -> Any:
        """One step: of `data` on TensorFlow, `(state, data)` on JAX."""
        if keras.backend.backend() == "jax":
            return super().test_step(*arguments)  # By way of compute_loss_and_updates.
        x, y, sample_weight = self._checked_batch(*arguments)
        predictions = self.predictions(x, training=False)
        loss = self.compute_loss(x, y, predictions.adapted, sample_weight, training=False)
        self.track_loss(loss, x)
        return self.compute_metrics(x, y, predictions, sample_weight)

    def predict_step(self, *arguments: Any) -> Any:
        """One step: of `data` on TensorFlow, `(state, data)` on JAX.

        Examples with non-finite inputs get NaN outputs: no class, and no harm to others.
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(arguments[-1])
        predicted = super().predict_step(*arguments)
        if keras.backend.backend() == "jax":
            outputs, state = predicted
            return mark_non_finite(outputs, finite_examples(x)), state
        return mark_non_finite(predicted, finite_examples(x))

    def compute_loss_and_updates(
        self,
        trainable_variables: Sequence[Any],
        non_trainable_variables: Sequence[Any],
        metrics_variables: Sequence[Any],
        x: Any,
        y: Any,
        sample_weight: Any,
        training: bool = False,
        optimizer_variables: Sequence[Any] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Predictions, list[Tensor], list[Tensor]]]:
        """What Keras's steps on JAX differentiate: MN Algorithm 1, with both predictions.

        Returns:
            `(scaled_loss, (loss, predictions, non_trainable_variables,
            metrics_variables))`.
        """
        state = {
            id(variable): (variable, value)
            for variables, values in (
                (self.trainable_variables, trainable_variables),
                (self.non_trainable_variables, non_trainable_variables),
                (self.metrics_variables, metrics_variables),
                (self.optimizer.variables if training else [], optimizer_variables or []),
            )
            for variable, value in zip(variables, values, strict=True)
        }
        with keras.StatelessScope(list(state.values()), collect_losses=True) as scope:
            predictions = self.predictions(x, training=training)
            loss = self.compute_loss(  # MN Eq. (2)
                x, y, predictions.adapted, sample_weight, training=training
            )
            scaled_loss = self.optimizer.scale_loss(loss) if training else loss
        updated = [
            [scope.get_current_value(variable) for variable in variables]
            for variables in (self.non_trainable_variables, self.metrics_variables)
        ]
        return scaled_loss, (loss, predictions, *updated)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Updates the compiled metrics, and those before adaptation."""
        if not isinstance(y_pred, Predictions):  # Keras makes the metrics' variables.
            y_pred = Predictions(y_pred, y_pred)
        self._unadapted_metrics.update_state(
            *(counted(each) for each in (y, y_pred.unadapted, sample_weight))
        )
        return super().compute_metrics(x, y, y_pred.adapted, sample_weight)

    def _checked_batch(self, data: Any) -> tuple[Any, Any, Any]:
        """Unpacks a batch, of which an unbuilt model is built."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if not self.built:
            self._build_for(x)
        return x, y, sample_weight

    @functools.wraps(keras.Model.export)
    def export(
        self, filepath: Any, format: str = "tf_saved_model", *args: Any, **kwargs: Any
    ) -> Any:
        tape = self.neighborhood.active_inner_loop == "tape"
        if format == "onnx" and (tape or self.inner_steps > 1):
            raise ValueError(
                '`format` must not be "onnx" for a head that adapts on a nested tape or in '
                "several steps: ONNX has no operations for its gradients. Take a "
                "SavedModel, or LiteRT, where several steps need its Flex operations. "
                f'Received: format="onnx", inner_steps={self.inner_steps}, '
                f"active_inner_loop={self.neighborhood.active_inner_loop!r}"
            )
        # Keras exports what was called, and the steps call the parts of the model.
        self(self._symbolic_inputs(self.get_build_config()["input_shape"]))
        return super().export(filepath, format, *args, **kwargs)

    @functools.wraps(keras.Model.quantize)
    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Quantizes the backbone; the head stays as it is, since it is finetuned."""
        if self.backbone is None:
            raise ValueError(
                "`quantize` needs a backbone to quantize: a head must not be quantized. "
                f"Received: model {self.name!r} without a backbone"
            )
        self.backbone.quantize(*args, **kwargs)
        self.train_function = self.test_function = self.predict_function = None

    def get_config(self) -> dict[str, Any]:
        neighborhood = self.neighborhood.get_config()
        for inherited in ("name", "trainable", "dtype"):
            neighborhood.pop(inherited)
        return {
            **super().get_config(),
            "backbone": keras.saving.serialize_keras_object(self.backbone),
            **neighborhood,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> MetaNeighborhoodModel:
        config = with_dictionary(config)
        for part in ("backbone", "head", "dictionary"):
            if isinstance(config[part], dict):
                config[part] = keras.saving.deserialize_keras_object(
                    config[part], custom_objects=custom_objects
                )
        rate_trainable = config.pop("rate_trainable", True)
        made = cls(**config)
        made.neighborhood.rate.trainable = rate_trainable
        return made


class UnadaptedMetrics:
    """Copies of the compiled metrics, named `unadapted_...`.

    They are made at the first update, when the targets' shape tells which accuracy
    `"accuracy"` means. A plain object, so that Keras does not track its metrics as state
    of a model that is already built.
    """

    def __init__(self, metrics: Any = None, weighted_metrics: Any = None) -> None:
        self._compiled = [
            [metric for metric in keras.tree.flatten([given or []]) if metric]
            for given in (metrics, weighted_metrics)
        ]
        self._copies: list[list[keras.metrics.Metric]] | None = None

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The copies made so far."""
        return [metric for group in self._copies or [] for metric in group]

    def update_state(self, targets: Any, unadapted: Any, sample_weight: Any) -> None:
        """Adds a batch of predictions made before adaptation.

        Raises:
            ValueError: For a compiled metric that cannot be copied.
        """
        if self._copies is None:
            self._copies = self._made(targets)
        plain, weighted = self._copies
        for metric in plain:
            metric.update_state(targets, unadapted)
        for metric in weighted:
            metric.update_state(targets, unadapted, sample_weight=sample_weight)

    def _made(self, targets: Any) -> list[list[keras.metrics.Metric]]:
        """Returns copies of the metrics, under the names that Keras reports them by."""
        used: collections.Counter[str] = collections.Counter()
        copies: list[list[keras.metrics.Metric]] = []
        for group, prefix in zip(self._compiled, ("", "weighted_"), strict=True):
            copies.append([])
            for metric in group:
                name, resolved = _resolved(metric, targets)
                name = prefix + name if name in used else name
                number = f"_{used[name]}" if name in used else ""
                used[name] += 1
                copies[-1].append(_copy(resolved, f"{UNADAPTED}{name}{number}"))
        return copies


def _resolved(metric: Any, targets: Any) -> tuple[str, Any]:
    """Returns the name of a compiled metric, and the metric or function that it means."""
    kind_of_metric = metric.lower() if isinstance(metric, str) else None
    if kind_of_metric in ("accuracy", "acc"):
        sparse = len(targets.shape) < 2 or targets.shape[-1] == 1
        kind = (
            keras.metrics.SparseCategoricalAccuracy
            if sparse
            else keras.metrics.CategoricalAccuracy
        )
        return metric, kind()
    if kind_of_metric in ("crossentropy", "ce"):
        raise ValueError(
            "`metrics` must not hold 'crossentropy', which expects probabilities where "
            "the model gives logits. Pass "
            "keras.metrics.SparseCategoricalCrossentropy(from_logits=True). "
            f"Received: metrics containing {metric!r}"
        )
    resolved = keras.metrics.get(metric)
    if isinstance(metric, str):
        return metric, resolved  # Keras reports "mae" under that name.
    if hasattr(resolved, "name"):
        return resolved.name, resolved
    name = getattr(resolved, "__name__", type(resolved).__name__)
    # Keras spells `<lambda>` as `lambda`, and `TopTwo` as `top_two`.
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower(), resolved


def _copy(metric: Any, name: str) -> keras.metrics.Metric:
    if not isinstance(metric, keras.metrics.Metric):
        return keras.metrics.MeanMetricWrapper(metric, name=name)
    cause = None
    if not _loses_arguments(type(metric)):
        try:
            return type(metric).from_config({**metric.get_config(), "name": name})
        except (TypeError, ValueError, NotImplementedError) as error:
            cause = error
    raise ValueError(
        "`metrics` must be metrics whose `get_config` holds the arguments of their "
        "`__init__`, so that they can be kept before adaptation too. "
        f"Received: {metric!r}"
    ) from cause


def _loses_arguments(kind: type[keras.metrics.Metric]) -> bool:
    """Whether a kind of metric takes arguments, but has no config of its own."""
    if kind.get_config is not keras.metrics.Metric.get_config:
        return False
    arguments = inspect.signature(kind).parameters.values()
    named = {each.name for each in arguments if each.kind not in _VARIADIC}
    return not named <= {"name", "dtype"}

"""The layer that adapts a head to each example's neighbours, then predicts."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
from absl import logging
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods import dual_form, inner_loss, nested_tape
from nsl_keras.neighborhoods.contributions import contributions
from nsl_keras.neighborhoods.dictionary import NeighborDictionary
from nsl_keras.neighborhoods.learning_rate import InnerLearningRate
from nsl_keras.second_order import require_second_derivatives

INNER_LOOPS = ("auto", "dual", "tape")


class Neighbors(NamedTuple):
    """The dictionary entries an example looks at most, the heaviest first.

    Attributes:
        indices: Entry numbers, of shape `(batch, k)`.
        weights: Attention weights, of that shape.
        values: Class probabilities (targets, in regression) of the entries, of shape
            `(batch, k, outputs)`.
        output_changes: What each entry adds to the logits (outputs, in regression) of
            the example, of shape `(batch, k, outputs)`. Over all entries of the
            dictionary these sum to the outputs after, minus those before adaptation.
            Where an inner step is linear in the head's weights, a single step on a
            `Dense` layer, it is what the step on this entry's loss alone does; elsewhere
            the entry's share along the straight path from no attention to this one,
            integrated with 8 points: exact to rounding for smooth heads, to a few percent
            for several steps through ReLU layers.
    """

    indices: Any
    weights: Any
    values: Any
    output_changes: Any


@keras.saving.register_keras_serializable("nsl_keras")
class MetaNeighborhoodHead(keras.layers.Layer):
    """Finetunes a head, per example, on a learned dictionary of neighbours, and predicts.

    With features `z`, dictionary `{(k_j, v_j)}` and head `f` with weights `phi`,

        w_j(z)  = softmax_j(sim(z, k_j) / temperature)
        phi_z   = phi - rate * d/dphi sum_j w_j(z) L(f_phi(k_j), v_j)    (inner_steps times)
        outputs = f_{phi_z}(z)

    where `L` is the cross-entropy of the head's logits, or in regression the squared
    error, summed over the outputs. The result is differentiable,
    second-order terms included, with respect to features, head, keys, values and rate.
    It can stand behind any features in a functional model. Under a mixed-precision policy
    it computes in, and returns, float32.

    Args:
        head: A Keras layer or model from features to logits, or to a regression's
            outputs, without non-trainable variables. `Dense`, `CosineDense` and
            `Sequential` stacks of them adapt in the dual form; everything else on a
            nested tape. A `CosineDense` layer's scale is trained, but not adapted.
        num_neighbors: int, the number of dictionary entries `S`.
        metric: `"cosine"` or `"euclidean"`, see `NeighborDictionary`.
        temperature: float above 0, see `NeighborDictionary`.
        value_scale: float above 0, see `NeighborDictionary`.
        fixed_values: bool, or an array, see `NeighborDictionary`.
        inner_steps: int, the number of inner steps. Attention is computed once for all.
            Memory grows with the steps: with more than one every example has weights.
        inner_learning_rate: float above 0, the start value of the rate.
        learning_rate_form: `"scalar"`: one learned rate; `"diagonal"`: one for each row
            of each kernel and one for each bias; `"fixed"`: not trained. Learned rates
            enter through their absolute value.
        dictionary_dropout: float in [0, 1), the share of entries left out in training.
        dropout_scope: `"example"` or `"batch"`, see `NeighborDictionary`. With `"batch"`
            the entries left out are not computed at all: training takes less time.
        chunk_size: int or `None`, the number of entries whose terms for every example are
            held at once, in the forward pass and, computed anew, in the backward pass.
            It bounds memory in the dual form where there are such terms, in a cosine
            layer and wherever `inner_steps` is above 1; results change by rounding only.
            `None` stands for 512, which stay in a processor's cache; accelerators may
            like more. Attention, of shape `(batch, num_neighbors)`, is held whole.
        task: `"classification"` or `"regression"`: the inner loss, and what values are.
        inner_loop: `"dual"`: adaptation as attention over the dictionary, for dense
            heads; `"tape"`: a vectorised nested gradient tape, for any head; `"auto"`:
            dual where the head allows it. The two agree to rounding; `active_inner_loop`
            tells which one runs.
        seed: int or `None`, the seed of dropout.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Features, of shape `(batch, features)`.
        training: bool, whether dictionary entries are left out.
        adapt: bool; if false, the head predicts as it is.

    Input shape:
        `(batch, features)`.

    Output shape:
        `(batch, classes)`, logits; or `(batch, outputs)`.

    Raises:
        ValueError: For arguments outside the ranges above; at build, if a classifier's
            head ends in a softmax or sigmoid or has fewer than two outputs; if the head
            holds non-trainable variables, computes in half precision on the tape, or
            cannot be treated by `inner_loop="dual"` (the error names the layer); if
            TensorFlow has no exact second derivative of a layer on the tape (layer and
            group normalization, bilinear resizing); and if `chunk_size` is given for the
            tape.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> inputs = keras.Input((28, 28, 1))
    >>> features = keras.layers.Dense(64)(keras.layers.Flatten()(inputs))
    >>> head = nsl_keras.layers.CosineDense(10)
    >>> logits = nsl_keras.layers.MetaNeighborhoodHead(head, num_neighbors=100)(features)
    >>> model = keras.Model(inputs, logits)
    >>> tuple(model(keras.ops.ones((2, 28, 28, 1))).shape)
    (2, 10)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, Eq. (1) and (3). The
        inner loss is a sum over entries weighted by attention, as in both paper and
        authors' code.
    """

    #: The keys, values and attention; made at build.
    dictionary: NeighborDictionary

    def __init__(
        self,
        head: keras.layers.Layer,
        num_neighbors: int,
        metric: str = "cosine",
        temperature: float = 0.2,
        value_scale: float = 10.0,
        fixed_values: Any = False,
        inner_steps: int = 1,
        inner_learning_rate: float = 0.05,
        learning_rate_form: str = "scalar",
        dictionary_dropout: float = 0.5,
        dropout_scope: str = "example",
        chunk_size: int | None = None,
        task: str = "classification",
        inner_loop: str = "auto",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.compute_dtype != self.variable_dtype:
            self.dtype_policy = keras.dtype_policies.get(self.variable_dtype)
        if not isinstance(head, keras.layers.Layer):
            raise ValueError(
                f"`head` must be a Keras layer or model. Received: head={head!r}"
            )
        self.head = head
        self.num_neighbors = validation.positive_integer(num_neighbors, "num_neighbors")
        self.metric = metric
        self.temperature = temperature
        self.value_scale = value_scale
        self.task = validation.one_of(task, inner_loss.LOSSES, "task")
        self.inner_steps = validation.positive_integer(inner_steps, "inner_steps")
        self.inner_learning_rate = inner_learning_rate
        self.learning_rate_form = learning_rate_form
        self.dictionary_dropout = validation.fraction(
            dictionary_dropout, "dictionary_dropout"
        )
        self.dropout_scope = dropout_scope
        self.chunk_size = (
            None
            if chunk_size is None
            else validation.positive_integer(chunk_size, "chunk_size")
        )
        self.inner_loop = validation.one_of(inner_loop, INNER_LOOPS, "inner_loop")
        self.seed = seed
        self.input_spec = keras.layers.InputSpec(ndim=2)
        self.rate = InnerLearningRate(
            inner_learning_rate,
            learning_rate_form,
            dtype=self.dtype_policy,
            name="inner_learning_rate",
        )
        # The number of values is the head's width, known at build; this checks the rest.
        self.fixed_values = fixed_values
        width = (1, *np.shape(fixed_values))[-1]
        self.fixed_values = self._make_dictionary(width).fixed_values
        self._stages: list[dual_form.DenseStage] | None = None

    def _make_dictionary(self, num_values: int) -> NeighborDictionary:
        return NeighborDictionary(
            self.num_neighbors,
            num_values,
            metric=self.metric,
            temperature=self.temperature,
            value_scale=self.value_scale,
            fixed_values=self.fixed_values,
            dropout=self.dictionary_dropout,
            dropout_scope=self.dropout_scope,
            task=self.task,
            seed=self.seed,
            dtype=self.dtype_policy,
            name="dictionary",
        )

    @property
    def active_inner_loop(self) -> str:
        """`"dual"` or `"tape"`: the way the built layer adapts."""
        if not self.built:
            raise ValueError(
                "`active_inner_loop` is known once the layer is built. Received: "
                f"unbuilt layer {self.name!r} with inner_loop={self.inner_loop!r}"
            )
        return "tape" if self._stages is None else "dual"

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(ndim=2, axes={-1: features})
        if not self.head.built:
            self.head.build((None, features))
        outputs = self.head.compute_output_shape((None, features))
        if self.task == "classification":
            _require_logits(self.head, outputs)
        elif len(outputs) != 2 or outputs[-1] is None:
            raise ValueError(
                "`head` must map features to outputs of shape (batch, outputs). "
                f"Received: output shape {tuple(outputs)}"
            )
        self._stages = self._choose_stages()
        if self._stages is None:
            self._require_tape(features)
            variables = nested_tape.adapted_variables(self.head)
        else:
            variables = [v for stage in self._stages for v in stage.variables]
        if not variables:
            raise ValueError(
                "`head` must have trainable variables to adapt. "
                f"Received: head {self.head.name!r} without any"
            )
        self.rate.build_for([tuple(variable.shape) for variable in variables])
        self.dictionary = self._make_dictionary(num_values=outputs[-1])
        self.dictionary.build((None, features))

    def _choose_stages(self) -> list[dual_form.DenseStage] | None:
        if self.inner_loop == "tape":
            return None
        try:
            stages = dual_form.stages_of(self.head)
        except dual_form.NoDualFormError as error:
            if self.inner_loop == "dual":
                raise ValueError(
                    '`inner_loop="dual"` needs a head of Dense and CosineDense layers: '
                    f'{error}. Use "tape" or "auto". Received: '
                    f"inner_loop={self.inner_loop!r}, head={self.head.name!r}"
                ) from error
            logging.info("%s adapts its head on a nested tape: %s.", self.name, str(error))
            return None
        return stages

    def _require_tape(self, features: int) -> None:
        if self.chunk_size is not None:
            raise ValueError(
                "`chunk_size` must be None on the nested tape, which holds a head for "
                "each example and all entries at once. Received: "
                f"chunk_size={self.chunk_size}, inner_loop={self.inner_loop!r}, "
                f"head={self.head.name!r}"
            )
        if self.head.non_trainable_variables:
            names = ", ".join(v.path for v in self.head.non_trainable_variables)
            raise ValueError(
                "`head` must not have non-trainable variables (batch norm, dropout, "
                "frozen layers): per-example finetuning has no use for them. Move them "
                f"to the backbone. Received: {names}"
            )
        symbolic = keras.KerasTensor((None, features), dtype=self.variable_dtype)
        if self.head(symbolic).dtype in ("float16", "bfloat16"):
            raise ValueError(
                "`head` must compute in float32 or wider on the nested tape. Give its "
                'layers dtype="float32". Received: a head that returns '
                f"{self.head(symbolic).dtype}"
            )
        require_second_derivatives(self.head, argument="head")

    def call(
        self, inputs: Tensor, training: bool | None = None, adapt: bool = True
    ) -> Tensor:
        if adapt:
            entries = self.dictionary.draw_entries(training)
            kept = None
            if entries is None:
                kept = self.dictionary.draw_kept(inputs, training)
            logits = self.adapted_logits(inputs, kept, entries)
        else:
            logits = self.head(inputs)
        return ops.cast(logits, self.compute_dtype)

    def adapted_logits(
        self, features: Tensor, kept: Tensor | None = None, entries: Tensor | None = None
    ) -> Tensor:
        """Returns the finetuned head's outputs, in float32 or wider.

        Args:
            features: Tensor of shape `(batch, features)`.
            kept: Boolean tensor, the dictionary entries that take part, see
                `NeighborDictionary.attention`; `None` is all of them.
            entries: Integer tensor, the numbers of the entries that take part where they
                are the same for all examples; instead of `kept`.

        Returns:
            Tensor of shape `(batch, classes)`, or `(batch, outputs)` in regression.
        """
        features = at_least_float32(features)
        arguments = self._inner_loop_arguments(features, kept, entries)
        return self._adapted_outputs(*arguments, features)

    def _adapted_outputs(
        self, keys: Tensor, values: Tensor, attention: Tensor, features: Tensor
    ) -> Tensor:
        arguments = (keys, values, attention, features, self.rate.rates(), self.inner_steps)
        loss = inner_loss.LOSSES[self.task]
        if self._stages is None:
            return nested_tape.adapted_outputs(self.head, *arguments, loss)
        chunk_size = self.chunk_size or dual_form.CACHED_ENTRIES
        return dual_form.adapted_outputs(self._stages, *arguments, loss, chunk_size)

    def adapted_weights(self, features: Tensor, kept: Tensor | None = None) -> list[Tensor]:
        """Returns each example's finetuned head weights.

        Args:
            features: Tensor of shape `(batch, features)`.
            kept: Boolean tensor, as in `adapted_logits`.

        Returns:
            One tensor per adapted variable of the head, in the head's order, each of
            shape `(batch, *variable_shape)`.
        """
        features = at_least_float32(features)
        arguments = self._inner_loop_arguments(features, kept)
        rates, steps = self.rate.rates(), self.inner_steps
        loss = inner_loss.LOSSES[self.task]
        if self._stages is None:
            return nested_tape.adapted_weights(self.head, *arguments, rates, steps, loss)
        chunk_size = self.chunk_size or dual_form.CACHED_ENTRIES
        return dual_form.adapted_weights(
            self._stages, *arguments, rates, steps, loss, chunk_size
        )

    def initialize_from(self, features: Any, y: Any, seed: int | None = None) -> None:
        """Sets the dictionary's entries to examples drawn at random.

        Args:
            features: Array of shape `(n, features)`.
            y: Labels or targets; see `NeighborDictionary.initialize_from`.
            seed: int or `None`, the seed of the draw.
        """
        if not self.built:
            self.build((None, *np.shape(features)[1:]))
        self.dictionary.initialize_from(features, y, seed)

    def neighbors(self, features: Tensor, k: int = 5) -> Neighbors:
        """Returns the `k` entries that each example looks at most, and what they do.

        Args:
            features: Tensor of shape `(batch, features)`.
            k: int, the number of entries; at most `num_neighbors`.

        Returns:
            `Neighbors(indices, weights, values, output_changes)`.

        Raises:
            ValueError: If `k` is not in `1..num_neighbors`.
        """
        k = validation.positive_integer(k, "k")
        if k > self.num_neighbors:
            raise ValueError(
                f"`k` must be at most `num_neighbors`. Received: k={k}, "
                f"num_neighbors={self.num_neighbors}"
            )
        features = ops.cast(features, self.variable_dtype)
        keys, values, attention = self._inner_loop_arguments(features, None)
        weights, indices = ops.top_k(attention, k)
        changes = contributions(
            lambda weights, queries: self._adapted_outputs(keys, values, weights, queries),
            attention,
            features,
            indices,
        )
        return Neighbors(indices, weights, ops.take(values, indices, axis=0), changes)

    def _inner_loop_arguments(
        self, features: Tensor, kept: Tensor | None, entries: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.dictionary.attention(features, kept, entries)
        dtype = attention.dtype
        keys = ops.cast(ops.convert_to_tensor(self.dictionary.keys), dtype)
        values = ops.cast(self.dictionary.values, dtype)
        if entries is not None:
            keys, values = (ops.take(rows, entries, axis=0) for rows in (keys, values))
        return keys, values, attention

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return tuple(self.head.compute_output_shape(tuple(input_shape)))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "head": keras.saving.serialize_keras_object(self.head),
            "num_neighbors": self.num_neighbors,
            "metric": self.metric,
            "temperature": self.temperature,
            "value_scale": self.value_scale,
            "fixed_values": self.fixed_values,
            "inner_steps": self.inner_steps,
            "inner_learning_rate": self.inner_learning_rate,
            "learning_rate_form": self.learning_rate_form,
            "dictionary_dropout": self.dictionary_dropout,
            "dropout_scope": self.dropout_scope,
            "chunk_size": self.chunk_size,
            "task": self.task,
            "inner_loop": self.inner_loop,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MetaNeighborhoodHead:
        config = dict(config)
        config["head"] = keras.saving.deserialize_keras_object(config["head"])
        return cls(**config)


def _require_logits(head: keras.layers.Layer, output_shape: tuple[int | None, ...]) -> None:
    if len(output_shape) != 2 or output_shape[-1] is None or output_shape[-1] < 2:
        raise ValueError(
            "`head` must map features to logits of at least two classes, of shape "
            '(batch, classes), or be given task="regression". '
            f"Received: output shape {tuple(output_shape)}"
        )
    last = head.layers[-1] if isinstance(head, keras.Sequential) else head
    squashing = (keras.activations.softmax, keras.activations.sigmoid)
    if (
        isinstance(last, keras.layers.Softmax)
        or getattr(last, "activation", None) in squashing
    ):
        raise ValueError(
            "`head` must return logits, without a softmax or sigmoid at its end. "
            f"Received: head={head.name!r} ending in layer {last.name!r}"
        )

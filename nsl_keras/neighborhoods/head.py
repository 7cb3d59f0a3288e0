"""The layer that adapts a head to each example's neighbours, then predicts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from absl import logging
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, largest
from nsl_keras.neighborhoods.dictionary import NeighborDictionary
from nsl_keras.neighborhoods.dual_form import (
    CACHED_ENTRIES,
    DualForm,
    NoDualFormError,
    stages_of,
)
from nsl_keras.neighborhoods.explain import Nearest, Neighbors, output_changes
from nsl_keras.neighborhoods.inner_loop import (
    LOSSES,
    Entries,
    InnerLearningRate,
    InnerLoop,
    NestedTape,
)
from nsl_keras.training.checks import require_logits
from nsl_keras.training.second_order import require_second_derivatives

INNER_LOOPS = ("auto", "dual", "tape")


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
    It can follow any features in a functional model. Under a mixed-precision policy it
    computes in, and returns, float32.

    Args:
        head: A Keras layer or model from features to logits, or to a regression's
            outputs, without state such as moving statistics. `Dense`, `CosineDense` and
            `Sequential` stacks of them adapt in the dual form; everything else on a
            nested tape. A `CosineDense` layer's scale is trained, but not adapted; frozen
            layers (`trainable=False`) adapt, but are not trained.
        dictionary: `NeighborDictionary`, or the number of its entries `S`: then everything
            else has its default. `num_values` and `task`, where they are `None`, are taken
            from the head.
        inner_steps: int, the number of inner steps. Attention is computed once for all.
            Memory grows with the steps: with more than one every example has weights.
        inner_learning_rate: float above 0, the start value of the rate.
        learning_rate_form: `"scalar"`: one learned rate; `"diagonal"`: one for each row
            of each kernel and one for each bias; `"fixed"`: not trained. Learned rates
            enter through their absolute value.
        chunk_size: int or `None`, the number of entries whose terms for every example are
            held at once, in the forward pass and, computed anew, in the backward pass.
            It bounds memory in the dual form where there are such terms, in a cosine
            layer and wherever `inner_steps` is above 1; results change by rounding only.
            `None` stands for 512, which stay in a processor's cache; accelerators may
            like more. Attention, of shape `(batch, num_neighbors)`, is held whole.
        task: `"classification"` or `"regression"`: the inner loss, and what values are.
        inner_loop: `"dual"`: adaptation as attention over the dictionary, for dense
            heads; `"tape"`: a vectorized nested gradient tape, for any head; `"auto"`:
            dual where the head allows it. The two agree to rounding; `active_inner_loop`
            tells which one runs.
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
            holds state, has an activity regularizer or weights of another dtype, computes
            in half precision on the tape, or cannot be treated by `inner_loop="dual"` (the
            error names the layer); if TensorFlow has no exact second derivative of a layer
            (layer and group normalization, resizing, softsign); if `chunk_size` is given
            for the tape; and if the dictionary has another `num_values` or `task`. At
            build and at a call, if the head has LoRA or quantized weights.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> inputs = keras.Input((28, 28, 1))
    >>> features = keras.layers.Dense(64)(keras.layers.Flatten()(inputs))
    >>> head = nsl_keras.layers.CosineDense(10)
    >>> dictionary = nsl_keras.layers.NeighborDictionary(100, temperature=0.1)
    >>> logits = nsl_keras.layers.MetaNeighborhoodHead(head, dictionary)(features)
    >>> model = keras.Model(inputs, logits)
    >>> tuple(model(keras.ops.ones((2, 28, 28, 1))).shape)
    (2, 10)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, Eq. (1) and (3). The
        inner loss is a sum over entries weighted by attention, as in both paper and
        authors' code.
    """

    #: How the head is finetuned; made at build.
    _finetuning: InnerLoop

    def __init__(
        self,
        head: keras.layers.Layer,
        dictionary: NeighborDictionary | int,
        inner_steps: int = 1,
        inner_learning_rate: float = 0.05,
        learning_rate_form: str = "scalar",
        chunk_size: int | None = None,
        task: str = "classification",
        inner_loop: str = "auto",
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
        self.task = validation.one_of(task, LOSSES, "task")
        self.inner_steps = validation.number_of_steps(inner_steps, "inner_steps")
        self.rate = InnerLearningRate(
            inner_learning_rate,
            learning_rate_form,
            dtype=self.dtype_policy,
            name="inner_learning_rate",
        )
        self.inner_learning_rate = self.rate.initial
        self.learning_rate_form = self.rate.form
        self.dictionary = (
            dictionary
            if isinstance(dictionary, NeighborDictionary)
            else NeighborDictionary(
                validation.positive_integer(dictionary, "dictionary"),
                dtype=self.dtype_policy,
                name="dictionary",
            )
        )
        self.chunk_size = validation.optional(
            validation.positive_integer, chunk_size, "chunk_size"
        )
        self.inner_loop = validation.one_of(inner_loop, INNER_LOOPS, "inner_loop")
        self.input_spec = keras.layers.InputSpec(ndim=2)

    @property
    def active_inner_loop(self) -> str:
        """`"dual"` or `"tape"`: the way the built layer adapts."""
        validation.built(self, "active_inner_loop")
        return "dual" if isinstance(self._finetuning, DualForm) else "tape"

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if self.built:
            return  # New rates would take the place of learned ones.
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(ndim=2, axes={-1: features})
        for each in (self.head, *rewiring.sublayers(self.head)):
            if getattr(each, "activity_regularizer", None) is not None:
                raise ValueError(
                    "`head` must not have an activity regularizer: it would penalize the "
                    f"outputs before adaptation. Received: layer {each.name!r} with one"
                )
        _require_plain_weights(self.head)
        if not self.head.built:
            self.head.build((None, features))
        outputs = self.head.compute_output_shape((None, features))
        if not isinstance(outputs, tuple) or any(
            isinstance(each, tuple) for each in outputs
        ):
            raise ValueError(
                "`head` must have one output, outside a list: several targets are the "
                f"columns of one, as of `Dense(2)`. Received: output shapes {outputs}"
            )
        if self.task == "classification":
            _require_logits(self.head, outputs)
        elif len(outputs) != 2 or outputs[-1] is None:
            raise ValueError(
                "`head` must map features to outputs of shape (batch, outputs). "
                f"Received: output shape {tuple(outputs)}"
            )
        self.dictionary.set_outputs(outputs[-1], self.task)
        require_second_derivatives(self.head, argument="head")
        self._finetuning = self._dual_form() or self._nested_tape(features)
        variables = self._finetuning.variables
        if not variables:
            raise ValueError(
                "`head` must have weights to adapt. "
                f"Received: head {self.head.name!r} without any"
            )
        for variable in variables:
            if _wide(variable.dtype) != _wide(self.variable_dtype):
                raise ValueError(
                    "`head` must have weights of the layer's own dtype, "
                    f"{self.variable_dtype}. Received: {variable.path!r} of dtype "
                    f"{variable.dtype}"
                )
        self.rate.build_for([tuple(variable.shape) for variable in variables])
        if not self.dictionary.built:
            self.dictionary.build((None, features))
        rewiring.pass_on_frozen(self)

    def _dual_form(self) -> DualForm | None:
        """Returns the dual form, if it is asked for and the head allows it."""
        if self.inner_loop == "tape":
            return None
        try:
            stages = stages_of(self.head)
        except NoDualFormError as error:
            if self.inner_loop == "dual":
                raise ValueError(
                    '`inner_loop="dual"` needs a head of Dense and CosineDense layers: '
                    f'{error}. Use "tape" or "auto". Received: '
                    f"inner_loop={self.inner_loop!r}, head={self.head.name!r}"
                ) from error
            logging.info("%s adapts its head on a nested tape: %s.", self.name, str(error))
            return None
        return DualForm(
            stages,
            self.rate,
            self.inner_steps,
            LOSSES[self.task],
            self.chunk_size or CACHED_ENTRIES,
        )

    def _nested_tape(self, features: int) -> NestedTape:
        if self.chunk_size is not None:
            raise ValueError(
                "`chunk_size` must be None on the nested tape, which holds a head for "
                "each example and all entries at once. Received: "
                f"chunk_size={self.chunk_size}, inner_loop={self.inner_loop!r}, "
                f"head={self.head.name!r}"
            )
        with rewiring.unfrozen(self.head):
            state = [variable.path for variable in self.head.non_trainable_variables]
        if state:
            raise ValueError(
                "`head` must not have state (batch norm's statistics, dropout's seeds): "
                "per-example finetuning has no use for it. Move such layers to the "
                f"backbone. Received: {', '.join(state)}"
            )
        symbolic = keras.KerasTensor((None, features), dtype=self.variable_dtype)
        if self.head(symbolic).dtype in ("float16", "bfloat16"):
            raise ValueError(
                "`head` must compute in float32 or wider on the nested tape. Give its "
                'layers dtype="float32". Received: a head that returns '
                f"{self.head(symbolic).dtype}"
            )
        return NestedTape(self.head, self.rate, self.inner_steps, LOSSES[self.task])

    def call(
        self, inputs: Tensor, training: bool | None = None, adapt: bool = True
    ) -> Tensor:
        if not validation.boolean(adapt, "adapt"):
            return ops.cast(self.head(inputs), self.compute_dtype)
        _require_plain_weights(self.head)  # Both may come to a layer that is built.
        queries = self._queries(inputs)
        entries, attention = self.dictionary.look_up(queries, training)
        outputs = self._finetuning.outputs(entries, attention, queries)
        return ops.cast(outputs, self.compute_dtype)

    def adapted_logits(self, features: Tensor, kept: Tensor | None = None) -> Tensor:
        """Returns the finetuned head's outputs, in float32 or wider.

        Args:
            features: Tensor of shape `(batch, features)`.
            kept: Boolean tensor, the dictionary entries that take part, see
                `NeighborDictionary.attention`; `None` is all of them.

        Returns:
            Tensor of shape `(batch, classes)`, or `(batch, outputs)` in regression.
        """
        validation.built(self, "adapted_logits")
        queries = self._queries(features)
        entries, attention = self.dictionary.look_up(queries, kept=kept)
        return self._finetuning.outputs(entries, attention, queries)

    def adapted_weights(self, features: Tensor, kept: Tensor | None = None) -> list[Tensor]:
        """Returns each example's finetuned head weights.

        Args:
            features: Tensor of shape `(batch, features)`.
            kept: Boolean tensor, as in `adapted_logits`.

        Returns:
            One tensor per adapted variable of the head, in the head's order, each of
            shape `(batch, *variable_shape)`.
        """
        validation.built(self, "adapted_weights")
        entries, attention = self.dictionary.look_up(self._queries(features), kept=kept)
        return self._finetuning.weights(entries, attention)

    def _queries(self, features: Tensor) -> Tensor:
        """Returns features in the dtype that head and dictionary compute in."""
        return ops.cast(features, _wide(self.variable_dtype))

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
        """Returns the `k` entries of largest attention for each example, and what they do.

        Args:
            features: Tensor of shape `(batch, features)`.
            k: int, the number of entries; at most `num_neighbors`.

        Returns:
            `Neighbors(indices, weights, values, output_changes)`.

        Raises:
            ValueError: If `k` is not in `1..num_neighbors`, or the layer is not built yet.
        """
        validation.built(self, "neighbors")
        entries, attention, nearest = self._look_up(features, k)
        changes = output_changes(
            lambda weights, queries: self._finetuning.outputs(entries, weights, queries),
            attention,
            self._queries(features),
            nearest.indices,
        )
        return Neighbors(*nearest, changes)

    def nearest(self, features: Tensor, k: int = 5) -> Nearest:
        """Returns the `k` entries of largest attention for each example.

        Args:
            features: Tensor of shape `(batch, features)`.
            k: int, the number of entries; at most `num_neighbors`.

        Returns:
            `Nearest(indices, weights, values)`: what `neighbors` returns but for what
            each entry adds to the outputs, which takes a gradient.

        Raises:
            ValueError: If `k` is not in `1..num_neighbors`, or the layer is not built yet.
        """
        validation.built(self, "nearest")
        return self._look_up(features, k)[-1]

    def _look_up(self, features: Tensor, k: int) -> tuple[Entries, Tensor, Nearest]:
        """Returns all entries, their attention, and the `k` heaviest entries."""
        k = validation.positive_integer(k, "k")
        if k > self.dictionary.num_neighbors:
            raise ValueError(
                f"`k` must be at most `num_neighbors`. Received: k={k}, "
                f"num_neighbors={self.dictionary.num_neighbors}"
            )
        entries, attention = self.dictionary.look_up(self._queries(features))
        weights, indices = largest(attention, k)
        values = ops.take(entries.values, indices, axis=0)
        return entries, attention, Nearest(indices, weights, values)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return tuple(self.head.compute_output_shape(tuple(input_shape)))

    def count_multiply_adds(self, input_shape: tuple[int | None, ...]) -> int | None:
        """Returns the multiply-adds of attention, finetuning and head, for one example.

        The first step's pass over the dictionary, which a batch makes once, is not among
        them. `None` on the nested tape, where they are not known.
        """
        features, entries = input_shape[-1], self.dictionary.num_neighbors
        if features is None or not isinstance(self._finetuning, DualForm):
            return None
        return entries * features + self._finetuning.count_multiply_adds(entries)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "head": keras.saving.serialize_keras_object(self.head),
            "dictionary": keras.saving.serialize_keras_object(self.dictionary),
            "inner_steps": self.inner_steps,
            "inner_learning_rate": self.inner_learning_rate,
            "learning_rate_form": self.learning_rate_form,
            "chunk_size": self.chunk_size,
            "task": self.task,
            "inner_loop": self.inner_loop,
            # Of a layer that no other config holds; older files have none.
            "rate_trainable": self.rate.trainable,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MetaNeighborhoodHead:
        config = with_dictionary(config)
        for part in ("head", "dictionary"):
            config[part] = keras.saving.deserialize_keras_object(config[part])
        rate_trainable = config.pop("rate_trainable", True)
        made = cls(**config)
        made.rate.trainable = rate_trainable
        return made


def _require_plain_weights(head: keras.layers.Layer) -> None:
    """Raises for LoRA and quantization, with which a step would adapt something else."""
    for layer in (head, *rewiring.sublayers(head)):
        low_rank = getattr(layer, "lora_enabled", False)
        if low_rank or getattr(layer, "quantization_mode", None):
            raise ValueError(
                "`head` must have neither LoRA nor quantized weights: it is finetuned for "
                "each example as it stands. Both may be in the backbone. Received: layer "
                f"{layer.name!r} {'with LoRA' if low_rank else 'with quantized weights'}"
            )


#: What a config held before it held a dictionary, by the dictionary's own names.
_FORMER_ARGUMENTS = {
    "num_neighbors": "num_neighbors",
    "metric": "metric",
    "temperature": "temperature",
    "value_scale": "value_scale",
    "fixed_values": "fixed_values",
    "dropout": "dictionary_dropout",
    "dropout_scope": "dropout_scope",
    "seed": "seed",
}


def with_dictionary(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config, in which former arguments became a dictionary."""
    config = dict(config)
    if "dictionary" not in config:
        arguments = {now: config.pop(then) for now, then in _FORMER_ARGUMENTS.items()}
        config["dictionary"] = keras.saving.serialize_keras_object(
            NeighborDictionary(**arguments, dtype=config.get("dtype"), name="dictionary")
        )
    return config


def _wide(dtype: str) -> str:
    """Returns float32, or a dtype that is wider."""
    return keras.backend.result_type(dtype, "float32")


def _require_logits(head: keras.layers.Layer, output_shape: tuple[int | None, ...]) -> None:
    if len(output_shape) != 2 or output_shape[-1] is None or output_shape[-1] < 2:
        raise ValueError(
            "`head` must map features to logits of at least two classes, of shape "
            '(batch, classes); a regression needs task="regression". '
            f"Received: output shape {tuple(output_shape)}"
        )
    require_logits(head, "head")

"""Recurrent cells with a neural similarity: `W^T M x` and `R^T M h`.

The cells are Keras's, with the same weights and dropout masks, and with `M` applied to the
vector that a kernel meets; all gates share the `M` of their kernel. Applied to vectors,
rather than to a kernel at every step, `M` costs less and leaves no copy of a kernel a step
for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor
from nsl_keras.inheritance import StandsOnKeras
from nsl_keras.similarity import matrices, predictors
from nsl_keras.similarity.neural_similarity import (
    NeuralSimilarity,
    VectorSimilarity,
    get_initializer,
)

#: The recurrent kernel's argument is that of the input kernel.
SAME = "same"


class CellSimilarity(VectorSimilarity):
    """Private: the `M` of one kernel of a cell, which keeps the kernel itself."""

    kernel = None
    bias = None

    def __init__(self, *, units: int, kernel_regularizer: Any, **arguments: Any) -> None:
        self.units = units
        self.kernel_regularizer = kernel_regularizer
        super().__init__(**arguments)

    @property
    def plain_width(self) -> int:
        return self.units

    def _get_predictor(self, predictor: Any) -> keras.layers.Layer | None:
        if not isinstance(predictor, str):
            return predictors.get(predictor)
        # A cell is called once a time step: batch norms would mix the statistics of all
        # steps, and update their moving averages from within a loop.
        return predictors.get(
            predictor,
            predictors.DenseSimilarityPredictor,
            batch_normalization=False,
            kernel_regularizer=self.kernel_regularizer,
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        if self.predictor is None:
            return
        with rewiring.unfrozen(self.predictor):
            state = [each.name for each in self.predictor.non_trainable_variables]
        if state:
            raise ValueError(
                "`predictor` of a cell must hold no state of its own, such as that of "
                "batch norms or dropout: it is called once a time step. "
                f"Received: a predictor with the state {state}"
            )

    def equivalent(self, kernel: Tensor) -> Tensor:
        self.require_static("equivalent_kernel")
        return super().equivalent(kernel)


class SimilarityCell(StandsOnKeras):
    """Private mixin, in front of one of Keras's recurrent cells."""

    def __init__(
        self,
        *args: Any,
        similarity: Any = "diagonal",
        recurrent_similarity: Any = SAME,
        block_size: int | None = None,
        recurrent_block_size: int | str | None = SAME,
        similarity_initializer: Any = "identity",
        similarity_regularizer: Any = None,
        similarity_constraint: Any = None,
        predictor: Any = None,
        recurrent_predictor: Any = SAME,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        validation.positive_integer(self.units, "units")
        for name in ("dropout", "recurrent_dropout"):
            # As given: Keras clips its attributes to 0 and 1.
            validation.fraction(kwargs.get(name, getattr(self, name)), name)
        if recurrent_similarity == SAME:
            recurrent_similarity = similarity
        if recurrent_block_size == SAME:
            recurrent_block_size = block_size
        if recurrent_predictor == SAME:
            recurrent_predictor = None if recurrent_similarity is None else predictor
            if not (recurrent_predictor is None or isinstance(predictor, str)):
                raise ValueError(
                    "`recurrent_predictor` must be given where `predictor` is a layer: "
                    "input and state have predictors of their own. "
                    f"Received: predictor={predictor!r}, recurrent_predictor='same'"
                )
        if similarity is None and recurrent_similarity is None:
            raise ValueError(
                "`similarity` and `recurrent_similarity` must not both be None. "
                f"Received: similarity=None, recurrent_similarity={recurrent_similarity}"
            )
        self.similarity = _similarity_or_none(similarity)
        self.recurrent_similarity = _similarity_or_none(recurrent_similarity)
        self.block_size = block_size
        self.recurrent_block_size = recurrent_block_size
        self.similarity_initializer = get_initializer(similarity_initializer)
        self.similarity_regularizer = keras.regularizers.get(similarity_regularizer)
        self.similarity_constraint = keras.constraints.get(similarity_constraint)
        # The static arguments reach the kernels with a static `M`. If there is none, they
        # reach all, which refuse them.
        pairs = (similarity, predictor), (recurrent_similarity, recurrent_predictor)
        all_dynamic = all(kind is None or given is not None for kind, given in pairs)
        self.input_similarity = self._make_cell_similarity(
            "",
            predictor,
            all_dynamic,
            block_size=block_size,
            kernel_regularizer=self.kernel_regularizer,
        )
        self.state_similarity = self._make_cell_similarity(
            "recurrent_",
            recurrent_predictor,
            all_dynamic,
            block_size=recurrent_block_size,
            kernel_regularizer=self.recurrent_regularizer,
        )

    def _make_cell_similarity(
        self, prefix: str, predictor: Any, all_dynamic: bool, **options: Any
    ) -> CellSimilarity | None:
        similarity = getattr(self, f"{prefix}similarity")
        if similarity is None:
            if predictor is not None:
                raise ValueError(
                    f"`{prefix}predictor` must be None where `{prefix}similarity` is "
                    f"None. Received: {prefix}predictor={predictor!r}"
                )
            return None
        if predictor is None or all_dynamic:
            options |= {
                "similarity_initializer": self.similarity_initializer,
                "similarity_regularizer": self.similarity_regularizer,
                "similarity_constraint": self.similarity_constraint,
            }
        return CellSimilarity(
            units=self.units,
            similarity=similarity,
            predictor=predictor,
            dtype=self.dtype_policy,
            name=f"{prefix}similarity",
            **options,
        )

    @property
    def predictor(self) -> keras.layers.Layer | None:
        """What predicts the `M` of the input kernel; `None` where that is static."""
        return None if self.input_similarity is None else self.input_similarity.predictor

    @property
    def recurrent_predictor(self) -> keras.layers.Layer | None:
        """What predicts the `M` of the recurrent kernel; `None` where that is static."""
        return None if self.state_similarity is None else self.state_similarity.predictor

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        validation.known_axis(input_shape, -1, "last axis")
        super().build(input_shape)
        if self.input_similarity is not None:
            self.input_similarity.build(tuple(input_shape))
        if self.state_similarity is not None:
            self.state_similarity.build((input_shape[0], self.units))
        rewiring.pass_on_frozen(self)

    def _input_products(self, inputs: Tensor, training: bool) -> Tensor:
        """Returns `W^T M x` for all gates, side by side."""
        drops = training and 0 < self.dropout < 1
        return gate_products(
            inputs,
            self.get_dropout_mask(inputs) if drops else None,
            self.kernel,
            comparison(self.input_similarity, inputs, training),
        )

    def _state_products(self, state: Tensor, training: bool) -> Tensor:
        """Returns `R^T M h` for all gates, side by side."""
        return gate_products(
            state,
            self._state_masks(state, training),
            self.recurrent_kernel,
            comparison(self.state_similarity, state, training),
        )

    def _state_masks(self, state: Tensor, training: bool) -> Any:
        drops = training and 0 < self.recurrent_dropout < 1
        return self.get_recurrent_dropout_mask(state) if drops else None

    @property
    def similarity_matrix(self) -> Tensor:
        """The static block `M_s` of the input kernel.

        Raises:
            ValueError: If the cell has none, predicts it, or is not built yet.
        """
        return _static_matrix(self, "similarity", self.input_similarity)

    @property
    def recurrent_similarity_matrix(self) -> Tensor:
        """The static block `M_s` of the recurrent kernel.

        Raises:
            ValueError: If the cell has none, predicts it, or is not built yet.
        """
        return _static_matrix(self, "recurrent_similarity", self.state_similarity)

    @property
    def equivalent_kernel(self) -> Tensor:
        """The kernel `M^T W` that meets the input of the plain cell.

        Raises:
            ValueError: If `M` is predicted, or the cell is not built yet.
        """
        return self._equivalent("kernel", self.input_similarity)

    @property
    def equivalent_recurrent_kernel(self) -> Tensor:
        """The kernel `M^T R` that meets the state of the plain cell.

        Raises:
            ValueError: If `M` is predicted, or the cell is not built yet.
        """
        return self._equivalent("recurrent_kernel", self.state_similarity)

    def _equivalent(self, name: str, part: CellSimilarity | None) -> Tensor:
        if not self.built:
            raise ValueError(
                f"The equivalent of `{name}` needs a built cell. Call the "
                f"`keras.layers.RNN` around cell {self.name!r} on data first."
            )
        kernel = ops.convert_to_tensor(getattr(self, name))
        return kernel if part is None else part.equivalent(kernel)

    def fold(self) -> keras.layers.Layer:
        """Returns a new cell of Keras's own that computes the same.

        This cell stays as it is, and the two share no weights. To put it into a model, wrap
        it in `keras.layers.RNN`.

        Raises:
            ValueError: If one of the similarities is predicted, or the cell is not built.
        """
        # Copies: on JAX the two would share buffers, which a training step donates.
        kernels = [
            ops.convert_to_numpy(kernel)
            for kernel in (self.equivalent_kernel, self.equivalent_recurrent_kernel)
        ]
        plain = self.plain.from_config(super().get_config())
        plain.build((None, self.kernel.shape[0]))
        plain.kernel.assign(kernels[0])
        plain.recurrent_kernel.assign(kernels[1])
        if self.use_bias:
            plain.bias.assign(ops.convert_to_numpy(self.bias.value))
        rewiring.copy_activations(self, plain)
        return plain

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "similarity": _serialize(self.similarity),
            "recurrent_similarity": _serialize(self.recurrent_similarity),
            "block_size": self.block_size,
            "recurrent_block_size": self.recurrent_block_size,
            "similarity_initializer": keras.initializers.serialize(
                self.similarity_initializer
            ),
            "similarity_regularizer": keras.regularizers.serialize(
                self.similarity_regularizer
            ),
            "similarity_constraint": keras.constraints.serialize(
                self.similarity_constraint
            ),
            "predictor": keras.saving.serialize_keras_object(self.predictor),
            "recurrent_predictor": keras.saving.serialize_keras_object(
                self.recurrent_predictor
            ),
        }


def _similarity_or_none(identifier: Any) -> matrices.Similarity | None:
    return None if identifier is None else matrices.get(identifier)


def _serialize(similarity: matrices.Similarity | None) -> Any:
    return None if similarity is None else matrices.serialize(similarity)


def _static_matrix(
    cell: SimilarityCell, name: str, similarity: CellSimilarity | None
) -> Tensor:
    if similarity is None:
        raise ValueError(
            f"The matrix of `{name}` needs one. Received: cell {cell.name!r} with "
            f"{name}=None"
        )
    return similarity.similarity_matrix


def comparison(
    similarity: CellSimilarity | None, vectors: Tensor, training: bool
) -> Callable[[Tensor], Tensor]:
    """Returns the function `v -> M v`, whose `M` is predicted from undropped vectors."""
    if similarity is None:
        return lambda compared: compared
    parameters = similarity.parameters(vectors, training)
    return functools.partial(similarity.compare, parameters)


def gate_products(
    vectors: Tensor, masks: Any, kernel: Any, compare: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns `W^T M (mask * v)` for each gate of a kernel, side by side.

    Args:
        vectors: Tensor of shape `(batch, n)`.
        masks: Dropout masks: one a gate in a list, one for all gates, or `None`.
        kernel: The gates' kernels, of shape `(n, gates * units)`.
        compare: The function `v -> M v`.
    """
    if not isinstance(masks, list):
        dropped = vectors if masks is None else vectors * masks
        return ops.matmul(compare(dropped), kernel)
    kernels = ops.split(ops.convert_to_tensor(kernel), len(masks), axis=-1)
    products = [
        ops.matmul(compare(vectors * mask), each)
        for mask, each in zip(masks, kernels, strict=True)
    ]
    return ops.concatenate(products, axis=-1)


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilaritySimpleRNNCell(SimilarityCell, keras.layers.SimpleRNNCell):
    """Simple recurrent cell with a bilinear similarity, for `keras.layers.RNN`.

        h_t = activation(W^T M_x x_t + b + R^T M_h h_{t-1})

    With default initializers the static cell equals `keras.layers.SimpleRNNCell`: `M_x`
    and `M_h` start at the identity. `NeuralSimilarityGRUCell` tells what `M_x`, `M_h`,
    their blocks and their predictors are.

    Args:
        Those of `keras.layers.SimpleRNNCell`, and:
        similarity: As in `NeuralSimilarityGRUCell`, like all that follow.
        recurrent_similarity: Similarity of `R`; `"same"` as `similarity`, `None` for none.
        block_size: int that divides the input's features, or `None`.
        recurrent_block_size: int that divides `units`, `None`, or `"same"`.
        similarity_initializer: Initializer of the static blocks.
        similarity_regularizer: Regularizer of the static similarities' parameters.
        similarity_constraint: Constraint on the static similarities' parameters.
        predictor: Name or layer, `None` for a static `M_x`.
        recurrent_predictor: Name or layer, `None` for a static `M_h`, or `"same"`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: The state `h`, of shape `(batch, units)`, alone or in a list.
        training: bool, whether to drop.

    Input shape:
        `(batch, features)`, one time step.

    Output shape:
        `(batch, units)`.

    Raises:
        ValueError: As `NeuralSimilarityGRUCell`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> cell = nsl_keras.layers.NeuralSimilaritySimpleRNNCell(8, similarity="symmetric")
    >>> tuple(keras.layers.RNN(cell)(keras.ops.ones((2, 5, 4))).shape)
    (2, 8)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), as
        `NeuralSimilarityGRUCell`.
    """

    def call(
        self, inputs: Tensor, states: Any, training: bool = False
    ) -> tuple[Tensor, Any]:
        nested = isinstance(states, (list, tuple))
        state = states[0] if nested else states
        outputs = self._input_products(inputs, training)
        if self.use_bias:
            outputs = outputs + self.bias
        outputs = self.activation(outputs + self._state_products(state, training))
        return outputs, [outputs] if nested else outputs


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityGRUCell(SimilarityCell, keras.layers.GRUCell):
    """Gated recurrent cell with a bilinear similarity, for `keras.layers.RNN`.

    With default initializers the static cell equals `keras.layers.GRUCell`: `M_x` and
    `M_h` start at the identity. For the gates `z` (update) and `r` (reset),

        z = s(W_z^T M_x x_t + R_z^T M_h h_{t-1} + b_z)         r = the same with W_r, R_r
        c = activation(W_c^T M_x x_t + r * (R_c^T M_h h_{t-1} + b'_c) + b_c)
        h_t = z * h_{t-1} + (1 - z) * c

    with `s` the `recurrent_activation`; `reset_after=False` has
    `R_c^T M_h (r * h_{t-1})` in `c`. `W` and `R` hold the kernels of all gates, which share
    `M_x` and `M_h`: `M = diag(M_s, ..., M_s)` with one block of `block_size x block_size`,
    feature `i = block * block_size + t`; without a block size `M = M_s`.

    *Static*: `M_x` and `M_h` are weights, and `fold()` returns Keras's cell with the
    kernels `M_x^T W` and `M_h^T R`, equal up to the rounding of the compute dtype. Fold
    before you pass weights on: Keras's cell loads a file of this one's without `M_x` and
    `M_h`, and without an error.

    *Dynamic*: each `M` is the identity plus what a predictor sees, at every step, in the
    vector that the `M` meets: `M_x(x_t)` and `M_h(h_{t-1})`, before dropout and reset.
    Predictors made by name have no batch norm, which would mix the statistics of all
    steps. An unconstrained `M` predicted from `n` features without blocks holds
    `batch * n^2` numbers a step.

    Args:
        Those of `keras.layers.GRUCell`, and:
        similarity: Similarity of `W`: `"diagonal"`, `"unconstrained"`, `"symmetric"`,
            `"positive_semidefinite"`, `"sparse"`, a `nsl_keras.similarities.Similarity`,
            or `None` for none.
        recurrent_similarity: Similarity of `R`: the same, or `"same"` as `similarity`.
        block_size: int that divides the input's features, or `None` for one block.
        recurrent_block_size: int that divides `units`, `None` for one block, or `"same"`
            as `block_size`.
        similarity_initializer: Initializer of the static blocks `M_s`.
        similarity_regularizer: Regularizer of the static similarities' parameters.
        similarity_constraint: Constraint on the static similarities' parameters.
        predictor: `None` for a static `M_x`; `"sphere"`, `"full_sphere"`, `"mlp"`, or a
            layer without batch norm or dropout that maps a vector to the parameters of its
            `M`: a `nsl_keras.predictors.DenseSimilarityPredictor` with
            `batch_normalization=False`, or your own. The kernels of a predictor given by
            name have the `kernel_regularizer`.
        recurrent_predictor: The same for `M_h`, or `"same"` for one of the kind that
            `predictor` names. To be given where `predictor` is a layer. The kernels of a
            predictor given by name have the `recurrent_regularizer`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: The state `h`, of shape `(batch, units)`, alone or in a list.
        training: bool, whether to drop.

    Input shape:
        `(batch, features)`, one time step.

    Output shape:
        `(batch, units)`.

    Raises:
        ValueError: For arguments outside the ranges above, if both similarities are `None`,
            for the similarity `"full"`, for static similarity arguments or a static kind
            (`"sparse"`) with a predictor, or a layer as `predictor` alone, at construction;
            for sizes that a block size does not divide, or a predictor with state or
            another output shape, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> sequences = keras.random.normal((2, 5, 12), seed=0)
    >>> cell = nsl_keras.layers.NeuralSimilarityGRUCell(
    ...     8, similarity="unconstrained", block_size=4)
    >>> recurrent = keras.layers.RNN(cell, return_sequences=True)
    >>> tuple(recurrent(sequences).shape), tuple(cell.similarity_matrix.shape)
    ((2, 5, 8), (4, 4))
    >>> plain = keras.layers.RNN(cell.fold(), return_sequences=True)
    >>> bool(keras.ops.max(keras.ops.abs(plain(sequences) - recurrent(sequences))) < 1e-5)
    True
    >>> dynamic = nsl_keras.layers.NeuralSimilarityGRUCell(8, predictor="sphere")
    >>> tuple(keras.layers.Bidirectional(keras.layers.RNN(dynamic))(sequences).shape)
    (2, 16)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 1 ("NSL can easily
        be applied to fully connected networks and recurrent networks") and Section 3.1;
        one `M` for all kernels of a layer. The paper says no more about recurrent
        networks, and the authors released no code for them.
    """

    def call(
        self, inputs: Tensor, states: Any, training: bool = False
    ) -> tuple[Tensor, Any]:
        nested = isinstance(states, (list, tuple))
        state = states[0] if nested else states
        x = self._input_products(inputs, training)
        if self.use_bias:
            bias = ops.convert_to_tensor(self.bias)
            x = x + (bias[0] if self.reset_after else bias)
        x_update, x_reset, x_candidate = ops.split(x, 3, axis=-1)
        if self.reset_after:
            h = self._state_products(state, training)
            if self.use_bias:
                h = h + bias[1]
            h_update, h_reset, h_candidate = ops.split(h, 3, axis=-1)
            reset = self.recurrent_activation(x_reset + h_reset)
            h_candidate = reset * h_candidate
        else:
            # The candidate's kernel meets another vector than the gates', the same `M`.
            compare = comparison(self.state_similarity, state, training)
            masks = self._state_masks(state, training)
            gate_masks, mask = (None, None) if masks is None else (masks[:2], masks[2])
            kernel = ops.convert_to_tensor(self.recurrent_kernel)
            gates, last = kernel[:, : 2 * self.units], kernel[:, 2 * self.units :]
            h = gate_products(state, gate_masks, gates, compare)
            h_update, h_reset = ops.split(h, 2, axis=-1)
            reset = self.recurrent_activation(x_reset + h_reset)
            h_candidate = gate_products(reset * state, mask, last, compare)
        update = self.recurrent_activation(x_update + h_update)
        candidate = self.activation(x_candidate + h_candidate)
        outputs = update * state + (1 - update) * candidate
        return outputs, [outputs] if nested else outputs


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityLSTMCell(SimilarityCell, keras.layers.LSTMCell):
    """Long short-term memory cell with a bilinear similarity, for `keras.layers.RNN`.

    With default initializers the static cell equals `keras.layers.LSTMCell`: `M_x` and
    `M_h` start at the identity. For the gates `i` (input), `f` (forget) and `o` (output),

        i = s(W_i^T M_x x_t + R_i^T M_h h_{t-1} + b_i)         f, o: likewise
        c_t = f * c_{t-1} + i * activation(W_c^T M_x x_t + R_c^T M_h h_{t-1} + b_c)
        h_t = o * activation(c_t)

    with `s` the `recurrent_activation`. The carry `c` meets no kernel, and no `M`.
    `NeuralSimilarityGRUCell` tells what `M_x`, `M_h`, their blocks and their predictors
    are.

    Args:
        Those of `keras.layers.LSTMCell`, and:
        similarity: As in `NeuralSimilarityGRUCell`, like all that follow.
        recurrent_similarity: Similarity of `R`; `"same"` as `similarity`, `None` for none.
        block_size: int that divides the input's features, or `None`.
        recurrent_block_size: int that divides `units`, `None`, or `"same"`.
        similarity_initializer: Initializer of the static blocks.
        similarity_regularizer: Regularizer of the static similarities' parameters.
        similarity_constraint: Constraint on the static similarities' parameters.
        predictor: Name or layer, `None` for a static `M_x`.
        recurrent_predictor: Name or layer, `None` for a static `M_h`, or `"same"`.

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: List of the state `h` and the carry `c`, each `(batch, units)`.
        training: bool, whether to drop.

    Input shape:
        `(batch, features)`, one time step.

    Output shape:
        `(batch, units)`.

    Raises:
        ValueError: As `NeuralSimilarityGRUCell`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> cell = nsl_keras.layers.NeuralSimilarityLSTMCell(8, predictor="sphere")
    >>> tuple(keras.layers.RNN(cell)(keras.ops.ones((2, 5, 4))).shape)
    (2, 8)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), as
        `NeuralSimilarityGRUCell`.
    """

    def call(
        self, inputs: Tensor, states: Any, training: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        state, carry = states
        products = self._input_products(inputs, training)
        products = products + self._state_products(state, training)
        if self.use_bias:
            products = products + self.bias
        x_input, x_forget, x_carry, x_output = ops.split(products, 4, axis=-1)
        input_gate, forget_gate, output_gate = map(
            self.recurrent_activation, (x_input, x_forget, x_output)
        )
        carry = forget_gate * carry + input_gate * self.activation(x_carry)
        outputs = output_gate * self.activation(carry)
        return outputs, [outputs, carry]


def cells_of(layer: keras.layers.Layer) -> list[SimilarityCell]:
    """Returns the cells with a similarity in `keras.layers.RNN` or `Bidirectional`."""
    if type(layer) not in (keras.layers.RNN, keras.layers.Bidirectional):
        return []
    return [each for each in rewiring.sublayers(layer) if isinstance(each, SimilarityCell)]


def similarities_of(layer: keras.layers.Layer) -> list[NeuralSimilarity]:
    """Returns a layer if it has a similarity, or the similarities of its cells."""
    if isinstance(layer, NeuralSimilarity):
        return [layer]
    return [
        each for each in rewiring.sublayers(layer) if isinstance(each, NeuralSimilarity)
    ]


def is_foldable(layer: keras.layers.Layer) -> bool:
    """Whether `convert.fold` can make a plain layer of this one.

    Layers of classes derived from the package's cannot be folded: they may compute
    something else.
    """
    parts = similarities_of(layer)
    ours = type(layer).__module__.startswith("nsl_keras.")
    is_static = bool(parts) and all(part.predictor is None for part in parts)
    return is_static and (ours or bool(cells_of(layer)))

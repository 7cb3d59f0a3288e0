"""Recurrent cells with a neural similarity: `W^T M x` and `R^T M h` in their gates.

They are Keras's cells, with the same weights and dropout masks, and `M` applied to the
vector that a kernel meets; all gates share the `M` of their kernel. Applied to vectors,
rather than to a kernel at every step, `M` costs less and leaves no copy of a kernel a step
for the backward pass.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.similarity import matrices
from nsl_keras.similarity.similarity_vector import SimilarityVector

Tensor = Any

#: The recurrent kernel's argument is that of the input kernel.
SAME = "same"


class CellSimilarity(SimilarityVector):
    """Private: the `M` of one kernel of a cell, which keeps the kernel itself."""

    kernel = None
    bias = None
    # A cell is called once a time step: batch norms would mix the statistics of all steps,
    # and update their moving averages from within a loop.
    predictor_batch_normalization = False

    def __init__(self, *, name: str, dtype: Any, **arguments: Any) -> None:
        super().__init__(name=name, dtype=dtype)
        self._store_vector_similarity(
            learn_shape=False, shape_threshold=0.5, kernel_trainable=True, **arguments
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self._build_vector_similarity(input_shape)
        if self.predictor is None or not self.predictor.trainable:
            return
        state = [variable.name for variable in self.predictor.non_trainable_variables]
        if state:
            raise ValueError(
                "`predictor` of a cell must hold no state of its own, such as that of "
                "batch norms or dropout: it is called once a time step. "
                f"Received: a predictor with the state {state}"
            )

    def parameters(self, vectors: Tensor, training: bool | None) -> Tensor:
        """Returns the parameters of `M`, predicted from vectors `(batch, n)` or static."""
        return self._parameters(vectors, training)

    def compare(self, parameters: Tensor, vectors: Tensor) -> Tensor:
        """Returns `M v` for vectors `(batch, n)`."""
        return self._compare(parameters, vectors)

    def equivalent(self, kernel: Tensor) -> Tensor:
        """Returns `M^T W` for a kernel `(n, units)`."""
        self._require_static("equivalent_kernel")
        return self._unflatten(self._equivalent(self._flatten(kernel)))


class SimilarityCell(keras.layers.Layer):
    """Private mixin, in front of one of Keras's recurrent cells."""

    #: Keras's cell, which the static cell folds to.
    plain: type[keras.layers.Layer]

    def _store_cell_similarity(
        self,
        *,
        similarity: Any,
        recurrent_similarity: Any,
        block_size: int | None,
        recurrent_block_size: int | str | None,
        similarity_initializer: Any,
        similarity_regularizer: Any,
        similarity_constraint: Any,
        predictor: Any,
        recurrent_predictor: Any,
    ) -> None:
        """Validates and stores the arguments; call it last in `__init__`."""
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
        self.similarity = None if similarity is None else matrices.get(similarity)
        self.recurrent_similarity = (
            None if recurrent_similarity is None else matrices.get(recurrent_similarity)
        )
        self.block_size = block_size
        self.recurrent_block_size = recurrent_block_size
        self.similarity_initializer = keras.initializers.get(similarity_initializer)
        self.similarity_regularizer = keras.regularizers.get(similarity_regularizer)
        self.similarity_constraint = keras.constraints.get(similarity_constraint)
        # A static argument reaches what is static; with nothing static it is refused.
        all_dynamic = (similarity is None or predictor is not None) and (
            recurrent_similarity is None or recurrent_predictor is not None
        )
        self.input_similarity = self._part(
            "", self.similarity, block_size, predictor, self.kernel_regularizer, all_dynamic
        )
        self.state_similarity = self._part(
            "recurrent_",
            self.recurrent_similarity,
            recurrent_block_size,
            recurrent_predictor,
            self.recurrent_regularizer,
            all_dynamic,
        )

    def _part(
        self,
        prefix: str,
        similarity: matrices.Similarity | None,
        block_size: Any,
        predictor: Any,
        predictor_regularizer: Any,
        all_dynamic: bool,
    ) -> CellSimilarity | None:
        """Returns the similarity of one kernel, `None` where it is left out."""
        if similarity is None:
            if predictor is not None:
                raise ValueError(
                    f"`{prefix}predictor` must be None where `{prefix}similarity` is "
                    f"None. Received: {prefix}predictor={predictor!r}"
                )
            return None
        refused = predictor is None or all_dynamic
        return CellSimilarity(
            name=f"{prefix}similarity",
            dtype=self.dtype_policy,
            similarity=similarity,
            block_size=block_size,
            similarity_initializer=self.similarity_initializer if refused else "identity",
            similarity_regularizer=self.similarity_regularizer if refused else None,
            similarity_constraint=self.similarity_constraint if refused else None,
            predictor=predictor,
            predictor_regularizer=predictor_regularizer,
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

    def _input_product(self, inputs: Tensor, training: bool) -> Tensor:
        """Returns `W^T M x` for all gates, side by side."""
        drops = training and 0 < self.dropout < 1
        return _products(
            inputs,
            self.get_dropout_mask(inputs) if drops else None,
            self.kernel,
            self.input_similarity,
            _parameters(self.input_similarity, inputs, training),
        )

    def _state_product(self, state: Tensor, training: bool) -> Tensor:
        """Returns `R^T M h` for all gates, side by side."""
        return _products(
            state,
            self._state_mask(state, training),
            self.recurrent_kernel,
            self.state_similarity,
            _parameters(self.state_similarity, state, training),
        )

    def _state_mask(self, state: Tensor, training: bool) -> Any:
        drops = training and 0 < self.recurrent_dropout < 1
        return self.get_recurrent_dropout_mask(state) if drops else None

    @property
    def similarity_matrix(self) -> Tensor:
        """The static block `M_s` of the input kernel.

        Raises:
            ValueError: If the cell has none, predicts it, or is not built yet.
        """
        return self._part_with("similarity", self.input_similarity).similarity_matrix

    @property
    def recurrent_similarity_matrix(self) -> Tensor:
        """The static block `M_s` of the recurrent kernel.

        Raises:
            ValueError: If the cell has none, predicts it, or is not built yet.
        """
        part = self._part_with("recurrent_similarity", self.state_similarity)
        return part.similarity_matrix

    def _part_with(self, name: str, part: CellSimilarity | None) -> CellSimilarity:
        if part is None:
            raise ValueError(
                f"The matrix of `{name}` needs one. Received: cell {self.name!r} with "
                f"{name}=None"
            )
        return part

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
        # Copies: on JAX the two would share buffers, which training gives away.
        kernels = [
            ops.convert_to_numpy(kernel)
            for kernel in (self.equivalent_kernel, self.equivalent_recurrent_kernel)
        ]
        own = self._cell_config()
        plain = self.plain.from_config(
            {name: value for name, value in self.get_config().items() if name not in own}
        )
        plain.build((None, self.kernel.shape[0]))
        plain.kernel.assign(kernels[0])
        plain.recurrent_kernel.assign(kernels[1])
        if self.use_bias:
            plain.bias.assign(ops.convert_to_numpy(self.bias.value))
        return plain

    def _cell_config(self) -> dict[str, Any]:
        return {
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

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._cell_config()}


def _serialize(similarity: matrices.Similarity | None) -> Any:
    return None if similarity is None else matrices.serialize(similarity)


def _parameters(
    similarity: CellSimilarity | None, vectors: Tensor, training: bool
) -> Tensor | None:
    """Returns the parameters of `M`, which a predictor sees in the undropped vectors."""
    return None if similarity is None else similarity.parameters(vectors, training)


def _products(
    vectors: Tensor,
    masks: Any,
    kernel: Any,
    similarity: CellSimilarity | None,
    parameters: Tensor | None,
) -> Tensor:
    """Returns `W^T M (mask * v)` for each gate of a kernel, side by side.

    Args:
        vectors: Tensor of shape `(batch, n)`.
        masks: Dropout masks: one a gate in a list, one for all gates, or `None`.
        kernel: The gates' kernels, of shape `(n, gates * units)`.
        similarity: The similarity, `None` for the identity.
        parameters: Its parameters.
    """
    if isinstance(masks, list):
        parts = ops.split(ops.convert_to_tensor(kernel), len(masks), axis=-1)
        products = [
            _products(vectors, mask, part, similarity, parameters)
            for mask, part in zip(masks, parts, strict=True)
        ]
        return ops.concatenate(products, axis=-1)
    if masks is not None:
        vectors = vectors * masks
    if similarity is not None:
        vectors = similarity.compare(parameters, vectors)
    return ops.matmul(vectors, kernel)


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilaritySimpleRNNCell(SimilarityCell, keras.layers.SimpleRNNCell):
    """Simple recurrent cell with a bilinear similarity, for `keras.layers.RNN`.

        h_t = activation(W^T M_x x_t + b + R^T M_h h_{t-1})

    With default initializers the static cell equals `keras.layers.SimpleRNNCell`: `M_x`
    and `M_h` start at the identity. What `M_x`, `M_h`, their blocks and their predictors
    are is told at `NeuralSimilarityGRUCell`.

    Args:
        units: int, the size of the state.
        activation: Activation function, `None` for none.
        use_bias: bool, whether to add a bias.
        kernel_initializer: Initializer of the input kernel `W`.
        recurrent_initializer: Initializer of the recurrent kernel `R`.
        bias_initializer: Initializer of the bias.
        kernel_regularizer: Regularizer of `W`.
        recurrent_regularizer: Regularizer of `R`.
        bias_regularizer: Regularizer of the bias.
        kernel_constraint: Constraint on `W`.
        recurrent_constraint: Constraint on `R`.
        bias_constraint: Constraint on the bias.
        dropout: float in [0, 1), the part of the inputs that is dropped.
        recurrent_dropout: float in [0, 1), the part of the states that is dropped.
        seed: Seed of both dropouts.
        similarity: As in `NeuralSimilarityGRUCell`, like all that follow.
        recurrent_similarity: Similarity of `R`; `"same"` as `similarity`, `None` for none.
        block_size: int that divides the input's features, or `None`.
        recurrent_block_size: int that divides `units`, `None`, or `"same"`.
        similarity_initializer: Initializer of the static blocks.
        similarity_regularizer: Regularizer of the static similarities' parameters.
        similarity_constraint: Constraint on the static similarities' parameters.
        predictor: Name or layer, `None` for a static `M_x`.
        recurrent_predictor: Name or layer, `None` for a static `M_h`, or `"same"`.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

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

    plain = keras.layers.SimpleRNNCell

    def __init__(
        self,
        units: int,
        activation: Any = "tanh",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: Any = None,
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
        super().__init__(
            validation.positive_integer(units, "units"),
            activation=activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            recurrent_initializer=recurrent_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            recurrent_regularizer=recurrent_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            recurrent_constraint=recurrent_constraint,
            bias_constraint=bias_constraint,
            dropout=validation.fraction(dropout, "dropout"),
            recurrent_dropout=validation.fraction(recurrent_dropout, "recurrent_dropout"),
            seed=seed,
            **kwargs,
        )
        self._store_cell_similarity(
            similarity=similarity,
            recurrent_similarity=recurrent_similarity,
            block_size=block_size,
            recurrent_block_size=recurrent_block_size,
            similarity_initializer=similarity_initializer,
            similarity_regularizer=similarity_regularizer,
            similarity_constraint=similarity_constraint,
            predictor=predictor,
            recurrent_predictor=recurrent_predictor,
        )

    def call(
        self, inputs: Tensor, states: Any, training: bool = False
    ) -> tuple[Tensor, Any]:
        nested = isinstance(states, (list, tuple))
        state = states[0] if nested else states
        outputs = self._input_product(inputs, training)
        if self.use_bias:
            outputs = outputs + self.bias
        outputs = self.activation(outputs + self._state_product(state, training))
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
    kernels `M_x^T W` and `M_h^T R`, equal up to the rounding of the compute dtype.

    *Dynamic*: each `M` is the identity plus what a predictor sees, at every step, in the
    vector that the `M` meets: `M_x(x_t)` and `M_h(h_{t-1})`, before dropout and reset.
    Predictors made by name have no batch norm, which would mix the statistics of all
    steps. An unconstrained `M` predicted from `n` features without blocks holds
    `batch * n^2` numbers a step.

    Args:
        units: int, the size of the state.
        activation: Activation function of the candidate, `None` for none.
        recurrent_activation: Activation function of the gates, `None` for none.
        use_bias: bool, whether to add a bias.
        kernel_initializer: Initializer of the input kernel `W`.
        recurrent_initializer: Initializer of the recurrent kernel `R`.
        bias_initializer: Initializer of the bias.
        kernel_regularizer: Regularizer of `W`, and of the kernels of a predictor of `M_x`
            given by name.
        recurrent_regularizer: Regularizer of `R`, and of the kernels of a predictor of
            `M_h` given by name.
        bias_regularizer: Regularizer of the bias.
        kernel_constraint: Constraint on `W`.
        recurrent_constraint: Constraint on `R`.
        bias_constraint: Constraint on the bias.
        dropout: float in [0, 1), the part of the inputs that is dropped, before `M_x`.
        recurrent_dropout: float in [0, 1), the part of the states that is dropped, before
            `M_h`.
        reset_after: bool, whether the reset gate acts after the recurrent product.
        seed: Seed of both dropouts.
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
            `batch_normalization=False`, or your own.
        recurrent_predictor: The same for `M_h`, or `"same"` for one of the kind that
            `predictor` names. To be given where `predictor` is a layer.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

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

    plain = keras.layers.GRUCell

    def __init__(
        self,
        units: int,
        activation: Any = "tanh",
        recurrent_activation: Any = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        reset_after: bool = True,
        seed: Any = None,
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
        super().__init__(
            validation.positive_integer(units, "units"),
            activation=activation,
            recurrent_activation=recurrent_activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            recurrent_initializer=recurrent_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            recurrent_regularizer=recurrent_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            recurrent_constraint=recurrent_constraint,
            bias_constraint=bias_constraint,
            dropout=validation.fraction(dropout, "dropout"),
            recurrent_dropout=validation.fraction(recurrent_dropout, "recurrent_dropout"),
            reset_after=reset_after,
            seed=seed,
            **kwargs,
        )
        self._store_cell_similarity(
            similarity=similarity,
            recurrent_similarity=recurrent_similarity,
            block_size=block_size,
            recurrent_block_size=recurrent_block_size,
            similarity_initializer=similarity_initializer,
            similarity_regularizer=similarity_regularizer,
            similarity_constraint=similarity_constraint,
            predictor=predictor,
            recurrent_predictor=recurrent_predictor,
        )

    def call(
        self, inputs: Tensor, states: Any, training: bool = False
    ) -> tuple[Tensor, Any]:
        nested = isinstance(states, (list, tuple))
        state = states[0] if nested else states
        products = self._input_product(inputs, training)
        if self.use_bias:
            bias = ops.convert_to_tensor(self.bias)
            products = products + (bias[0] if self.reset_after else bias)
        x_update, x_reset, x_candidate = ops.split(products, 3, axis=-1)
        if self.reset_after:
            products = self._state_product(state, training)
            if self.use_bias:
                products = products + bias[1]
            h_update, h_reset, h_candidate = ops.split(products, 3, axis=-1)
            update = self.recurrent_activation(x_update + h_update)
            reset = self.recurrent_activation(x_reset + h_reset)
            candidate = self.activation(x_candidate + reset * h_candidate)
        else:
            update, reset, candidate = self._reset_before(
                x_update, x_reset, x_candidate, state, training
            )
        outputs = update * state + (1 - update) * candidate
        return outputs, [outputs] if nested else outputs

    def _reset_before(
        self,
        x_update: Tensor,
        x_reset: Tensor,
        x_candidate: Tensor,
        state: Tensor,
        training: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gates and the candidate with the reset before the product.

        The candidate's kernel meets another vector than those of the gates, and the same
        `M`.
        """
        similarity = self.state_similarity
        parameters = _parameters(similarity, state, training)
        masks = self._state_mask(state, training)
        gates, last = (None, None) if masks is None else (masks[:2], masks[2])
        kernel = ops.convert_to_tensor(self.recurrent_kernel)
        border = 2 * self.units
        products = _products(state, gates, kernel[:, :border], similarity, parameters)
        h_update, h_reset = ops.split(products, 2, axis=-1)
        update = self.recurrent_activation(x_update + h_update)
        reset = self.recurrent_activation(x_reset + h_reset)
        h_candidate = _products(
            reset * state, last, kernel[:, border:], similarity, parameters
        )
        return update, reset, self.activation(x_candidate + h_candidate)


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityLSTMCell(SimilarityCell, keras.layers.LSTMCell):
    """Long short-term memory cell with a bilinear similarity, for `keras.layers.RNN`.

    With default initializers the static cell equals `keras.layers.LSTMCell`: `M_x` and
    `M_h` start at the identity. For the gates `i` (input), `f` (forget) and `o` (output),

        i = s(W_i^T M_x x_t + R_i^T M_h h_{t-1} + b_i)         f, o = the same with theirs
        c_t = f * c_{t-1} + i * activation(W_c^T M_x x_t + R_c^T M_h h_{t-1} + b_c)
        h_t = o * activation(c_t)

    with `s` the `recurrent_activation`. What `M_x`, `M_h`, their blocks and their
    predictors are is told at `NeuralSimilarityGRUCell`. The carry `c` meets no kernel, and
    no `M`.

    Args:
        units: int, the size of the state.
        activation: Activation function of carry and output, `None` for none.
        recurrent_activation: Activation function of the gates, `None` for none.
        use_bias: bool, whether to add a bias.
        kernel_initializer: Initializer of the input kernel `W`.
        recurrent_initializer: Initializer of the recurrent kernel `R`.
        bias_initializer: Initializer of the bias.
        unit_forget_bias: bool, whether the forget gate's bias starts at 1.
        kernel_regularizer: Regularizer of `W`.
        recurrent_regularizer: Regularizer of `R`.
        bias_regularizer: Regularizer of the bias.
        kernel_constraint: Constraint on `W`.
        recurrent_constraint: Constraint on `R`.
        bias_constraint: Constraint on the bias.
        dropout: float in [0, 1), the part of the inputs that is dropped.
        recurrent_dropout: float in [0, 1), the part of the states that is dropped.
        seed: Seed of both dropouts.
        similarity: As in `NeuralSimilarityGRUCell`, like all that follow.
        recurrent_similarity: Similarity of `R`; `"same"` as `similarity`, `None` for none.
        block_size: int that divides the input's features, or `None`.
        recurrent_block_size: int that divides `units`, `None`, or `"same"`.
        similarity_initializer: Initializer of the static blocks.
        similarity_regularizer: Regularizer of the static similarities' parameters.
        similarity_constraint: Constraint on the static similarities' parameters.
        predictor: Name or layer, `None` for a static `M_x`.
        recurrent_predictor: Name or layer, `None` for a static `M_h`, or `"same"`.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

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

    plain = keras.layers.LSTMCell

    def __init__(
        self,
        units: int,
        activation: Any = "tanh",
        recurrent_activation: Any = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        unit_forget_bias: bool = True,
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: Any = None,
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
        super().__init__(
            validation.positive_integer(units, "units"),
            activation=activation,
            recurrent_activation=recurrent_activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            recurrent_initializer=recurrent_initializer,
            bias_initializer=bias_initializer,
            unit_forget_bias=unit_forget_bias,
            kernel_regularizer=kernel_regularizer,
            recurrent_regularizer=recurrent_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            recurrent_constraint=recurrent_constraint,
            bias_constraint=bias_constraint,
            dropout=validation.fraction(dropout, "dropout"),
            recurrent_dropout=validation.fraction(recurrent_dropout, "recurrent_dropout"),
            seed=seed,
            **kwargs,
        )
        self._store_cell_similarity(
            similarity=similarity,
            recurrent_similarity=recurrent_similarity,
            block_size=block_size,
            recurrent_block_size=recurrent_block_size,
            similarity_initializer=similarity_initializer,
            similarity_regularizer=similarity_regularizer,
            similarity_constraint=similarity_constraint,
            predictor=predictor,
            recurrent_predictor=recurrent_predictor,
        )

    def call(
        self, inputs: Tensor, states: Any, training: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        state, carry = states
        products = self._input_product(inputs, training)
        products = products + self._state_product(state, training)
        if self.use_bias:
            products = products + self.bias
        x_input, x_forget, x_carry, x_output = ops.split(products, 4, axis=-1)
        carry = self.recurrent_activation(x_forget) * carry + self.recurrent_activation(
            x_input
        ) * self.activation(x_carry)
        outputs = self.recurrent_activation(x_output) * self.activation(carry)
        return outputs, [outputs, carry]

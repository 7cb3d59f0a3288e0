"""The gated recurrent cell with a neural similarity."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.recurrent_cell import (
    SAME,
    SimilarityCell,
    gate_products,
    parameters_of,
)


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
        parameters = parameters_of(similarity, state, training)
        masks = self._state_mask(state, training)
        gates, last = (None, None) if masks is None else (masks[:2], masks[2])
        kernel = ops.convert_to_tensor(self.recurrent_kernel)
        border = 2 * self.units
        products = gate_products(state, gates, kernel[:, :border], similarity, parameters)
        h_update, h_reset = ops.split(products, 2, axis=-1)
        update = self.recurrent_activation(x_update + h_update)
        reset = self.recurrent_activation(x_reset + h_reset)
        h_candidate = gate_products(
            reset * state, last, kernel[:, border:], similarity, parameters
        )
        return update, reset, self.activation(x_candidate + h_candidate)

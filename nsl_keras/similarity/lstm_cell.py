"""The long short-term memory cell with a neural similarity."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.recurrent_cell import SAME, SimilarityCell


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

"""The simple recurrent cell with a neural similarity."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.recurrent_cell import SAME, SimilarityCell


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

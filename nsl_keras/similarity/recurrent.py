"""Recurrent cells and layers with a neural similarity: `W^T M x` and `R^T M h`.

The cells derive from Keras's, and `M` multiplies the input vector of each kernel; all gates
share the `M` of their kernel. Multiplying vectors costs less than multiplying a kernel at
every step, and leaves no copy of a kernel per step for the backward pass.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import keras
from keras import ops, tree

from nsl_keras import nesting, validation
from nsl_keras.backend import Tensor, leave_out_of_xla
from nsl_keras.similarity import predictors
from nsl_keras.similarity.dense import VectorForm
from nsl_keras.similarity.with_similarity import WithSimilarity
from nsl_keras.turning import Foldable


class SimilarityCell(WithSimilarity):
    """Private mixin: gives `M_x x` and `M_h h` to the Keras cell it precedes."""

    dynamic_form = VectorForm
    own_attributes = ("input_form", "state_form")
    # Both forms have the same arguments.
    bilinear_form = property(attrgetter("input_form"))

    def set_similarity(self, similarity: Any, predictor: Any, block_size: Any) -> None:
        # Keras calls a cell in a loop, and the losses of its steps do not leave the loop.
        is_plain = predictor is None or similarity.regularizer is None
        fits = is_plain and similarity.shared_by == "layer" and not similarity.learn_shape
        demand = (
            "one without `shared_by`, `learn_shape` and, if predicted, `regularizer` in a "
            "recurrent cell"
        )
        validation.require(fits, "similarity", demand, type(similarity).__name__)
        if isinstance(predictor, predictors.SimilarityPredictor):
            # A cell is called once per time step: batch norms would mix the statistics of
            # all steps, and update their moving averages inside a loop.
            norms = predictor.batch_normalization
            demand = "None or False in a recurrent cell"
            validation.require(norms in (None, False), "batch_normalization", demand, norms)
            predictor = predictor.without_batch_norms()
        self.input_form, self.state_form = (
            self.make_form(similarity, predictor, block_size, name)
            for name in ("similarity", "recurrent_similarity")
        )

    def build_similarity(self, input_shape: tuple[int | None, ...]) -> None:
        for form, kernel in self.forms_and_kernels():
            options = {"kernel_regularizer": kernel.regularizer, "width": self.units}
            form.build(tuple(kernel.shape), (-1,), feature_axes=(0,), **options)
        nesting.pass_on_frozen(self)

    def forms_and_kernels(self) -> list[tuple[Any, keras.Variable]]:
        return [(self.input_form, self.kernel), (self.state_form, self.recurrent_kernel)]

    def call(self, inputs: Tensor, states: Any, training: bool = False) -> Any:
        state, *carry = tree.flatten(states)
        x, h = self.input_form.multiply(inputs), self.state_form.multiply(state)
        return super().call(x, tree.pack_sequence_as(states, [h, *carry]), training)

    def folded_variables(self) -> list[tuple[keras.Variable, Tensor]]:
        self.input_form.require_kind("static", "fold")
        return [
            (kernel, form.fold_kernel(ops.convert_to_tensor(kernel)))
            for form, kernel in self.forms_and_kernels()
        ]


def gate_products(vectors: Tensor, masks: Any, kernel: Tensor) -> Tensor:
    """Returns `W^T (mask * v)` for each gate of a kernel, side by side.

    `masks` is a list of dropout masks, one per gate; one mask for all gates; or `None`.
    """
    if not isinstance(masks, list):
        return ops.matmul(vectors if masks is None else vectors * masks, kernel)
    kernels = ops.split(kernel, len(masks), axis=-1)
    products = [
        ops.matmul(vectors * mask, each) for mask, each in zip(masks, kernels, strict=True)
    ]
    return ops.concatenate(products, axis=-1)


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityGRUCell(SimilarityCell, keras.layers.GRUCell):
    """Gated recurrent cell with a bilinear similarity, for `keras.layers.RNN`.

    For the gates `z` (update) and `r` (reset), the cell computes

        z = s(W_z^T M_x x_t + R_z^T M_h h_{t-1} + b_z)         r = the same with W_r, R_r
        c = activation(W_c^T M_x x_t + r * (R_c^T M_h h_{t-1} + b'_c) + b_c)
        h_t = z * h_{t-1} + (1 - z) * c

    where `s` is the `recurrent_activation`; with `reset_after=False`, `c` uses
    `R_c^T M_h (r * h_{t-1})`. All gates share `M_x` and `M_h`, which consist of equal
    blocks as in `NeuralSimilarityDense`. Dropout applies to `M_x x_t` and `M_h h_{t-1}`.

    *Static*: `M_x` and `M_h` are weights that start at the identity, so with default
    initializers the cell equals `keras.layers.GRUCell`. `fold()` returns Keras's cell with
    the kernels `M_x^T W` and `M_h^T R`. Fold before you transfer weights to Keras's cell.

    *Dynamic*: at every step, a small network that sees `x_t` or `h_{t-1}` predicts how the
    parameters of `M_x(x_t)` or `M_h(h_{t-1})` differ from the identity's. An unconstrained
    `M` of `n` features without blocks has `batch * n^2` entries per step.

    Args:
        Same as `keras.layers.GRUCell`, plus, explained at `NeuralSimilarityDense`:
        similarity: Similarity of `W` and of `R`, each with its own `M`.
        predictor: Predictor of `M_x` and `M_h`, without batch norms; `None` for static
            matrices. A custom layer predicts both, so features must equal `units`.
        block_size: int that divides the input's features and `units`, or `None`.

    Call arguments:
        inputs: One time step.
        states: The state `h`, of shape `(batch, units)`, alone or in a list.
        training: bool, whether to apply dropout.

    Input shape:
        `(batch, features)`.

    Output shape:
        `(batch, units)`.

    Raises:
        ValueError: As in `NeuralSimilarityDense`; also for a predictor with batch norms,
            and for a similarity with `learn_shape`, `shared_by` or, if predicted, a
            `regularizer`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> cell = nsl_keras.layers.NeuralSimilarityGRUCell(8, similarity="unconstrained")
    >>> tuple(keras.layers.RNN(cell)(keras.ops.ones((2, 5, 4))).shape)
    (2, 8)
    >>> tuple(cell.input_form.similarity_matrix.shape)
    (4, 4)

    Reference:
        See `NeuralSimilarityDense`. The authors released no code for recurrent networks.
    """

    plain = keras.layers.GRUCell

    # Keras's `call` cannot take `M_h h` as the state: it also adds `z * state`.
    def call(self, inputs: Tensor, states: Any, training: bool = False) -> Any:
        (state,) = tree.flatten(states)
        # Keras's masks are `None` without dropout.
        masks = self.get_dropout_mask(inputs) if training and self.dropout < 1 else None
        x = self.input_form.multiply(inputs)
        x = gate_products(x, masks, ops.convert_to_tensor(self.kernel))
        if self.use_bias:
            bias = ops.convert_to_tensor(self.bias)
            x = x + (bias[0] if self.reset_after else bias)
        x_update, x_reset, x_candidate = ops.split(x, 3, axis=-1)
        drops = training and self.recurrent_dropout < 1
        masks = self.get_recurrent_dropout_mask(state) if drops else None
        kernel = ops.convert_to_tensor(self.recurrent_kernel)
        h = self.state_form.multiply(state)
        if self.reset_after:
            h = gate_products(h, masks, kernel)
            if self.use_bias:
                h = h + bias[1]
            h_update, h_reset, h_candidate = ops.split(h, 3, axis=-1)
            reset = self.recurrent_activation(x_reset + h_reset)
            h_candidate = reset * h_candidate
        else:
            gate_masks, mask = (None, None) if masks is None else (masks[:2], masks[2])
            h = gate_products(h, gate_masks, kernel[:, : 2 * self.units])
            h_update, h_reset = ops.split(h, 2, axis=-1)
            reset = self.recurrent_activation(x_reset + h_reset)
            h = self.state_form.multiply(reset * state, seen=state)
            h_candidate = gate_products(h, mask, kernel[:, 2 * self.units :])
        update = self.recurrent_activation(x_update + h_update)
        candidate = self.activation(x_candidate + h_candidate)
        outputs = update * state + (1 - update) * candidate
        return outputs, tree.pack_sequence_as(states, [outputs])


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilaritySimpleRNNCell(SimilarityCell, keras.layers.SimpleRNNCell):
    """Simple recurrent cell with a bilinear similarity, for `keras.layers.RNN`.

        h_t = activation(W^T M_x x_t + b + R^T M_h h_{t-1})

    Args:
        **kwargs: Arguments of `keras.layers.SimpleRNNCell` and `NeuralSimilarityGRUCell`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> cell = nsl_keras.layers.NeuralSimilaritySimpleRNNCell(8, similarity="symmetric")
    >>> tuple(keras.layers.RNN(cell)(keras.ops.ones((2, 5, 4))).shape)
    (2, 8)
    """

    plain = keras.layers.SimpleRNNCell


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityLSTMCell(SimilarityCell, keras.layers.LSTMCell):
    """Long short-term memory cell with a bilinear similarity, for `keras.layers.RNN`.

    For the gates `i` (input), `f` (forget) and `o` (output),

        i = s(W_i^T M_x x_t + R_i^T M_h h_{t-1} + b_i)         f, o: likewise
        c_t = f * c_{t-1} + i * activation(W_c^T M_x x_t + R_c^T M_h h_{t-1} + b_c)
        h_t = o * activation(c_t)

    where `s` is the `recurrent_activation`. The carry `c` has no kernel, so it has no `M`.

    Args:
        **kwargs: Arguments of `keras.layers.LSTMCell` and `NeuralSimilarityGRUCell`.

    Call arguments:
        inputs, training: As in `NeuralSimilarityGRUCell`.
        states: List of the state `h` and the carry `c`, each `(batch, units)`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> cell = nsl_keras.layers.NeuralSimilarityLSTMCell(8, predictor="sphere")
    >>> tuple(keras.layers.RNN(cell)(keras.ops.ones((2, 5, 4))).shape)
    (2, 8)
    """

    plain = keras.layers.LSTMCell


class SimilarityRecurrent(nesting.KeepsFrozen, Foldable, keras.layers.RNN):
    """Private: Keras's recurrent layer around one of the cells above."""

    cell_type: type[SimilarityCell]
    similarity = property(attrgetter("cell.similarity"))
    predictor = property(attrgetter("cell.predictor"))
    block_size = property(attrgetter("cell.block_size"))
    units = property(attrgetter("cell.units"))
    use_bias = property(attrgetter("cell.use_bias"))
    dropout = property(attrgetter("cell.dropout"))
    recurrent_dropout = property(attrgetter("cell.recurrent_dropout"))
    activation = property(attrgetter("cell.activation"))
    recurrent_activation = property(attrgetter("cell.recurrent_activation"))

    def __init__(self, units: int, activation: Any = "tanh", **kwargs: Any) -> None:
        of_plain = inspect.signature(self.cell_type.plain.__init__).parameters
        names = {"similarity", "predictor", "block_size", *of_plain}
        of_cell = {name: kwargs.pop(name) for name in names & set(kwargs)}
        both = {name: kwargs[name] for name in ("dtype", "trainable") if name in kwargs}
        cell = self.cell_type(units, activation, **of_cell, **both, name="cell")
        super().__init__(cell, **kwargs)
        self.input_spec = keras.InputSpec(ndim=3)

    def fold_inplace(self) -> None:
        self.cell.fold_inplace()
        super().fold_inplace()
        if not isinstance(self, keras.layers.SimpleRNN):
            self.use_cudnn = "auto"
            leave_out_of_xla(self)  # As Keras does.

    def get_config(self) -> dict[str, Any]:
        config = {**self.cell.get_config(), **super().get_config()}
        del config["cell"]
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SimilarityRecurrent:
        return cls(**config)


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityGRU(SimilarityRecurrent):
    """Gated recurrent layer with a bilinear similarity.

    This layer is a `keras.layers.RNN` with the cell `NeuralSimilarityGRUCell`; if static,
    it folds into the Keras layer of the same kind.

    Args:
        **kwargs: Arguments of `keras.layers.GRU` and `NeuralSimilarityGRUCell`, without
            `use_cudnn`.

    Input shape:
        `(batch, steps, features)`.

    Output shape:
        That of `keras.layers.GRU`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityGRU(8, return_sequences=True)
    >>> tuple(keras.layers.Bidirectional(layer)(keras.ops.ones((2, 5, 4))).shape)
    (2, 5, 16)
    """

    cell_type = NeuralSimilarityGRUCell
    plain = keras.layers.GRU


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityLSTM(SimilarityRecurrent):
    """Long short-term memory layer with a bilinear similarity.

    This layer is the twin of `NeuralSimilarityGRU` with a `NeuralSimilarityLSTMCell`.

    Args:
        **kwargs: Arguments of `keras.layers.LSTM` and `NeuralSimilarityGRU`, without
            `use_cudnn`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityLSTM(8, similarity="symmetric")
    >>> tuple(layer(keras.ops.ones((2, 5, 4))).shape), type(layer.fold()).__name__
    ((2, 8), 'LSTM')
    """

    cell_type = NeuralSimilarityLSTMCell
    plain = keras.layers.LSTM


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilaritySimpleRNN(SimilarityRecurrent):
    """Simple recurrent layer with a bilinear similarity.

    This layer is the twin of `NeuralSimilarityGRU` with a `NeuralSimilaritySimpleRNNCell`.

    Args:
        **kwargs: Arguments of `keras.layers.SimpleRNN` and `NeuralSimilarityGRU`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilaritySimpleRNN(8, predictor="sphere")
    >>> tuple(layer(keras.ops.ones((2, 5, 4))).shape)
    (2, 8)
    """

    cell_type = NeuralSimilaritySimpleRNNCell
    plain = keras.layers.SimpleRNN

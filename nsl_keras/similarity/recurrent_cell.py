"""What recurrent cells with a neural similarity share: `W^T M x` and `R^T M h`.

The cells are Keras's cells, with the same weights and dropout masks, and `M` applied to the
vector that a kernel meets; all gates share the `M` of their kernel. Applied to vectors,
rather than to a kernel at every step, `M` costs less and leaves no copy of a kernel a step
for the backward pass.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity import matrices
from nsl_keras.similarity.similarity_vector import SimilarityVector

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
        return gate_products(
            inputs,
            self.get_dropout_mask(inputs) if drops else None,
            self.kernel,
            self.input_similarity,
            parameters_of(self.input_similarity, inputs, training),
        )

    def _state_product(self, state: Tensor, training: bool) -> Tensor:
        """Returns `R^T M h` for all gates, side by side."""
        return gate_products(
            state,
            self._state_mask(state, training),
            self.recurrent_kernel,
            self.state_similarity,
            parameters_of(self.state_similarity, state, training),
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


def parameters_of(
    similarity: CellSimilarity | None, vectors: Tensor, training: bool
) -> Tensor | None:
    """Returns the parameters of `M`, which a predictor sees in the undropped vectors."""
    return None if similarity is None else similarity.parameters(vectors, training)


def gate_products(
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
            gate_products(vectors, mask, part, similarity, parameters)
            for mask, part in zip(masks, parts, strict=True)
        ]
        return ops.concatenate(products, axis=-1)
    if masks is not None:
        vectors = vectors * masks
    if similarity is not None:
        vectors = similarity.compare(parameters, vectors)
    return ops.matmul(vectors, kernel)

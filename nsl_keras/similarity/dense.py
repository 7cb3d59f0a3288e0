"""The dense layer with a neural similarity: `W^T M x` in place of `W^T x`."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.similarity_vector import SimilarityVector


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityDense(SimilarityVector):
    """Dense layer with a learned or predicted bilinear similarity.

    With default initializers the static layer equals `keras.layers.Dense`: `M` starts at
    the identity. For an input `x` of `n` features,

        y = W^T M x + b,    M = diag(M_s, ..., M_s)

    with one block `M_s` of `block_size x block_size` that all `n / block_size` blocks of
    features share: feature `i = block * block_size + t`. Without `block_size` there is
    one block, `M = M_s`, of `n x n`.

    *Static* (`predictor=None`): `M` is a weight. The layer multiplies once with
    `equivalent_kernel`, `M^T W`, and `fold()` returns the plain `Dense` that computes the
    same.

    *Dynamic* (with a predictor): `M(x)` is the identity plus what the predictor sees in
    each vector `x`. The layer cannot be folded.

    Args:
        units: int, the number of outputs.
        activation: Activation function, `None` for none.
        use_bias: bool, whether to add a bias.
        kernel_initializer: Initializer of the kernel, of shape `(n, units)`.
        bias_initializer: Initializer of the bias.
        kernel_regularizer: Regularizer of the kernel, and of the kernels of a predictor
            given by name.
        bias_regularizer: Regularizer of the bias.
        activity_regularizer: Regularizer of the output.
        kernel_constraint: Constraint on the kernel.
        bias_constraint: Constraint on the bias.
        similarity: `"diagonal"` (`T` parameters, where `T` is `block_size` or `n`),
            `"unconstrained"` (`T^2`), `"symmetric"`, `"positive_semidefinite"`,
            `"sparse"`, or a `nsl_keras.similarities.Similarity`.
        block_size: int that divides `n`, or `None` for one block of all features.
        similarity_initializer: Initializer of the static block `M_s`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it.
        similarity_regularizer: Regularizer of the static similarity's parameters.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"mlp"`, or a layer that
            maps each vector to the parameters of its `M`, such as a
            `nsl_keras.predictors.DenseSimilarityPredictor` with this layer's
            `block_size` and `similarity`.
        learn_shape: bool, whether to learn which features of a block the kernel reads:
            `M = D R`, with a Boolean diagonal `D` and `R` of the kind `similarity`,
            learned or predicted. `learned_shape` returns `D`.
        shape_threshold: float in [0, 1), the threshold that a feature's real-valued
            parameter, starting at 1, must exceed for the feature to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Tensor of rank 2 or more.
        training: bool, passed to the predictor (batch norm).

    Input shape:
        `(batch, ..., n)`.

    Output shape:
        `(batch, ..., units)`.

    Raises:
        ValueError: For arguments outside the ranges above, for the similarity `"full"`,
            for static similarity arguments or a static kind (`"sparse"`) with a predictor,
            at construction; if the number of features is unknown or not divisible by
            `block_size`, or a predictor has another output shape, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> features = keras.random.normal((2, 12), seed=0)
    >>> static = nsl_keras.layers.NeuralSimilarityDense(
    ...     4, similarity="unconstrained", block_size=3)
    >>> tuple(static(features).shape), tuple(static.similarity_matrix.shape)
    ((2, 4), (3, 3))
    >>> plain = static.fold()
    >>> difference = keras.ops.max(keras.ops.abs(plain(features) - static(features)))
    >>> type(plain).__name__, bool(difference < 1e-6)
    ('Dense', True)
    >>> dynamic = nsl_keras.layers.NeuralSimilarityDense(4, predictor="sphere")
    >>> tuple(dynamic(features).shape)
    (2, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 1 ("NSL can easily
        be applied to fully connected networks and recurrent networks") and Section 3.1,
        Eqs. (1) and (2), with features in place of taps; kernel shape, Section 3.5. The
        authors released no code for it.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        similarity: Any = "diagonal",
        block_size: int | None = None,
        similarity_initializer: Any = "identity",
        similarity_regularizer: Any = None,
        similarity_constraint: Any = None,
        predictor: Any = None,
        learn_shape: bool = False,
        shape_threshold: float = 0.5,
        kernel_trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        self.units = validation.positive_integer(units, "units")
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True
        self._store_vector_similarity(
            block_size=block_size,
            predictor_regularizer=self.kernel_regularizer,
            similarity=similarity,
            similarity_initializer=similarity_initializer,
            similarity_regularizer=similarity_regularizer,
            similarity_constraint=similarity_constraint,
            predictor=predictor,
            learn_shape=learn_shape,
            shape_threshold=shape_threshold,
            kernel_trainable=kernel_trainable,
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})
        self.kernel = self.add_weight(
            name="kernel",
            shape=(features, self.units),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            autocast=False,
        )
        self.bias = (
            self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
            if self.use_bias
            else None
        )
        self._build_vector_similarity(input_shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        inputs = ops.cast(inputs, self.compute_dtype)  # Of integers too.
        if self.predictor is None:
            kernel = self.equivalent_kernel
        else:
            inputs = self._compare(self._parameters(inputs, training), inputs)
            kernel = self._unflatten(
                self._shaped(self._flatten(ops.convert_to_tensor(self.kernel)))
            )
        outputs = ops.matmul(inputs, ops.cast(kernel, inputs.dtype))
        if self.bias is not None:
            outputs = outputs + ops.cast(self.bias, outputs.dtype)
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.units)

    def _plain_layer(self) -> keras.layers.Layer:
        similarity = {*self._similarity_config(), "block_size"}
        config = {k: v for k, v in self.get_config().items() if k not in similarity}
        layer = keras.layers.Dense.from_config(config)
        layer.build((None, self.kernel.shape[0]))
        return layer

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
            "block_size": self.block_size,
            **self._similarity_config(),
        }

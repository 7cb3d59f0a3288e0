"""The hyperspherical network with self-attention of Table 8, and its regularizer."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras.backbones import Factory, Units, he_normal, height_and_width
from nsl_keras.layers import BatchNormalization, GlobalNeuralSimilarity2D, SphereConv2D


@keras.saving.register_keras_serializable("experiments")
class OrthogonalityRegularizer(keras.regularizers.Regularizer):
    """Draws filters toward an orthonormal set (Appendix B.2).

        strength * ||F^T F - I||^2 + l2 * ||F||^2,   F = reshape(W, (-1, filters))

    in Frobenius norms. `keras.regularizers.OrthogonalRegularizer` ignores lengths, and
    takes only matrices. The authors use strength 1e-4 on every SphereConv, and `l2=2.5e-4`
    on attention kernels.
    """

    def __init__(self, strength: float = 1e-4, l2: float = 0.0) -> None:
        self.strength, self.l2 = strength, l2

    def __call__(self, x: Any) -> Any:
        matrix = ops.reshape(x, (-1, x.shape[-1]))
        products = ops.matmul(ops.transpose(matrix), matrix)
        identity = ops.eye(x.shape[-1], dtype=products.dtype)
        distance = ops.sum(ops.square(products - identity))
        return self.strength * distance + self.l2 * ops.sum(ops.square(matrix))

    def get_config(self) -> dict[str, Any]:
        return {"strength": self.strength, "l2": self.l2}


def self_attention_spherenet(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    filters: Sequence[int] = (128, 192, 256),
    attention: bool = True,
    sphere: bool = True,
    orthogonality: float = 0.0,
    l2: float = 0.0,
    batch_normalization: Factory = BatchNormalization,
) -> keras.Model:
    """A SphereNet with self-attention as dynamic global neural similarity (Appendix B.2).

    Three stages of three 3x3 convolutions; the authors' self-attention after the first two;
    a "valid" convolution of the last width over the remaining map (4x4 for 32x32 pixels),
    with neither batch norm nor ReLU; and a linear classifier. No layer has a bias. It has
    3,926,274 parameters for 10 classes; layout and start values from the authors' code.

    The four combinations of `attention` and `sphere` are the networks of Table 8; without
    `sphere`, convolutions are plain, also those of the attention. `orthogonality` is the
    strength of an `OrthogonalityRegularizer` on all kernels except the classifier's, `l2`
    the decay of batch norms and kernels, except those of `SphereConv2D`, whose length
    hardly matters: 1e-4 and 2.5e-4 (5e-4 of half the squares) in their code.
    """
    decay = keras.regularizers.L2(l2) if l2 else None
    both = OrthogonalityRegularizer(orthogonality, l2) if orthogonality else decay
    of_kernels, convolution = both, keras.layers.Conv2D
    if sphere:
        of_kernels = OrthogonalityRegularizer(orthogonality) if orthogonality else None
        convolution = SphereConv2D
    norms = {"gamma_regularizer": decay, "beta_regularizer": decay}
    layers = Units(
        functools.partial(convolution, kernel_regularizer=of_kernels),
        functools.partial(batch_normalization, **norms),
    )
    inputs = outputs = keras.Input(input_shape)
    for stage, width in enumerate(filters):
        outputs = layers.stage(outputs, width, 3, f"stage_{stage}")
        if attention and stage < 2:
            options = {"regularizer": both, "sphere": sphere}
            outputs = GlobalNeuralSimilarity2D(
                "softmax_attention", name=f"stage_{stage}_attention", **options
            )(outputs)
    left = height_and_width(outputs.shape[1:])
    outputs = layers.convolve(outputs, filters[-1], left, "features", padding="valid")
    outputs = keras.layers.Flatten(name="flatten")(outputs)
    outputs = keras.layers.Dense(
        classes,
        use_bias=False,
        kernel_initializer=he_normal(),
        kernel_regularizer=decay,
        name="classifier",
    )(outputs)
    return keras.Model(inputs, outputs, name="self_attention_spherenet")

"""A predictor of convolutions: an `M` for each position of a layer, or for each block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.predictors.base import Predictor, Shape
from nsl_keras.similarity.sphere import SphereConv1D, SphereConv2D, SphereConv3D

_SPHERE = {1: SphereConv1D, 2: SphereConv2D, 3: SphereConv3D}
#: Plain convolutions by the number of spatial axes.
PLAIN_CONVOLUTIONS = {
    1: keras.layers.Conv1D,
    2: keras.layers.Conv2D,
    3: keras.layers.Conv3D,
}


@keras.saving.register_keras_serializable("nsl_keras")
class SimilarityPredictor(Predictor):
    """Predicts, at every output position of a convolution, what `M` adds to the identity.

    Two layers with the kernel size of the convolution they serve. By `kind`, for the
    diagonal similarity (`T` outputs, the number of taps):

        "sphere":       SphereConv(H, input norm) -> BN -> ReLU -> Conv(T) -> BN
        "full_sphere":  SphereConv(H) -> BN -> ReLU -> SphereConv(T) -> BN
        "cnn":          Conv(H) -> BN -> ReLU -> Conv(T) -> BN

    For the unconstrained similarity (`T^2` outputs) and others there is no batch norm,
    except after the output of `"cnn"` and in `"full_sphere"`, which has both.

    The first layer has the strides, padding and dilation of the convolution, the second
    stride 1 and `"same"` (`"causal"` in a causal predictor), so that the prediction has
    exactly the output's positions. With `downsampling=b` the first layer has `b` times the
    strides, and position `p` takes the prediction at `p // b`.

    What is left `None` of the geometry is taken from the layer that is served, when that
    is built: `predictor=SimilarityPredictor(hidden_filters=16)`.

    Args:
        kernel_size: int or tuple of 1, 2 or 3 ints, as in the convolution served; an int
            is a square 2D kernel. `None` for that of the layer served, as in `similarity`,
            `strides`, `padding`, `data_format`, `dilation_rate` and `dtype`; of a predictor
            that is used without a layer it must be given.
        kind: `"sphere"`, `"full_sphere"`, `"cnn"` (`"mlp"` is the same), or a name of your
            own from `nsl_keras.predictors.register`. Plain convolutions diverge without
            the normalized output, the paper finds.
        similarity: Name or `Similarity` whose parameters are predicted;
            `"diagonal"` without a layer.
        hidden_filters: int or `None`, the width of the hidden layer; `None` is half the
            filters of the layer served, at least 8, and at most the authors' 64 for the
            diagonal similarity and 128 for others.
        strides: int or tuple of ints; 1 without a layer.
        padding: `"valid"`, `"same"` or, in 1D, `"causal"`; `"valid"` without a layer.
        data_format: `"channels_last"` or `"channels_first"`;
            `keras.config.image_data_format()` without a layer.
        dilation_rate: int or tuple of ints; 1 without a layer.
        pooled: bool, whether to predict one `M` per example, the mean of what is predicted
            at its positions, instead of one per position.
        downsampling: int, the side of the blocks of positions that share one `M`: with 2,
            `M` is predicted once for each block of 2x2 positions of an image, by a first
            layer of twice the strides; 1 for one at each position, as in the paper. Blocks
            begin at the first position, and those at the end may be smaller. Where
            `downsampling` times the strides exceeds the kernel size, some pixels are seen
            by no prediction.
        batch_normalization: bool or `None`: `False` for no batch norm at all; `True` for
            both; `None` for those named above.
        momentum: float in [0, 1), momentum of the batch norms. A network's predictions
            depend on it: one that averages over many steps lags weights that move fast. The
            default averages over about ten steps (Keras's batch norm over a hundred, the
            authors' over a thousand).
        momentum_warmup: bool, whether the batch norms' moving statistics are unbiased from
            the first step on, as in `nsl_keras.layers.BatchNormalization`; `False` for the
            fixed momentum of the authors.
        epsilon: float above 0, added to the variances in the batch norms.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy.
        hidden_kernel_initializer: Initializer of the first kernel; `None` is He's
            normal times 0.1, as in the authors' code.
        output_kernel_initializer: Initializer of the second kernel; `None` is that of
            `start`.
        start: `"identity"`: `M` is the identity until the first step, so that the layer
            is the plain one. The scale of the last batch norm starts at zero; where there
            is none, the second kernel does, or, if that goes by angle, a factor of each
            output. `"published"`: that scale starts at one and the second kernel at He's
            normal times 0.001, as in the authors' code: `M` starts near the identity.
        kernel_regularizer: Regularizer of both kernels.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Input shape:
        `(batch, *spatial, channels)` with `data_format="channels_last"`,
        `(batch, channels, *spatial)` with `"channels_first"`.

    Output shape:
        `(batch, *new_spatial, outputs)` or `(batch, outputs, *new_spatial)`, with the
        `outputs` parameters of the similarity; `(batch, outputs)` if pooled.

    Raises:
        ValueError: For arguments outside the ranges above, at construction; for a geometry
            other than that of the layer served, or none at all, for a dilated kernel with
            `downsampling`, and for a network of your own with `downsampling` that does not
            predict once for each block, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> predictor = nsl_keras.predictors.SimilarityPredictor(3, padding="same")
    >>> tuple(predictor(keras.ops.ones((2, 8, 8, 4))).shape)
    (2, 8, 8, 9)
    >>> wide = nsl_keras.predictors.SimilarityPredictor(hidden_filters=96)
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(
    ...     8, 3, strides=2, similarity="unconstrained", predictor=wide)
    >>> tuple(layer(keras.ops.ones((2, 9, 9, 4))).shape), wide.strides, wide.outputs
    ((2, 4, 4, 8), (2, 2), 81)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1 and
        Appendix A. The paper mentions no batch norm; the places above are those of the
        authors' code, as is the plain second convolution of `"sphere"`.
    """

    _width = "hidden_filters"

    def __init__(
        self,
        kernel_size: int | tuple[int, ...] | None = None,
        kind: str = "sphere",
        similarity: Any = None,
        hidden_filters: int | None = None,
        strides: int | tuple[int, ...] | None = None,
        padding: str | None = None,
        data_format: str | None = None,
        dilation_rate: int | tuple[int, ...] | None = None,
        pooled: bool = False,
        downsampling: int = 1,
        batch_normalization: bool | None = None,
        momentum: float = 0.9,
        momentum_warmup: bool = True,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        start: str = "identity",
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kind=kind,
            similarity=similarity,
            batch_normalization=batch_normalization,
            momentum=momentum,
            momentum_warmup=momentum_warmup,
            epsilon=epsilon,
            synchronized=synchronized,
            hidden_kernel_initializer=hidden_kernel_initializer,
            output_kernel_initializer=output_kernel_initializer,
            start=start,
            kernel_regularizer=kernel_regularizer,
            **kwargs,
        )
        self.kernel_size = validation.optional(_kernel_size, kernel_size)
        if kernel_size is None and not (strides is None and dilation_rate is None):
            raise ValueError(
                "`strides` and `dilation_rate` must be None where `kernel_size` is. "
                f"Received: strides={strides}, dilation_rate={dilation_rate}"
            )
        rank = len(self.kernel_size or ())
        self.hidden_filters = validation.optional(
            validation.positive_integer, hidden_filters, "hidden_filters"
        )
        self.strides = validation.optional(
            validation.positive_integers, strides, rank, "strides"
        )
        self.padding = validation.optional(
            validation.one_of, padding, ("valid", "same", "causal"), "padding"
        )
        self.data_format = validation.optional(
            validation.one_of,
            data_format,
            ("channels_last", "channels_first"),
            "data_format",
        )
        self.dilation_rate = validation.optional(
            validation.positive_integers, dilation_rate, rank, "dilation_rate"
        )
        self.pooled = validation.boolean(pooled, "pooled")
        self.downsampling = validation.positive_integer(downsampling, "downsampling")

    def _geometry(self, layer: keras.layers.Layer) -> dict[str, Any]:
        taken = self._equal(
            layer, "kernel_size", "strides", "padding", "data_format", "dilation_rate"
        )
        self._refuse_to_look_ahead(layer)
        dilation_rate = taken.get("dilation_rate") or self.dilation_rate
        self._refuse_holes(dilation_rate, f" in layer {layer.name!r}")
        return taken

    def _refuse_holes(self, dilation_rate: tuple[int, ...], where: str = "") -> None:
        if self.downsampling > 1 and max(dilation_rate) > 1:
            raise ValueError(
                "`downsampling` must be 1 where the kernel is dilated: convolutions cannot "
                "have both strides and dilation. Received: "
                f"downsampling={self.downsampling}, dilation_rate={dilation_rate}{where}"
            )

    def _refuse_to_look_ahead(self, layer: keras.layers.Layer) -> None:
        if layer.padding == "causal" and self.pooled:
            raise ValueError(
                "`predictor` must not be pooled in a causal layer, or it would look "
                "ahead. Received: predictor.pooled=True"
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if self.kernel_size is None:
            raise ValueError(
                "`kernel_size` must be given to a predictor that serves no layer. "
                "Received: kernel_size=None"
            )
        rank = len(self.kernel_size)
        validation.rank(input_shape, rank + 2)
        self.strides = self.strides or (1,) * rank
        self.padding = self.padding or "valid"
        self.data_format = self.data_format or keras.config.image_data_format()
        self.dilation_rate = self.dilation_rate or (1,) * rank
        self._refuse_holes(self.dilation_rate)
        taps = math.prod(self.kernel_size)
        self._build_network(taps, self.kernel_size, tuple(input_shape))
        self._check_blocks(tuple(input_shape))

    def _check_blocks(self, input_shape: Shape) -> None:
        """Refuses a network of one's own that does not predict one `M` for each block."""
        if self.downsampling == 1:
            return
        # Later inputs may have other sizes: some that fill their blocks, some that do not.
        step = self.downsampling * max(self.strides)
        for size in range(
            3 * step + max(self.kernel_size), 4 * step + max(self.kernel_size)
        ):
            shape = list(input_shape)
            for axis in self._spatial_axes:
                shape[axis] = size
            *_, (_, _, predicted) = self.calls(tuple(shape))
            for axis in self._spatial_axes:
                blocks = -(-self._positions(shape, axis) // self.downsampling)
                if predicted[axis] != blocks:
                    raise ValueError(
                        f"`kind` must predict at {blocks} places along axis {axis} of an "
                        f"input of shape {tuple(shape)} with downsampling="
                        f"{self.downsampling}, as `predictor.hidden` does. Received: "
                        f"kind={self.kind!r}, which predicts at {predicted[axis]}"
                    )

    def _layer(
        self, place: str, normalize: str | None, initializer: keras.initializers.Initializer
    ) -> keras.layers.Layer:
        options: dict[str, Any] = {
            **self._options(f"{place}_convolution", initializer),
            "data_format": self.data_format,
            "padding": "causal" if self.padding == "causal" else "same",
        }
        filters = self.outputs
        if place == "hidden":
            filters = self.hidden_filters
            options["strides"] = tuple(self.downsampling * each for each in self.strides)
            options["padding"] = self.padding
            options["dilation_rate"] = self.dilation_rate
        rank = len(self.kernel_size)
        if normalize is None:
            return PLAIN_CONVOLUTIONS[rank](filters, self.kernel_size, **options)
        return _SPHERE[rank](filters, self.kernel_size, normalize=normalize, **options)

    def _pool(self, outputs: Tensor) -> Tensor:
        return ops.mean(outputs, axis=self._spatial_axes)

    def _at_every_position(self, outputs: Tensor, input_shape: Any) -> Tensor:
        """Repeats the prediction of each block, and drops what no position asks for."""
        shape = list(ops.shape(outputs))
        for axis in self._spatial_axes:
            outputs = self._repeated(outputs, axis)
            shape[axis] = self._positions(input_shape, axis)
        # A slice of all there is would cost a copy in the gradient.
        if any(shape[axis] != outputs.shape[axis] for axis in self._spatial_axes):
            outputs = ops.slice(outputs, (0,) * len(shape), shape)
        return outputs

    def _repeated(self, outputs: Tensor, axis: int) -> Tensor:
        """Repeats predictions along an axis, each over its block of positions."""
        shape = list(ops.shape(outputs))
        shape[axis] *= self.downsampling
        # Not `ops.repeat`, which is slower on a CPU.
        each = ops.expand_dims(outputs, axis + 1)
        return ops.reshape(ops.concatenate([each] * self.downsampling, axis + 1), shape)

    @property
    def _spatial_axes(self) -> tuple[int, ...]:
        first = 1 if self.data_format == "channels_last" else 2
        return tuple(range(first, first + len(self.kernel_size)))

    def _positions(self, input_shape: Any, axis: int) -> Any:
        """Returns how many positions the layer served has along an axis."""
        number = axis - self._spatial_axes[0]
        size, stride = input_shape[axis], self.strides[number]
        if self.padding != "valid":
            return -(-size // stride)
        reach = (self.kernel_size[number] - 1) * self.dilation_rate[number]
        return (size - reach - 1) // stride + 1

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        if self.pooled:
            return (input_shape[0], self.outputs)
        *_, (_, _, predicted) = self.calls(tuple(input_shape))
        if self.downsampling == 1:
            return predicted
        shape = list(predicted)
        for axis in self._spatial_axes:
            known = input_shape[axis] is not None
            shape[axis] = self._positions(input_shape, axis) if known else None
        return tuple(shape)

    def calls(
        self, input_shape: Shape
    ) -> Iterator[tuple[keras.layers.Layer, Shape, Shape]]:
        """Yields the layers, each with the shapes of its input and its output."""
        shape = input_shape
        for name in self._network:
            layer, before = getattr(self, name), shape
            shape = tuple(layer.compute_output_shape(before))
            yield layer, before, shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "kernel_size": self.kernel_size,
            "hidden_filters": self.hidden_filters,
            "strides": self.strides,
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": self.dilation_rate,
            "pooled": self.pooled,
            "downsampling": self.downsampling,
        }


def _kernel_size(value: Any) -> tuple[int, ...]:
    if isinstance(value, (int, np.integer)):
        return validation.positive_integers(value, 2, "kernel_size")
    if not isinstance(value, (tuple, list)) or not 1 <= len(value) <= 3:
        raise ValueError(
            "`kernel_size` must be a positive integer or 1 to 3 of them. "
            f"Received: kernel_size={value!r}"
        )
    return validation.positive_integers(tuple(value), len(value), "kernel_size")

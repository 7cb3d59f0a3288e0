"""Other ways to compute `W^T M(p) x_p`, in ratios to the package's own.

One rule: every formulation takes inputs, kernel and the parameters of `M` (9 or 9x9 a
position), for a 3x3 kernel, stride 1 and zero padding, and gives the same numbers. The
authors' are written from the description of their computation.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import tensorflow as tf

import nsl_keras
from experiments.speed import measure
from experiments.speed.dynamic import BATCH, SIZES
from nsl_keras.similarity.convolution import dynamic_convolution

Formulation = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
TAPS = 9


def comparisons(xla: bool) -> Iterator[measure.Comparison]:
    """Yields the comparisons of this group, one at a time."""
    for size, channels in SIZES:
        inputs = tf.random.normal((BATCH, size, size, channels))
        kernel = 0.1 * tf.random.normal((3, 3, channels, channels))
        for title, formulations, shape in (
            ("DNS", DIAGONAL, (TAPS,)),
            ("UNS", UNCONSTRAINED, (TAPS, TAPS)),
        ):
            arguments = [inputs, kernel, tf.random.normal((BATCH, size, size, *shape))]
            ours, authors, *rejected = formulations
            # The comparison with the authors' in full; the others as a record of a choice.
            for names, most_rounds in (((ours, authors), None), ((ours, *rejected), 5)):
                yield measure.Comparison(
                    f"{title}, {size}x{size}, {channels}->{channels}, forward+backward",
                    {
                        name: measure.gradients(formulations[name], arguments, xla)
                        for name in names
                    },
                    most_rounds=most_rounds,
                )


def own(similarity: str) -> Formulation:
    """The package's: slices; masks and a product for each tap, or one mixing product."""

    def convolution(inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor):
        form = types.SimpleNamespace(
            similarity=nsl_keras.similarities.get(similarity),
            parameters=lambda *_: parameters,
        )
        layer = types.SimpleNamespace(
            kernel_size=(3, 3),
            strides=(1, 1),
            padding="same",
            dilation_rate=(1, 1),
            channel_axis=-1,
            bilinear_form=form,
        )
        return dynamic_convolution(layer, inputs, kernel, None)

    return convolution


def authors_diagonal(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """One convolution with nine copies of the kernel, each with one live tap."""
    one_tap = tf.reshape(tf.eye(TAPS), (3, 3, 1, TAPS, 1)) * kernel[:, :, :, None, :]
    copies = tf.reshape(one_tap, (*kernel.shape[:3], -1))
    answers = _by_taps(tf.nn.conv2d(inputs, copies, 1, "SAME"))
    return tf.reduce_sum(parameters[..., None] * answers, axis=-2)


def authors_unconstrained(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """Every tap of the kernel at every pixel, then nine broadcast products."""
    answers = _one_by_one(inputs, _taps_as_filters(kernel))
    return tf.add_n(
        [
            tf.reduce_sum(parameters[..., tap, None] * _by_taps(shifted), axis=-2)
            for tap, shifted in enumerate(_indexed(answers))
        ]
    )


def indexed_diagonal(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """Shifts read by indexing, in one tensor, then one 1x1 convolution."""
    compared = parameters[..., None] * tf.stack(_indexed(inputs), axis=-2)
    return _one_by_one(_without_taps(compared), _taps_as_inputs(kernel))


def indexed_unconstrained(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """The same, and a product of 9x9 at every position in place of the mask."""
    compared = parameters @ tf.stack(_indexed(inputs), axis=-2)
    return _one_by_one(_without_taps(compared), _taps_as_inputs(kernel))


def extracted_diagonal(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """`extract_patches` times the mask, then one product."""
    patches = tf.image.extract_patches(
        inputs, [1, 3, 3, 1], [1, 1, 1, 1], [1, 1, 1, 1], "SAME"
    )
    compared = parameters[..., None] * _by_taps(patches)
    return _product(_without_taps(compared), _taps_as_inputs(kernel))


def concatenated_diagonal(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """A mask a tap, all taps side by side along the channels, then one product."""
    masks = tf.split(parameters, TAPS, axis=-1)
    masked = [mask * tap for mask, tap in zip(masks, _sliced(inputs), strict=True)]
    return _product(tf.concat(masked, axis=-1), _taps_as_inputs(kernel))


def product_first_diagonal(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """A product a tap at every pixel, then nine shifted, masked sums."""
    masks = tf.split(parameters, TAPS, axis=-1)
    weights = tf.unstack(tf.reshape(kernel, (TAPS, *kernel.shape[2:])))
    return tf.add_n(
        [
            mask * _sliced(_product(inputs, weight))[tap]
            for tap, (mask, weight) in enumerate(zip(masks, weights, strict=True))
        ]
    )


def by_taps_unconstrained(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """One mixing product, as the package's, then a product for each tap."""
    mixed = tf.unstack(parameters @ tf.stack(_sliced(inputs), axis=-2), axis=-2)
    weights = tf.unstack(tf.reshape(kernel, (TAPS, *kernel.shape[2:])))
    return tf.add_n(
        [_product(tap, weight) for tap, weight in zip(mixed, weights, strict=True)]
    )


def channels_first_unconstrained(
    inputs: tf.Tensor, kernel: tf.Tensor, parameters: tf.Tensor
) -> tf.Tensor:
    """The mixing product with the taps along the last axis."""
    mixed = tf.matmul(tf.stack(_sliced(inputs), axis=-1), parameters, transpose_b=True)
    weights = tf.transpose(tf.reshape(kernel, (TAPS, *kernel.shape[2:])), (1, 0, 2))
    return _product(_without_taps(mixed), tf.reshape(weights, (-1, kernel.shape[-1])))


#: By name, the package's own first, then the authors'.
DIAGONAL: dict[str, Formulation] = {
    "nsl_keras": own("diagonal"),
    "the authors'": authors_diagonal,
    "shifts by indexing, 1x1 convolution": indexed_diagonal,
    "extract_patches, one product": extracted_diagonal,
    "taps concatenated, one product": concatenated_diagonal,
    "products first": product_first_diagonal,
}
UNCONSTRAINED: dict[str, Formulation] = {
    "nsl_keras": own("unconstrained"),
    "the authors'": authors_unconstrained,
    "shifts by indexing, 1x1 convolution": indexed_unconstrained,
    "mixed, a product a tap": by_taps_unconstrained,
    "mixed with the taps last": channels_first_unconstrained,
}


def _indexed(tensor: tf.Tensor) -> list[tf.Tensor]:
    padded = tf.pad(tensor, [[0, 0], [1, 1], [1, 1], [0, 0]])
    _, height, width, _ = tensor.shape
    return [
        padded[:, row : row + height, column : column + width]
        for row in range(3)
        for column in range(3)
    ]


def _sliced(tensor: tf.Tensor) -> list[tf.Tensor]:
    padded = tf.pad(tensor, [[0, 0], [1, 1], [1, 1], [0, 0]])
    return [
        tf.slice(padded, (0, row, column, 0), tensor.shape)
        for row in range(3)
        for column in range(3)
    ]


def _by_taps(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, (*tensor.shape[:-1], TAPS, -1))


def _without_taps(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, (*tensor.shape[:-2], -1))


def _taps_as_inputs(kernel: tf.Tensor) -> tf.Tensor:
    return tf.reshape(kernel, (-1, kernel.shape[-1]))


def _taps_as_filters(kernel: tf.Tensor) -> tf.Tensor:
    taps_first = tf.reshape(kernel, (TAPS, *kernel.shape[2:]))
    return tf.reshape(tf.transpose(taps_first, (1, 0, 2)), (kernel.shape[2], -1))


def _one_by_one(tensor: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(tensor, matrix[None, None], 1, "SAME")


def _product(tensor: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    rows = tf.reshape(tensor, (-1, matrix.shape[0])) @ matrix
    return tf.reshape(rows, (*tensor.shape[:-1], matrix.shape[1]))

"""SphereConv and self-attention as special cases of neural similarity, in numbers.

    python -m experiments.neural_similarity.special_cases

A convolution compares kernel and input by `W^T M x`: locally, with `M` between the taps of
one patch (Eq. 2 of the paper), or globally, with `M` between all positions of the feature
map (Eq. 8). For each case the script writes the matrix `M` out in full, puts it into the
general formula, in float64, and prints the largest difference to the layer that computes
the same without it.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import ops

import nsl_keras

HEIGHT, WIDTH, CHANNELS, FILTERS = 5, 6, 8, 4
POSITIONS = HEIGHT * WIDTH
TAPS = 9


def local_similarity(kernel, matrices, patches):
    """Eq. (2): `y[b,p,o] = sum_ctu W[t,c,o] M[b,p,o,t,u] x[b,p,u,c]`."""
    return np.einsum("tco,bpotu,bpuc->bpo", kernel, matrices, patches, optimize=True)


def global_similarity(kernel, matrices, features):
    """Eq. (8): `F = W_G^T M_G X_F`, with a block-diagonal `M_G` as in Eq. (9).

    The kernel has 3x3 taps and "same" padding; `W_G` is that convolution as a matrix.
    """
    channels, filters = kernel.shape[1:]
    # shifts[t, p, q] is 1 where tap t of position p lies on position q.
    shifts = np.array(
        [
            np.kron(np.eye(HEIGHT, k=row - 1), np.eye(WIDTH, k=column - 1))
            for row in range(3)
            for column in range(3)
        ]
    )
    as_matrix = np.einsum("tpq,tco->cqpo", shifts, kernel)
    as_matrix = as_matrix.reshape(channels * POSITIONS, POSITIONS * filters)
    outputs = []
    for matrix, example in zip(matrices, features, strict=True):
        blocks = np.kron(np.eye(channels), matrix)
        flattened = example.T.reshape(-1)
        outputs.append(as_matrix.T @ (blocks @ flattened))
    return np.reshape(outputs, (len(features), POSITIONS, filters))


def plain_convolution(images):
    """`M` is the identity."""
    layer = keras.layers.Conv2D(FILTERS, 3, padding="same", use_bias=False)
    outputs = layer(images)
    matrices = np.broadcast_to(np.eye(TAPS), (len(images), POSITIONS, FILTERS, TAPS, TAPS))
    return outputs, local_similarity(taps_of(layer), matrices, patches_of(images))


def sphere_convolution(images):
    """`M` is `1 / (|W| |x|)` on the diagonal: it depends on the input (Section 3.3.1)."""
    layer = nsl_keras.layers.SphereConv2D(FILTERS, 3, padding="same")
    outputs = layer(images)
    kernel, patches = taps_of(layer), patches_of(images)
    factors = 1 / (norm(patches, (2, 3))[..., None] * norm(kernel, (0, 1)))
    matrices = factors[..., None, None] * np.eye(TAPS)
    return outputs, local_similarity(kernel, matrices, patches)


def self_attention(images):
    """`M` is `G1(X) G2(X)^T` (Eq. 11), in front of a 3x3 convolution."""
    layer = nsl_keras.layers.GlobalNeuralSimilarity2D("attention", sphere=False)
    convolution = keras.layers.Conv2D(FILTERS, 3, padding="same", use_bias=False)
    outputs = convolution(layer(images))
    features = features_of(images)
    first, second = (
        features @ as_float64(part.kernel) for part in (layer.query, layer.key)
    )
    matrices = first @ np.swapaxes(second, 1, 2)
    return outputs, global_similarity(taps_of(convolution), matrices, features)


def softmax_self_attention(images):
    """The block of the authors' code: two global similarities, summed.

    One is the identity. The other has `M = gamma A D`, with the softmax `A` and with
    `D = 1 / |x|` on the diagonal, and the unit vectors of the third kernel for `W`.
    """
    layer = nsl_keras.layers.GlobalNeuralSimilarity2D(similarity="softmax_attention")
    layer.build(images.shape)
    layer.gamma.assign(0.8)
    outputs = layer(images)
    features = features_of(images)
    first, second, third = (
        as_float64(part.kernel) / norm(as_float64(part.kernel), 0)
        for part in (layer.query, layer.key, layer.value)
    )
    directions = features / norm(features, -1)[..., None]
    scores = np.maximum(directions @ first, 0) @ np.swapaxes(directions @ second, 1, 2)
    attention = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    matrices = as_float64(layer.gamma) * attention / norm(features, -1)[:, None, :]
    identity = np.broadcast_to(np.eye(POSITIONS), matrices.shape)
    explicit = global_similarity(at_centre(np.eye(CHANNELS)), identity, features)
    return outputs, explicit + global_similarity(at_centre(third), matrices, features)


CASES = {
    "convolution": plain_convolution,
    "SphereConv": sphere_convolution,
    "self-attention, Eq. (11)": self_attention,
    "self-attention with softmax": softmax_self_attention,
}


def norm(array, axis):
    """The norm that the layers divide by, with 1e-4 under the root."""
    return np.sqrt(np.sum(array**2, axis=axis) + 1e-4)


def as_float64(tensor):
    return ops.convert_to_numpy(tensor).astype("float64")


def taps_of(layer):
    """A 3x3 kernel with its taps in one row: `(taps, channels, filters)`."""
    kernel = as_float64(layer.kernel)
    return kernel.reshape(TAPS, *kernel.shape[2:])


def at_centre(kernel):
    """A 1x1 kernel `(channels, filters)` as the centre tap of a 3x3 one."""
    return np.eye(TAPS)[TAPS // 2][:, None, None] * kernel


def features_of(images):
    """The feature map as a matrix: `(batch, positions, channels)`."""
    return as_float64(images).reshape(len(images), POSITIONS, CHANNELS)


def patches_of(images):
    """The input under each tap: `(batch, positions, taps, channels)`."""
    padded = np.pad(as_float64(images), [(0, 0), (1, 1), (1, 1), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    windows = np.moveaxis(windows, 3, -1)
    return windows.reshape(len(images), POSITIONS, TAPS, CHANNELS)


def compare():
    """Returns `(largest difference, largest output)` by case."""
    keras.utils.set_random_seed(0)
    images = keras.random.normal((2, HEIGHT, WIDTH, CHANNELS))
    found = {}
    for name, case in CASES.items():
        outputs, explicit = case(images)
        difference = np.abs(as_float64(outputs).reshape(explicit.shape) - explicit)
        found[name] = float(difference.max()), float(np.abs(explicit).max())
    return found


def main() -> None:
    print("| special case | largest difference to its layer | largest output |")
    print("|---|---|---|")
    for name, (difference, largest) in compare().items():
        print(f"| {name} | {difference:.1e} | {largest:.2f} |")


if __name__ == "__main__":
    main()

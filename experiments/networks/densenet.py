"""The densely connected networks of Meta-Neighborhoods."""

import keras

from nsl_keras.backbones import FAST_BATCH_NORMALIZATION, Factory, Units


def densenet_bc(
    depth: int = 40,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    growth: int = 12,
    dropout: float = 0.2,
    convolution: Factory = keras.layers.Conv2D,
    final_relu: bool = False,
    batch_normalization: Factory = FAST_BATCH_NORMALIZATION,
) -> keras.Model:
    """A DenseNet-BC of depth `6n + 4` for small images (Huang et al., 2017), to features.

    A 3x3 convolution to `2 growth` channels and three blocks of `n` bottlenecks. Each
    appends `growth` channels to its input (batch norm, ReLU, 1x1 convolution to `4 growth`,
    batch norm, ReLU, 3x3 convolution). Between the blocks are batch norm, ReLU, a 1x1
    convolution to half the channels and average pooling. Dropout follows every convolution
    except the first; `final_relu` is that of the authors' networks with a dot-product head.

    40 is the depth that the paper names (132 features, 174,792 parameters); 76 is that of
    the authors' code and of the paper's results (258 features, 484,140 parameters).
    """
    bottlenecks, rest = divmod(depth - 4, 6)
    if rest or bottlenecks < 1:
        raise ValueError(f"`depth` must be of the form 6n + 4. Received: depth={depth}")
    layers = Units(convolution, batch_normalization, keras.initializers.GlorotUniform)
    axis = 1 if keras.config.image_data_format() == "channels_first" else -1

    def unit(inputs, filters: int, size: int, name: str):
        """Batch norm, ReLU, convolution and dropout."""
        outputs = layers.activate(inputs, name)
        outputs = layers.convolve(outputs, filters, size, name)
        if not dropout:
            return outputs
        return keras.layers.Dropout(dropout, name=f"{name}_dropout")(outputs)

    inputs = keras.Input(input_shape)
    outputs = layers.convolve(inputs, 2 * growth, 3, "root")
    for block in range(3):
        for index in range(bottlenecks):
            at = f"block_{block}_bottleneck_{index}"
            branch = unit(outputs, 4 * growth, 1, f"{at}_layer_1")
            branch = unit(branch, growth, 3, f"{at}_layer_2")
            outputs = keras.layers.Concatenate(axis, name=at)([outputs, branch])
        if block < 2:
            at = f"transition_{block}"
            outputs = unit(outputs, outputs.shape[axis] // 2, 1, at)
            outputs = keras.layers.AveragePooling2D(2, name=at)(outputs)
    outputs = (layers.activate if final_relu else layers.normalize)(outputs, "final")
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(outputs)
    return keras.Model(inputs, outputs, name=f"densenet_bc_{depth}")

"""iFiLM: feature maps scaled and shifted per example, by a small dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
from absl import logging
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods.key_metrics import Cosine

_PLACES = ("all", "last", "before_head")

_GLOBAL_POOLINGS = (
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalAveragePooling3D,
    keras.layers.GlobalMaxPooling1D,
    keras.layers.GlobalMaxPooling2D,
    keras.layers.GlobalMaxPooling3D,
)


@keras.saving.register_keras_serializable("nsl_keras")
class InstanceFiLM(keras.layers.Layer):
    """Instance-wise feature modulation: `y = (1 + w G) a + w B` per channel.

    The mean `g` of an example's feature map over space looks up a dictionary of its own,

        w = softmax_j(sharpness * cos(g, k_j)),

    and the weights mix the scales `G` and shifts `B` of the entries. Both start at zero,
    so that the layer starts as the identity. Place it after a batch norm.

    Args:
        dictionary_size: int, the number of entries.
        sharpness: float above 0, the start value of the learned factor in front of the
            cosine: an inverse temperature.
        axis: int, the channel axis: -1, or 1 for `data_format="channels_first"`.
        key_initializer: Initializer of the keys; `None` is a normal distribution of
            standard deviation 0.05.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Feature maps.
        mask: Boolean tensor of shape `(batch, steps)`, for sequences with channels last:
            masked steps are left out of the mean. The mask is passed on.

    Input shape:
        `(batch, ..., channels)`, or `(batch, channels, ...)` with `axis=1`, with any
        number of spatial axes.

    Output shape:
        That of the input.

    Raises:
        ValueError: If `dictionary_size` or `sharpness` is not positive, or the number
            of channels is unknown at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.InstanceFiLM(10)
    >>> tuple(layer(keras.ops.ones((2, 8, 8, 16))).shape)
    (2, 8, 8, 16)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.2, Eq. (4). The paper
        scales by `w G` with a fixed temperature; the residual form, the learned factor
        `sharpness` and its start at 5 are those of the authors' code.
    """

    def __init__(
        self,
        dictionary_size: int = 10,
        sharpness: float = 5.0,
        axis: int = -1,
        key_initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dictionary_size = validation.positive_integer(
            dictionary_size, "dictionary_size"
        )
        self.sharpness = validation.positive_number(sharpness, "sharpness")
        self.axis = validation.one_of(axis, (-1, 1), "axis")
        self.key_initializer = keras.initializers.get(
            key_initializer or keras.initializers.RandomNormal(stddev=0.05)
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        channels = validation.known_axis(input_shape, self.axis, "channel axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={self.axis: channels})
        shape = (self.dictionary_size, channels)
        self.keys = self.add_weight(
            name="keys", shape=shape, initializer=self.key_initializer, autocast=False
        )
        self.scales = self.add_weight(
            name="scales", shape=shape, initializer="zeros", autocast=False
        )
        self.shifts = self.add_weight(
            name="shifts", shape=shape, initializer="zeros", autocast=False
        )
        self.learned_sharpness = self.add_weight(
            name="sharpness",
            shape=(),
            initializer=keras.initializers.Constant(self.sharpness),
            autocast=False,
        )

    def call(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        rank = len(inputs.shape)
        channel_axis = self.axis if self.axis > 0 else rank - 1
        space = tuple(axis for axis in range(1, rank) if axis != channel_axis)
        if not keras.backend.is_float_dtype(inputs.dtype):
            inputs = ops.cast(inputs, self.compute_dtype)
        queries = at_least_float32(inputs)
        if space:
            queries = _mean(queries, space, mask if self.axis < 0 else None)
        weights = ops.softmax(self.learned_sharpness * Cosine()(queries, self.keys))
        channels = inputs.shape[channel_axis]
        per_channel = [-1] + [1] * (rank - 1)
        per_channel[channel_axis] = channels
        # The authors' code adds the scales to 1.
        scale = ops.reshape(1 + ops.matmul(weights, self.scales), per_channel)
        shift = ops.reshape(ops.matmul(weights, self.shifts), per_channel)
        scale, shift = ops.cast(scale, inputs.dtype), ops.cast(shift, inputs.dtype)
        return scale * inputs + shift  # MN Eq. (4)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def count_multiply_adds(self, input_shape: tuple[int | None, ...]) -> int | None:
        """Returns the multiply-adds of attention, scales and shifts, for one example."""
        channels = input_shape[self.axis]
        return None if channels is None else 3 * self.dictionary_size * channels

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "dictionary_size": self.dictionary_size,
            "sharpness": self.sharpness,
            "axis": self.axis,
            "key_initializer": keras.initializers.serialize(self.key_initializer),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> InstanceFiLM:
        if "temperature" in config:  # What older files call the sharpness.
            config = {**config, "sharpness": config["temperature"]}
            del config["temperature"]
        return super().from_config(config)


def _mean(inputs: Tensor, space: tuple[int, ...], mask: Tensor | None) -> Tensor:
    if mask is None:
        return ops.mean(inputs, axis=space)
    kept = mask
    for _ in range(len(inputs.shape) - len(mask.shape)):
        kept = ops.expand_dims(kept, -1)
    kept = ops.broadcast_to(ops.cast(kept, inputs.dtype), ops.shape(inputs))
    return ops.sum(kept * inputs, axis=space) / ops.maximum(ops.sum(kept, axis=space), 1)


@rewiring.reaching_backbones
def add_film(
    model: keras.Model,
    where: str | Iterable[str] | Callable[[keras.layers.Layer], Any] = "all",
    dictionary_size: int = 10,
    verbose: Any = "auto",
) -> keras.Model:
    """Returns a new model whose feature maps are modulated by iFiLM.

    The new model has the weights of `model` and, before training, exactly its outputs:
    every `InstanceFiLM` starts as the identity. Nested models and
    `keras.layers.TimeDistributed` are entered. Names, dtype policies, trainable flags and
    shared layers stay; a batch norm that is called several times gets one iFiLM, which is
    shared as well. `model` itself stays as it is, and shares no weights with the new
    model, which is not compiled.

    Args:
        model: A built functional or Sequential model. A model of a class derived from
            these comes back as a plain functional or Sequential model. A
            `MetaNeighborhoodModel` comes back as one, with iFiLM in such a backbone.
        where: Where the iFiLM layers are:

            * `"all"`: after every batch norm, as in the paper;
            * `"last"`: after the last batch norm in the order of the graph;
            * `"before_head"`: where the head takes the last feature map. There is no more
              than activations and sums between it and the last batch norm of a feature
              map, so this is before the last global pooling (`GlobalAveragePooling`,
              `GlobalMaxPooling`) after that batch norm or, without one, before the last
              `Flatten`;
            * a collection of layer names: after each of these layers;
            * a function of a layer: after each layer for which it returns a true value.

            Layers of nested models count. Batch norms inside other layers, such as the
            predictors of neural similarities, do not. The channels of layers other than
            batch norms are where their `data_format` says; without one, on the last axis,
            but for feature maps where `keras.config.image_data_format()` says.
        dictionary_size: int, the number of entries of each iFiLM.
        verbose: 0 for silence, 1 for a progress bar over layers, 2 for a line at the end;
            `"auto"` for a bar where it takes longer than two seconds.

    Returns:
        A `keras.Model`, Sequential if `model` is. Each iFiLM is named after the layer
        that it goes with, `{name}_film`.

    Raises:
        ValueError: If `model` is subclassed, contains a subclassed model with batch norms,
            is not built, or has iFiLM already; if there is nothing at the places that
            `where` names: no batch norms, no head, no layers of these names; if a chosen
            batch norm is over another axis than the first or last after the batch axis, or
            another chosen layer has several outputs; or for arguments outside their range.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> plain = keras.Sequential([
    ...     keras.Input((16, 16, 3)),
    ...     keras.layers.Conv2D(8, 3),
    ...     keras.layers.BatchNormalization(name="norm"),
    ...     keras.layers.ReLU(),
    ...     keras.layers.GlobalAveragePooling2D(),
    ...     keras.layers.Dense(5),
    ... ])
    >>> model = nsl_keras.convert.add_film(plain)
    >>> images = keras.random.normal((2, 16, 16, 3), seed=0)
    >>> bool(keras.ops.all(model(images) == plain(images)))
    True
    >>> [layer.name for layer in model.layers if "norm" in layer.name]
    ['norm', 'norm_film']

    What the authors' option `last` is in their ResNets: the batch norms of the last block
    of each stage, and the final one.

    >>> import re
    >>> last = re.compile(r"stage_._block_2_layer_._normalization|final_normalization")
    >>> resnet = nsl_keras.convert.add_film(
    ...     nsl_keras.backbones.resnet_v2(29), lambda layer: last.fullmatch(layer.name))
    >>> sum(layer.name.endswith("_film") for layer in resnet.layers)
    10

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.2: one dictionary along
        with each batch norm. `"last"` and `"before_head"` are options of the authors' code
        (there `last` and `before_fc`), which leaves open where in a given network they
        are: `last` is the ten places above in a ResNet, and nowhere in other networks.
    """
    where = _checked_places(where)
    dictionary_size = validation.positive_integer(dictionary_size, "dictionary_size")
    calls = rewiring.calls(model)
    _refuse_unsuited(model, [call.layer for call in calls], isinstance(where, str))
    chosen = (
        [_head(model, calls)] if where == "before_head" else _chosen(model, calls, where)
    )
    axes = {id(call.layer): _channel_axis(call) for call in chosen}
    names = {call.layer.name for call in calls}
    films: list[InstanceFiLM] = []

    def replace(layer: keras.layers.Layer) -> list[keras.layers.Layer] | None:
        if id(layer) not in axes:
            return None
        film = InstanceFiLM(
            dictionary_size,
            axis=axes[id(layer)],
            dtype=layer.dtype_policy,
            name=rewiring.unused_name(f"{layer.name}_film", names),
        )
        films.append(film)
        return [film, layer] if where == "before_head" else [layer, film]

    new_model = rewiring.rebuild(model, replace)
    logging.info(
        "iFiLM was added to %r in %d places: %s",
        model.name,
        len(films),
        ", ".join(film.name for film in films),
    )
    return new_model


def _checked_places(where: Any) -> Any:
    """Returns a place by name, a function, or layer names, as `add_film` takes them."""
    if callable(where) or (isinstance(where, str) and where in _PLACES):
        return where
    names = (
        list(where) if isinstance(where, Iterable) and not isinstance(where, str) else []
    )
    if not names or not all(isinstance(name, str) for name in names):
        places = ", ".join(repr(place) for place in _PLACES)
        raise ValueError(
            f"`where` must be one of {places}, a collection of layer names, or a function "
            f"of a layer. Received: where={where!r}"
        )
    return names


def _refuse_unsuited(
    model: keras.Model, found: Iterable[keras.Operation], searched: bool
) -> None:
    """Raises for iFiLM in a model and, if it is searched for batch norms, hidden ones."""
    for layer in found:
        inside = [layer, *rewiring.sublayers(layer)]
        if any(isinstance(each, InstanceFiLM) for each in inside):
            raise ValueError(
                "`model` must have no iFiLM yet; choose all places at once. "
                f"Received: model {model.name!r}, with iFiLM in {layer.name!r}"
            )
        if (
            searched
            and isinstance(layer, keras.Model)
            and any(isinstance(each, keras.layers.BatchNormalization) for each in inside)
        ):
            raise ValueError(
                "`model` must be functional or Sequential, and so must the models in it "
                "that have batch norms. Received: the subclassed model "
                f"{layer.name!r} of type {type(layer).__name__!r}"
            )


def _chosen(
    model: keras.Model, calls: list[rewiring.Call], where: Any
) -> list[rewiring.Call]:
    """Returns the calls that an iFiLM follows."""
    calls = [call for call in calls if isinstance(call.layer, keras.layers.Layer)]
    if isinstance(where, str):
        norms = [call for call in calls if _is_norm(call)]
        if not norms:
            raise ValueError(
                "`model` must have batch norms, as functional or Sequential models' "
                f"layers. Received: model {model.name!r} without any"
            )
        return norms if where == "all" else norms[-1:]
    if callable(where):
        chosen = [call for call in calls if where(call.layer)]
    else:
        missing = sorted(set(where) - {call.layer.name for call in calls})
        if missing:
            raise ValueError(
                f"`where` must name layers of model {model.name!r}. "
                f"Received: where={where!r}, of which it lacks {missing!r}"
            )
        chosen = [call for call in calls if call.layer.name in where]
    if not chosen:
        raise ValueError(
            f"`where` must choose layers of model {model.name!r}. "
            f"Received: where={where!r}, which chooses none"
        )
    for call in chosen:
        if len(call.output_shapes) != 1 or len(call.output_shapes[0]) < 2:
            raise ValueError(
                "`where` must choose layers with one output of at least two axes. "
                f"Received: {call.layer.name!r} with outputs of shapes "
                f"{list(call.output_shapes)}"
            )
    return chosen


def _head(model: keras.Model, calls: list[rewiring.Call]) -> rewiring.Call:
    """Returns the call that takes the last feature map into the head."""
    norms = [index for index, call in enumerate(calls) if _is_norm(call) and _is_map(call)]
    after = range(norms[-1] + 1 if norms else len(calls), len(calls))
    for kinds in (_GLOBAL_POOLINGS, (keras.layers.Flatten,)):
        heads = [
            i for i in after if isinstance(calls[i].layer, kinds) and _is_map(calls[i])
        ]
        if not heads:
            continue
        head = calls[heads[-1]]
        taken = head.input_shapes[0]
        sizes = [*taken[1:]]
        del sizes[-1 if _channel_axis(head) < 0 else 0]
        # The pooling in a squeeze-and-excitation block is followed by its map once more.
        reused = any(taken in call.input_shapes for call in calls[heads[-1] + 1 :])
        if not reused or set(sizes) == {1}:
            return head
    raise ValueError(
        '`where="before_head"` needs a model with a head, after a global pooling or '
        "Flatten layer that takes the last feature map. "
        f"Received: model {model.name!r} without one"
    )


def _is_norm(call: rewiring.Call) -> bool:
    return isinstance(call.layer, keras.layers.BatchNormalization)


def _is_map(call: rewiring.Call) -> bool:
    return len(call.input_shapes[0]) > 2


def _channel_axis(call: rewiring.Call) -> int:
    """Returns the channel axis of the map that a call takes or makes, 1 or -1."""
    layer, rank = call.layer, len(call.output_shapes[0])
    if not _is_norm(call):
        default = keras.config.image_data_format() if rank > 3 else "channels_last"
        return 1 if getattr(layer, "data_format", default) == "channels_first" else -1
    axis = layer.axis % rank
    if axis not in (1, rank - 1):
        raise ValueError(
            "Batch norms must be over the last axis or the one after the batch axis. "
            f"Received: {layer.name!r} with axis={layer.axis} for {rank} axes"
        )
    return -1 if axis == rank - 1 else 1

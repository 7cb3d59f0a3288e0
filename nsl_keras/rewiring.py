"""Walks and rebuilds functional and Sequential models, nested ones included.

One rule: layers of the source model are never called and never shared with the new one,
so that the source keeps its graph, its weights and its trainable flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import keras
import numpy as np
from keras import tree

from nsl_keras.progress import Progress

#: Says what `rebuild` puts in a layer's place: layers to call one after the other, among
#: which the layer itself stands for its copy. `None` is that copy alone.
Replace = Callable[[keras.layers.Layer], Sequence[keras.layers.Layer] | None]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer, or of an operation of `keras.ops`, in a model's graph.

    Attributes:
        layer: What is called.
        input_shapes: Shapes of the tensors that go in, batch axis included.
        output_shapes: Shapes of the tensors that come out.
        input_dtypes: Dtypes of the tensors that go in.
        repeats: How often an example runs through it: the number of time steps inside
            `keras.layers.TimeDistributed`, 1 elsewhere; `None` if not known.
    """

    layer: keras.Operation
    input_shapes: tuple[tuple[int | None, ...], ...]
    output_shapes: tuple[tuple[int | None, ...], ...]
    input_dtypes: tuple[str, ...] = ()
    repeats: int | None = 1


def is_graph(layer: Any) -> bool:
    """Whether a layer is a functional or Sequential model, so that its graph is all of it.

    A model with a `call` of its own is not: only the class knows what it computes.
    """
    return (
        isinstance(layer, keras.Model)
        and isinstance(layer, (keras.Function, keras.Sequential))
        and type(layer).call.__module__.partition(".")[0] == "keras"
    )


def require_graph(model: Any) -> None:
    """Raises unless `model` is a built functional or Sequential model."""
    if not is_graph(model):
        raise ValueError(
            "`model` must be a functional or Sequential model; the graph of a subclassed "
            "model, with a `call` of its own, is not known. "
            f"Received: model={model!r} of type {type(model).__name__!r}"
        )
    if not hasattr(model, "inputs"):
        raise ValueError(
            "`model` must be built: start it with a `keras.Input`, or call it on data. "
            f"Received: Sequential model {model.name!r}, which has no input shape yet"
        )


class WithBackbone:
    """Mixin of models that are more than a graph, around a backbone that is one."""

    backbone: Any

    def with_backbone(self, backbone: keras.Model) -> keras.Model:
        """Returns a copy of the model, with its weights, around another backbone."""
        raise NotImplementedError

    def count_head_multiply_adds(self) -> int | None:
        """Returns the multiply-adds after the backbone; `None` if they are not known."""
        raise NotImplementedError


def graph_in(model: Any) -> Any:
    """Returns the backbone of a model that has one, and any other model itself.

    Raises:
        ValueError: If the backbone is no built functional or Sequential model.
    """
    if not isinstance(model, WithBackbone):
        return model
    backbone = model.backbone
    if not is_graph(backbone) or not hasattr(backbone, "inputs"):
        raise ValueError(
            "`model` must have a backbone that is a built functional or Sequential model. "
            f"Received: a {type(model).__name__} with backbone={backbone!r}"
        )
    return backbone


Function = TypeVar("Function", bound=Callable[..., Any])


def reaching_backbones(convert: Function) -> Function:
    """Lets a function of a functional model, that returns one, convert backbones too."""

    @functools.wraps(convert)
    def reached(model: Any, *args: Any, **kwargs: Any) -> Any:
        converted = convert(graph_in(model), *args, **kwargs)
        if isinstance(model, WithBackbone):
            return model.with_backbone(converted)
        return converted

    return cast("Function", reached)


def unused_name(name: str, used: set[str]) -> str:
    """Returns a name that no layer has: the one given, or with a number after it."""
    candidates = [name, *(f"{name}_{number}" for number in range(1, len(used) + 1))]
    return next(each for each in candidates if each not in used)


def calls(model: keras.Model) -> list[Call]:
    """Returns every call of a layer in a model, in the order of the graph.

    Nested models and `keras.layers.TimeDistributed` are entered, with the sizes that they
    are called on here; a shared layer appears once for each call.

    Raises:
        ValueError: If the model is subclassed, or not built.
    """
    found: list[Call] = []
    _walk(model, None, 1, found)
    return found


def layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a model and of the models nested in it, each once.

    Raises:
        ValueError: If the model is subclassed, or not built.
    """
    unique = {id(call.layer): call.layer for call in calls(model)}
    return [each for each in unique.values() if isinstance(each, keras.layers.Layer)]


def sublayers(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """Yields the layers that a layer holds as attributes, at any depth, each once.

    In the order of the attributes, each layer before those that it holds.
    """
    seen = {id(layer)}
    waiting: list[Any] = [vars(layer)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, keras.layers.Layer):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                waiting.append(vars(value))
        elif isinstance(value, dict):
            waiting.extend(reversed(value.values()))  # The last one is taken first.
        elif isinstance(value, (list, tuple, set)):
            waiting.extend(reversed(list(value)))


def copy_activations(source: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Hands on the weights of activations that are layers, such as `PReLU`.

    Args:
        source: A built layer.
        copy: A layer made from its config.
    """
    for name in ("activation", "recurrent_activation"):
        one, other = getattr(source, name, None), getattr(copy, name, None)
        if not isinstance(one, keras.layers.Layer) or not isinstance(other, type(one)):
            continue
        if not one.built:  # Keras builds it when the layer is first called.
            continue
        if not other.built:
            other.build_from_config(one.get_build_config())
        other.set_weights(one.get_weights())


def pass_on_frozen(layer: keras.layers.Layer) -> None:
    """Freezes the layers that a frozen layer made in `build`.

    To be called at the end of `build`. A layer that is frozen when it is made, as each
    copy of a frozen one is, has Keras freeze its own variables alone.
    """
    if not layer.trainable:
        for each in sublayers(layer):
            each.trainable = False


@contextlib.contextmanager
def unfrozen(layer: keras.layers.Layer) -> Iterator[None]:
    """Makes all of a layer trainable while it lasts, then restores each flag.

    Then `trainable_variables` are all weights but state: moving statistics and seeds.
    """
    layers = [(each, each.trainable) for each in (layer, *sublayers(layer))]
    variables = [(each, each.trainable) for each in layer.variables]
    # Off and on again: a flag that is on already passes nothing on to variables.
    for each, _ in layers:
        each.trainable = False
    for each, _ in layers:
        each.trainable = True
    try:
        yield
    finally:
        # A layer passes its flag on: those that it holds come after it.
        for each, trainable in layers:
            each.trainable = trainable
        for variable, trainable in variables:
            if variable.trainable != trainable:
                variable.trainable = trainable


def rebuild(model: keras.Model, replace: Replace, verbose: Any = 0) -> keras.Model:
    """Returns a new model with the source's graph and weights, some layers replaced.

    Layers are copied from their configs and keep their names, dtype policies and trainable
    flags; shared layers and shared predictors stay shared, nested models nested. The
    models themselves come back trainable, so that each layer's own flag decides, and not
    compiled. A model of a class derived from a functional or Sequential one comes back as
    a plain one.

    Args:
        model: A functional or Sequential model.
        replace: Called once with each layer (models and `keras.layers.TimeDistributed`
            are entered instead); returns the layers to put in its place, or `None`. The
            first of them is called with all arguments of the source's call. Weights of
            new layers are the caller's to set.
        verbose: Progress over layers: `"auto"`, 0, 1 or 2.

    Raises:
        ValueError: If the model is subclassed or not built, or if a layer cannot be made
            from its config.
    """
    steps = len({id(call.layer) for call in calls(model)})
    return _Rebuilding(replace, Progress(steps, verbose)).run(model)


class _Rebuilding:
    """One run of `rebuild`."""

    def __init__(self, replace: Replace, progress: Progress) -> None:
        self._replace = replace
        self._progress = progress
        #: What stands in a layer's place, by the layer's id: the same for all its calls.
        self._chains: dict[int, list[keras.Operation]] = {}
        #: What is called before the last layer of a chain, by the id of that layer.
        self._before: dict[int, list[keras.Operation]] = {}
        #: Layers and their copies, whose weights follow when the graph is there.
        self._copies: list[tuple[keras.layers.Layer, keras.layers.Layer]] = []
        #: What several layers share, by the number that their configs give it.
        self._shared: dict[int, Any] = {}

    def run(self, model: keras.Model) -> keras.Model:
        new_model = self._model(model)
        for source, copy in self._copies:
            _copy_state(source, copy)
        self._progress.close()
        return new_model

    def _model(self, model: keras.Model) -> keras.Model:
        require_graph(model)
        if isinstance(model, keras.Sequential):
            (tensor,) = model.inputs
            stack = [layer for each in model.layers for layer in self._chain(each)]
            start = keras.Input(
                batch_shape=tensor.shape, dtype=tensor.dtype, name=tensor.name
            )
            return keras.Sequential([start, *stack], name=model.name)
        starts = {
            id(each.output): keras.layers.InputLayer.from_config(each.get_config()).output
            for each in model.layers
            if isinstance(each, keras.layers.InputLayer)
        }
        inputs = tree.map_structure(lambda tensor: starts[id(tensor)], model.input)
        return keras.models.clone_model(
            _uncompiled(model),
            input_tensors=inputs,
            clone_function=self._last,
            call_function=self._call,
        )

    # `clone_model` wants one layer in a layer's place: it is given the last of the chain,
    # and calls those before it together with it.

    def _last(self, layer: keras.Operation) -> keras.Operation:
        *before, last = self._chain(layer)
        self._before[id(last)] = before
        return last

    def _call(self, last: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        if "mask" in kwargs and kwargs["mask"] is None:
            del kwargs["mask"]  # What stands in for a Softmax may not know of masks.
        for layer in self._before[id(last)]:
            args, kwargs = (layer(*args, **kwargs),), {}
        return last(*args, **kwargs)

    def _chain(self, layer: keras.Operation) -> list[keras.Operation]:
        if id(layer) not in self._chains:
            self._chains[id(layer)] = self._new_chain(layer)
        return self._chains[id(layer)]

    def _new_chain(self, layer: keras.Operation) -> list[keras.Operation]:
        if is_graph(layer):
            return [self._model(layer)]
        if type(layer) is keras.layers.TimeDistributed:
            *before, last = self._chain(layer.layer)
            names = [f"{layer.name}_{each.name}" for each in before] + [layer.name]
            return [
                keras.layers.TimeDistributed(each, name=name, dtype=layer.dtype_policy)
                for each, name in zip([*before, last], names, strict=True)
            ]
        self._progress.advance()
        chain = self._replace(layer) if isinstance(layer, keras.layers.Layer) else None
        if chain is None:
            return [self._copy(layer)]
        return [self._copy(layer) if each is layer else each for each in chain]

    def _copy(self, layer: keras.Operation) -> keras.Operation:
        try:
            if isinstance(layer, keras.layers.Lambda):
                # The function is at hand: nothing foreign is run by taking it over.
                copy = type(layer).from_config(layer.get_config(), safe_mode=False)
                copy.function = layer.function
            else:
                copy = type(layer).from_config(self._config(layer))
        except Exception as error:
            raise ValueError(
                "Every layer of `model` must be one that `from_config(get_config())` "
                "makes again, its own classes and functions registered with "
                "`keras.saving.register_keras_serializable`. "
                f"Received: layer {layer.name!r} of type {type(layer).__name__!r}, for "
                f"which it raised {type(error).__name__}: {error}"
            ) from error
        if isinstance(layer, keras.layers.Layer):
            self._copies.append((layer, copy))
        return copy

    def _config(self, layer: keras.Operation) -> dict[str, Any]:
        """A layer's config, with one object in it for what several layers share."""
        config = layer.get_config()
        for name, value in config.items():
            number = value.get("shared_object_id") if isinstance(value, dict) else None
            if number is not None:
                if number not in self._shared:
                    self._shared[number] = keras.saving.deserialize_keras_object(value)
                config[name] = self._shared[number]
        return config


def _copy_state(source: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Hands on weights, trainable flags, and what else a layer would keep in a file."""
    copy.set_weights(source.get_weights())
    pairs = list(_counterparts(source, copy))
    for one, other in pairs:
        if _has_own_variables(one):
            store: dict[str, Any] = {}
            one.save_own_variables(store)
            other.load_own_variables({key: np.asarray(store[key]) for key in store})
        if hasattr(one, "save_assets"):  # A vocabulary that it adapted to, for example.
            with tempfile.TemporaryDirectory() as folder:
                one.save_assets(folder)
                other.load_assets(folder)
        if isinstance(other, keras.layers.Normalization):
            other.finalize_state()  # It computes with what it derives from its weights.
    # A flag reaches all that a layer holds, by several ways perhaps: once more for those
    # whose holders came after them.
    for _ in pairs:
        differing = [pair for pair in pairs if pair[0].trainable != pair[1].trainable]
        for one, other in differing:
            other.trainable = one.trainable
        if not differing:
            break
    for variable, new in zip(source.weights, copy.weights, strict=True):
        if new.trainable != variable.trainable:
            new.trainable = variable.trainable


def _counterparts(
    source: keras.layers.Layer, copy: keras.layers.Layer
) -> Iterator[tuple[keras.layers.Layer, keras.layers.Layer]]:
    """Yields a layer and its copy, and so all layers that the two hold in one place."""
    seen = set()
    waiting: list[tuple[Any, Any]] = [(source, copy)]
    while waiting:
        one, other = waiting.pop()
        if isinstance(one, keras.layers.Layer):
            if id(one) in seen or type(one) is not type(other):
                continue
            seen.add(id(one))
            yield one, other
            one, other = vars(one), vars(other)
        if isinstance(one, dict) and isinstance(other, dict):
            waiting.extend((one[key], other[key]) for key in one if key in other)
        elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            waiting.extend(zip(one, other, strict=False))


def _has_own_variables(layer: keras.layers.Layer) -> bool:
    """Whether a layer says itself what it keeps as its weights, and is none of Keras's."""
    module = type(layer).save_own_variables.__module__
    return module.partition(".")[0] not in ("keras", "nsl_keras")


class _Probe(keras.Operation):
    """Stands for a layer in a clone of its graph, and notes the calls as they are made.

    So a walk needs nothing of Keras but its public `clone_model`, and makes no weights.
    """

    def __init__(
        self, layer: keras.Operation, repeats: int | None, found: list[Call]
    ) -> None:
        super().__init__(name=layer.name)
        self._probed, self._repeats, self._found = layer, repeats, found

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        return _visit(self._probed, self._repeats, self._found, *args, **kwargs)


def _visit(
    layer: keras.Operation,
    repeats: int | None,
    found: list[Call],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns the outputs of a call, as symbolic tensors, and notes the calls in it."""
    inputs: Any = args[0] if args else kwargs.get("inputs")
    if is_graph(layer):
        return _walk(layer, inputs, repeats, found)
    outputs = layer.compute_output_spec(*args, **kwargs)
    if type(layer) is keras.layers.TimeDistributed:
        batch, steps, *rest = inputs.shape
        step = keras.KerasTensor((batch, *rest), inputs.dtype)
        known = None if repeats is None or steps is None else repeats * steps
        _visit(layer.layer, known, found, step)
    else:
        given = [each for each in tree.flatten((args, kwargs)) if _is_symbolic(each)]
        shapes, dtypes = _shapes(given), tuple(each.dtype for each in given)
        found.append(Call(layer, shapes, _shapes(outputs), dtypes, repeats))
    return outputs


def _walk(model: keras.Model, inputs: Any, repeats: int | None, found: list[Call]) -> Any:
    """Returns the outputs of a model on `inputs`, or on its own where they are `None`."""
    require_graph(model)
    if isinstance(model, keras.Sequential):
        outputs = model.inputs[0] if inputs is None else inputs
        for layer in model.layers:
            outputs = _visit(layer, repeats, found, outputs)
        return outputs
    if inputs is None:
        inputs = model.inputs
    elif isinstance(inputs, dict) and isinstance(model.input, dict):
        inputs = {key: inputs[key] for key in model.input}  # Keras leaves out the others.
    elif isinstance(inputs, dict):
        inputs = [inputs[tensor.name] for tensor in model.inputs]
    fresh = [
        keras.Input(
            batch_shape=given.shape,
            dtype=given.dtype,
            sparse=given.sparse,
            name=tensor.name,
        )
        for given, tensor in zip(tree.flatten(inputs), model.inputs, strict=True)
    ]
    walked = keras.models.clone_model(
        _uncompiled(model),
        input_tensors=tree.pack_sequence_as(model.input, fresh),
        clone_function=lambda layer: _Probe(layer, repeats, found),
    )
    # New tensors: those of the walk belong to its graph.
    return tree.map_structure(
        lambda tensor: keras.KerasTensor(tensor.shape, tensor.dtype), walked.output
    )


def _uncompiled(model: keras.Model) -> keras.Model:
    """The same graph in a model without an optimizer, which a clone would take over."""
    return keras.Model(model.input, model.output, name=model.name)


def _shapes(structure: Any) -> tuple[tuple[int | None, ...], ...]:
    return tuple(
        tuple(each.shape) for each in tree.flatten(structure) if _is_symbolic(each)
    )


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor)

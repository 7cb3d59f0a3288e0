"""Walks and rebuilds functional and Sequential models, nested models included.

The new model shares no layer with the source. The source keeps its graph, weights and
trainable flags.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import keras
from keras import ops, tree

from nsl_keras import configs, nesting

Layer: TypeAlias = keras.layers.Layer
Shapes: TypeAlias = tuple[tuple[int | None, ...], ...]

#: Returns the layers that replace a layer in `rebuild`, called one after the other. The
#: layer itself among them is replaced by its copy. `None` keeps only that copy.
Replace: TypeAlias = Callable[[Layer], Sequence[Layer] | None]

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer, or of an operation of `keras.ops`, in a model's graph.

    `repeats` is the number of calls per example: the time steps inside
    `keras.layers.TimeDistributed`, 1 elsewhere; `None` if unknown.
    """

    layer: keras.Operation
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]
    repeats: int | None = 1

    def on(self, tensor: Any) -> Any:
        """Calls the layer again, on a tensor in place of its input."""
        args, kwargs = tree.map_structure(
            lambda each: tensor if isinstance(each, keras.KerasTensor) else each,
            self.arguments,
        )
        return self.layer(*args, **kwargs)

    @property
    def input_shapes(self) -> Shapes:
        """The shapes of the inputs, with the batch axis."""
        return tuple(tuple(each.shape) for each in self.inputs)

    @property
    def output_shapes(self) -> Shapes:
        """The shapes of the outputs, with the batch axis."""
        return tuple(tuple(each.shape) for each in self.outputs)


def is_graph(layer: Any) -> bool:
    """Whether a layer is a functional or Sequential model with Keras's own `call`."""
    return (
        isinstance(layer, keras.Model)
        and isinstance(layer, (keras.Function, keras.Sequential))
        and type(layer).call.__module__.partition(".")[0] == "keras"
    )


def require_graph(model: Any) -> None:
    """Raises unless `model` is a built functional or Sequential model."""
    if not is_graph(model) or not hasattr(model, "inputs"):
        raise ValueError(
            "`model` must be a functional or Sequential model of Keras 3, and must be "
            "built: start it with a `keras.Input`, or call it on data. Received: "
            f"model={model!r} of type {type(model).__module__}.{type(model).__name__}"
        )


def symbols_of(model: Any) -> tuple[Any, Any]:
    """Returns the symbolic inputs and outputs of a graph, in the model's structure."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def fits(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether two shapes are equal as far as they are known."""
    return len(one) == len(other) and all(
        None in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True)
    )


def name_shapes(model: Any, inputs: Any, error: ValueError) -> None:
    """Raises with the shapes that a graph takes, after a call on other shapes failed."""
    expected = [each.shape for each in getattr(model, "inputs", None) or ()]
    received = [tuple(getattr(each, "shape", ())) for each in tree.flatten(inputs)]
    if not all(map(fits, expected, received)):
        raise ValueError(
            f"Inputs of {model.name!r} must have shapes {expected}, with a batch axis in "
            f"front. Received: shapes {received}"
        ) from error


def reaching_backbones(convert: Function) -> Function:
    """Lets a function from model to model convert the backbone of a model that has one."""

    @functools.wraps(convert)
    def converted(model: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(model, "with_backbone"):
            return model.with_backbone(convert(model.backbone, *args, **kwargs))
        return convert(model, *args, **kwargs)

    return cast("Function", converted)


def unused_name(name: str, used: set[str]) -> str:
    """Returns `name`, with a number appended if it is used already."""
    candidates = [name, *(f"{name}_{number}" for number in range(1, len(used) + 1))]
    return next(each for each in candidates if each not in used)


def calls(model: keras.Model) -> list[Call]:
    """Returns every call of a layer in a model, in the order of the graph.

    Calls inside nested models and `keras.layers.TimeDistributed` count, with the shapes
    of their call in this model. A shared layer appears once for each call.
    """
    return traced(model)[0]


def traced(model: keras.Model) -> tuple[list[Call], list[keras.KerasTensor]]:
    """Returns `calls` and the outputs of the model, which its last calls return."""
    found: list[Call] = []
    return found, list(_noting_calls(model, found).outputs)


def layers(model: keras.Model) -> list[Layer]:
    """Returns the layers of a model and of its nested models, each once."""
    require_graph(model)
    found: dict[int, Layer] = {}
    for each in model.layers:
        layer = each.layer if type(each) is keras.layers.TimeDistributed else each
        if is_graph(layer):
            found |= {id(inner): inner for inner in layers(layer)}
        elif not isinstance(layer, keras.layers.InputLayer):
            found[id(layer)] = layer
    return list(found.values())


def has_plain_kernel(layer: Layer) -> bool:
    """Whether a layer's kernel, if it has one, is a variable of floating-point numbers.

    LoRA and its relatives compute the kernel, and quantization stores integers.
    """
    kernel = getattr(layer, "kernel", None)
    return kernel is None or (
        isinstance(kernel, keras.Variable) and keras.backend.is_float_dtype(kernel.dtype)
    )


def copy_value(source: Any, variable: keras.Variable) -> None:
    """Copies a value: on JAX two layers would share a buffer, which training donates."""
    variable.assign(ops.convert_to_numpy(source))


def copy_activations(source: Layer, copy: Layer) -> None:
    """Copies the weights of activations that are layers, for example `PReLU`."""
    kind = keras.layers.Layer
    for name in ("activation", "recurrent_activation"):
        one, other = getattr(source, name, None), getattr(copy, name, None)
        # Keras builds an activation when its layer is first called.
        if isinstance(one, kind) and isinstance(other, kind) and one.built:
            if not other.built:
                other.build_from_config(one.get_build_config())
            other.set_weights(one.get_weights())


def paired_variables(source: Layer, copy: Layer) -> list[tuple[Any, Any]]:
    """Pairs the variables of a layer or model with the variables of a copy.

    Variables inside a layer are paired by name: quantization adds variables after those of
    the layer, but a layer that is made from its config has them first.
    """
    if is_graph(source):
        pairs = zip(layers(source), layers(copy), strict=True)
        return [each for one, other in pairs for each in paired_variables(one, other)]
    found: dict[int, Any] = {}
    for one, other in reversed(_paired_layers(source, copy)):  # Its own variables remain.
        taken = set(map(id, found.values()))
        own = [each for each in one.variables if id(each) not in found]
        new = [each for each in other.variables if id(each) not in taken]
        named = {each.name: each for each in new}
        if len(named) == len(new) and all(each.name in named for each in own):
            new = [named[each.name] for each in own]
        found |= {id(each): partner for each, partner in zip(own, new, strict=True)}
    return [(each, found[id(each)]) for each in source.variables]


def _paired_layers(source: Layer, copy: Layer) -> list[tuple[Layer, Layer]]:
    """Returns a layer and those inside it, each with that of a copy."""
    copies = [copy, *nesting.sublayers(copy)]
    return [*zip([source, *nesting.sublayers(source)], copies, strict=True)]


def rebuild(model: keras.Model, replace: Replace) -> keras.Model:
    """Returns a new model with the source's graph and some layers replaced.

    All other layers are copies, with the source's weights, flags and saved state.
    """
    return _Rebuilding(replace).run(model)


def output_spec(model: Layer, inputs: Any) -> Any:
    """Returns a model's symbolic outputs.

    Functional models already know their outputs. They accept inputs that omit a trailing
    axis of size 1, but a symbolic call with such inputs fails.
    """
    outputs = getattr(model, "outputs", None)
    if outputs and len(outputs) == 1 and None not in outputs[0].shape[1:]:
        batch = tree.flatten(inputs)[0].shape[0]
        return keras.KerasTensor((batch, *outputs[0].shape[1:]), outputs[0].dtype)
    return model(inputs)


def _is_made_by_keras(kind: type[keras.Model], plain: type[keras.Model]) -> bool:
    """Whether a model's class takes the arguments of Keras's own class."""
    signatures = (inspect.signature(each.__init__) for each in (kind, plain))
    one, other = ([*signature.parameters] for signature in signatures)
    return one == other


#: In place of the function in the config of a `Lambda`.
_PLACEHOLDER = keras.saving.serialize_keras_object(keras.activations.linear)


class _Rebuilding:
    """One run of `rebuild`."""

    def __init__(self, replace: Replace) -> None:
        self._replace = replace
        #: The replacements of each layer, by its id, for all its calls.
        self._chains: dict[int, list[Any]] = {}
        #: Layers and their copies; models and wrappers around layers, and theirs.
        self._copies: list[tuple[Layer, Layer]] = []
        self._containers: list[tuple[Layer, Layer]] = []
        #: Objects that several layers share, by the id in their configs.
        self._shared: dict[int, Any] = {}

    def run(self, model: keras.Model) -> keras.Model:
        new_model = self._model(model)
        for source, copy in self._copies:
            copy_state(source, copy)
        for source, copy in self._containers:
            # Not around a new layer that is trained: a loaded file would freeze that too.
            if not source.trainable and not copy.trainable_variables:
                copy.trainable = False
        # Keras exports no model to ONNX that was never called.
        new_model(symbols_of(new_model)[0])
        if type(new_model) is not type(model):
            warnings.warn(
                f"The new model is a plain Keras model, without what {model.name!r}'s "
                f"class {type(model).__name__!r} adds, such as steps or preprocessing.",
                stacklevel=5,  # The caller of a decorated function that rebuilds.
            )
        return new_model

    def _model(self, model: keras.Model) -> keras.Model:
        copy = self._new_model(model)
        self._containers.append((model, copy))
        return copy

    def _new_model(self, model: keras.Model) -> keras.Model:
        require_graph(model)
        if isinstance(model, keras.Sequential):
            (tensor,) = model.inputs
            start = keras.Input(
                batch_shape=tensor.shape,
                dtype=tensor.dtype,
                sparse=tensor.sparse,
                name=tensor.name,
            )
            stack = [layer for each in model.layers for layer in self._chain(each)]
            kept = _is_made_by_keras(type(model), keras.Sequential)
            kind = type(model) if kept else keras.Sequential
            return kind([start, *stack], name=model.name)
        starts = {
            id(each.output): type(each).from_config(each.get_config()).output
            for each in model.layers
            if isinstance(each, keras.layers.InputLayer)
        }
        made = keras.models.clone_model(
            _uncompiled(model),
            # Keras's own inputs of a clone are neither sparse nor optional.
            input_tensors=tree.map_structure(lambda each: starts[id(each)], model.input),
            clone_function=lambda each: each,
            call_function=self._call,
        )
        if type(made) is type(model) or not _is_made_by_keras(type(model), type(made)):
            return made
        return type(model)(made.input, made.output, name=model.name)

    def _call(self, layer: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mask", True) is None:
            del kwargs["mask"]  # The replacement of a Softmax may not take masks.
        first, *others = self._chain(layer)
        outputs = first(*args, **kwargs)
        for each in others:
            outputs = each(outputs)
        return outputs

    def _chain(self, layer: keras.Operation) -> list[Any]:
        if id(layer) not in self._chains:
            self._chains[id(layer)] = self._new_chain(layer)
        return self._chains[id(layer)]

    def _new_chain(self, layer: Any) -> list[Any]:
        if is_graph(layer):
            return [self._model(layer)]
        if type(layer) is keras.layers.TimeDistributed:
            *before, last = self._chain(layer.layer)
            names = [f"{layer.name}_{each.name}" for each in before] + [layer.name]
            wrappers = [
                keras.layers.TimeDistributed(each, name=name, dtype=layer.dtype_policy)
                for each, name in zip([*before, last], names, strict=True)
            ]
            self._containers += [(layer, each) for each in wrappers]
            return wrappers
        chain = self._replace(layer) if isinstance(layer, keras.layers.Layer) else None
        return [
            self._copy(each) if each is layer else each
            for each in ([layer] if chain is None else chain)
        ]

    def _copy(self, layer: keras.Operation) -> keras.Operation:
        try:
            if isinstance(layer, keras.layers.Lambda):
                # Safe: the function itself is reused, and no foreign code runs.
                config = {**layer.get_config(), "function": _PLACEHOLDER}
                copy = type(layer).from_config(config, safe_mode=False)
                copy.function = layer.function
            else:
                copy = self._from_config(layer)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                "`from_config(get_config())` must recreate every layer of `model`; "
                "register custom classes and functions with "
                "`keras.saving.register_keras_serializable`. "
                f"Received: layer {layer.name!r} of type {type(layer).__name__!r}"
            ) from error
        if isinstance(layer, keras.layers.Layer):
            self._copies.append((layer, copy))
        return copy

    def _from_config(self, layer: keras.Operation) -> keras.Operation:
        """Returns a copy; what several layers share stays one object."""
        config = layer.get_config()
        for name, value in config.items():
            number = value.get("shared_object_id") if isinstance(value, dict) else None
            if number is not None:
                if number not in self._shared:
                    self._shared[number] = keras.saving.deserialize_keras_object(value)
                config[name] = self._shared[number]
        try:
            return configs.remade(layer, config=config)
        except (TypeError, ValueError):  # A custom layer that makes them from a config.
            return type(layer).from_config(config)


def copy_state(source: Layer, copy: Layer) -> None:
    """Copies weights, trainable flags, and other saved state of a layer."""
    if len(source.weights) != len(copy.weights):
        raise ValueError(
            "Every layer of `model` must have the weights that its config makes, and no "
            "weights of LoRA or quantization inside it. "
            f"Received: layer {source.name!r} of type {type(source).__name__!r}"
        )
    for one, other in _paired_layers(source, copy):
        store: dict[str, Any] = {}
        one.save_own_variables(store)
        other.load_own_variables(  # Copies, as in `copy_value`.
            {key: ops.convert_to_numpy(value) for key, value in store.items()}
        )
        if hasattr(one, "save_assets"):  # For example an adapted vocabulary.
            with tempfile.TemporaryDirectory() as folder:
                one.save_assets(folder)
                other.load_assets(folder)
        if other.trainable != one.trainable:
            other.trainable = one.trainable
    weights = set(map(id, source.weights))
    for variable, new in paired_variables(source, copy):
        if id(variable) in weights:
            # A layer with LoRA saves the product of its parts, and loads zeros for them.
            copy_value(variable, new)
        if new.trainable != variable.trainable:
            new.trainable = variable.trainable


class _Probe(keras.Operation):
    """Replaces a layer in a clone of its graph, and notes its calls.

    A walk thus needs only Keras's public `clone_model`, and makes no weights.
    """

    def __init__(self, layer: Any, found: list[Call]) -> None:
        super().__init__(name=layer.name)
        self._probed, self._found = layer, found

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._probed
        inside: list[Call] = []
        if is_graph(layer):
            model = _noting_calls(layer, inside)
            on_its_own_inputs = len(inside)
            outputs = model.compute_output_spec(*args, **kwargs)
            # Keras makes no new calls on inputs of the same shapes.
            inside = inside[on_its_own_inputs:] or inside
            own = [*model.inputs, *model.outputs]
            others = [*_tensors((args, kwargs)), *_tensors(outputs)]
            self._found += _connected(inside, own, others)
            return outputs
        outputs = layer.compute_output_spec(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        if type(layer) is keras.layers.TimeDistributed:
            batch, steps, *rest = inputs[0].shape
            step = keras.KerasTensor((batch, *rest), inputs[0].dtype)
            _Probe(layer.layer, inside).compute_output_spec(step)
            for call in inside:
                is_known = None not in (steps, call.repeats)
                repeats = steps * call.repeats if is_known else None
                self._found.append(dataclasses.replace(call, repeats=repeats))
        else:
            self._found.append(Call(layer, (args, kwargs), inputs, _tensors(outputs)))
        return outputs


def _connected(calls: list[Call], own: Sequence[Any], others: Sequence[Any]) -> list[Call]:
    """Returns the calls inside a nested model, on the tensors of the model around it."""
    outside = {id(one): other for one, other in zip(own, others, strict=False)}

    def moved(tensors: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(outside.get(id(each), each) for each in tensors)

    return [
        dataclasses.replace(call, inputs=moved(call.inputs), outputs=moved(call.outputs))
        for call in calls
    ]


def _noting_calls(model: Any, found: list[Call]) -> keras.Model:
    """Returns a model of the same shapes that notes the calls of its layers."""
    require_graph(model)
    return keras.models.clone_model(
        _uncompiled(model), clone_function=lambda each: _Probe(each, found)
    )


def _uncompiled(model: keras.Model) -> keras.Model:
    """Returns the same graph in a model without an optimizer, which clones would copy."""
    return keras.Model(*symbols_of(model), name=model.name)


def _tensors(structure: Any) -> tuple[keras.KerasTensor, ...]:
    leaves = tree.flatten(structure)
    return tuple(each for each in leaves if isinstance(each, keras.KerasTensor))

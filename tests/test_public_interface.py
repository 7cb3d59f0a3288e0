"""Walks the public interface: all registered, all documented, every example runs."""

import doctest
import functools
import inspect
import re

import keras
import pytest

import nsl_keras
from tools.documentation import interface

SERIALIZABLE = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.regularizers.Regularizer,
    nsl_keras.similarities.Similarity,
    nsl_keras.key_metrics.KeyMetric,
)


PUBLIC = {
    name: functools.reduce(getattr, name.split(".")[1:], nsl_keras)
    for name in interface.public_names()
}
#: Each thing under one of its names: some are in several modules.
EXAMPLES = {id(thing): name for name, thing in sorted(PUBLIC.items())}


def test_the_package_lists_its_modules():
    modules = [name.removeprefix("nsl_keras.") for name in interface.modules()]
    classes = ["MetaNeighborhoodModel", "NonFiniteLossError", "__version__"]
    assert dir(nsl_keras) == classes + modules


def test_registered():
    for thing in PUBLIC.values():
        is_class = inspect.isclass(thing) and not inspect.isabstract(thing)
        if is_class and issubclass(thing, SERIALIZABLE):
            name = keras.saving.get_registered_name(thing)
            assert name == f"nsl_keras>{thing.__name__}"


def parameters_of(thing):
    """The arguments of a function or class, also those that its `__init__` passes on."""
    if not inspect.isclass(thing):
        return set(inspect.signature(thing).parameters)
    names = set()
    for base in thing.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            names |= {each.name for each in parameters}
            if not any(each.kind is each.VAR_POSITIONAL for each in parameters):
                break
    return names - {"self", "args", "kwargs"}


def bases(thing):
    """The classes and functions that a docstring names: "Same as `X` and `Y`, plus"."""
    public = {name.rpartition(".")[2]: each for name, each in PUBLIC.items()}
    for names in re.findall(
        r"(?:Args:\n +Same as|kwargs: Arguments of) ((?:`[\w.]+`(?: and )?)+)",
        inspect.getdoc(thing) or "",
    ):
        for name in re.findall(r"[\w.]+(?=`)", names):
            *module, last = name.split(".")
            of_keras = module and module[0] == "keras"
            yield getattr(keras.layers, last) if of_keras else public[last]


def documents(thing):
    """The docstrings of a class and of those that it names."""
    return "".join([inspect.getdoc(thing), *map(documents, bases(thing))])


def documented(thing):
    """The arguments that a docstring describes, itself or at the class that it names."""
    if not thing.__module__.startswith("nsl_keras"):
        return parameters_of(thing)
    own = re.findall(r"^ +(\w+): ", inspect.getdoc(thing) or "", re.M)
    return set(own).union(*map(documented, bases(thing)))


def omissions(name, thing):
    document = inspect.getdoc(thing)
    if not document:
        yield f"{name} has no docstring"
        return
    is_class = inspect.isclass(thing)
    if is_class and issubclass(thing, Exception):
        return
    if not (is_class and inspect.isabstract(thing)):
        parameters = set(inspect.signature(thing).parameters) - {"self", "args", "kwargs"}
        for parameter in sorted(parameters - documented(thing)):
            yield f"{name}: {parameter} undocumented"
    if is_class and issubclass(thing, keras.layers.Layer):
        for section in ("Args:", "Input shape:", "Output shape:", "Raises:", "Reference:"):
            if section not in documents(thing):
                yield f"{name} has no section {section!r}"


def test_documented():
    found = [omission for item in PUBLIC.items() for omission in omissions(*item)]
    assert not found


#: Names whose examples train or draw, which takes seconds.
SLOW = re.compile(r"nsl_keras\.(few_shot\.|callbacks\.|visualize\.|MetaNeighborhoodModel)")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if SLOW.match(name) else ())
        for name in sorted(EXAMPLES.values())
    ],
)
def test_example_runs(name, eager):
    # The methods' examples too.
    found = doctest.DocTestFinder().find(PUBLIC[name], name, globs={})
    assert found and found[0].examples, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    output = []
    for test in found:
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


def test_arguments_are_attributes_and_config_keys():
    for name, thing in PUBLIC.items():
        kinds = "nsl_keras.(MetaNeighborhoodModel|layers.|predictors.)"
        if not (inspect.isclass(thing) and re.match(kinds, name)):
            continue
        parameters = parameters_of(thing)
        required = {
            "filters": 2,
            "kernel_size": 3,
            "units": 3,
            "equation": "ab,bc->ac",
            "output_shape": 3,
            "num_neighbors": 4,
            "num_values": 3,
            "head": keras.layers.Dense(3),
            "dictionary": 4,
            "backbone": None,
        }
        layer = thing(**{k: v for k, v in required.items() if k in parameters})
        config = layer.get_config()
        # The docstring leaves the others to those of other layers.
        for parameter in parameters.difference(*map(parameters_of, bases(thing))):
            assert hasattr(layer, parameter), f"{name}.{parameter}"
            assert parameter in config, f"{name}: {parameter} not in its config"

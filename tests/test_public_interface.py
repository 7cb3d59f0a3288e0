"""Walks the public interface: all registered, all documented, every example runs."""

import doctest
import inspect
import re

import keras
import pytest

import nsl_keras

MODULES = (
    nsl_keras.callbacks,
    nsl_keras.layers,
    nsl_keras.convert,
    nsl_keras.distribution,
    nsl_keras.losses,
    nsl_keras.similarities,
    nsl_keras.predictors,
    nsl_keras.regularizers,
    nsl_keras.backbones,
    nsl_keras.export,
    nsl_keras.few_shot,
    nsl_keras.key_metrics,
    nsl_keras.visualize,
)
SERIALIZABLE = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.regularizers.Regularizer,
    nsl_keras.similarities.Similarity,
    nsl_keras.key_metrics.KeyMetric,
)


def public_names(module):
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and getattr(thing, "__module__", None) == module.__name__
    }


PUBLIC = {
    f"{module.__name__}.{name}": thing
    for module in MODULES
    for name, thing in public_names(module).items()
}
PUBLIC |= {
    f"nsl_keras.{name}": thing
    for name, thing in vars(nsl_keras).items()
    if not name.startswith("_") and not inspect.ismodule(thing)
}
#: Each thing under one of its names: some are in several modules.
EXAMPLES = {id(thing): name for name, thing in sorted(PUBLIC.items())}


def test_the_docstring_of_the_package_names_its_modules():
    named = set(re.findall(r"`(\w+)`", nsl_keras.__doc__))
    assert {module.__name__.rpartition(".")[2] for module in MODULES} <= named
    assert all(hasattr(nsl_keras, name) for name in named)


def test_registered():
    offenders = []
    for name, thing in PUBLIC.items():
        if not inspect.isclass(thing) or not issubclass(thing, SERIALIZABLE):
            continue
        if inspect.isabstract(thing):
            continue
        if keras.saving.get_registered_name(thing) != f"nsl_keras>{thing.__name__}":
            offenders.append(name)
    assert not offenders


def bases(thing):
    """The classes whose arguments a docstring takes over: "Those of `X`, and:"."""
    text = inspect.getdoc(thing) or ""
    named = re.findall(r"Those of `(keras\.layers\.)?(?:\w+\.)*(\w+)`", text)
    ours = {name.rpartition(".")[2]: each for name, each in PUBLIC.items()}
    return [getattr(keras.layers, n) if of_keras else ours[n] for of_keras, n in named]


def documented(thing):
    """The arguments that a docstring describes, itself or at the class that it names."""
    if not thing.__module__.startswith("nsl_keras"):
        return set(inspect.signature(thing).parameters)
    own = re.findall(r"^ +(\w+): ", inspect.getdoc(thing) or "", re.M)
    return set(own).union(*map(documented, bases(thing)))


def inherited(thing):
    """The arguments that a layer has from the Keras layer that it is based on."""
    taken = [each for each in bases(thing) if each.__module__.startswith("keras")]
    return {name for each in taken for name in inspect.signature(each).parameters}


def omissions(name, thing):
    """What the docstring does not say."""
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
            if section not in document:
                yield f"{name} has no section {section!r}"


def test_documented():
    found = [omission for item in PUBLIC.items() for omission in omissions(*item)]
    assert not found


def trains(name):
    """Whether an example trains a model, which takes seconds."""
    return name.startswith(("nsl_keras.few_shot.", "nsl_keras.callbacks.")) or (
        name == "nsl_keras.MetaNeighborhoodModel"
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if trains(name) else ())
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
        if not inspect.isclass(thing):
            continue
        model = name == "nsl_keras.MetaNeighborhoodModel"
        if not model and not name.startswith(
            ("nsl_keras.layers.", "nsl_keras.predictors.")
        ):
            continue
        parameters = set(inspect.signature(thing).parameters) - {"kwargs"}
        required = {
            "filters": 2,
            "kernel_size": 3,
            "units": 3,
            "num_neighbors": 4,
            "num_values": 3,
            "head": keras.layers.Dense(3),
            "dictionary": 4,
            "backbone": None,
        }
        layer = thing(**{k: v for k, v in required.items() if k in parameters})
        config = layer.get_config()
        for parameter in parameters - inherited(thing):
            assert hasattr(layer, parameter), f"{name}.{parameter}"
            assert parameter in config, f"{name}: {parameter} not in its config"

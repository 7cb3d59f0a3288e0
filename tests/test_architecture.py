"""Which folder may import which, and no private API anywhere."""

import ast
import graphlib
import inspect
import pathlib
import re
import sys

import keras
import numpy as np
import pytest
from helpers import CROSS_ENTROPY, IS_TENSORFLOW, normal

import nsl_keras

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "nsl_keras"
ROOMS = ("nsl_keras", "examples", "experiments", "tools")
MODULES = sorted(PACKAGE.rglob("*.py"))
#: Where people meet a name, except pages that trace the papers and the authors' code.
PAGES = [
    path
    for pattern in ("README.md", "docs/**/*.md", "examples/**/*.py", "examples/**/*.ipynb")
    for path in ROOT.glob(pattern)
    if path.name not in ("papers.md", "authors_code.md", "results.md")
]

#: Levels from the ground up. A module imports only from levels below its own.
LEVELS = {
    "nesting": 0,
    "version": 0,
    "validation": 0,
    "backend": 1,
    "configs": 1,
    "files": 1,
    "copying": 2,
    "graphs": 2,
    "regularizers": 2,
    "turning": 3,
    "similarities": 3,
    "normalization": 4,
    "training": 4,
    "similarity": 5,
    "neighborhoods": 5,
    "backbones": 6,
    "few_shot": 6,
    "visualize": 6,
    "export": 7,
    # Names only.
    "callbacks": 7,
    "convert": 7,
    "key_metrics": 7,
    "layers": 7,
    "predictors": 7,
    "__init__": 8,
}


def folder_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def named_modules():
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path


def imports_of(path):
    """Full names of what a module imports, functions' own imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_down():
    offenders = []
    for path in MODULES:
        folder = folder_of(path)
        for name in imports_of(path):
            if not name.startswith("nsl_keras."):
                continue
            other = name.split(".")[1]
            if other != folder and LEVELS[other] >= LEVELS[folder]:
                offenders.append(f"{path} imports {name}")
    assert not offenders


def test_no_module_imports_itself_by_way_of_others():
    """Within a folder too, and nothing hidden from a running program."""
    assert not [path for path in MODULES if "TYPE_CHECKING" in path.read_text()]
    names = dict(named_modules())
    del names["nsl_keras"]  # All modules say `from nsl_keras import ...`.
    imported = {}
    for name, path in names.items():
        found = set(imports_of(path))
        found |= {each.rpartition(".")[0] for each in found}
        # A package's own modules take each other from it.
        imported[name] = (found & set(names)) - {name.rpartition(".")[0]}
    graphlib.TopologicalSorter(imported).prepare()


def test_backends_stay_in_their_folder():
    """No module imports the experiments, and nothing uses private modules of others."""
    sources = [path for room in ROOMS for path in ROOT.glob(f"{room}/**/*.py")]
    for path in sources:
        found = re.search(r"keras\.src|tensorflow\.python|tf\.python", path.read_text())
        assert not found, f"{path} uses {found.group()}"
    for path in MODULES:
        found = {name.split(".")[0] for name in imports_of(path)}
        assert "experiments" not in found, path
        if folder_of(path) not in ("backend", "export"):
            assert not found & {"tensorflow", "jax", "jaxlib", "torch"}, path


#: Underscored names of Keras that the package uses, in `backend/` alone.
FOREIGN = {"_autocast", "_initial_epoch", "_maybe_symbolic_build", "_path", "_tracker"}


def test_no_underscored_names_of_others():
    """A name that the package neither defines nor assigns on `self` is someone else's."""
    own, used = {"_asdict", "_replace"}, set()  # Public methods of named tuples.
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Constant):  # Of `object.__setattr__`.
                own.add(node.value)
            elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                    own.add(node.attr)
                used.add((node.attr, folder_of(path)))
    found = {(name, folder) for name, folder in used if name not in own - FOREIGN}
    assert found == {(name, "backend") for name in FOREIGN}


def test_no_overridden_private_names_of_keras():
    """Except in `backend/`, no class of the package has a method of Keras's own name."""
    offenders = []
    for name, _ in named_modules():
        # A module for the other backend is not imported.
        for kind in vars(sys.modules.get(name, nsl_keras)).values():
            if not inspect.isclass(kind) or kind.__module__ != name:
                continue
            bases = [
                base for base in kind.__mro__ if not base.__module__.startswith("nsl_keras")
            ]
            private = {each for base in bases for each in vars(base) if each[0] == "_"}
            found = {each for each in vars(kind) if re.match("_[a-z]", each)} & private
            if not name.startswith("nsl_keras.backend"):
                offenders += [f"{kind.__name__}.{each}" for each in found - {"_abc_impl"}]
    assert not offenders


def words_of(paths):
    return set(re.findall(r"\w+", "".join(path.read_text() for path in paths)))


def test_nothing_is_there_for_the_experiments_alone():
    defined, needed = set(), words_of(PAGES)
    for path in MODULES:
        module = ast.parse(path.read_text())
        kinds = ast.FunctionDef, ast.ClassDef
        defined |= {each.name for each in module.body if isinstance(each, kinds)}
        for node in ast.walk(module):
            # Not where a module of public names lists it.
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                needed.add(node.id)
            elif isinstance(node, ast.Attribute):
                needed.add(node.attr)
    experiments = ROOT.glob("experiments/**/*.py")
    used = defined & words_of(path for path in experiments if "tests" not in path.parts)
    assert len(used) > 50
    assert not used - needed


def passed_by(run):
    """How many functions of the package a call enters, in how many files."""
    seen = set()

    def note(frame, event, _):
        code = frame.f_code
        is_named = event == "call" and code.co_name[0] != "<"
        if is_named and code.co_filename.startswith(str(PACKAGE)):
            seen.add((code.co_filename, code.co_firstlineno))

    run()  # Builds.
    sys.setprofile(note)
    run()
    sys.setprofile(None)
    return len(seen), len({file for file, _ in seen})


@pytest.mark.skipif(not IS_TENSORFLOW, reason="The train step of TensorFlow")
def test_a_batch_passes_few_functions(eager):
    """Whoever reads a path must follow them all: longer ones need a reason."""
    images, x, y = normal(4, 8, 8, 3), normal(8, 5), np.arange(8) % 3
    make = nsl_keras.layers.NeuralSimilarityConv2D
    static, plain, sphere = (make(4, 3, predictor=each) for each in (None, "cnn", "sphere"))
    head = keras.layers.Dense(3)
    model = nsl_keras.MetaNeighborhoodModel(keras.layers.Dense(6), head, dictionary=20)
    model.compile("sgd", CROSS_ENTROPY)
    model.predict(x, verbose=0)
    assert passed_by(lambda: static(images)) == (5, 3)
    assert passed_by(lambda: plain(images)) == (9, 4)
    assert passed_by(lambda: sphere(images)) == (10, 5)
    assert passed_by(lambda: model.predict_function([(x,)])) == (12, 6)
    assert passed_by(lambda: model.train_step((x, y))) == (18, 7)

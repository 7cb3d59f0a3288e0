"""The house: which room may import which, and no private API anywhere."""

import ast
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parents[1] / "nsl_keras"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: Floors from the ground up. A module imports only from floors below its own.
FLOORS = {
    "version": 0,
    "files": 0,
    "inheritance": 0,
    "registry": 0,
    "validation": 0,
    "backend": 1,
    "rewiring": 1,
    "distribution": 2,
    "second_order": 2,
    "normalization": 2,
    "training": 2,
    "training_backup": 2,
    "similarity": 3,
    "neighborhoods": 3,
    "backbones": 4,
    "few_shot": 4,
    "visualize": 4,
    "export": 5,
    # Names only.
    "callbacks": 5,
    "convert": 5,
    "key_metrics": 5,
    "layers": 5,
    "losses": 5,
    "predictors": 5,
    "regularizers": 5,
    "similarities": 5,
    "__init__": 6,
}


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
        room = room_of(path)
        for name in imports_of(path):
            if not name.startswith("nsl_keras."):
                continue
            other = name.split(".")[1]
            if other == room:
                continue
            if FLOORS[other] >= FLOORS[room]:
                offenders.append(f"{path} imports {name}")
    assert not offenders


def test_backends_stay_in_their_room():
    offenders = [
        f"{path} imports {name}"
        for path in MODULES
        if room_of(path) not in ("backend", "export")
        for name in imports_of(path)
        if name.split(".")[0] in ("tensorflow", "jax", "jaxlib", "torch")
    ]
    assert not offenders


def test_every_room_has_a_floor():
    assert {room_of(path) for path in MODULES} == set(FLOORS)


def test_public_api_only():
    sources = [*MODULES, *PACKAGE.parent.glob("examples/**/*.py")]
    sources += PACKAGE.parent.glob("benchmarks/**/*.py")
    for path in sources:
        found = re.search(r"keras\.src|tensorflow\.python|tf\.python", path.read_text())
        assert not found, f"{path} uses {found.group()}"


def test_name_modules_hold_no_code():
    for name in (
        "callbacks",
        "convert",
        "key_metrics",
        "layers",
        "losses",
        "predictors",
        "regularizers",
        "similarities",
    ):
        for node in ast.parse((PACKAGE / f"{name}.py").read_text()).body:
            assert isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)), name


def test_setup_is_a_shim():
    text = (PACKAGE.parent / "setup.py").read_text()
    assert len(text.strip().splitlines()) <= 3

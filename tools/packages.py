"""Builds wheel and source distribution, and tries each in an empty environment.

    python tools/packages.py                        # with this Python
    python tools/packages.py --python=python3.12 --python=python3.13
    python tools/packages.py --extra=jax --keep=dist

For each interpreter and extra a new environment gets the wheel, another one the source
distribution, with what they depend on and nothing else; `smoke.py` runs in an empty folder.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
#: What has no place in either file.
_FOREIGN = ("tests/", "examples/", "experiments/", "tools/", "results/", "saved_models/")
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "install")
_BUILD = ("-m", "build", "--quiet")


def main() -> None:
    """Builds, looks into the files, installs and runs them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="An interpreter; repeatable.")
    parser.add_argument("--extra", default="tensorflow-cpu", help="The backend's extra.")
    parser.add_argument("--keep", type=pathlib.Path, help="Where to leave both files.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        files = build(options.keep or folder / "dist", folder)
        for python in options.python or [sys.executable]:
            for file in files:
                print(f"{python}, {file.name}, [{options.extra}]:", flush=True)
                try_out(python, file, options.extra, folder)


def build(destination: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    """Builds from what git tracks, and checks what is inside."""
    source = folder / "source"
    source.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for path in filter(None, tracked.split("\0")):
        if (ROOT / path).is_file():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes((ROOT / path).read_bytes())
    tool = folder / "build"
    run([sys.executable, "-m", "venv", tool])
    run([tool / "bin/python", *_PIP, "build"])
    run([tool / "bin/python", *_BUILD, "--outdir", destination.resolve(), source])
    wheel, archive = (
        max(destination.glob(kind), key=os.path.getmtime) for kind in ("*.whl", "*.tar.gz")
    )
    for file, contents in ((wheel, _wheel(wheel)), (archive, _archive(archive))):
        for needed in ("nsl_keras/__init__.py", "nsl_keras/py.typed"):
            if not any(each.endswith(needed) for each in contents):
                raise SystemExit(f"{needed} is missing in {file.name}.")
        foreign = [each for each in contents if any(part in each for part in _FOREIGN)]
        if foreign:
            raise SystemExit(f"{file.name} holds more than the package: {foreign}")
    return [wheel, archive]


def _wheel(path: pathlib.Path) -> list[str]:
    with zipfile.ZipFile(path) as file:
        return file.namelist()


def _archive(path: pathlib.Path) -> list[str]:
    with tarfile.open(path) as file:
        return file.getnames()


def try_out(python: str, file: pathlib.Path, extra: str, folder: pathlib.Path) -> None:
    """Installs a file into a new environment, and runs `smoke.py` with it."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        empty = pathlib.Path(name)
        run([python, "-m", "venv", empty / "environment"])
        own = empty / "environment/bin/python"
        run([own, *_PIP, f"{file.resolve()}[{extra}]"])
        (empty / "smoke.py").write_text((HERE / "smoke.py").read_text())
        backend = "jax" if extra == "jax" else "tensorflow"
        run([own, "smoke.py"], cwd=empty, env={**os.environ, "KERAS_BACKEND": backend})


def run(command: list, **options) -> None:
    """Runs a command, whose output is shown; it must succeed."""
    subprocess.run(list(map(str, command)), check=True, timeout=1800, **options)


if __name__ == "__main__":
    main()

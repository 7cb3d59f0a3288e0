"""Examples as commands under JAX, where no TensorFlow is installed."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]

SCRIPT = """
import runpy, sys
sys.modules["tensorflow"] = None
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""

FILE = """
import runpy, sys
sys.modules["tensorflow"] = None
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run_under_jax(module, *arguments):
    """Runs a module with its flags in a process of its own; it must succeed."""
    _run("-c", SCRIPT, module, *arguments)


def run_script_under_jax(path, *arguments, timeout=280):
    """Runs a file in the same way."""
    _run("-c", FILE, str(path), *arguments, timeout=timeout)


def _run(*arguments, timeout=280):
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        # More threads of scikit-learn's t-SNE would wait for each other most of the time.
        env={**os.environ, "KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]

"""What the guide to serving says: code that runs, commands that there are."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "serving.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.S)


@pytest.mark.long
def test_code_runs(tmp_path):
    for package in ("ai_edge_litert", "onnxruntime", "tf2onnx", "mlserver"):
        pytest.importorskip(package)
    from examples.serving import client

    (tmp_path / "saved_models").symlink_to(ROOT / "saved_models")
    with client.running_server(ROOT / "saved_models") as server:
        code = "\n".join(BLOCKS).replace(":8080", f":{server.http_port}")
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split("\n")[:-1] == [
        "(5, 10) (5, 5)",
        "['classes', 'entries', 'values', 'weights']",
        "(5, 10)",
        "(5, 10)",
    ]


def test_commands_lead_somewhere():
    for module in re.findall(r"python -m ([\w.]+)", GUIDE):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`", GUIDE):
        assert re.search(rf"^(?:[\w-]+ )*{target}\b[ \w-]*:", makefile, re.M), target

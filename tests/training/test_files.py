"""Files are whole or what they were, and nothing is left beside them."""

import errno
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from nsl_keras.callbacks import TrainingBackup
from nsl_keras.training import files

#: The module's own file: importing the package would take seconds.
KILLED = """
import os, runpy, signal, sys
with runpy.run_path(sys.argv[2])["replacing"](sys.argv[1]) as scratch:
    scratch.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


def write(path, text):
    with files.replacing(path) as scratch:
        scratch.write_text(text)


def test_a_file_takes_its_place_whole(tmp_path):
    path = tmp_path / "new" / "a.json"
    write(path, "first")
    with files.replacing(path) as scratch:
        assert scratch.name == "a.json"
        scratch.write_text("second")
        assert path.read_text() == "first"
        # Another file of the same folder meanwhile.
        write(path.with_name("b"), "b")
    assert path.read_text() == "second"
    assert names(path.parent) == ["a.json", "b"]


def test_a_folder_takes_its_place_whole(tmp_path):
    path = tmp_path / "new" / "1"
    with files.replacing(path) as scratch:
        (scratch / "variables").mkdir(parents=True)
        (scratch / "variables" / "index").write_text("index")
        assert not path.exists()
    assert names(path.parent) == ["1", "index", "variables"]
    with pytest.raises(OSError), files.replacing(path) as scratch:
        scratch.mkdir()
    assert names(path.parent) == ["1", "index", "variables"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_an_error_leaves_what_was_there(tmp_path, monkeypatch, error):
    path = tmp_path / "a.json"
    write(path, "first")

    def fail(descriptor):
        raise error

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", fail)
        with pytest.raises(type(error)):
            write(path, "second")
    assert path.read_text() == "first"
    assert names(tmp_path) == ["a.json"]


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    path = tmp_path / "a.json"
    write(path, "first")
    killed = subprocess.run([sys.executable, "-c", KILLED, path, files.__file__])
    assert killed.returncode == -9
    assert path.read_text() == "first"
    assert len(names(tmp_path)) == 3
    write(tmp_path / "b", "b")
    assert names(tmp_path) == ["a.json", "b"]


def test_scratch_of_others_stays(tmp_path):
    host = socket.gethostname()
    kept = [f".scratch-{host}-1-0", f".scratch-elsewhere-{os.getpid()}-0", ".scratch-x"]
    # No system numbers its processes so high.
    for name in [*kept, f".scratch-{host}-{os.getpid()}-99", f".scratch-{host}-99999999-0"]:
        (tmp_path / name).mkdir()
    write(tmp_path / "a", "a")
    assert names(tmp_path) == sorted([*kept, "a"])


def test_a_folder_that_can_be_written_to(tmp_path):
    files.require_room(tmp_path / "new")
    assert names(tmp_path) == ["new"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/a` must be a folder .* Not a directory"):
        files.require_room(tmp_path / "file" / "a")


@pytest.mark.parametrize(
    "path", ["gs://bucket/model", "s3:/bucket", pathlib.Path("hdfs://a/b"), "model.keras"]
)
def test_folders_that_are_not_on_this_machine(path):
    for given in (path, str(path)):
        with pytest.raises(ValueError, match="`folder` must be a folder of this machine"):
            files.local_folder(given)
    with pytest.raises(ValueError, match="`folder` must be a folder of this machine"):
        TrainingBackup(path)
    assert files.local_folder("~/model") == pathlib.Path.home() / "model"

"""Files are whole or what they were, and nothing is left beside them."""

import errno
import os
import pathlib

import pytest

from nsl_keras import files


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
        write(path.with_name("b"), "b")  # Another file of the same folder meanwhile.
    assert path.read_text() == "second"
    assert names(path.parent) == ["a.json", "b"]


def test_a_folder_takes_its_place_whole(tmp_path):
    """Others beside it stay, whoever made them."""
    old = tmp_path / ".scratch-old"
    old.mkdir()
    os.utime(old, (0, 0))
    with files.replacing(tmp_path / "1") as scratch:
        (scratch / "variables").mkdir(parents=True)
        assert not (tmp_path / "1").exists()
    with pytest.raises(OSError), files.replacing(tmp_path / "1") as scratch:
        scratch.mkdir()
    assert names(tmp_path) == [".scratch-old", "1", "variables"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_an_error_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "a.json"
    write(path, "first")
    with pytest.raises(type(error)), files.replacing(path) as scratch:
        scratch.write_text("sec")
        raise error
    assert path.read_text() == "first" and names(tmp_path) == ["a.json"]


def test_local():
    for given in ("gs://bucket/model", pathlib.Path("gs://bucket"), "hdfs://host/a"):
        with pytest.raises(ValueError, match="must be on this machine"):
            files.local(given, "path")
    assert files.local("~/model", "path") == pathlib.Path.home() / "model"

"""What a caller got wrong ends in one line, what an example got wrong in a traceback."""

import sys

import pytest
from absl import flags

from examples.common import command, image_folders
from examples.few_shot import data

flags.DEFINE_string("flag_of_the_test", None, "A flag.")


def told(main, arguments=("test",)):
    with pytest.raises(SystemExit) as caught:
        command.guarded(main, list(arguments))
    return caught.value.code


def raising(error):
    def main(_):
        raise error

    return main


def test_errors_of_flags_name_them_as_they_are_written():
    message = "`flag_of_the_test` must be\n  less than `x`. Received: 3"
    assert told(raising(ValueError(message))) == (
        "--flag_of_the_test must be less than `x`. Received: 3"
    )


def test_arguments_that_are_no_flags():
    assert told(lambda _: None, ["test", "epochs=3"]).startswith(
        "Unknown arguments: epochs=3. Flags begin with --"
    )


def test_files_and_packages_that_are_missing(tmp_path, monkeypatch):
    def reads(_):
        (tmp_path / "nothing.npz").read_bytes()

    assert told(reads) == f"No such file or directory: {tmp_path / 'nothing.npz'}"
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)

    def imports(_):
        import tensorflow_datasets  # noqa: F401

    assert told(imports).startswith("This example needs tensorflow_datasets. Install")


@pytest.mark.parametrize(
    "error",
    [ValueError("`units` must be positive"), ValueError("boom"), KeyError("flag")],
    ids=str,
)
def test_other_errors_are_the_example_s(error):
    with pytest.raises(type(error)):
        command.guarded(raising(error), ["test"])


@pytest.mark.parametrize(
    ("load", "layout"),
    [
        (lambda: data.load("pacs"), "train, validation (or val) and test"),
        (lambda: image_folders.read("pacs", None), "art_painting,cartoon,photo,sketch"),
        (lambda: image_folders.read("pacs_without_photo", None), "art_painting"),
        (lambda: image_folders.read("tiny_imagenet", None), "val_annotations.txt"),
    ],
    ids=["few_shot", "pacs", "pacs_without", "tiny_imagenet"],
)
def test_data_that_is_missing_is_told_with_its_layout(load, layout):
    with pytest.raises(ValueError, match=r"^`data_dir` must be") as caught:
        load()
    assert layout in str(caught.value)


def test_every_set_of_folders_has_a_layout():
    names = {name.partition("_without_")[0] for name in image_folders.READERS}
    assert names == set(image_folders.LAYOUTS)

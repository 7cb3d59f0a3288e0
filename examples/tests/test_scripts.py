"""Each script of examples/ runs with its flags, and prints its results."""

import re
import runpy
import sys

import keras
import pytest
from helpers import BACKEND, ROOT, run_python
from sklearn.datasets import load_digits

SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("[a-z]*.py"))
tensorflow_only = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="tf.distribute is TensorFlow's"
)


def run_alone(name, *flags):
    return run_python(ROOT / "examples" / f"{name}.py", *flags)


@pytest.fixture
def run(capfd, monkeypatch, one_thread):
    """Runs a script in this process: another would import for longer than most train."""

    def script(name, *flags):
        path = ROOT / "examples" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, flags)])
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # For processes that it starts.
        runpy.run_path(str(path), run_name="__main__")
        return capfd.readouterr().out

    return script


def numbers(pattern, printed):
    """The numbers that a pattern's groups find: of the first line that has it."""
    found = re.search(pattern, printed)
    assert found, printed
    return [float(each) for each in found.groups()]


def test_every_script_is_tested_and_listed():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {*SCRIPTS} == tested - {"every_script_is_tested_and_listed"}
    listed = (ROOT / "examples" / "README.md").read_text()
    for name in SCRIPTS:
        text = (ROOT / "examples" / f"{name}.py").read_text()
        assert f"]({name}.py)" in listed
        assert f"python examples/{name}.py" in text
        assert len(text.splitlines()) <= 100


def test_transformer(run, eager, large_batches):
    printed = run("transformer", "--epochs=3", "--seeds=1")
    sizes = re.findall(r"test accuracy [\d.]+ %, a task of ([\d.]+) kB", printed)
    assert len(sizes) == 3 and sorted(sizes, key=float) == sizes
    assert numbers(r"largest change of a logit by folding: (\S+)", printed)[0] < 1e-4


def test_similarity_layer(run, eager, large_batches):
    printed = run("similarity_layer", "--epochs=1", "--seeds=1")
    pattern = r"{}\s+test accuracy [\d.]+ %, (\d+) parameters"
    names = ("plain", "static", "dynamic", "plain, wider")
    plain, static, dynamic, wider = (
        numbers(pattern.format(f"\n{name}"), f"\n{printed}")[0] for name in names
    )
    assert static - plain == 2 * 81 and plain < dynamic <= wider
    assert "dynamic Diagonal" in printed
    assert numbers(r"parameters after folding: (\d+)", printed) == [plain]
    assert numbers(r"logit by folding: (\S+)", printed)[0] < 1e-4
    assert "layers after folding: Conv2D, Conv2D, MaxPooling2D, Conv2D" in printed


def test_few_shot_own_photos(run, tmp_path):
    digits = load_digits()
    for name, part in {"photos": slice(5), "others": slice(5, 25)}.items():
        for digit in (7, 8, 9):
            (folder := tmp_path / name / str(digit)).mkdir(parents=True)
            for number, image in enumerate(digits.images[digits.target == digit][part]):
                pixels = image[..., None] * 255 / 16
                keras.utils.save_img(folder / f"{number}.png", pixels, scale=False)
    parts = [keras.Input((8, 8, 1)), keras.layers.Flatten()]
    parts += [keras.layers.Rescaling(1 / 255)]
    keras.Sequential(parts).save(network := tmp_path / "network.keras")
    printed = run(
        *("few_shot_own_photos", f"--backbone={network}", f"--output={tmp_path}"),
        *(f"--photos={tmp_path / 'photos'}", f"--judge={tmp_path / 'others'}"),
        *("--classify", f"{tmp_path / 'others/7/0.png'}"),
    )
    assert "15 photos of the classes 7, 8, 9" in printed
    numbers(r"leaving one photo out at a time: (\d+) of 15 right", printed)
    assert numbers(r"60 other photos: ([\d.]+)% right", printed)[0] > 60
    assert re.search(r"7.0\.png: [789], \d+%", printed)
    assert (tmp_path / "classifier.keras").is_file()


def test_regression(run):
    printed = run("regression", "--epochs=1", "--folds=2")
    for row in ("plain", "neighbors", "before adaptation", "kNN"):
        numbers(rf"{row}\s+mean ([\d.]+)   folds [\d.]+, [\d.]+", printed)
    assert len(re.findall(r"entry \d+, attention [\d.]+, target", printed)) == 3


def test_sine_waves(run):
    printed = run("sine_waves", "--iterations=500")
    row = r"{}\s+([\d.]+) ([\d.]+) ([\d.]+)"
    before, _, after = numbers(row.format("MAML"), printed)
    assert after < 0.7 * before
    assert after < numbers(row.format("pretrained"), printed)[2]


@tensorflow_only
def test_several_devices():
    printed = run_alone("several_devices", "--epochs=1")
    assert "2 replicas: " in printed
    assert numbers(r"largest difference of a weight: (\S+)", printed)[0] < 1e-4


def test_resume_after_kill(run):
    printed = run("resume_after_kill", "--epochs=2")
    begins = re.findall(r"begins at epoch (\d)", printed)
    assert begins == ["0", "0", "1"]
    assert "exit status -9" in printed
    assert "equal to the last digit: True" in printed


def test_save_load_export(run, tmp_path, large_batches):
    printed = run("save_load_export", "--epochs=1", f"--output={tmp_path}")
    assert numbers(r"model.keras: largest change of a logit (\S+)", printed)[0] < 1e-4
    assert numbers(r"weights.h5: largest change of a logit (\S+)", printed)[0] < 1e-4
    assert re.search(r"goes on after step [1-9]\d*, with training loss \d", printed)
    assert (tmp_path / "served" / "1" / "saved_model.pb").is_file()

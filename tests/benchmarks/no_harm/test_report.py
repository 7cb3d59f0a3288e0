"""The page, from runs that are made up."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from no_harm_runs import record

from benchmarks.no_harm import report
from benchmarks.no_harm.methods import COMPARED, METHODS
from examples.common import runs


def test_page_and_picture(tmp_path, capsys):
    setting = {"learning_rate": 1e-3, "epochs": 2, "batch_size": 32, "compared_images": 512}
    records = runs.RunRecords(tmp_path / "runs", setting)
    for network in ("narrow_cnn", "no_batch_norm"):
        for name in METHODS:
            if (network, name) == ("no_batch_norm", "neighbors_film"):
                continue
            for seed in (0, 1):
                accuracy = 0.5 + 0.01 * seed * (name == "static_dns")
                made = record(name, seed, accuracy, network=network, seconds=2.0)
                records.add(("digits", network, name, seed), made)
    report.write(tmp_path)
    assert capsys.readouterr().out.count("PASS ") == 3 * len(COMPARED)
    text = (tmp_path / "README.md").read_text()
    assert (
        "| static DNS | 2 | +0.50 ± 0.00 | none | +0.50 (digits narrow CNN) | +0.25 |"
        in text
    )
    assert (
        "| static DNS | 50.50 ± 0.71 | +0.50 ± 0.71 | 6.35 | +0.25 | 0.0 | 0.0 | 1,000 |"
        in text
    )
    assert "iFiLM | not applicable |" in text
    assert "## With this package's batch norms\n\nNot run.\n" in text
    assert (tmp_path / "no_harm_keras.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "no_harm.png").exists()


def test_both_kinds_of_batch_norms(tmp_path, capsys):
    """Each has its verdicts and picture, and networks without batch norm count in both."""
    setting = {"learning_rate": 1e-3, "epochs": 2, "batch_size": 32, "compared_images": 512}
    for batch_norm, gap, networks in (
        ("keras", 0.5, ("narrow_cnn", "no_batch_norm")),
        ("unbiased", 0.25, ("narrow_cnn",)),
    ):
        records = runs.RunRecords(tmp_path / report.MATRICES[batch_norm].place, setting)
        for network in networks:
            for name in ("plain", "static_dns"):
                made = record(name, 0, 0.5, gap=gap, network=network)
                records.add(("digits", network, name, 0), made)
    report.write(tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("PASS static DNS (2 cells): mean") == 2
    text = (tmp_path / "README.md").read_text()
    assert "| static DNS | 50.0 (50.0) | 0 | 1 | 1 | 25.0 (25.0) | 0 | 1 | 1 |" in text
    _, own, keras_own, _, cells, keras_cells, without = text.split("\n## ")
    assert own.startswith("With this package's") and "| 37.5 | 37.5 |" in own
    assert keras_own.startswith("With Keras's") and "| 50.0 | 50.0 |" in keras_own
    assert cells.count("\n### ") == keras_cells.count("\n### ") == 1
    assert "### digits, no batch norm\n" in without and without.count("\n### ") == 1
    for name in ("no_harm.png", "no_harm_keras.png"):
        assert f"]({name})" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_nothing_to_compare(tmp_path):
    with pytest.raises(ValueError, match=r"`output_dir` must hold runs.*with 0 runs"):
        report.write(tmp_path)

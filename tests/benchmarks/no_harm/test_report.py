"""Tables, picture and verdicts from runs that are made up."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from no_harm_runs import record, several

from benchmarks.no_harm import comparison, report
from benchmarks.no_harm.methods import COMPARED, METHODS
from examples.common import runs


def lines_of(title, found):
    lines = report.verdicts(comparison.compare(found))
    return [line for line in lines if line.split(" ", 1)[1].startswith(f"{title} (")]


def test_a_loss_fails_and_is_named():
    found = several("plain", [0.5, 0.6]) + several("static_dns", [0.48, 0.58])
    found += several("plain", [0.5, 0.6], network="small_resnet")
    found += several("static_dns", [0.53, 0.63], network="small_resnet")
    worst, mean, gap = lines_of("static DNS", found)
    assert worst == "FAIL static DNS (2 cells): no cell below -1.0 points: " + (
        "digits narrow CNN -2.00 ± 0.00 (last 3 epochs -1.00)"
    )
    assert mean.startswith("PASS") and mean.endswith("+0.50")
    assert gap.startswith("PASS")


def test_a_loss_of_one_seed_has_no_interval():
    found = several("plain", [0.5]) + several("static_dns", [0.48])
    worst, *_ = lines_of("static DNS", found)
    assert ": digits narrow CNN -2.00 of one seed (last 3 epochs -1.00); undecided" in worst


def test_a_low_mean_fails():
    found = several("plain", [0.5, 0.6]) + several("static_dns", [0.495, 0.595])
    worst, mean, _ = lines_of("static DNS", found)
    assert worst.startswith("PASS") and "half-width" not in worst
    assert mean.startswith("FAIL") and mean.endswith("-0.50")


def test_differences_beyond_chance():
    plain = [0.5, 0.6, 0.7]
    found = several("plain", plain) + several("static_dns", [0.49, 0.589, 0.691])
    found += several("dynamic_dns", [0.52, 0.621, 0.719])
    found += several("static_uns", [0.4, 0.7, 0.65])
    last, mean = report.clear_differences(comparison.compare(found)).splitlines()
    assert last == (
        "* After the last epoch: 1 above, 1 below zero. "
        "Below: static DNS, digits narrow CNN -1.00 ± 0.25."
    )
    assert mean.startswith("* Mean of the last 3 epochs: ")
    (none, _) = report.clear_differences([]).splitlines()
    assert none.endswith("0 above, 0 below zero. Below: none.")


def test_gaps_beyond_chance():
    found = several("plain", [0.5] * 3, gap=0.1) + several("static_dns", [0.5] * 3, gap=0.2)
    found += several("dynamic_dns", [0.5] * 3, gap=0.105)
    # Of these three on average 0.12 above plain's, one is below it.
    for seed, gap in enumerate((0.05, 0.3, 0.31)):
        found.append(record("static_uns", seed, 0.5, gap=gap))
    assert report.clear_gaps(comparison.compare(found)) == (
        "* Too large in 2 of 3 cells; baselines beside themselves: in about 0.\n"
        "* Clearly more than 1 above the baseline's: "
        "static DNS, digits narrow CNN +10.0 ± 0.0."
    )
    assert report.clear_gaps([]).endswith("above the baseline's: none.")


def test_scattered_seeds_need_more():
    found = several("plain", [0.5, 0.6]) + several("static_dns", [0.5, 0.7])
    worst, *_ = lines_of("static DNS", found)
    assert worst.startswith("PASS")
    assert worst.endswith("half-width above 2.0: digits narrow CNN (seeds: 2)")


@pytest.mark.parametrize(
    ("plain", "own", "verdict"),
    [
        (0.0, 0.029, "PASS"),
        (0.0, 0.031, "FAIL"),
        (0.2, 0.209, "PASS"),
        (0.2, 0.211, "FAIL"),
    ],
)
def test_gap_between_training_and_inference(plain, own, verdict):
    found = several("plain", [0.5], gap=plain) + several("static_dns", [0.5], gap=own)
    *_, gap = lines_of("static DNS", found)
    assert gap.startswith(verdict)


def test_a_gap_that_fails_is_named_with_both_modes():
    found = several("plain", [0.5], gap=0.01) + several("static_dns", [0.5], gap=0.2)
    *_, gap = lines_of("static DNS", found)
    assert gap.endswith(
        "digits narrow CNN 20.0 (90.0 to 70.0 %), baseline 1.0 (90.0 to 89.0 %), "
        "+19.0 of one seed"
    )
    found = [
        record(name, seed, 0.5, gap=gap)
        for name, gaps in (("plain", (0.0, 0.0)), ("static_dns", (0.1, 0.2)))
        for seed, gap in enumerate(gaps)
    ]
    *_, gap = lines_of("static DNS", found)
    assert gap.endswith("baseline 0.0 (90.0 to 90.0 %), +15.0 ± 63.5")


def test_what_was_not_run_is_said():
    found = several("plain", [0.5]) + several("static_dns", [0.5])
    lines = report.verdicts(comparison.compare(found))
    assert sum(line.startswith("NOT RUN ") for line in lines) == len(COMPARED) - 1


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


def test_picture_has_methods_and_cells():
    found = several("plain", [0.5]) + several("static_dns", [0.4])
    found += several("plain", [0.5], dataset="mnist_6000")
    found += several("static_uns", [0.51], dataset="mnist_6000")
    axes = report.plot_differences(comparison.compare(found)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "static DNS",
        "static UNS",
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "digits\nnarrow CNN",
        "MNIST (6,000)\nnarrow CNN",
    ]
    assert [text.get_text() for text in axes.texts] == ["-10.0", "", "", "+1.0"]
    (image,) = axes.images
    assert image.norm.vmin == -image.norm.vmax


def test_nothing_to_compare(tmp_path):
    with pytest.raises(ValueError, match=r"`output_dir` must hold runs.*with 0 runs"):
        report.write(tmp_path)


def test_gaps_by_batch_norms():
    """In the cells that both have, beside the baseline's, and with a verdict."""

    def compared(gap, networks):
        found = []
        for network in networks:
            found += several("plain", [0.5, 0.5], gap=0.08, network=network)
            found += several("static_dns", [0.5, 0.5], gap=gap, network=network)
        return comparison.compare(found)

    both_networks = ["narrow_cnn", "small_resnet"]
    everywhere = compared(0.2, [*both_networks, "no_batch_norm"])
    unbiased = compared(0.085, both_networks)
    text = report.gap_section(everywhere, unbiased)
    assert (
        "| static DNS | 20.0 (8.0) | 2 | 2 | 2 | 8.5 (8.0) | 0 | 2 | 2 "
        "| 4.2 (4.0) | 0 | 2 | 2 |"
    ) in text
    assert "| static UNS | not run |" in text
    # The verdicts on moving averages are those of the matrices.
    assert text.count("\nPASS static DNS (2 cells): inference at most 3 points") == 1
    # Runs of before, and cells that one of them lacks.
    for run in unbiased[0].found[1], *unbiased[1].found:
        del run["by_mode"]["first_epoch"]["estimated"]
    text = report.gap_section(everywhere, unbiased)
    assert "| 8.5 (8.0) | 0 | 2 | 2 | 4.2 (4.0) | 0 | 1 | 1 |" in text
    text = report.gap_section(compared(0.2, ["small_resnet"]), compared(0.3, both_networks))
    shares = "20.0 (8.0) | 1 | 1 | 2 | 30.0 (8.0) | 1 | 1 | 2 | 15.0 (4.0) | 1 | 1 | 2 |"
    assert f"| static DNS | {shares}" in text
    assert "\nFAIL static DNS (1 cell): inference at most 3 points" in text
    assert report.gap_section([], compared(0.3, ["small_resnet"])) == "Not run."

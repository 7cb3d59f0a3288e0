"""Tables, from runs that are made up."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from no_harm_runs import several

from benchmarks.no_harm import comparison, report_tables


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
    text = report_tables.gap_section(everywhere, unbiased)
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
    text = report_tables.gap_section(everywhere, unbiased)
    assert "| 8.5 (8.0) | 0 | 2 | 2 | 4.2 (4.0) | 0 | 1 | 1 |" in text
    text = report_tables.gap_section(
        compared(0.2, ["small_resnet"]), compared(0.3, both_networks)
    )
    shares = "20.0 (8.0) | 1 | 1 | 2 | 30.0 (8.0) | 1 | 1 | 2 | 15.0 (4.0) | 1 | 1 | 2 |"
    assert f"| static DNS | {shares}" in text
    assert "\nFAIL static DNS (1 cell): inference at most 3 points" in text
    assert report_tables.gap_section([], compared(0.3, ["small_resnet"])) == "Not run."


def test_step_times_that_are_not_known():
    found = several("plain", [0.5], seconds=2.0) + several("static_dns", [0.5], seconds=3.0)
    found += several("static_uns", [0.5], command="another")
    comparisons = comparison.compare(found)
    for text in (
        report_tables.summary_table(comparisons),
        report_tables.cell_tables(found, comparisons),
    ):
        (known,) = [line for line in text.splitlines() if "| static DNS |" in line]
        assert "| 1.50x |" in known
        (unknown,) = [line for line in text.splitlines() if "| static UNS |" in line]
        assert "| unknown |" in unknown

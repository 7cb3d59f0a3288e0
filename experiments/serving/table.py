"""What killed exports and the load campaign found, from results/serving.jsonl."""

from __future__ import annotations

import pathlib
import textwrap

from experiments.common import runs, tables

RECORDS = pathlib.Path(__file__).parents[2] / "results" / "serving.jsonl"


def export_kills() -> str:
    """Markdown of the killed exports."""
    found = _found("export_kills")
    if found is None:
        return "`python -m experiments.serving.export_kills`: not run."
    return _filled(
        [
            f"{tables.commands([found])} killed",
            f"{found['kills']} exporting processes,",
            f"{found['kills_inside_a_write']} of them inside a write, while a reader",
            "loaded each version as soon as it saw it:",
            f"{found['versions_written']:,} versions,",
            f"{found['versions_that_did_not_load'] or 'none'} of which failed to load.",
        ]
    )


def load() -> str:
    """Markdown of the load campaign."""
    found = _found("load")
    if found is None:
        return "Not run."
    latency = found["latency_at_batch_1"]
    images = found["images_a_second_in_batches_of_64"]
    rows = [
        [
            name,
            *(f"{latency[name][each]:.2f}" for each in ("p50_ms", "p99_ms")),
            f"{images[name]:,.0f}",
        ]
        for name in latency
    ]
    columns = ["", "p50, ms, 1 image", "p99, ms", "images a second, batches of 64"]
    said = [
        f"{tables.commands([found])}, {found['cores']} cores that the client and other",
        "work share:",
        f"{found['answered']:,} of {found['requests']:,} requests were answered.",
        f"{found['good_equal_to_the_model']:,} of {found['good']:,} good ones got what the",
        f"model predicts (to {found['largest_difference']:.1e}),",
        f"{found['malformed_refused']:,} of {found['malformed']:,} malformed ones status",
        "400 or 422. Memory:",
        f"{found['memory_mib_first_tenth']:.1f} MiB in the first tenth,",
        f"{found['memory_mib_last_tenth']:.1f} MiB in the last",
        f"({found['memory_growth_percent']:+.2f} %).",
    ]
    return f"{_filled(said)}\n\n{tables.markdown(columns, rows)}"


def _found(name: str) -> dict | None:
    return next((each for each in runs.read(RECORDS) if each["key"] == [name]), None)


def _filled(said: list[str]) -> str:
    return textwrap.fill(" ".join(said), 96, break_on_hyphens=False)

"""The tables of the benchmarks in results/README.md."""

import pathlib

from experiments.common import runs, tables

PLACE = "benchmarks.jsonl"


def sections(results: pathlib.Path) -> str:
    groups = dict.fromkeys(run["key"][0] for run in runs.read(results / PLACE))
    parts = [
        "## Step times",
        "Ratios to the plain Keras layer or model in the same process, interleaved rounds, "
        "median and its 95 % interval (`make bench`). MiB: the largest resident memory "
        "of a pass above that before it, in a separate process, and that of the baseline.",
        *(_times(results, group) for group in groups),
    ]
    return "\n\n".join(parts)


def measured(results: pathlib.Path, group: str) -> list[dict]:
    """What was measured of a group: without XLA first, then with it."""
    found = runs.read(results / PLACE)
    chosen = [each for each in found if each["key"][0] == group]
    return sorted(chosen, key=lambda each: each["xla"])


def _times(results: pathlib.Path, group: str) -> str:
    found = measured(results, group)
    rows = [
        [
            *(row["case"], row["candidate"], row["baseline"], each["xla"]),
            _ratio(row["median"]),
            f"{_ratio(row['low'])} to {_ratio(row['high'])}",
            str(row["rounds"]),
            ", ".join(f"{row[each]:.0f}" for each in row if each.endswith("mebibytes")),
        ]
        for each in found
        for row in each["rows"]
    ]
    columns = ["case", "candidate", "baseline", "XLA", "ratio", "95 % interval", "rounds"]
    columns += ["MiB"] * any(row[-1] for row in rows)
    return (
        f"### {group}\n\n{tables.commands(found)}, {found[0]['cores']} CPU cores.\n\n"
        f"{tables.markdown(columns, (row[: len(columns)] for row in rows))}"
    )


def _ratio(number: float) -> str:
    """Two digits at least, also where a candidate takes a hundredth of the time."""
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"

"""The closing table of a run of the demo, as Markdown."""

from __future__ import annotations


def table(rows: list[dict]) -> str:
    """Returns one line a model, from the rows of a results file."""
    lines = [
        "| model | test accuracy, % | difference to its twin | before adaptation "
        "| parameters | step time |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["step_time_ratio"]
        timing = "" if ratio is None else f"{ratio['median']:.2f}x"
        lines.append(
            f"| {row['title']} | {_percent(row, 'test_accuracy')} "
            f"| {_percent(row, 'difference', '+')} "
            f"| {_percent(row, 'test_unadapted_accuracy')} "
            f"| {row['parameters']:,} | {timing} |"
        )
    return "\n".join(lines)


def _percent(row: dict, key: str, sign: str = "") -> str:
    if f"{key}_mean" not in row:
        return ""
    mean, deviation = row[f"{key}_mean"], row[f"{key}_std"]
    spread = "" if deviation is None else f" ± {100 * deviation:.2f}"
    return f"{100 * mean:{sign}.2f}{spread}"

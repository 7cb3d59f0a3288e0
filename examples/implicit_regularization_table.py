"""The table of `examples.implicit_regularization`, as Markdown."""

from __future__ import annotations

import numpy as np

MEASURES = ("loss", "nuclear_norm", "effective_rank", "distance")


def table(content: dict) -> str:
    """One line a kind of data and a flow: means over the seeds at the last step."""
    lines = [
        "| data | descent on | loss | nuclear norm | effective rank "
        "| distance from the target |",
        "|---|---|---|---|---|---|",
    ]
    runs = content["runs"]
    for data in dict.fromkeys(run["data"] for run in runs):
        shown = [run for run in runs if run["data"] == data]
        for flow in dict.fromkeys(run["flow"] for run in shown):
            last = [
                {key: run[key][-1] for key in MEASURES}
                for run in shown
                if run["flow"] == flow
            ]
            lines.append(_line(data, flow, last))
        targets = [run["target"] for run in shown if run["flow"] == shown[0]["flow"]]
        lines.append(_line(data, "(target)", targets))
    return "\n".join(lines)


def _line(data: str, flow: str, rows: list[dict]) -> str:
    means = {key: np.mean([row[key] for row in rows]) for key in MEASURES}
    return (
        f"| {data} | {flow} | {means['loss']:.1e} | {means['nuclear_norm']:.2f} "
        f"| {means['effective_rank']:.1f} | {means['distance']:.2f} |"
    )

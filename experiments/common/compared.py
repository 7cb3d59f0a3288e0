"""The table of methods beside a baseline, and beside published figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.common import tables

#: Columns by their titles: functions of a method's name, which return a cell.
Columns = Mapping[str, Callable[[str], str]]


def compared(
    found: list[dict],
    titles: Mapping[str, str],
    baseline: str,
    difference: str,
    percents: Callable[[str], dict[int, float]],
    published: tuple[str, Mapping[str, float]] | None = None,
    before_seeds: Columns | None = None,
    after_seeds: Columns | None = None,
) -> str:
    """Markdown: a line a method, also for those that were not run.

    `percents` returns those of a method by seed; `difference` is the title of the column of
    differences, `published` title and percents of a column of published ones.
    """
    before, after = before_seeds or {}, after_seeds or {}
    tuned = any("learning_rate" in run for run in found)
    timed = any("step_time" in run for run in found)
    columns = ["method", *([published[0]] if published else []), "here", difference]
    columns += [*before, "seeds", *after, *(["rate"] if tuned else []), "parameters"]
    columns += [*(tables.COSTS if timed else []), "images per second on a GPU"]
    rows = []
    for name, title in titles.items():
        cells = [title]
        if published:
            cells.append(percent(published[1].get(name)))
        chosen = tables.of_method(found, name)
        if not chosen:
            rows.append([*cells, "not run"])
            continue
        own, others = percents(name), percents(baseline)
        cells += [
            tables.outcome(chosen, own.values()),
            "" if name == baseline else tables.difference(own, others),
            *(make(name) for make in before.values()),
            tables.seeds(chosen),
            *(make(name) for make in after.values()),
            *([tables.rates(chosen)] if tuned else []),
            f"{chosen[0]['parameters']:,}",
            *(tables.costs(chosen) if timed else []),
            tables.images_per_second(chosen),
        ]
        rows.append(cells)
    return tables.markdown(columns, rows)


def percent(figure: float | None) -> str:
    """A published figure, or an empty cell."""
    return "" if figure is None else f"{figure:.2f}"

"""Parts of Markdown tables: means over seeds, differences paired by seed."""

import dataclasses
import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.common import runs

#: The cell of a row without a run, and the start of the line of rows without any figure.
NOT_RUN = "not run"
REST = "Not run: "
#: Those that chose learning rates; `None` where nothing was chosen.
Trials = list[dict] | None
#: The cell of a difference between rows that were not trained alike.
NOT_COMPARABLE = "not comparable"
#: What a ± may be over.
OVER = "seeds", "draws", "draws of domains", "folds"
SPREAD = re.compile(r"\d+\.\d+ ± \d+\.\d+")
#: Every ± that was made, without its sign: what it is over, and of how many values.
MADE: dict[str, tuple[str, int]] = {}


@dataclasses.dataclass(frozen=True)
class Fair:
    """What an experiment asks of a table of its rows."""

    #: Baseline, controls and nearest neighbors by the row that needs them.
    beside: Mapping[str, Sequence[str]]
    #: Titles by names in the records, where they differ.
    titles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def problems(self, text: str, found: list[dict], trials: Trials = None) -> list[str]:
        """What the tables of a text lack, whose figures are of `found`."""
        lines = [each for each in text.splitlines() if each[:1] == "|"]
        rows = [re.split(r" *[|:;] *", each) for each in lines if NOT_RUN not in each]
        shown = {piece for row in rows for piece in row}
        found = [run for run in found if "method" in run]
        names = {run["method"] for run in found} | {*self.beside}
        titles = {name: self.titles.get(name, name) for name in names}
        lacking = [
            f"{titles[name]} without the star of its learning rate"
            for name in names
            if titles[name] in shown and star(of_method(found, name), trials)
        ]
        shown = {piece.rstrip("*") for piece in shown}
        for name, others in self.beside.items():
            missing = {self.titles.get(other, other) for other in others} - shown
            if titles[name] in shown and missing:
                lacking.append(f"{titles[name]} without {', '.join(sorted(missing))}")
        return lacking


def unstated(text: str) -> list[str]:
    """Each ± of a text that is not one of `spread` over seeds or draws."""
    found = SPREAD.findall(text)
    return [each for each in found if MADE.get(each, ("nothing",))[0] not in OVER]


def star(found: list[dict], trials: Trials = None) -> str:
    """Marks a row whose learning rate is the lowest or the highest that was tried."""
    names = {run["method"] for run in found}
    rates = {_rate(trial) for trial in trials or [] if trial["method"] in names}
    for run in found:
        tried = run.get("setting", {}).get("rates", ())
        rates.update(tried[run["method"]] if isinstance(tried, dict) else tried)
    edges = {min(rates), max(rates)} if len(rates) > 1 else set()
    return "*" * any(_rate(run) in edges for run in found)


def _rate(run: dict) -> float | None:
    return run.get("rate", run.get("learning_rate"))


def scores(trials: Iterable[dict]) -> dict[float, list[float]]:
    """Accuracies of trials by rate; of one that diverged, 0."""
    found: dict[float, list[float]] = {}
    for trial in trials:
        score = trial.get("accuracy", trial.get("validation_accuracy", 0.0))
        found.setdefault(_rate(trial), []).append(score)
    return found


def best_rate(trials: Iterable[dict]) -> float:
    """The rate of the best mean accuracy; of equal ones the first that was tried."""
    found = scores(trials)
    return max(found, key=lambda rate: statistics.mean(found[rate]))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table and its notes; rows that are too short end in empty cells."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = [*row, *[""] * (len(columns) - len(row))]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    return "\n\n".join([table, *notes(table)])


def notes(table: str) -> list[str]:
    """What the ± of a table are over, and what a star means."""
    over: dict[str, set[int]] = {}
    for kind, count in (MADE[each] for each in SPREAD.findall(table) if each in MADE):
        over.setdefault(kind, set()).add(count)
    parts = [
        f"± over {' or '.join(map(str, sorted(counts)))} {kind}."
        for kind, counts in over.items()
    ]
    if re.search(r"[^*]\*(?: \||:)", table):
        parts.append("\\*: the learning rate is the lowest or the highest that was tried.")
    return [" ".join(parts)] if parts else []


def spread(
    value: float, width: float, over: str, count: int, sign: str = "", digits: int = 2
) -> str:
    if not math.isfinite(width):
        return f"{value:{sign}.{digits}f}"
    made = f"{value:{sign}.{digits}f} ± {width:.{digits}f}"
    MADE[made.lstrip("+-")] = over, count
    return made


def mean(values: Iterable[float], sign: str = "", over: str = "seeds") -> str:
    """The mean ± the standard deviation; of two values both."""
    values = list(values)
    if len(values) < 3:
        return " and ".join(f"{each:{sign}.2f}" for each in values)
    deviation = statistics.stdev(values)
    return spread(statistics.mean(values), deviation, over, len(values), sign)


def of_method(found: list[dict], method: str) -> list[dict]:
    return [run for run in found if run["method"] == method]


def percent(found: list[dict], method: str, key: str) -> dict[int, float]:
    """A share in percent by seed, of the runs of a method that have it."""
    return {run["seed"]: 100 * run[key] for run in of_method(found, method) if key in run}


def mean_percent(found: list[dict], method: str, key: str) -> str:
    return mean(percent(found, method, key).values())


def difference(
    found: dict[Any, float], baseline: dict[Any, float], over: str = "seeds"
) -> str:
    """The mean difference over the seeds that both have."""
    both = [seed for seed in found if seed in baseline]
    return mean((found[seed] - baseline[seed] for seed in both), "+", over)


def trials_of(records: runs.RunRecords) -> Trials:
    """The trials of a setting."""
    setting = records.setting or {}
    if not setting.get("tuned") and len(setting.get("rates", ())) < 2:
        return None
    path = records.path.with_name(f"{records.path.stem}_tuning.jsonl")
    return runs.RunRecords(path, records.name.replace("everything", "all")).runs


def incomparable(
    first: list[dict], second: list[dict], trials: Trials = None, chance: float = 0.0
) -> str:
    """Why the runs of two rows cannot be paired; empty if they can.

    Backends draw other start weights. If `trials` chose learning rates, those of both rows
    must be as long and leave chance, and each row must have the rate that is best among
    those that were tried for both.
    """
    rows = [each for each in (first, second) if each]
    named = [[run.get("versions", {}).get("backend", "?") for run in each] for each in rows]
    backends = [{each.split()[0] for each in names} for names in named]
    if any(backend != backends[0] for backend in backends):
        return " and ".join(sorted(set.union(*backends)))
    if trials is None or len(rows) < 2:
        return ""
    tried = [of_method(trials, each[0]["method"]) for each in rows]
    # Older trials do not name their steps; their setting does.
    lengths = {trial["steps"] for each in tried for trial in each if "steps" in trial}
    if len(lengths) > 1:
        return f"trials of {sorted(lengths)} steps"
    found = [scores(each) for each in tried]
    for own, each in zip(rows, found, strict=True):
        if each and max(map(statistics.mean, each.values())) < 1.25 * chance:
            return f"the trials of {own[0]['method']} did not leave chance"
    both = found[0].keys() & found[1].keys()
    for own, each in zip(rows, tried, strict=True):
        shared = [trial for trial in each if _rate(trial) in both]
        if {_rate(run) for run in own} != {best_rate(shared) if shared else None}:
            return f"the rate of {own[0]['method']} is not the best that both tried"
    return ""


def require_comparable(
    first: list[dict], second: list[dict], trials: Trials = None
) -> None:
    """Raises a `ValueError` where a claim would compare what was not trained alike."""
    if reason := incomparable(first, second, trials):
        names = [sorted({run["method"] for run in each}) for each in (first, second)]
        raise ValueError(f"{names[0]} and {names[1]} are {NOT_COMPARABLE}: {reason}")


def outcome(found: list[dict], values: Iterable[float]) -> str:
    """The mean over the runs of a method, and how many diverged."""
    diverged = sum("diverged" in run for run in found)
    note = f"diverged in {diverged} of {len(found)}" if diverged else ""
    return "; ".join(each for each in (mean(values), note) if each)


def seeds(found: list[dict]) -> str:
    return ", ".join(map(str, sorted({run["seed"] for run in found})))


def commands(made: list[dict]) -> str:
    """The commands that made the runs, one for all methods and seeds, and their commits."""
    several: dict[tuple[str, bool], dict[str, None]] = {}
    for run in made:
        words = shlex.split(run["command"])
        chosen = [each for each in words if each.startswith(_CHOOSING)]
        rest = shlex.join(each for each in words if each not in chosen)
        # A command without a method makes all.
        kind = any(each.startswith("--method=") for each in chosen)
        several.setdefault((rest, kind), {}).update(dict.fromkeys(chosen))
    called = []
    for (rest, _), chosen in several.items():
        seeds = ",".join(each[8:] for each in chosen if each.startswith("--seeds="))
        flags = [each for each in chosen if not each.startswith("--seeds=")]
        if seeds:
            flags.append("--seeds=" + ",".join(sorted({*seeds.split(",")}, key=int)))
        called.append(f"`{' '.join([rest, shlex.join(flags)]).strip()}`")
    return f"{'; '.join(called)} ({commits(made)})"


#: Flags of which a command takes several.
_CHOOSING = ("--method=", "--network=", "--domain=", "--similarity=", "--seeds=")


def commits(made: list[dict]) -> str:
    """The commits of this package that made the runs; of many, their number."""
    found = sorted({run["commit"] for run in made if run.get("commit")})
    if len(found) > 5:
        return f"{len(found)} commits"
    return f"commit{'s' * (len(found) > 1)} {', '.join(found) or 'unknown'}"


def trials(made: list[dict]) -> str:
    """One line a row and rate: the mean accuracy on validation images."""
    found: dict[tuple, list[dict]] = {}
    for run in made:
        found.setdefault((run["method"], run["learning_rate"]), []).append(run)
    lines = []
    for (method, rate), each in found.items():
        accuracies = percent(each, method, "validation_accuracy").values()
        lines.append([method, f"{rate:g}", outcome(each, accuracies), seeds(each)])
    return markdown(["method", "rate", "validation accuracy, %", "seeds"], lines)


def rates(made: list[dict]) -> str:
    found = {rate for rate in map(_rate, made) if rate}
    return ", ".join(f"{rate:g}" for rate in sorted(found))


def million_multiply_adds(made: list[dict]) -> str:
    """What one image takes."""
    adds = next((run["multiply_adds"] for run in made if run.get("multiply_adds")), None)
    return "" if adds is None else f"{adds / 1e6:.1f}"


def step_time(made: list[dict]) -> str:
    """The time of a step beside the plain network's."""
    times = [run["step_time"] for run in made if "step_time" in run]
    if not times:
        return ""
    median, low, high = (
        statistics.median(each[name] for each in times)
        for name in ("median", "low", "high")
    )
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


#: Columns that a table has where any run has a figure.
COSTS = {
    "million multiply-adds": million_multiply_adds,
    "step time / plain (quartiles)": step_time,
}


def training(setting: dict) -> str:
    """The recipe of a setting in words: optimizer, rates, batches, images."""
    recipe = setting["recipe"]
    drops = ", ".join(f"{drop:,}" for drop in recipe["rate_drops"])
    parts = [f"divided by 10 at {drops}"]
    if recipe["cosine_decay"]:
        parts = ["which falls to 0 along a cosine"]
    if recipe.get("warmup_steps"):
        parts.append(f"after {recipe['warmup_steps']:,} steps of warm-up")
    rate = f"{recipe['learning_rate']:g}"
    if setting.get("tuned"):
        rate = "the rate that was best for each row on validation images"
    images = [
        f"batches of {recipe['batch_size']}",
        f"augmentation {recipe['augmentation']}",
        *([f"{setting['input']} input"] if setting.get("input") else []),
        *([setting["precision"]] if setting.get("precision") else []),
    ]
    names, optimizer = {"adam": "Adam", "adamw": "AdamW"}, recipe["optimizer"]
    by = f"{names.get(optimizer, optimizer)} at {rate}"
    return f"{by}, {', '.join(parts)}; {', '.join(images)}"


def compared(
    found: list[dict],
    methods: Mapping[str, Any],
    baseline: str,
    columns: Sequence[str],
    percents: Callable[[str], dict[int, float]],
    published: Mapping[str, Mapping[str, float]],
    more: Mapping[str, Callable[[str], str]],
    trials: Trials = None,
) -> str:
    """A line a method beside a baseline; those without any figure follow the table.

    `columns` are the titles of the columns of percents and of their differences; `percents`
    returns those of a method by seed; `published` has percents of columns of published
    ones by titles, `more` has columns by titles: functions of a method's name. `trials`
    chose the learning rates.
    """
    tuned = any("learning_rate" in run for run in found)
    costs = {title: cost for title, cost in COSTS.items() if cost(found)}
    columns = [
        "method",
        *published,
        *columns,
        *more,
        "seeds",
        *(["rate"] if tuned else []),
        "parameters",
        *costs,
    ]
    rows = []
    for name, method in methods.items():
        chosen = of_method(found, name)
        cells = [f"{method.title}{star(chosen, trials)}"]
        cells += [figure(each.get(name)) for each in published.values()]
        if not chosen:
            rows.append([*cells, NOT_RUN])
            continue
        own, plain = percents(name), of_method(found, baseline)
        shown = difference(own, percents(baseline)) if name != baseline else ""
        if shown and incomparable(chosen, plain, trials):
            shown = NOT_COMPARABLE
        cells += [
            outcome(chosen, own.values()),
            shown,
            *(make(name) for make in more.values()),
            seeds(chosen),
            *([rates(chosen)] if tuned else []),
            f"{chosen[0]['parameters']:,}",
            *(cost(chosen) for cost in costs.values()),
        ]
        rows.append(cells)
    return run_and_not_run(columns, rows)


def run_and_not_run(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, and below it the titles of rows that only say that they were not run."""
    kept, rest = [], []
    for row in rows:
        empty = row[-1] == NOT_RUN and not any(row[1:-1])
        (rest if empty else kept).append(row)
    made = markdown(columns, kept)
    return f"{made}\n\n{REST}{'; '.join(row[0] for row in rest)}." if rest else made


def figure(published: float | None) -> str:
    return "" if published is None else f"{published:.2f}"

"""Tables 1 to 5 and 8 of Neural Similarity Learning from runs, beside the paper's."""

import functools
import pathlib

from experiments.common import runs, tables
from experiments.neural_similarity import methods

_SERVED = "served_parameters"
FAIR = tables.Fair(
    {
        "static_dns": ("cnn",),
        "dynamic_dns": ("cnn", "cnn_parameters"),
        "dynamic_uns_warmup": ("cnn", "cnn_warmup"),
    },
    {name: method.title for name, method in methods.METHODS.items()},
)
PLACE = "neural_similarity.jsonl"
TITLE = "## Neural Similarity Learning, Tables 1 to 5 and 8"


def section(records: runs.RunRecords, numbers: list[str] | None = None) -> str:
    """Markdown of a setting's runs, for tables or for all with more than the baseline's."""
    setting, found = records.setting, records.runs
    parts = [_heading(setting, found)]
    for number in tables_of(records) if numbers is None else numbers:
        trials = tables.trials_of(records)
        parts.append(_table(number, setting["dataset"], found, trials))
    return "\n\n".join(parts)


def apart(results: pathlib.Path, name: str, rates: tuple[float, ...]) -> str:
    """Markdown of table "uns" from trials: differences at the first rate, and errors."""
    records = runs.RunRecords(results / "neural_similarity_tuning.jsonl", name)
    table = methods.TABLES["uns"]
    at = {r: [run for run in records.runs if run["learning_rate"] == r] for r in rates}
    found, setting = at[rates[0]], records.setting or {}
    own = {"tuned": None, "recipe": {**setting["recipe"], "learning_rate": rates[0]}}

    def errors(rate: float, name: str) -> dict[int, float]:
        return _errors(at[rate], name, "validation_accuracy")

    def at_rate(rate: float, name: str) -> str:
        return tables.mean(errors(rate, name).values())

    def loss(name: str) -> str:
        return tables.mean(run["training_loss"] for run in tables.of_method(found, name))

    others = {f"error at {r:g}, %": functools.partial(at_rate, r) for r in rates[1:]}
    made = tables.compared(
        found,
        {n: row for n, row in table.methods.items() if tables.of_method(found, n)},
        table.baseline,
        ("error, %", "difference to baseline"),
        functools.partial(errors, rates[0]),
        {},
        {"training loss": loss, **others},
    )
    return f"{_heading({**setting, **own}, records.runs, 'validation')}\n\n{made}"


def tables_of(records: runs.RunRecords) -> list[str]:
    """Numbers of the tables of which there are more runs than the baseline's.

    But of tables that are not the paper's, none whose runs another has too.
    """
    ran = {run["method"] for run in records.runs}
    rows = {
        number: ran & set(table.methods)
        for number, table in methods.TABLES.items()
        if table.network == records.setting["network"]
        and table.predictors == records.setting.get("predictors", "published")
        and ran & set(table.methods) - {table.baseline}
    }
    return [
        number
        for number, own in rows.items()
        if number.isdigit() or not any(own < other for other in rows.values())
    ]


def _heading(setting: dict, found: list[dict], part: str = "test") -> str:
    recipe = setting["recipe"]
    variant = f" ({setting['variant']} variant)" if setting["variant"] else ""
    backend, version = found[0]["versions"]["backend"].split()
    if setting.get("filters"):
        variant += f" of {'-'.join(map(str, setting['filters']))} filters"
    return (
        f"### {setting['network']}{variant} on {setting['dataset']}: "
        f"{setting['train_examples']:,} images, {recipe['steps']:,} steps, "
        f"{setting.get('predictors', 'published')} predictors, {backend}\n\n"
        f"{tables.commands(found)} with {backend} {version}. "
        f"{tables.training(setting)}, batch norm momentum "
        f"{setting['batch_normalization_momentum']:g}. Errors on "
        f"{setting[f'{part}_examples']:,} {part} images after the last step, in %."
    )


def _table(number: str, dataset: str, found: list[dict], trials: tables.Trials) -> str:
    table = methods.TABLES[number]
    errors = table.errors.get(dataset)
    more = {}
    if errors and table.top_5_errors:
        more = {
            "paper, top-5": lambda name: tables.figure(table.top_5_errors.get(name)),
            "top-5": lambda name: tables.mean(_errors(found, name, "test_top_5").values()),
        }
    served = {r["method"]: f"{r['served_parameters']:,}" for r in found if _SERVED in r}
    if served:
        more["parameters, served"] = lambda name: served.get(name, "")
    made = tables.compared(
        found,
        table.methods,
        table.baseline,
        ("error, %", "difference to baseline"),
        lambda name: _errors(found, name, "test_accuracy"),
        {f"paper ({dataset})": errors} if errors else {},
        more,
        trials,
    )
    title = f"Table {number}. {table.title}" if number.isdigit() else table.title
    return f"{title}\n\n{made}"


def _errors(found: list[dict], method: str, key: str) -> dict[int, float]:
    accuracies = tables.percent(found, method, key)
    return {seed: 100 - accuracy for seed, accuracy in accuracies.items()}

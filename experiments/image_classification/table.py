"""Table 1 and Appendix A of Meta-Neighborhoods from runs, beside the paper's figures."""

import functools

from experiments.common import runs, tables
from experiments.image_classification import methods

EXPERIMENTS = methods.EXPERIMENTS
#: Pictures of one model, by the ends of their names.
PICTURES = {
    "prototype_cosines": "Figure 4. Cosines to prototypes",
    "feature_map": "Figure 5. Entries among examples",
    "subcategories": "Figure 6. Nearest images",
    "entries": "Figures 9 and 10. Entries and the images nearest to them",
}
FAIR = tables.Fair(
    dict.fromkeys(methods.METHODS, (methods.BASELINE,)),
    {name: method.title for name, method in methods.METHODS.items()},
)
PLACE = "image_classification.jsonl"
TITLE = "## Meta-Neighborhoods, Table 1 and Appendices A.3 to A.9: image classification"


def section(records: runs.RunRecords, experiments: list[str] | None = None) -> str:
    """Markdown of a setting's runs, for experiments or for all that have a run."""
    setting, found = records.setting, records.runs
    chosen = experiments_of(records) if experiments is None else experiments
    trials = tables.trials_of(records)
    made = [_table(EXPERIMENTS[name], setting, found, trials) for name in chosen]
    pictures = {name: EXPERIMENTS[name].title for name in chosen} | {
        f"{name}_{end}": f"{title}: {method.title}"
        for end, title in PICTURES.items()
        for name, method in methods.METHODS.items()
    }
    for name, title in pictures.items():
        drawn = f"figures/{records.name}_{name}.png"
        if (records.path.parent / drawn).exists():
            made.append(f"![{title}]({drawn})")
    return "\n\n".join([_heading(setting, found), *made])


def experiments_of(records: runs.RunRecords) -> list[str]:
    """Names of the experiments of which there are more runs than Table 1 has."""
    ran = {run["method"] for run in records.runs}
    coarse = records.setting["coarse"]
    in_table_1 = set() if coarse else set(EXPERIMENTS["table_1"].names)
    return [
        name
        for name, experiment in EXPERIMENTS.items()
        if experiment.coarse == coarse
        and ran & set(experiment.names) - (in_table_1 if name != "table_1" else set())
    ]


def _heading(setting: dict, found: list[dict]) -> str:
    recipe, dictionary = setting["recipe"], setting["dictionary"]
    backbone = setting["backbone"]
    if setting.get("filters"):
        backbone += f" of {'-'.join(map(str, setting['filters']))} filters"
    entries = f"{dictionary['num_neighbors']:,} entries, T = {dictionary['temperature']:g}"
    return (
        f"### {backbone} on {setting['dataset']}, {setting['classes']} classes: "
        f"{setting['train_examples']:,} images, {recipe['steps']:,} steps\n\n"
        f"{tables.commands(found)}. {tables.training(setting)}; {entries}. Accuracies on "
        f"{setting['test_examples']:,} test images after the last step, in %."
    )


def _table(
    experiment: methods.Experiment, setting: dict, found: list[dict], trials: tables.Trials
) -> str:
    published = experiment.published.get((setting["backbone"], setting["dataset"]))
    more = {"before adaptation": "test_unadapted_accuracy"}
    if any("rising_cosines" in run for run in found):
        more["cosines that rise, %"] = "rising_cosines"
    if experiment.coarse:
        more["coarse classes, by nearest images"] = "coarse_induction_accuracy"
        more["fine classes, by nearest images"] = "induction_accuracy"
    made = tables.compared(
        found,
        experiment.methods,
        methods.BASELINE,
        ("accuracy, %", "difference to vanilla"),
        lambda name: tables.percent(found, name, "test_accuracy"),
        {"paper": published} if published else {},
        {
            title: functools.partial(tables.mean_percent, found, key=key)
            for title, key in more.items()
        },
        trials,
    )
    title = " ".join(part for part in (f"{experiment.title}.", experiment.note) if part)
    return f"{title}\n\n{made}"

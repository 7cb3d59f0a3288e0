"""The tables of README and documentation, by the names that stand on the pages.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and is followed by the
command that wrote its files.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Collection

import experiments.demo.table
import experiments.few_shot.methods
import experiments.few_shot.table
import experiments.image_classification.methods
import experiments.image_classification.table
import experiments.neural_similarity.methods
import experiments.neural_similarity.table
import experiments.regression.table
import experiments.speed.table
from experiments.common import runs, tables
from experiments.neural_similarity import predictor_cost
from experiments.no_harm import comparison, report, report_tables

RESULTS = pathlib.Path(__file__).parents[1] / "results"
FILES = "https://github.com/nsl-keras/nsl_keras/tree/main/results"

#: What the table of costs shows of the benchmarks: what it is, group, case and candidate.
COSTS = (
    (
        "static unconstrained similarity, training step of CNN-9",
        "static",
        "CNN-9, training step",
        "static UNS",
    ),
    (
        "static unconstrained similarity folded, inference of CNN-9",
        "static",
        "CNN-9, inference",
        "folded UNS",
    ),
    *(
        (
            f"dynamic {title} similarity{with_blocks}, one layer of {filters} filters at "
            f"{size}x{size}, training step",
            "dynamic",
            f"{size}x{size}, {filters}->{filters}, forward+backward",
            f"dynamic {kind}, {part}",
        )
        for title, kind in (("diagonal", "DNS"), ("unconstrained", "UNS"))
        for part, with_blocks in (
            ("layer", ""),
            ("layer, in blocks", " with `downsampling=2`"),
        )
        for size, filters in ((32, 32), (8, 128))
    ),
    *(
        (
            f"Meta-Neighborhoods, 5,000 entries, {title}, {what}",
            "model",
            f"{network}, S=5000, C=10, B=128, {what}",
            "Meta-Neighborhoods",
        )
        for network, title in (
            ("convnet4", "4-layer network"),
            ("resnet_v2(29)", "ResNet-29"),
        )
        for what in ("training step", "inference")
    ),
)
#: The same of peak memory: what it is, case and candidate.
MEMORY = (
    *(
        (f"one layer of 32 filters at 32x32: {title}", "32x32, 32->32, B=128", candidate)
        for title, candidate in (
            ("convolution", "Conv2D"),
            ("dynamic diagonal similarity", "dynamic DNS, layer"),
            ("dynamic unconstrained similarity", "dynamic UNS, layer"),
        )
    ),
    *(
        (
            f"head of 256 features and 10 classes: {entries:,} entries",
            "d=256, C=10, B=128",
            f"Meta-Neighborhoods, dual form, S={entries}",
        )
        for entries in (1000, 10000, 100000)
    ),
)


def with_tables(text: str) -> str:
    """Returns a page with the parts between its markers made anew."""
    return re.sub(
        r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->",
        lambda match: (
            f"<!-- table: {match['name']} -->\n{TABLES[match['name']]()}\n<!-- end -->"
        ),
        text,
        flags=re.S,
    )


def _where() -> str:
    """One row a kind of problem: plain network, the same with a method, and the price."""
    digits = _bare_demo()
    few_shot = _few_shot(experiments.few_shot.methods.CLAIMS, None)
    found = report.load(RESULTS / "no_harm", "unbiased")
    matrix = report_tables.summary_table(comparison.compare(found))
    linear, cnn = _cells(digits, "linear features"), _cells(digits, "CNN")
    neighbors = _cells(digits, "linear features + Meta-Neighborhoods")
    static = _cells(digits, "CNN, static neural similarity")
    plain = _cells(few_shot, "finetuning of the classifier, from zero")
    dynamic, naive = _cells(few_shot, "dynamic NSN"), _cells(matrix, "dynamic UNS")
    wide = _cells(few_shot, "plain network with the dynamic one's parameters")
    slower = float(neighbors[-1][:-1]) / float(linear[-1][:-1])
    return tables.markdown(
        ["where", "plain, %", "with", "%", "difference, points", "training time"],
        [
            ["few labels: 5 images a class, new classes of CIFAR-100", plain[0]]
            + ["dynamic similarity", *dynamic[:2], f"{_seconds(dynamic, plain):.1f}x"],
            ["", plain[0], "more filters, as many parameters", *wide[:2]]
            + [f"{_seconds(wide, plain):.1f}x"],
            ["every default, five epochs, small data: mean of 15 tasks", ""]
            + ["dynamic similarity", "", naive[1], naive[-1]],
            ["weak features: one linear layer, digits", linear[0]]
            + ["learned neighbours", *neighbors[:2], f"{slower:.1f}x"],
            ["a good network: CNN, digits", cnn[0]]
            + ["static similarity", *static[:2], f"{static[-1]}, 1x once folded"],
        ],
    )


def _seconds(cells: list[str], baseline: list[str]) -> float:
    """How much longer the training took: its column is the last but one."""
    return float(cells[-2]) / float(baseline[-2])


def _cells(table: str, title: str) -> list[str]:
    """The cells of a row of a Markdown table after its title."""
    row = next(line for line in table.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def _bare_demo() -> str:
    found = runs.RunRecords(RESULTS / "demo" / "digits").runs
    return experiments.demo.table.table(found) if found else "Not run."


def _demo() -> str:
    return _shown(experiments.demo.table.section(RESULTS, "digits"), "demo/digits")


def _few_shot(
    names: Collection[str] = tuple(experiments.few_shot.methods.METHODS), columns: int = 5
) -> str:
    place = "few_shot/cifar_fs_small_cnn4_5way_5shot_augmented_tuned"
    records = runs.RunRecords(RESULTS / place)
    return _shown(experiments.few_shot.table.section(records, names), place, columns)


def _few_shot_claims() -> str:
    return _few_shot(experiments.few_shot.methods.CLAIMS, 4)


def _image_classification() -> str:
    place = "image_classification/convnet4_cifar10_all_1500"
    records = runs.RunRecords(RESULTS / place)
    made = experiments.image_classification.table.section(records, ["table_1"])
    return _shown(made, place, 6)


def _neural_similarity() -> str:
    place = "neural_similarity/cnn9_cifar10_all_500"
    records = runs.RunRecords(RESULTS / place)
    return _shown(experiments.neural_similarity.table.section(records, ["4"]), place, 6)


def _converged() -> str:
    """Both parts of the campaign of narrow networks, in one table."""
    parts = [
        (
            "CNN-9",
            "neural_similarity/cnn9_default_16-32-64_cifar10_10000_2340_tuned",
            experiments.neural_similarity.methods.TABLES["cost"].methods,
            experiments.neural_similarity.methods.TABLES["cost"].baseline,
        ),
        (
            "ConvNet-4",
            "image_classification/convnet4_12-48-96-96_cifar10_10000_2340_tuned",
            experiments.image_classification.methods.EXPERIMENTS["table_1"].methods,
            experiments.image_classification.methods.BASELINE,
        ),
    ]
    columns = ["network", "method", "test accuracy, %", "difference", "seeds", "rate"]
    columns += ["parameters", *tables.COSTS]
    rows = []
    for network, place, methods, baseline in parts:
        found = runs.RunRecords(RESULTS / place).runs
        plain = tables.percent(found, baseline, "test_accuracy")
        for name, method in methods.items():
            chosen = tables.of_method(found, name)
            accuracies = tables.percent(found, name, "test_accuracy")
            rows.append(
                [
                    network,
                    method.title,
                    tables.outcome(chosen, accuracies.values()),
                    "" if name == baseline else tables.difference(accuracies, plain),
                    tables.seeds(chosen),
                    tables.rates(chosen),
                    f"{chosen[0]['parameters']:,}",
                    *tables.costs(chosen),
                ]
                if chosen
                else [network, method.title, "not run"]
            )
    command = (
        "`python -m experiments.campaign --plan=narrow --data_dir=DATA_DIR --output_dir=.`"
    )
    places = [place for _, place, _, _ in parts]
    return _with_source(tables.markdown(columns, rows), command, *places)


def _regression() -> str:
    return _shown(experiments.regression.table.section(RESULTS), "regression")


def _predictor_cost() -> str:
    return _shown(predictor_cost.section(RESULTS), predictor_cost.PLACE)


def _no_harm(batch_norm: str) -> str:
    found = report.load(RESULTS / "no_harm", batch_norm)
    made = report_tables.summary_table(comparison.compare(found))
    command = "`python -m experiments.no_harm --output_dir=.`"
    if batch_norm == "unbiased":
        command += ", for networks with batch norms with `--batch_norm=unbiased`"
    return _shown(f"{command}\n\n{made}", "no_harm", 6)


def _costs() -> str:
    rows = [
        [title, *_found(group, "median", "{:.2f}x", case, candidate)]
        for title, group, case, candidate in COSTS
    ]
    made = tables.markdown(["what", "without XLA", "with XLA"], rows)
    return _shown(
        f"`make bench`: ratios to the plain layer or model.\n\n{made}", "benchmarks"
    )


def _memory() -> str:
    group = experiments.speed.table.MEMORY
    rows = [
        [
            title,
            *_found(group, "mebibytes", "{:.0f}", f"{case}, forward+backward", candidate),
        ]
        for title, case, candidate in MEMORY
    ]
    made = tables.markdown(["what", "MiB without XLA", "MiB with XLA"], rows)
    return _shown(f"`make bench`\n\n{made}", "benchmarks")


def _found(group: str, key: str, form: str, case: str, candidate: str) -> list[str]:
    """What was measured of a candidate without and with XLA."""
    measured = {
        each["xla"]: row[key]
        for each in experiments.speed.table.measured(RESULTS, group)
        for row in each["rows"]
        if (row["case"], row["candidate"]) == (case, candidate)
    }
    return [
        form.format(measured[xla]) if xla in measured else "not run"
        for xla in ("off", "on")
    ]


def _shown(section: str, place: str, columns: int | None = None) -> str:
    """The first table of a section, and below it, folded, what was run for it.

    Args:
        section: Markdown, in which headings and pictures do not count.
        place: Where the files are, in results/.
        columns: How many columns are shown; `None` for all.
    """
    parts = [part for part in section.split("\n\n") if not part.startswith(("#", "!["))]
    first = next((i for i, part in enumerate(parts) if part.startswith("|")), None)
    if first is None:
        return "\n\n".join(parts)
    how = "\n\n".join(parts[:first])
    return _with_source(_first_columns(parts[first], columns), how, place)


def _with_source(table: str, how: str, *places: str) -> str:
    """A table and below it, folded, what was run for it and where the files are."""
    files = " and ".join(f"[`results/{place}`]({FILES}/{place})" for place in places)
    return f"""{table}

<details markdown="1">
<summary>Command, setting and files</summary>

{how}

The files: {files}.

</details>"""


def _first_columns(table: str, count: int | None) -> str:
    if count is None:
        return table
    return "\n".join(
        f"{'|'.join(line.split('|')[: count + 1])}|" for line in table.splitlines()
    )


TABLES: dict[str, Callable[[], str]] = {
    "where": _where,
    "digits": _bare_demo,
    "demo": _demo,
    "few_shot": _few_shot,
    "few_shot_claims": _few_shot_claims,
    "cifar10": _image_classification,
    "converged": _converged,
    "cnn9": _neural_similarity,
    "regression": _regression,
    "predictor_cost": _predictor_cost,
    "no_harm": lambda: _no_harm("unbiased"),
    "no_harm_keras": lambda: _no_harm("keras"),
    "costs": _costs,
    "memory": _memory,
}

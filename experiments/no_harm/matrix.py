"""The runs of the matrix: in which order, by whom, and none of them twice."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable

import keras

from experiments.common import runs
from experiments.no_harm.comparison import compare
from experiments.no_harm.data import DATASETS
from experiments.no_harm.methods import METHODS, baselines
from experiments.no_harm.networks import NETWORKS
from experiments.no_harm.training import Cell, Setting

#: Seed, image set and network.
CellName = tuple[int, str, str]


def parse_shard(text: str) -> tuple[int, int]:
    """Returns `(i, n)` of "i/n".

    Raises:
        ValueError: If it is anything else, or `i` is not below `n`.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"`shard` must be i/n with i < n, as 0/2. Received: {text!r}")
    return int(match[1]), int(match[2])


def cells(
    seeds: Iterable[int],
    datasets: Collection[str] = DATASETS,
    networks: Collection[str] = NETWORKS,
    shard: tuple[int, int] = (0, 1),
) -> list[CellName]:
    """Returns the cells of a share, seed by seed, the cheapest image sets first.

    All methods of a cell are in one share: they use the same plain network.
    """
    chosen = [
        (seed, dataset, network)
        for seed in seeds
        for dataset in DATASETS
        if dataset in datasets
        for network in NETWORKS
        if network in networks
    ]
    index, count = shard
    return chosen[index::count]


def undecided(
    records: runs.RunRecords,
    cell: CellName,
    methods: Collection[str],
    seeds: Collection[int],
    most: int,
) -> list[str]:
    """Returns those of the methods that need the seed of a cell, and their baselines.

    A method needs more seeds while its interval is too wide to judge by, up to `most`.
    None does before `seeds` are there.
    """
    _, dataset, network = cell
    wide = [
        each.method
        for each in compare(records.runs)
        if (each.dataset, each.network) == (dataset, network)
        and each.method in methods
        and each.is_wide
        and set(seeds) <= set(each.seeds)
        and len(each.seeds) < most
    ]
    return [name for name in METHODS if name in {*wide, *baselines(wide)}]


def run_cell(
    records: runs.RunRecords,
    setting: Setting,
    cell: CellName,
    methods: Collection[str] = METHODS,
    data_dir: str | None = None,
) -> None:
    """Makes those runs of a cell that there are not yet."""
    seed, dataset, network = cell
    titles: dict[runs.Key, str] = {
        (dataset, network, name, seed): f"{DATASETS[dataset].title}, "
        f"{NETWORKS[network].title}, {method.title}, seed {seed}"
        for name, method in METHODS.items()
        if name in methods and method.suits(NETWORKS[network])
    }
    if all(map(records.holds, titles)):
        return
    images = DATASETS[dataset].load(seed, data_dir)
    trained = Cell(setting, images, NETWORKS[network], seed)

    def run(dataset: str, network: str, name: str, seed: int) -> dict:
        start = time.process_time()
        names = {"dataset": dataset, "network": network, "method": name, "seed": seed}
        record = names | trained.run(name)
        seconds = time.process_time() - start
        accuracy = 100 * record["test_accuracy"][-1]
        print(f"{accuracy:.2f} %, {seconds:.0f} seconds of a core", flush=True)
        return record | {
            "core_seconds": seconds,
            "command": runs.command("no_harm"),
            "versions": runs.versions(),
        }

    runs.run_all(records, titles, run)
    keras.utils.clear_session()

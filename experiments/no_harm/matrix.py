"""The runs of the matrix, none of them twice."""

from __future__ import annotations

import time
from collections.abc import Collection

import keras

from experiments.common import runs
from experiments.no_harm.comparison import WIDEST, compare
from experiments.no_harm.data import DATASETS
from experiments.no_harm.methods import METHODS
from experiments.no_harm.networks import NETWORKS
from experiments.no_harm.training import Cell, Setting

#: Seed, image set and network.
CellName = tuple[int, str, str]


def undecided(
    records: runs.RunRecords,
    cell: CellName,
    methods: Collection[str],
    seeds: Collection[int],
    most: int,
) -> list[str]:
    """Returns the methods that need the seed of a cell, and their baselines.

    One does while its interval is too wide to judge by, once `seeds` are there.
    """
    _, dataset, network = cell
    wide = [
        each.method
        for each in compare(records.runs)
        if (each.dataset, each.network) == (dataset, network)
        and each.method in methods
        and each.half_width() > WIDEST
        and set(seeds) <= set(each.seeds)
        and len(each.seeds) < most
    ]
    needed = {*wide, *(METHODS[name].baseline for name in wide)}
    return [name for name in METHODS if name in needed]


def run_cell(
    records: runs.RunRecords,
    setting: Setting,
    cell: CellName,
    methods: Collection[str] = METHODS,
    data_dir: str | None = None,
) -> None:
    seed, dataset, network = cell
    keys: list[runs.Key] = [
        (dataset, network, name, seed)
        for name, method in METHODS.items()
        if name in methods and (NETWORKS[network].batch_norm or not method.batch_norm)
    ]
    if all(map(records.holds, keys)):
        return
    images = DATASETS[dataset].load(seed, data_dir)
    trained = Cell(setting, images, NETWORKS[network], seed)

    def run(dataset: str, network: str, name: str, seed: int) -> dict:
        start = time.process_time()
        names = {"dataset": dataset, "network": network, "method": name, "seed": seed}
        record = names | trained.run(METHODS[name])
        seconds = time.process_time() - start
        accuracy = 100 * record["test_accuracy"][-1]
        print(f"{accuracy:.2f} %, {seconds:.0f} seconds of a core", flush=True)
        return record | {"core_seconds": seconds} | runs.about("no_harm")

    runs.run_all(records, keys, run)
    keras.utils.clear_session()

"""MAML on sine waves: the errors of `examples/sine_waves.py`, recorded.

    python -m experiments.few_shot.sine_waves --seeds=0,1,2

The experiment is Section 5.1 of Finn et al. (2017).
"""

import pathlib

from absl import flags

from examples import sine_waves
from experiments.common import command, runs, tables

FLAGS = flags.FLAGS

PLACE = "sine_waves.jsonl"


def table(found: list[dict]) -> str:
    rows = [
        [name, *map(tables.mean, zip(*(run["errors"][name] for run in found), strict=True))]
        for name in found[0]["errors"]
    ]
    return tables.markdown(["network", "0 steps", "1 step", "10 steps"], rows)


def section(results: pathlib.Path) -> str:
    found = runs.RunRecords(results / PLACE).runs
    return (
        f"## Few-shot regression: sine waves\n\n{tables.commands(found)}: "
        f"{found[0]['setting']['iterations']:,} "
        "iterations of 25 waves, one inner step of 0.01, Adam at 0.001. Mean squared "
        "errors on 600 new waves before and after gradient steps on ten points; seeds: "
        f"{tables.seeds(found)}. The paper draws curves and prints no numbers.\n\n"
        f"{table(found)}"
    )


def main(_arguments: list[str]) -> None:
    results = runs.results_folder(FLAGS.output_dir)
    setting = {"iterations": FLAGS.iterations}
    records = runs.RunRecords(results / PLACE, setting=setting)

    def run(seed: int) -> dict:
        return {
            "seed": seed,
            **runs.about("few_shot.sine_waves"),
            "errors": sine_waves.errors(FLAGS.iterations, seed),
        }

    runs.run_all(records, [(int(seed),) for seed in FLAGS.seeds], run)
    print(table(records.runs))


if __name__ == "__main__":
    flags.DEFINE_integer("iterations", 70_000, "Steps of training.", lower_bound=1)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, a run each.")
    command.run(main)

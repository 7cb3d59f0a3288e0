r"""Runs the rows of the papers' tables in order of worth, as far as the time allows.

    python -m experiments.campaign --plan=narrow --data_dir=~/tensorflow_datasets \
        --budget_minutes=60
    KERAS_BACKEND=jax python -m experiments.campaign --plan=cifar10 \
        --data_file=cifar10.npz --budget_minutes=25 --state_dir=~/unfinished

    KERAS_BACKEND=jax python -m experiments.campaign --plan=device --minutes=10 \
        --data_file=cifar10.npz --output_dir=OUT --state_dir=OUT/unfinished

The same command goes on where the last call stopped. --plan=narrow compares narrow networks
on 10,000 images of CIFAR-10, on a few processor cores. The other plans, each named after
its data set, have the papers' networks and numbers of steps, for a GPU. A row that is tuned
has as many trials as the plan's other such rows, and is trained at the rate that was best
for it on validation images; all others have the rates that the papers give.

--output_dir/results/campaign.jsonl has a line a finished command. Such a command is not
called again: to renew a run, delete its line and the command's.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import keras
from absl import flags

from experiments.common import command, recipe, runs

FLAGS = flags.FLAGS

#: A command in `experiments` with its flags, and those of the trials of its rate.
Row = tuple[str, str]


def rows(line: str, names: str, tuning: str = "") -> list[Row]:
    """A row for each name of a method; `a+b` are rows of one command."""
    methods = (" --method=".join(["", *name.split("+")]) for name in names.split())
    return [(line + each, tuning) for each in methods]


_NARROW = (
    "--dataset=cifar10 --train_size=10000 --epochs=30 --cosine_decay "
    "--augmentation=pad_crop_flip --input=standardized --step_times --nojit_compile "
    "--save_every=100"
)
_NARROW_TRIALS = "--rates=1e-3,3e-3,1e-2 --tuning_share=0.3"


def _narrow_similarity(
    names: str, table: str = "cost", filters: str = "16,32,64"
) -> list[Row]:
    own = f"neural_similarity --table={table} --filters={filters} --optimizer=adam"
    return rows(f"{own} {_NARROW}", names, _NARROW_TRIALS)


def _narrow_neighborhoods(names: str) -> list[Row]:
    own = "image_classification --backbone=convnet4 --filters=12,48,96,96"
    return rows(f"{own} --num_neighbors=1000 {_NARROW}", names, _NARROW_TRIALS)


def _similarity(table: str, dataset: str, names: str, published: bool = False) -> list[Row]:
    """Rows of a table of Neural Similarity Learning, tuned unless they are as published."""
    own = f"neural_similarity --table={table} --dataset={dataset} --nohold_out"
    own += " --mixed_precision"
    if published:
        return rows(own, names)
    # The nearest to the published recipe that trains: standardized images, and rates that
    # rise at the start and are chosen on validation images.
    own += " --input=standardized --warmup_steps=1000"
    return rows(own, names, "--rates=0.01,0.02,0.05,0.1 --tuning_share=0.1")


def _neighborhoods(
    backbones: str, dataset: str, names: str, experiment: str = "table_1"
) -> list[Row]:
    """Rows of Table 1 of Meta-Neighborhoods, or of one of its appendices."""
    own = f"image_classification --dataset={dataset} --mixed_precision"
    # A.3 draws validation accuracies; the parts of these sets are those of A.1.
    if experiment != "A.3" and dataset not in ("cinic10", "mnist_m", "pacs"):
        own += " --nohold_out"
    own += f" --experiment={experiment} --backbone="
    return [row for each in backbones.split() for row in rows(own + each, names)]


_TIMED = "--steps=200 --step_times --jit_compile --save_every=50"
#: 200 steps of two episodes of 64 images, at one inner rate.
_TIMED_MAML = (
    "few_shot --dataset=cifar10 --ways=2 --shots=8 --queries=24 --episodes_per_step=2 "
    "--training_images=25600 --test_episodes=100 --jit_compile --save_every=50"
)
_IMAGENET = "imagenet2012 --stream"
_COST = "cnn static_dns dynamic_dns dynamic_uns dynamic_uns_blocks"
_MN = "plain neighborhoods neighborhoods_film"
_TABLE_8 = "cnn spherenet_attention spherenet cnn_attention"
_DEEP = "resnet29 densenet76 resnet56"
_TABLE_1 = "plain neighborhoods_film neighborhoods plain_film maxl_sgd"
_SIZES = " ".join(f"neighborhoods_size_{s}" for s in ("0.02", "0.1", "0.2", "0.5", "2"))
_PEAKS = " ".join(f"neighborhoods_peak_{s}" for s in ("0.2", "0.6", "1.4", "2", "4"))


def _table_3(dataset: str, backbones: str) -> list[Row]:
    """What Table 3 of Meta-Neighborhoods (A.5 and A.6) has beside rows of Table 1."""
    steps = "neighborhoods_diagonal neighborhoods_3 neighborhoods_3_diagonal"
    return [
        *_neighborhoods(backbones, dataset, steps, "A.5"),
        *_neighborhoods(backbones, dataset, "plain_dot_sgd plain_dot plain_sgd", "A.6"),
    ]


def _both_tables(dataset: str, backbones: str) -> list[Row]:
    return _neighborhoods(backbones, dataset, _TABLE_1) + _table_3(dataset, backbones)


def _few_shot(own: str) -> list[Row]:
    """As many images as in a hundred passes over the 38,400 for training.

    Rows of one command share their pretraining.
    """
    names = (
        "finetuning+nearest_centroid+static_nsn+closer_look+nearest_neighbor "
        "dynamic_nsn+dynamic_centroid same_parameters+same_parameters_centroid "
        "same_cost+same_cost_centroid squeeze_excite+squeeze_excite_centroid "
        "condconv+condconv_centroid "
        "meta_static_nsn+meta_static_published+meta_static_normalized "
        "maml proto_net matching_net relation_net neighborhoods "
        "maml_static maml_dynamic proto_net_static proto_net_dynamic "
        "relation_net_static relation_net_dynamic"
    )
    line = "few_shot --dataset=mini_imagenet --training_images=3840000"
    backbones = ("cnn4", "cnn9")
    return [r for b in backbones for r in rows(f"{line} --backbone={b} {own}", names)]


PLANS: dict[str, list[Row]] = {
    "narrow": [
        *_narrow_similarity("cnn dynamic_dns"),
        *_narrow_neighborhoods("plain neighborhoods_film neighborhoods"),
        *_narrow_similarity("cnn_cost cnn_parameters static_dns dynamic_uns"),
        *_narrow_similarity("squeeze_excite condconv eca"),
        *_narrow_neighborhoods("plain_film maxl"),
        *_narrow_similarity("cnn static_dns dynamic_dns", "resnet18", "16,32,64,128"),
        *_narrow_similarity("cnn pointwise one_tap", "efficient"),
        *_narrow_similarity("cnn pointwise one_tap one_tap_each", "mobile"),
    ],
    "cifar10": [
        *_similarity("4", "cifar10", "cnn dynamic_dns"),
        *_neighborhoods("resnet29", "cifar10", "plain neighborhoods_film neighborhoods"),
        *_similarity("4", "cifar10", "static_dns dynamic_uns cnn_plus static_uns"),
        *_similarity("4", "cifar10", "cnn static_dns dynamic_dns", published=True),
        *_similarity("1", "cifar10", "dynamic_dns_cnn"),
        *_similarity("3", "cifar10", "dynamic_dns_shared"),
        *_similarity("2", "cifar10", "static_dns_joint dynamic_dns_joint"),
        *_similarity("cost", "cifar10", "cnn dynamic_dns cnn_cost cnn_parameters"),
        *_similarity("cost", "cifar10", "static_dns dynamic_uns"),
        *_neighborhoods("resnet29", "cifar10", "plain_film"),
        *_similarity("8", "cifar10", _TABLE_8, published=True),
        *_neighborhoods("densenet76 resnet56", "cifar10", _TABLE_1),
        *_neighborhoods("resnet29", "cifar10", "maxl_sgd"),
        *_neighborhoods("resnet110", "cifar10", "plain"),
        *_table_3("cifar10", _DEEP),
    ],
    # For short loans of a GPU: step times and memory first, then the published recipes.
    "device": [
        *rows(f"neural_similarity --table=cost --dataset=cifar10 {_TIMED}", _COST),
        *rows(f"image_classification --backbone=resnet29 --dataset=cifar10 {_TIMED}", _MN),
        *rows(_TIMED_MAML, "maml"),
        *_similarity("4", "cifar10", "cnn dynamic_dns", published=True),
        *_neighborhoods("resnet29", "cifar10", _MN),
    ],
    "cifar100": [
        *_similarity("4", "cifar100", "cnn dynamic_dns"),
        *_neighborhoods("resnet29", "cifar100", _TABLE_1),
        *_similarity("4", "cifar100", "static_dns dynamic_uns cnn_plus static_uns"),
        *_neighborhoods("densenet76 resnet56", "cifar100", _TABLE_1),
        *_neighborhoods("resnet110", "cifar100", "plain"),
        *_neighborhoods("densenet76", "cifar100", "plain neighborhoods", "A.9"),
        *_neighborhoods(_DEEP, "cifar100", "plain plain_extra", "A.3"),
        *_neighborhoods("resnet29", "cifar100", f"{_SIZES} {_PEAKS}", "A.4"),
        *_table_3("cifar100", _DEEP),
    ],
    "cinic10": _both_tables("cinic10", _DEEP),
    "tiny_imagenet": _both_tables("tiny_imagenet", _DEEP),
    "mnist": _both_tables("mnist", "convnet4"),
    "svhn_cropped": _both_tables("svhn_cropped", "convnet4"),
    "mnist_m": _neighborhoods("convnet4", "mnist_m", _TABLE_1),
    "pacs": _neighborhoods("convnet4", "pacs", _TABLE_1),
    # Streamed, which takes TensorFlow; 400,000 steps a row, and 600,000.
    "imagenet": _neighborhoods("resnet56", "imagenet --stream", _TABLE_1),
    "imagenet2012": [
        *_similarity("5", _IMAGENET, "cnn dynamic_dns cnn_plus", published=True),
        *_similarity("resnet18", _IMAGENET, "cnn static_dns dynamic_dns", published=True),
        *_similarity("resnet50", _IMAGENET, "cnn static_dns dynamic_dns", published=True),
    ],
    "mini_imagenet": _few_shot("--trial_share=0.1 --rates=4e-3 --rates=2e-3 --rates=1e-3"),
    "mini_imagenet_published": _few_shot("--published"),
    # The UCI files of Table 2 of Meta-Neighborhoods, in --data_dir.
    "regression": [
        (f"regression --dataset={name}", "")
        for name in ("gom", "super", "cte", "toms", "music")
    ],
}


def commands(plan: str, seeds: Sequence[str]) -> Iterator[list[str]]:
    """Commands and their flags: each row with the first seed, then with the others.

    MAXL takes TensorFlow.
    """
    for seed in seeds if plan != "regression" else [""]:
        for line, tuning in PLANS[plan]:
            if "maxl" in line and keras.backend.backend() != "tensorflow":
                continue
            if tuning and seed == seeds[0]:
                yield [*line.split(), *tuning.split(), "--tune"]
            own = [*(["--tuned"] if tuning else []), *([f"--seeds={seed}"] if seed else [])]
            yield [*line.split(), *own]


def call(called: list[str], deadline: float) -> int:
    """Calls a command, which stops in time, and returns its status."""
    module, *arguments = called
    for name in ("data_dir", "data_file", "output_dir", "state_dir"):
        if getattr(FLAGS, name) is not None:
            arguments.append(f"--{name}={getattr(FLAGS, name)}")
    if module == "image_classification":
        arguments.append(f"--model_dir={FLAGS.state_dir}/models")
    minutes = (deadline - time.monotonic()) / 60
    arguments.append(f"--stop_after_minutes={minutes:.2f}")
    whole = [sys.executable, "-m", f"experiments.{module}", *arguments]
    return subprocess.run(whole).returncode


def main(_arguments: list[str]) -> None:
    deadline = time.monotonic() + 60 * FLAGS.budget_minutes
    path = runs.results_folder(FLAGS.output_dir) / "campaign.jsonl"
    done = runs.RunRecords(path, FLAGS.plan)
    failed = []
    planned = list(commands(FLAGS.plan, FLAGS.seeds))
    for called in planned:
        name = " ".join(called)
        if done.holds((name,)) or time.monotonic() > deadline:
            continue
        print(f"\n=== {name}", flush=True)
        start = time.monotonic()
        status = call(called, deadline)
        if status == 0:
            done.add((name,), {"seconds": round(time.monotonic() - start, 1)})
        elif status != recipe.OutOfTime.CODE:
            failed.append(f"Failed: {name}")
    finished = sum(done.holds((" ".join(called),)) for called in planned)
    print(f"\n{finished} of {len(planned)} commands finished", *failed, sep="\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    flags.DEFINE_enum("plan", "narrow", list(PLANS), "What to run.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "The first goes through all rows.")
    flags.DEFINE_float("budget_minutes", 60.0, "When to stop.")
    flags.DEFINE_alias("minutes", "budget_minutes")
    flags.DEFINE_string("data_dir", None, "Prepared tensorflow-datasets copies.")
    flags.DEFINE_string("data_file", None, "An .npz file of images.")
    command.run(main)

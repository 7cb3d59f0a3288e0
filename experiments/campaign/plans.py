"""Which commands a campaign consists of, the most worth first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """Rows of a table that one command makes: mostly one.

    Attributes:
        module: Name of the example in `examples`.
        methods: Names of the rows; none for an example that makes all of a table at once.
        flags: What the row's runs have in common with the others of its table.
        tuning: Flags of the row's trials; none where its rate is given, or where the
            example tries rates by itself.
        seeded: Whether there is a run a seed.
    """

    module: str
    methods: tuple[str, ...]
    flags: tuple[str, ...]
    tuning: tuple[str, ...] = ()
    seeded: bool = True

    def commands(self, seeds: Sequence[str]) -> list[list[str]]:
        """What to call: the trials, then a run a seed."""
        flags = [*self.flags, *(f"--method={name}" for name in self.methods)]
        if not self.seeded:
            return [[self.module, *flags]]
        trials = [[self.module, *flags, *self.tuning, "--tune"]] if self.tuning else []
        tuned = ["--tuned"] if self.tuning else []
        return [
            *trials,
            *([self.module, *flags, *tuned, f"--seeds={seed}"] for seed in seeds),
        ]


#: A function of the names of rows, which makes them.
Rows = Callable[[str], tuple[Row, ...]]


def _named(module: str, flags: Iterable[str], tuning: Iterable[str] = ()) -> Rows:
    return lambda names: tuple(
        Row(module, (name,), tuple(flags), tuple(tuning)) for name in names.split()
    )


_NARROW_RECIPE = (
    *("--dataset=cifar10", "--train_size=10000", "--epochs=30", "--cosine_decay"),
    *("--augmentation=pad_crop_flip", "--input=standardized", "--step_times"),
    *("--nojit_compile", "--save_every=100"),
)
_NARROW_TRIALS = ("--rates=1e-3,3e-3,1e-2", "--tuning_share=0.3")
_narrow_similarity = _named(
    "neural_similarity",
    ("--table=cost", "--filters=16,32,64", "--optimizer=adam", *_NARROW_RECIPE),
    _NARROW_TRIALS,
)
_narrow_neighborhoods = _named(
    "image_classification",
    (
        *("--backbone=convnet4", "--filters=12,48,96,96", "--num_neighbors=1000"),
        *_NARROW_RECIPE,
    ),
    _NARROW_TRIALS,
)

_PUBLISHED = ("--nohold_out", "--mixed_precision")
# The nearest to the published recipe that trains: standardized images, and rates that
# rise at the start and are chosen on validation images.
_TRAINS = ("--input=standardized", "--warmup_steps=1000")
_TRIALS = ("--rates=0.01,0.02,0.05,0.1", "--tuning_share=0.1")


def _similarity(table: str, dataset: str, as_published: bool = False) -> Rows:
    """Rows of a table of Neural Similarity Learning, tuned unless they are as published."""
    own = (f"--table={table}", f"--dataset={dataset}", *_PUBLISHED)
    if as_published:
        return _named("neural_similarity", own)
    return _named("neural_similarity", (*own, *_TRAINS), _TRIALS)


def _neighborhoods(backbone: str, dataset: str, experiment: str = "") -> Rows:
    """Rows of Table 1 of Meta-Neighborhoods, or of one of its appendices."""
    own = [f"--experiment={experiment}"] if experiment else []
    return _named(
        "image_classification",
        (f"--dataset={dataset}", *_PUBLISHED, f"--backbone={backbone}", *own),
    )


_TABLE_1 = "plain neighborhoods_film neighborhoods plain_film"
_FORMS_OF_STEPS = "neighborhoods_diagonal neighborhoods_3 neighborhoods_3_diagonal"
_OTHER_CLASSIFIERS = "plain_dot_sgd plain_dot plain_sgd"
_DEEP = ("resnet29", "densenet76", "resnet56")


def _table_1(dataset: str, *backbones: str) -> tuple[Row, ...]:
    """Table 1 of Meta-Neighborhoods on a data set."""
    made = [_neighborhoods(each, dataset)(_TABLE_1) for each in backbones]
    return tuple(row for rows in made for row in rows)


def _table_3(dataset: str, *backbones: str) -> tuple[Row, ...]:
    """What Table 3 of Meta-Neighborhoods (A.5 and A.6) has beside rows of Table 1."""
    made = [
        _neighborhoods(each, dataset, experiment)(names)
        for each in backbones
        for experiment, names in (("A.5", _FORMS_OF_STEPS), ("A.6", _OTHER_CLASSIFIERS))
    ]
    return tuple(row for rows in made for row in rows)


_SIZES = " ".join(f"neighborhoods_size_{s}" for s in ("0.02", "0.1", "0.2", "0.5", "2"))
_PEAKS = " ".join(f"neighborhoods_peak_{s}" for s in ("0.2", "0.6", "1.4", "2", "4"))


def _few_shot(backbone: str, methods: str) -> Row:
    """Rows of Table 6 of Neural Similarity Learning, which share their pretraining."""
    flags = (
        *("--dataset=mini_imagenet", f"--backbone={backbone}"),
        # A hundred passes over the 38,400 training images.
        *("--training_images=3840000", "--trial_share=0.1"),
        *("--rates=4e-3", "--rates=2e-3", "--rates=1e-3"),
    )
    return Row("few_shot", tuple(methods.split()), flags)


_PLAIN_FEATURES = "finetuning nearest_centroid static_nsn closer_look nearest_neighbor"
_DYNAMIC_FEATURES = "dynamic_nsn dynamic_centroid"
_LARGER_FEATURES = (
    "same_parameters same_parameters_centroid",
    "same_cost same_cost_centroid",
)
_META_LEARNED = "meta_static_nsn meta_static_published meta_static_normalized"

PLANS: dict[str, tuple[Row, ...]] = {
    # Narrow networks on part of CIFAR-10, for a few processor cores.
    "narrow": (
        *_narrow_similarity("cnn dynamic_dns"),
        *_narrow_neighborhoods("plain neighborhoods_film neighborhoods"),
        *_narrow_similarity("cnn_cost cnn_parameters static_dns dynamic_uns"),
        *_narrow_neighborhoods("plain_film"),
    ),
    # The papers' networks and steps, for a GPU under JAX; a plan a data set.
    "cifar10": (
        *_similarity("4", "cifar10")("cnn dynamic_dns"),
        *_neighborhoods("resnet29", "cifar10")("plain neighborhoods_film neighborhoods"),
        *_similarity("4", "cifar10")("static_dns dynamic_uns cnn_plus static_uns"),
        *_similarity("4", "cifar10", as_published=True)("cnn static_dns dynamic_dns"),
        *_similarity("1", "cifar10")("dynamic_dns_cnn"),
        *_similarity("3", "cifar10")("dynamic_dns_shared"),
        *_similarity("2", "cifar10")("static_dns_joint dynamic_dns_joint"),
        *_similarity("cost", "cifar10")(
            "cnn dynamic_dns cnn_cost cnn_parameters static_dns dynamic_uns"
        ),
        *_neighborhoods("resnet29", "cifar10")("plain_film"),
        *_similarity("8", "cifar10", as_published=True)(
            "cnn spherenet_attention spherenet cnn_attention"
        ),
        *_table_1("cifar10", "densenet76", "resnet56"),
        *_table_3("cifar10", *_DEEP),
    ),
    "cifar100": (
        *_similarity("4", "cifar100")("cnn dynamic_dns"),
        *_table_1("cifar100", "resnet29"),
        *_similarity("4", "cifar100")("static_dns dynamic_uns cnn_plus static_uns"),
        *_table_1("cifar100", "densenet76", "resnet56"),
        *_neighborhoods("densenet76", "cifar100", "A.9")("plain neighborhoods"),
        *_neighborhoods("resnet29", "cifar100", "A.3")("plain_extra"),
        *_neighborhoods("resnet29", "cifar100", "A.4")(f"{_SIZES} {_PEAKS}"),
        *_table_3("cifar100", *_DEEP),
    ),
    "cinic10": _table_1("cinic10", *_DEEP) + _table_3("cinic10", *_DEEP),
    "tiny_imagenet": _table_1("tiny_imagenet", *_DEEP) + _table_3("tiny_imagenet", *_DEEP),
    "mnist": _table_1("mnist", "convnet4") + _table_3("mnist", "convnet4"),
    "svhn_cropped": _table_1("svhn_cropped", "convnet4")
    + _table_3("svhn_cropped", "convnet4"),
    "mnist_m": _table_1("mnist_m", "convnet4"),
    "pacs": _table_1("pacs", "convnet4"),
    "imagenet": _table_1("imagenet", "resnet56"),
    # Streamed, which takes TensorFlow; 600,000 steps a row.
    "imagenet2012": _named(
        "neural_similarity",
        ("--table=5", "--dataset=imagenet2012", "--stream", "--mixed_precision"),
    )("cnn dynamic_dns cnn_plus"),
    "mini_imagenet": tuple(
        _few_shot(backbone, methods)
        for backbone in ("cnn4", "cnn9")
        for methods in (
            *(_PLAIN_FEATURES, _DYNAMIC_FEATURES, *_LARGER_FEATURES, _META_LEARNED),
            *("maml", "proto_net", "matching_net", "relation_net", "neighborhoods"),
        )
    ),
    "regression": tuple(
        Row("regression", (), (f"--dataset={name}",), seeded=False)
        for name in ("gom", "super", "cte", "toms", "music")
    ),
}


def commands(plan: str, seeds: Sequence[str]) -> Iterator[list[str]]:
    """Modules and their flags: each row with the first seed, then with the others."""
    rows = PLANS[plan]
    for row in rows:
        yield from row.commands(seeds[:1])
    for seed in seeds[1:]:
        for row in rows:
            if row.seeded:
                yield row.commands([seed])[-1]

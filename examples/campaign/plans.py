"""Which commands a campaign consists of, the most worth first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table: the example that trains it, its name, and the example's flags.

    Attributes:
        module: Name of the example in `examples`.
        method: Name of the row.
        flags: What the row's runs have in common with the others of its table.
        tuning: Flags of the row's trials; none where its rate is given.
    """

    module: str
    method: str
    flags: tuple[str, ...]
    tuning: tuple[str, ...] = ()

    def commands(self, seeds: Sequence[str]) -> list[list[str]]:
        """What to call: the trials, then a run a seed."""
        flags = [*self.flags, f"--method={self.method}"]
        trials = [[self.module, *flags, *self.tuning, "--tune"]] if self.tuning else []
        tuned = ["--tuned"] if self.tuning else []
        return [
            *trials,
            *([self.module, *flags, *tuned, f"--seeds={seed}"] for seed in seeds),
        ]


def _rows(
    module: str, methods: str, flags: Iterable[str], tuning: Iterable[str] = ()
) -> tuple[Row, ...]:
    return tuple(Row(module, name, tuple(flags), tuple(tuning)) for name in methods.split())


def _named(module: str, flags: Iterable[str], tuning: Iterable[str] = ()):
    return lambda methods: _rows(module, methods, flags, tuning)


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

_CIFAR = ("--dataset=cifar10", "--nohold_out", "--mixed_precision")
# The nearest to the published recipe that trains: standardized images, and rates that
# rise at the start and are chosen on validation images.
_TRAINS = ("--input=standardized", "--warmup_steps=1000")
_TRIALS = ("--rates=0.01,0.02,0.05,0.1", "--tuning_share=0.1")


def _table(number: str, *flags: str, tuning: Iterable[str] = ()):
    return _named("neural_similarity", (f"--table={number}", *_CIFAR, *flags), tuning)


_table_1 = _table("1", *_TRAINS, tuning=_TRIALS)
_table_2 = _table("2", *_TRAINS, tuning=_TRIALS)
_table_3 = _table("3", *_TRAINS, tuning=_TRIALS)
_table_4 = _table("4", *_TRAINS, tuning=_TRIALS)
_table_4_as_published = _table("4")
_table_8 = _table("8")
_cost = _table("cost", *_TRAINS, tuning=_TRIALS)
_neighborhoods = _named("image_classification", (*_CIFAR, "--backbone=resnet29"))

PLANS: dict[str, tuple[Row, ...]] = {
    # Narrow networks on part of CIFAR-10, for a few processor cores.
    "narrow": (
        *_narrow_similarity("cnn dynamic_dns"),
        *_narrow_neighborhoods("plain neighborhoods_film neighborhoods"),
        *_narrow_similarity("cnn_cost cnn_parameters static_dns dynamic_uns"),
        *_narrow_neighborhoods("plain_film"),
    ),
    # The papers' networks and steps, for a GPU under JAX.
    "published": (
        *_table_4("cnn dynamic_dns"),
        *_neighborhoods("plain neighborhoods_film neighborhoods"),
        *_table_4("static_dns dynamic_uns cnn_plus static_uns"),
        *_table_4_as_published("cnn static_dns dynamic_dns"),
        *_table_1("dynamic_dns_cnn"),
        *_table_3("dynamic_dns_shared"),
        *_table_2("static_dns_joint dynamic_dns_joint"),
        *_cost("cnn dynamic_dns cnn_cost cnn_parameters static_dns dynamic_uns"),
        *_neighborhoods("plain_film"),
        *_table_8("cnn spherenet_attention spherenet cnn_attention"),
    ),
}


def commands(plan: str, seeds: Sequence[str]) -> Iterator[list[str]]:
    """Modules and their flags: each row with the first seed, then with the others."""
    rows = PLANS[plan]
    for row in rows:
        yield from row.commands(seeds[:1])
    for seed in seeds[1:]:
        for row in rows:
            yield row.commands([seed])[-1]

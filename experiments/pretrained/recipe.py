r"""README's recipe on photographs: `adapt`, then a similarity, then `fold`.

    python -m experiments.pretrained.recipe --data_dir=FOLDER   # photo/<class>/

Every call has its default, but for what README's block says. The network and the draws are
those of `experiments.pretrained`. Nothing of the recipe is tuned. Its rivals start from the
same adapted classifier, and their learning rates are the best of the draw of the trials.
"""

import functools

import keras
from absl import flags

from experiments.common import command, runs, tables
from experiments.pretrained import __main__ as study, table
from nsl_keras import convert, few_shot

FLAGS = study.FLAGS
SHOTS, EPOCHS = 5, 30
#: What else could be trained as long, and the rates of the trials.
RIVALS = {
    "head": (1e-3, 3e-3, 1e-2, 3e-2),
    "LoRA of rank 1 + head": (1e-4, 3e-4, 1e-3, 3e-3),
    "everything": (1e-5, 3e-5, 1e-4, 3e-4),
}


def adapted(few: study.Few) -> keras.Model:
    """README's classifier: the network with a dense layer, then names and temperature."""
    ways = int(few.labels.max()) + 1
    model = keras.Sequential([study.backbone(), keras.layers.Dense(ways)])
    return few_shot.Finetuner(model, ways).adapt(few.images, few.labels)


@functools.lru_cache(1)
def starting(place: str, number: int) -> tuple[study.Few, keras.Model]:
    """A draw, and its adapted classifier, with all layers in one model."""
    few = study.draw(place, SHOTS, number)
    keras.utils.set_random_seed(number)
    network, names = adapted(few).layers
    model = study.classifier(few)
    model.layers[-1].set_weights(network.layers[-1].get_weights())
    return few, keras.Model(model.input, names(model.output))


def run_rival(name: str, place: str, number: int, rate: float) -> dict:
    few, start = starting(place, number)
    keras.utils.set_random_seed(number)
    found = study.METHODS[name](few, rate, lambda _: start)
    print(f"{100 * found['accuracy']:.1f}", flush=True)
    own = {"method": name, "domain": place, "seed": number, "rate": rate}
    return {**own, **runs.about("pretrained.recipe"), **found}


def run(place: str, number: int) -> dict:
    few = study.draw(place, SHOTS, number)
    keras.utils.set_random_seed(number)
    classifier = adapted(few)
    similar = convert.add_similarity(classifier, "unconstrained", train_classifier=True)
    trained = study.fit(similar, few.images, few.labels, 1e-3, EPOCHS)
    models = {
        "regression": study.classifier(few),
        "adapt": classifier,
        "similarity": convert.fold(similar),
    }
    found = {
        name: study.accuracy(few, model, few.judged)["accuracy"]
        for name, model in models.items()
    }
    print({name: round(100 * each, 1) for name, each in found.items()}, flush=True)
    about = runs.about("pretrained.recipe")
    return {"domain": place, "seed": number, **about, "accuracy": found, **trained}


def main(_arguments: list[str]) -> None:
    path = runs.results_folder(FLAGS.output_dir) / table.RECIPE
    setting = {"shots": SHOTS, "epochs": EPOCHS}
    domains = FLAGS.domain or table.PHOTOGRAPHS
    keys = [(place, int(number)) for number in FLAGS.seeds for place in domains]
    runs.run_all(runs.RunRecords(path, "", setting), keys, run)
    trials = runs.RunRecords(path, "trials", setting | {"rates": RIVALS})
    tried = [
        (name, place, str(rate))
        for place in table.TRIED_PHOTOGRAPHS
        for name, rates in RIVALS.items()
        for rate in rates
    ]
    runs.run_all(
        trials,
        tried,
        lambda name, place, rate: run_rival(name, place, study.TRIAL, float(rate)),
    )
    best = {name: tables.best_rate(tables.of_method(trials.runs, name)) for name in RIVALS}
    runs.run_all(
        runs.RunRecords(path, "rivals", setting | {"rates": RIVALS}),
        [(name, *key) for key in keys for name in RIVALS],
        lambda name, *key: run_rival(name, *key, best[name]),
    )
    print(f"\n{table.recipe(path.parent)}\n\nWrote {path}")


if __name__ == "__main__":
    flags.DEFINE_multi_enum("domain", [], table.PHOTOGRAPHS, "All by default.")
    flags.DEFINE_string("data_dir", None, "The folder of the images.")
    flags.DEFINE_list("seeds", ["0"], "Draws of the labeled images.")
    command.run(main)

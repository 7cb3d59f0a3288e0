r"""README's recipe on photographs: `adapt`, then a similarity, then `fold`.

    python -m experiments.pretrained.recipe --data_dir=FOLDER   # photo/<class>/

Every call has its default, but for what README's block says. The network and the draws are
those of `experiments.pretrained`; nothing is tuned here.
"""

import itertools

import keras
import numpy as np
from absl import flags

from experiments.common import command, runs
from experiments.pretrained import __main__ as study
from experiments.pretrained import table
from nsl_keras import convert, few_shot

FLAGS = study.FLAGS
SHOTS, EPOCHS = 5, 30


def head_alone(classifier: keras.Model, few: study.Few) -> float:
    """The accuracy after as much training of the dense layer alone; changes it."""
    network, names = classifier.layers
    head = network.layers[-1]
    features = keras.Model(network.inputs, head.input)
    alone = keras.Sequential([head, names])
    study.fit(alone, study.features(few.images, features), few.labels, 1e-3, EPOCHS)
    x = study.features(few.judged, features)
    return study.accuracy(few, alone, x)["accuracy"]


def run(place: str, number: int) -> dict:
    few = study.draw(place, SHOTS, number)
    keras.utils.set_random_seed(number)
    ways = int(few.labels.max()) + 1
    network = study.backbone()
    learner = few_shot.Finetuner(
        keras.Sequential([network, keras.layers.Dense(ways)]), ways
    )
    classifier = learner.adapt(few.images, few.labels)
    similar = convert.add_similarity(
        classifier, "unconstrained", freeze_backbone="features"
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    jit_compile = (
        keras.backend.backend() == "jax"
    )  # XLA compiles for longer than it trains.
    similar.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=jit_compile)
    similar.fit(few.images, few.labels, epochs=EPOCHS, verbose=0)
    models = {
        "regression": study.classifier(few),
        "adapt": classifier,
        "similarity": convert.fold(similar),
    }
    found = {
        name: study.accuracy(few, model, few.judged)["accuracy"]
        for name, model in models.items()
    }
    found["head"] = head_alone(classifier, few)
    print({name: round(100 * each, 1) for name, each in found.items()}, flush=True)
    trained = sum(int(np.prod(each.shape)) for each in similar.trainable_variables)
    about = runs.about("pretrained.recipe")
    return {"domain": place, "seed": number, **about, "accuracy": found, "trained": trained}


def main(_arguments: list[str]) -> None:
    path = runs.results_folder(FLAGS.output_dir) / table.RECIPE
    records = runs.RunRecords(path, "", {"shots": SHOTS, "epochs": EPOCHS})
    keys = itertools.product(FLAGS.seeds, FLAGS.domain or table.PHOTOGRAPHS)
    runs.run_all(
        records,
        [(place, int(number)) for number, place in keys],
        lambda place, number: run(place, number),
    )
    print(f"\n{table.recipe(path.parent)}\n\nWrote {path}")


if __name__ == "__main__":
    flags.DEFINE_multi_enum("domain", [], table.PHOTOGRAPHS, "All by default.")
    flags.DEFINE_string("data_dir", None, "The folder of the images.")
    flags.DEFINE_list("seeds", ["0"], "Draws of the labeled images.")
    command.run(main)

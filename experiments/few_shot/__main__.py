r"""Few-shot learning: Table 6 of Neural Similarity Learning, with today's baselines.

    python -m experiments.few_shot --data_file=cifar_fs.npz --dataset=cifar_fs --seeds=0,1
    python -m experiments.few_shot --dataset=omniglot --data_dir=~/tensorflow_datasets \
        --shots=1 --method=maml --method=proto_net
    python -m experiments.few_shot --dataset=mini_imagenet --data_dir=FOLDER_OF_IMAGES

FOLDER_OF_IMAGES holds train, validation (or val) and test, each with one sub-folder a
class. Networks are trained on the training classes, judged on episodes of the test classes,
and all choices are made on the validation classes. Every method gets as many trials and,
but for "longer", training images: with several --rates, each is tried for --trial_share of
the images, and the best on validation episodes is taken. Rows with a choice of inner rates
try one with each of the --rates, in turn: three rates of Adam or six try all of 0.01, 0.03
and 0.1. A meta-learned static network starts from the pretrained one, and then has as many
images again. ProtoNet is trained with --proto_ways classes an episode, as its authors do.
"""

import dataclasses

from absl import flags

from experiments.common import command, runs
from experiments.common.data import save_file
from experiments.few_shot import data, methods, table
from experiments.few_shot.training import Setting, Training, run_methods

FLAGS = flags.FLAGS
flags.DEFINE_string("dataset", "cifar_fs", "omniglot, or a name for your own images.")
flags.DEFINE_enum("backbone", "cnn4", ["cnn4", "cnn9"], "The network.")
flags.DEFINE_enum("variant", None, ["paper"], "CNN-9 with the 256 units of Table 7.")
flags.DEFINE_multi_enum("method", [], list(methods.METHODS), "Rows; all by default.")
flags.DEFINE_integer("ways", 5, "Classes of an episode.", lower_bound=2)
flags.DEFINE_integer("shots", 5, "Support images of a class.", lower_bound=1)
flags.DEFINE_integer("queries", 15, "Query images of a class.", lower_bound=1)
flags.DEFINE_integer("training_images", 400_000, "Budget of a method and seed.")
flags.DEFINE_integer("episodes_per_step", 4, "Episodes of a step.", lower_bound=1)
flags.DEFINE_integer("proto_ways", 20, "Classes of an episode that trains ProtoNet.", 2)
flags.DEFINE_integer("batch_size", 64, "Images of a step in pretraining.", lower_bound=1)
flags.DEFINE_integer("test_episodes", 600, "Episodes of a test.", lower_bound=2)
flags.DEFINE_multi_float("rates", [1e-3], "Rates of Adam tried for each method.")
flags.DEFINE_float("trial_share", 0.25, "Images of a trial, as a share of the budget.")
flags.DEFINE_integer("validation_episodes", 100, "Episodes that judge a trial.")
_AUGMENTED = "Shift and mirror images in pretraining; by default those in color."
flags.DEFINE_bool("augmentation", None, _AUGMENTED)
flags.DEFINE_bool(
    "published",
    None,
    "As the authors: all but MAML trained on validation classes too, a constant rate, "
    "no augmentation, the authors' predictors.",
)


def main(_arguments: list[str]) -> None:
    images = data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.data_file)
    if FLAGS.image_size:
        images = images.changed(lambda s: data.resized(s, FLAGS.image_size))
    if FLAGS.write_data_file:
        save_file(images, FLAGS.write_data_file)
        print(f"Wrote {FLAGS.write_data_file}")
        return
    names = [field.name for field in dataclasses.fields(Setting)]
    values = {name: getattr(FLAGS, name) for name in names}
    values["published"] = FLAGS.published or None
    if FLAGS.augmentation is None:
        values["augmentation"] = images.image_shape[-1] == 3 and not FLAGS.published
    setting = Setting(**values)
    states = runs.states_folder(
        FLAGS.state_dir,
        ["few_shot", dataclasses.asdict(setting), images.counts, images.fingerprint],
    )
    training = Training(setting, images, states)
    names = FLAGS.method or list(methods.METHODS)
    results = runs.results_folder(FLAGS.output_dir)
    records = run_methods(training, names, FLAGS.seeds, results)
    training.forget(names)
    print(f"\n{table.section(records)}\n\nWrote {records.path}")


if __name__ == "__main__":
    command.run(main)

"""Flags of the commands that train the papers' networks."""

import keras
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_list("seeds", ["0"], "Seeds, separated by commas.")
flags.DEFINE_string("data_dir", None, "Folder of images, or of tfds' prepared copies.")
flags.DEFINE_string("data_file", None, "Images from an .npz file that --dataset names.")
flags.DEFINE_string("write_data_file", None, "Write the images to such a file, and stop.")
flags.DEFINE_integer("image_size", None, "Resize the images to so many pixels.", 8)
flags.DEFINE_integer("save_every", 500, "Steps between saved states, at most.", 1)
flags.DEFINE_bool("jit_compile", None, "Compile the steps with XLA; else what suits.")
flags.DEFINE_integer("verbose", 2, "Progress: 0 silent, 1 a bar, 2 a line a chunk.")


def jit_compile() -> bool | str:
    """What the flag says; by default no XLA for TensorFlow on CPUs, where it is slower."""
    if FLAGS.jit_compile is not None:
        return FLAGS.jit_compile
    on_cpu = all(name.startswith("cpu") for name in keras.distribution.list_devices())
    return False if on_cpu and keras.backend.backend() == "tensorflow" else "auto"


def changes(*names: str) -> dict:
    """The flags among `names` that were given, as changes of a recipe."""
    return {name: value for name in names if (value := FLAGS[name].value) is not None}

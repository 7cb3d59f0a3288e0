"""The cards of served models: what they take, what they return, how they came about."""

from __future__ import annotations

from experiments.common import data
from experiments.demo.networks import Setting
from experiments.demo.table import TITLES


def model_card(dataset: str, record: dict, setting: Setting, found: data.ImageData) -> str:
    """The card of one of the demo's models, from the record of its run."""
    name = record["method"]
    size = ", ".join(map(str, found.image_shape))
    signatures = ["`serving_default` returns the logits"]
    entries = ""
    if "neighborhoods" in name:
        signatures += [
            "`unadapted` those of the head before it adapts",
            "`features` the features",
            "`neighbors` the dictionary entries of largest attention",
        ]
        entries = f", {setting.num_neighbors} dictionary entries"
    return f"""# {TITLES[name]} on {dataset}

* **Input** `inputs`: float32 images of shape (batch, {size}), values in [0, 1].
* **Output**: logits of {len(found.class_names)} classes, {", ".join(found.class_names)}.
* **Signatures**: {"; ".join(signatures)}.
* **Data**: {dataset}; {len(found.train.images):,} images for training,
  {len(found.validation.images):,} for choices, {len(found.test.images):,} for the test.
* **Recipe**: {setting.epochs} epochs in batches of {setting.batch_size}, AdamW at
  {setting.learning_rate:g}{entries}; seed {record["seed"]};
  {record["parameters"]:,} parameters.
* **Test accuracy**: {100 * record["test_accuracy"]:.2f} % on images that took no part in
  training or choices.
* **Written by** `{record["command"]}`.
* **Limits**: made to show the method on small images of one kind. It gives every image a
  class, also one that shows no such thing; images with NaN or infinite values get NaN.
"""

"""Images that are read while training, from a stand-in of a prepared data set."""

import types
from typing import ClassVar

import numpy as np

from examples.neural_similarity import stream as image_stream


class TinyBuilder:
    """A tfds builder's stand-in: images of different sizes, class by brightness."""

    class info:  # noqa: N801 (tfds's name)
        splits: ClassVar = {
            name: types.SimpleNamespace(num_examples=count)
            for name, count in (("train", 24), ("validation", 7), ("test", 3))
        }
        features: ClassVar = {
            "label": types.SimpleNamespace(names=["dark", "bright"]),
            "image": types.SimpleNamespace(shape=(None, None, 3)),
        }

    def as_dataset(self, split, shuffle_files=False, read_config=None):
        import tensorflow as tf

        count = self.info.splits[split].num_examples

        def examples():
            for index in range(count):
                shape = (20 + index % 5, 18 + index % 3, 3)
                value = 255 * (index % 2)
                image = np.full(shape, value, "uint8")
                yield {"image": image, "label": np.int64(index % 2)}

        signature = {
            "image": tf.TensorSpec((None, None, 3), tf.uint8),
            "label": tf.TensorSpec((), tf.int64),
        }
        data = tf.data.Dataset.from_generator(examples, output_signature=signature)
        return data.apply(tf.data.experimental.assert_cardinality(count))


def test_a_stream_of_images_of_any_size():
    stream = image_stream.ImageStream(TinyBuilder(), 16)
    assert stream.evaluated_split == "validation"
    assert stream.image_shape == (16, 16, 3)
    assert stream.counts["test_examples"] == 7
    made = image_stream.StreamedBatches(stream, 8, chunk=3, seed=0)
    images, labels = made[0]
    assert images.shape == (8, 16, 16, 3)
    np.testing.assert_allclose(images.mean((1, 2, 3)), labels, atol=1e-6)
    order = [tuple(labels), *(tuple(made[index][1]) for index in (1, 2))]
    # Looked at once more, the first batch is the same; another seed's is not.
    again = image_stream.StreamedBatches(stream, 8, chunk=3, seed=0)
    assert [tuple(again[index][1]) for index in (0, 0, 1, 2)][1:] == order
    other = image_stream.StreamedBatches(stream, 8, chunk=3, seed=1)
    assert [tuple(other[index][1]) for index in range(3)] != order
    assert sum(len(labels) for _, labels in stream.evaluation_batches(4)) == 7


def test_crops_of_a_stream_are_random():
    example = {
        "image": np.random.default_rng(0).integers(0, 256, (30, 20, 3)),
        "label": np.int64(0),
    }
    stream = image_stream.ImageStream(TinyBuilder(), 16)
    middle, _ = stream._example(example)
    crops = [stream._example(example, np.array([0, n]))[0] for n in range(2)]
    for image in (middle, *crops):
        assert tuple(image.shape) == (16, 16, 3)
    assert np.max(np.abs(np.asarray(crops[0]) - np.asarray(crops[1]))) > 0.1
    same, _ = stream._example(example, np.array([0, 1]))
    np.testing.assert_array_equal(np.asarray(same), np.asarray(crops[1]))

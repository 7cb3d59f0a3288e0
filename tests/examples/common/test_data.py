"""Image sets of the examples: parts, classes, files, folders of bad layouts."""

import numpy as np
import pytest
from PIL import Image

from examples.common import data as image_data
from examples.common import image_folders

PARTS = ("train", "validation", "test")


def write(path, value, size=32):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), (value,) * 3).save(path)


def values(split):
    """The value of each one-valued image."""
    assert split.images.dtype == np.float32 and split.images.max() <= 1
    assert (split.images == split.images[:, :1, :1, :1]).all()
    return np.round(255 * split.images[:, 0, 0, 0]).astype(int)


def classes(data):
    return {part: np.bincount(getattr(data, part).labels).tolist() for part in PARTS}


@pytest.fixture
def cinic10(tmp_path):
    for offset, part in enumerate(("train", "valid", "test")):
        for label, name in enumerate(("airplane", "bird")):
            for number in range(5):
                value = 100 * label + 10 * offset + number
                write(tmp_path / part / name / f"{number}.png", value)
    return tmp_path


def test_cinic10(cinic10):
    data = image_data.load("cinic10", str(cinic10))
    assert data.class_names == ["airplane", "bird"]
    assert data.image_shape == (32, 32, 3)
    assert classes(data) == {part: [5, 5] for part in PARTS}
    for offset, part in enumerate(PARTS):
        split = getattr(data, part)
        expected = [100 * label + 10 * offset + n for label in (0, 1) for n in range(5)]
        assert sorted(values(split)) == expected
        assert (values(split) // 100 == split.labels).all()
    # Mixed, so that the first few are not of one class, and always alike.
    assert len(set(image_data.load("cinic10", str(cinic10), 5).train.labels)) == 2
    again = image_data.load("cinic10", str(cinic10), train_examples=4)
    np.testing.assert_array_equal(again.train.images, data.train.images[:4])
    assert len(again.test.labels) == 10


def test_parts_with_different_classes(cinic10):
    write(cinic10 / "test" / "cat" / "1.png", 0)
    with pytest.raises(ValueError, match="cat in one of train and test alone"):
        image_data.load("cinic10", str(cinic10))


def test_sizes(cinic10):
    data = image_data.load("cinic10", str(cinic10), image_size=8)
    assert data.image_shape == (8, 8, 3) and data.test.images.shape[1:] == (8, 8, 3)
    assert image_data.load("digits", image_size=4).image_shape == (4, 4, 1)


@pytest.fixture
def tiny_imagenet(tmp_path):
    lines = []
    for label, name in enumerate(("n01", "n02", "n03")):
        for number in range(20):
            write(tmp_path / "train" / name / "images" / f"{number}.png", 50 * label, 64)
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("0.png\t0\t0\t9\t9\n")
    for number, label in enumerate((2, 0, 1, 2)):
        write(tmp_path / "val" / "images" / f"val_{number}.png", 50 * label, 64)
        lines.append(f"val_{number}.png\tn0{label + 1}\t0\t0\t62\t62")
    (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_tiny_imagenet(tiny_imagenet):
    data = image_data.load("tiny_imagenet", str(tiny_imagenet))
    assert data.class_names == ["n01", "n02", "n03"]
    assert data.image_shape == (32, 32, 3)
    assert classes(data) == {
        "train": [18, 18, 18],
        "validation": [2, 2, 2],
        "test": [1, 1, 2],
    }
    for part in PARTS:
        split = getattr(data, part)
        assert (values(split) // 50 == split.labels).all()
    large = image_data.load("tiny_imagenet", str(tiny_imagenet), image_size=64)
    assert large.image_shape == (64, 64, 3)


def test_tiny_imagenet_with_bad_annotations(tiny_imagenet):
    annotations = tiny_imagenet / "val" / "val_annotations.txt"
    lines = annotations.read_text().splitlines()
    annotations.write_text("\n".join([lines[0], "val_1.png\tn99\t0\t0\t1\t1"]))
    with pytest.raises(ValueError, match=r"Received: 'val_1.png n99 0 0 1 1' as number 2"):
        image_data.load("tiny_imagenet", str(tiny_imagenet))
    annotations.unlink()
    with pytest.raises(ValueError, match=r"`data_dir` must hold 'val_annotations.txt'"):
        image_data.load("tiny_imagenet", str(tiny_imagenet))


@pytest.mark.parametrize("form", ["folders", "lists"])
def test_mnist_m(tmp_path, form):
    for part, count in (("train", 12), ("test", 2)):
        lines = []
        for digit in range(10):
            for number in range(count):
                name = f"{digit}{number:03}.png"
                if form == "folders":
                    path = tmp_path / part / str(digit) / name
                else:
                    path = tmp_path / f"mnist_m_{part}" / name
                    lines.append(f"{name} {digit}\n")
                write(path, 20 * digit, 28)
        if form == "lists":
            (tmp_path / f"mnist_m_{part}_labels.txt").write_text("".join(lines))
    data = image_data.load("mnist_m", str(tmp_path))
    assert data.class_names == [str(digit) for digit in range(10)]
    assert classes(data) == {
        "train": [11] * 10,
        "validation": [1] * 10,
        "test": [2] * 10,
    }
    for part in PARTS:
        split = getattr(data, part)
        assert (values(split) // 20 == split.labels).all()


@pytest.fixture
def pacs(tmp_path):
    for offset, domain in enumerate(image_folders.DOMAINS):
        for label, name in enumerate(("dog", "elephant")):
            for number in range(25):
                value = 60 * offset + 30 * label + number
                write(tmp_path / domain / name / f"pic_{number:03}.jpg", value, 48)
    return tmp_path


def parts_of_images(data):
    """The values in each part, which name the images one by one."""
    return {part: sorted(values(getattr(data, part))) for part in PARTS}


def test_pacs_has_all_domains_in_every_part(pacs):
    data = image_data.load("pacs", str(pacs))
    assert data.class_names == ["dog", "elephant"]
    assert classes(data) == {"train": [72, 72], "validation": [8, 8], "test": [20, 20]}
    images = parts_of_images(data)
    assert sorted(np.concatenate([*images.values()])) == [
        60 * offset + 30 * label + n
        for offset in range(4)
        for label in (0, 1)
        for n in range(25)
    ]
    for part, count in (("train", 36), ("validation", 4), ("test", 10)):
        assert np.bincount(np.array(images[part]) // 60).tolist() == [count] * 4
        split = getattr(data, part)
        assert (values(split) % 60 // 30 == split.labels).all()


@pytest.mark.parametrize("domain", [0, 3])
def test_pacs_without_a_domain(pacs, domain):
    name = f"pacs_without_{image_folders.DOMAINS[domain]}"
    data = image_data.load(name, str(pacs))
    images = {part: np.array(each) for part, each in parts_of_images(data).items()}
    assert (images["test"] // 60 == domain).all() and len(images["test"]) == 50
    rest = np.concatenate([images["train"], images["validation"]])
    assert len(np.unique(rest)) == 150 and domain not in rest // 60
    assert len(images["validation"]) == 12


def test_pacs_lacks_a_domain(pacs):
    (pacs / "photo").rename(pacs / "photos")
    with pytest.raises(ValueError, match="`data_dir` must hold 'photo'"):
        image_data.load("pacs", str(pacs))


def test_a_folder_must_be_given():
    with pytest.raises(ValueError, match=r"`data_dir` must be the folder of pacs's"):
        image_data.load("pacs")


def test_broken_images_are_named(cinic10):
    (cinic10 / "valid" / "bird" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"1 of 10 images cannot be read: .*bird/0\.png"):
        image_data.load("cinic10", str(cinic10))


def test_resized_and_merged_data(tmp_path):
    rng = np.random.default_rng(0)
    image = np.linspace(0, 1, 8, dtype="float32")
    images = np.broadcast_to(image[None, :, None, None], (4, 8, 8, 1))
    split = image_data.Split(images, rng.integers(0, 2, 4))
    data = image_data.ImageData(split, split.take(2), split.take(3), ["a", "b"])
    larger = image_data.resized(data, 16)
    assert larger.validation.images.shape == (2, 16, 16, 1)
    assert np.all(np.diff(larger.train.images[0, :, 0, 0]) >= 0)
    merged = image_data.without_validation(data)
    assert len(merged.train.images) == len(merged.train.labels) == 6
    assert len(merged.validation.images) == 0
    image_data.save_file(data, tmp_path / "data.npz")
    again = image_data.load_file(tmp_path / "data.npz", 3)
    assert again.class_names == ["a", "b"]
    np.testing.assert_allclose(again.train.images, images[:3], atol=0.5 / 255)
    np.savez(tmp_path / "other.npz", train_images=images)
    with pytest.raises(ValueError, match=r"`data_file` must hold .*without train_labels"):
        image_data.load_file(tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"uint8 images .* train images of dtype float32"):
        np.savez(tmp_path / "floats.npz", **arrays_of(data, "float32"))
        image_data.load_file(tmp_path / "floats.npz")
    with pytest.raises(ValueError, match=r"and as many labels.*and 1 labels"):
        short = arrays_of(data, "uint8") | {"test_labels": split.labels[:1]}
        np.savez(tmp_path / "short.npz", **short)
        image_data.load_file(tmp_path / "short.npz")
    with pytest.raises(ValueError, match=r"must be given images in \[0, 1\]"):
        image_data.save_file(data.standardized, tmp_path / "standardized.npz")


def arrays_of(data, dtype):
    arrays = {}
    for part in image_data.PARTS:
        split = getattr(data, part)
        arrays[f"{part}_images"] = split.images.astype(dtype)
        arrays[f"{part}_labels"] = split.labels
    return arrays


def test_files_are_told_apart(tmp_path):
    """By what they hold: what is made of the images is the setting's matter."""
    image_data.save_file(make_data(40), tmp_path / "one.npz")
    image_data.save_file(make_data(40), tmp_path / "same.npz")
    image_data.save_file(make_data(41), tmp_path / "other.npz")
    one, same, other = (
        image_data.load_file(tmp_path / f"{name}.npz") for name in ("one", "same", "other")
    )
    assert one.fingerprint == same.fingerprint != other.fingerprint
    for made in (one.standardized, image_data.resized(one, 4)):
        assert made.fingerprint == one.fingerprint
    assert image_data.without_validation(one).fingerprint == one.fingerprint
    assert make_data(40).fingerprint is None


def make_data(count, channels=3):
    rng = np.random.default_rng(0)
    splits = [
        image_data.Split(
            rng.integers(0, 256, (size, 8, 8, channels)).astype("uint8"),
            rng.integers(0, 4, size),
        )
        for size in (count, 5, 7)
    ]
    return image_data.ImageData(*splits, ["a", "b", "c", "d"])


def test_pieces_are_small_and_lossless(tmp_path, monkeypatch):
    data = make_data(40)
    whole, folder = f"{tmp_path}/whole.npz", f"{tmp_path}/pieces"
    monkeypatch.setattr(image_data, "PIECE", 6000)
    monkeypatch.setattr(image_data, "HEADERS", 3000)
    image_data.save_file(data, folder)
    image_data.save_file(data, whole)
    files = sorted((tmp_path / "pieces").iterdir())
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) <= 6000
    found, expected = map(image_data.read_arrays, (folder, whole))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)
        assert found[key].dtype == array.dtype
    np.testing.assert_array_equal(found["train_images"], data.train.images)
    # Else images of both would be read.
    with pytest.raises(ValueError, match=r"must be a folder without \.npz files"):
        image_data.save_file(make_data(2), folder)
    # A part may be empty.
    image_data.save_file(image_data.without_validation(data), f"{tmp_path}/merged")
    merged = image_data.load_file(f"{tmp_path}/merged")
    assert len(merged.train.images) == 45 and len(merged.validation.images) == 0
    monkeypatch.setattr(image_data, "PIECE", 3100)
    with pytest.raises(ValueError, match="smaller than a piece of 3100 bytes"):
        image_data.save_file(data, f"{tmp_path}/none")


def test_standardized_images():
    found = make_data(40)
    made = found.standardized
    np.testing.assert_allclose(made.train.images.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(made.train.images.std((0, 1, 2)), 1, rtol=1e-6)
    # By the training images' numbers.
    deviation = found.train.images.std((0, 1, 2))
    np.testing.assert_allclose(
        np.diff(made.test.images, axis=0),
        np.diff(found.test.images.astype(float), axis=0) / deviation,
        atol=1e-6,
    )

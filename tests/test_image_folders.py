"""Folders of images: what is read, in which order, and what is said of broken ones."""

import builtins
import re

import keras
import numpy as np
import pytest
from PIL import Image

from nsl_keras import image_folders


def write(path, value=0, size=(4, 6), mode="RGB"):
    """An image of one value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    color = (value,) * 3 if mode == "RGB" else value
    Image.new(mode, size[::-1], color).save(path)


def break_file(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no image")


@pytest.fixture
def pets(tmp_path):
    for value, name in enumerate(("dog/2.png", "dog/10.PNG", "cat/1.bmp", "owl/a.ppm")):
        write(tmp_path / name, 10 * value)
    (tmp_path / "dog" / "list.txt").write_text("not an image")
    (tmp_path / "readme.md").write_text("not a class")
    break_file(tmp_path / "dog" / "._2.png")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_images_labels_and_names(pets):
    images, labels, names = image_folders.load_image_folder(pets)
    assert names == ["cat", "dog", "owl"]
    assert labels.tolist() == [0, 1, 1, 2] and labels.dtype == np.int64
    assert images.shape == (4, 4, 6, 3) and images.dtype == np.uint8
    assert images.reshape(4, -1).std(axis=1).max() == 0
    # In the order of the names: 10.PNG is before 2.png.
    assert images[:, 0, 0, 0].tolist() == [20, 10, 0, 30]


def test_the_folder_as_a_string(pets):
    assert len(image_folders.load_image_folder(str(pets))[0]) == 4


@pytest.mark.parametrize(
    ("image_size", "shape"), [(3, (3, 3)), ((2, 5), (2, 5)), (None, (4, 6))]
)
@pytest.mark.parametrize(("color", "channels"), [("rgb", 3), ("grayscale", 1)])
def test_size_and_color(pets, image_size, shape, color, channels):
    images, _, _ = image_folders.load_image_folder(pets, image_size, color)
    assert images.shape == (4, *shape, channels)
    assert images[:, 0, 0, 0].tolist() == [20, 10, 0, 30]


def test_height_is_the_first_axis_and_resizing_averages(tmp_path):
    pixels = np.zeros((8, 4), "uint8")
    pixels[1::2] = 200  # Lines; the lower half is a light area besides.
    pixels[4:] = 100
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    images, _, _ = image_folders.load_image_folder(tmp_path, (8, 4), "grayscale")
    np.testing.assert_array_equal(images[0, ..., 0], pixels)
    # Without antialiasing the lines would come out as 0 or 200.
    small, _, _ = image_folders.load_image_folder(tmp_path, (2, 1), "grayscale")
    assert (abs(small.ravel().astype(int) - 100) <= 20).all()


def test_colors_of_other_kinds_of_files(tmp_path):
    write(tmp_path / "a" / "1.png", 77, mode="L")
    Image.new("RGBA", (6, 4), (77, 77, 77, 255)).save(tmp_path / "a" / "2.png")
    Image.new("RGB", (6, 4), (77, 77, 77)).quantize(2).save(tmp_path / "a" / "3.png")
    for color, channels in (("rgb", 3), ("grayscale", 1)):
        images, _, _ = image_folders.load_image_folder(tmp_path, color=color)
        assert images.shape == (3, 4, 6, channels)
        assert (images == 77).all()


def test_images_below_a_class_are_the_class_own(tmp_path):
    for name in ("n01/images/0.png", "n01/more/deep/1.png", "n02/images/2.png"):
        write(tmp_path / name)
    _, labels, names = image_folders.load_image_folder(tmp_path)
    assert names == ["n01", "n02"] and labels.tolist() == [0, 0, 1]


def test_parts_of_a_data_set_are_hardly_classes(tmp_path):
    for name in ("train/cat/0.png", "train/dog/1.png", "test/cat/2.png", "test/dog/3.png"):
        write(tmp_path / name)
    with pytest.warns(UserWarning, match="of images: test, train. Were they the parts"):
        _, labels, _ = image_folders.load_image_folder(tmp_path)
    assert labels.tolist() == [0, 0, 1, 1]


def test_nested_classes(tmp_path):
    for name in ("Greek/02/x.png", "Greek/01/y.png", "Latin/01/z.png", "flat/w.png"):
        write(tmp_path / name)
    _, labels, names = image_folders.load_image_folder(tmp_path, nested=True)
    assert names == ["Greek/01", "Greek/02", "Latin/01", "flat"]
    assert labels.tolist() == [0, 1, 2, 3]
    (tmp_path / "Latin" / "02").mkdir()
    with pytest.raises(ValueError, match=r"1 classes without: Latin/02$"):
        image_folders.load_image_folder(tmp_path, nested=True)


@pytest.mark.parametrize("nested", [False, True])
def test_bad_folders(tmp_path, nested):
    def load(folder):
        return image_folders.load_image_folder(folder, nested=nested)

    with pytest.raises(ValueError, match=r"`folder` must be a folder.*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"`folder` must hold .*, which has none"):
        load(tmp_path)
    write(tmp_path / "1.png")  # An image, but of no class.
    with pytest.raises(ValueError, match=r"`folder` must hold .*, which has none"):
        load(tmp_path)
    write(tmp_path / "cat" / "1.png")
    for name in ("dog", "emu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"with 2 classes without: dog, emu$"):
        load(tmp_path)


def broken(folder):
    """Three readable images, and one of each way not to be."""
    for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
        write(folder / name, 50)
    break_file(folder / "cat" / "2.jpg")
    (folder / "cat" / "3.png").write_bytes(b"")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), "uint8")).save(
        folder / "dog" / "3.png"
    )
    whole = (folder / "dog" / "3.png").read_bytes()
    (folder / "dog" / "3.png").write_bytes(whole[: len(whole) // 2])
    deep = np.full((4, 6), 40000, "uint16")
    Image.fromarray(deep).save(folder / "dog" / "4.png")
    return ["cat/2.jpg", "cat/3.png", "dog/3.png", "dog/4.png"]


def test_unreadable_images_are_named_and_counted(tmp_path):
    names = ", ".join(str(tmp_path / name) for name in broken(tmp_path))
    with pytest.raises(ValueError, match="at most 8 bits a channel") as caught:
        image_folders.load_image_folder(tmp_path, 4)
    assert str(caught.value).endswith(f"Received: 4 of 7 images cannot be read: {names}")


def test_unreadable_images_are_left_out_where_asked(tmp_path):
    names = ", ".join(str(tmp_path / name) for name in broken(tmp_path))
    with pytest.warns(UserWarning, match="Left out: 4 of 7") as caught:
        images, labels, _ = image_folders.load_image_folder(tmp_path, 4, unreadable="skip")
    assert str(caught[0].message).endswith(names)
    assert images.shape == (3, 4, 4, 3) and (images == 50).all()
    assert labels.tolist() == [0, 1, 1]


def test_a_class_of_unreadable_images(tmp_path):
    write(tmp_path / "cat" / "1.png")
    break_file(tmp_path / "dog" / "1.png")
    with (
        pytest.warns(UserWarning, match="Left out: 1 of 2"),
        pytest.raises(ValueError, match=r"with 1 classes without: dog$"),
    ):
        image_folders.load_image_folder(tmp_path, unreadable="skip")
    break_file(tmp_path / "cat" / "1.png")
    with pytest.raises(ValueError, match="2 of 2 images cannot be read"):
        image_folders.load_image_folder(tmp_path, unreadable="skip")


def test_a_message_names_ten_at_most(tmp_path):
    for number in range(12):
        break_file(tmp_path / "a" / f"{number:02}.png")
    with pytest.raises(ValueError, match=r"12 of 12 .*09\.png and 2 more$"):
        image_folders.load_image_folder(tmp_path)


def test_sizes_must_agree_where_none_is_given(tmp_path):
    write(tmp_path / "a" / "1.png")
    write(tmp_path / "b" / "2.png", size=(5, 6))
    with pytest.raises(
        ValueError, match=r"`image_size` must be.*2\.png of shape \(5, 6, 3\)"
    ):
        image_folders.load_image_folder(tmp_path)
    assert image_folders.load_image_folder(tmp_path, 4)[0].shape == (2, 4, 4, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 0}, "`image_size` must be a positive integer or 2 of them"),
        ({"image_size": (1, 2, 3)}, "`image_size` must be a positive integer or 2"),
        ({"color": "rgba"}, "`color` must be one of 'rgb', 'grayscale'"),
        ({"unreadable": True}, "`unreadable` must be one of 'error', 'skip'"),
    ],
)
def test_bad_arguments(pets, changes, message):
    with pytest.raises(ValueError, match=message):
        image_folders.load_image_folder(pets, **changes)


def test_load_images_keeps_the_order(pets):
    paths = [pets / "owl/a.ppm", str(pets / "cat/1.bmp")]
    images, kept = image_folders.load_images(paths)
    assert images[:, 0, 0, 0].tolist() == [30, 20] and kept.tolist() == [0, 1]
    with pytest.warns(UserWarning, match="Left out: 1 of 3"):
        images, kept = image_folders.load_images(
            [paths[0], pets / "missing.png", paths[1]], unreadable="skip"
        )
    assert images[:, 0, 0, 0].tolist() == [30, 20] and kept.tolist() == [0, 2]
    with pytest.raises(ValueError, match="`paths` must name an image"):
        image_folders.load_images([])


def test_without_pillow(pets, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.split(".")[0] == "PIL":
            raise ImportError("No module named 'PIL'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=re.escape('pip install "nsl_keras[images]"')):
        image_folders.load_image_folder(pets)


def test_what_keras_saves_is_read(tmp_path):
    (tmp_path / "a").mkdir()
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype("float32")
    keras.utils.save_img(tmp_path / "a" / "1.png", image, scale=False)
    images, _, _ = image_folders.load_image_folder(tmp_path)
    np.testing.assert_array_equal(images[0], image)

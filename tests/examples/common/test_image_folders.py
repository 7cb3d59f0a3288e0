"""Folders of images: what is read, in which order, and what is said of broken ones."""

import keras
import numpy as np
import pytest
from PIL import Image

from examples.common import image_folders


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
    names = ("dog/2.png", "dog/10.PNG", "cat/more/1.bmp", "owl/a.ppm")
    for value, name in enumerate(names):
        write(tmp_path / name, 10 * value)
    (tmp_path / "dog" / "list.txt").write_text("not an image")
    (tmp_path / "readme.md").write_text("not a class")
    break_file(tmp_path / "dog" / "._2.png")
    break_file(tmp_path / "dog" / ".hidden" / "2.png")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_images_labels_and_names(pets):
    images, labels, names = image_folders.load_image_folder(pets, 5)
    assert names == ["cat", "dog", "owl"]
    assert labels.tolist() == [0, 1, 1, 2] and labels.dtype == np.int64
    assert images.shape == (4, 5, 5, 3) and images.dtype == np.uint8
    assert images.reshape(4, -1).std(axis=1).max() == 0
    # In the order of the names: 10.PNG is before 2.png.
    assert images[:, 0, 0, 0].tolist() == [20, 10, 0, 30]


def test_resizing_averages(tmp_path):
    pixels = np.zeros((8, 8), "uint8")
    pixels[1::2] = 200  # Lines, which would come out as 0 or 200 without antialiasing.
    Image.fromarray(pixels).save(tmp_path / "1.png")
    small = image_folders.load_images([tmp_path / "1.png"], 2)
    assert (abs(small.astype(int) - 100) <= 20).all()


def test_other_kinds_of_files(tmp_path):
    write(tmp_path / "1.png", 77, mode="L")
    Image.new("RGBA", (6, 4), (77, 77, 77, 255)).save(tmp_path / "2.png")
    Image.new("RGB", (6, 4), (77, 77, 77)).quantize(2).save(tmp_path / "3.png")
    keras.utils.save_img(tmp_path / "4.png", np.full((4, 4, 3), 77.0), scale=False)
    images = image_folders.load_images(sorted(tmp_path.iterdir()), 4)
    assert images.shape == (4, 4, 4, 3)
    assert (images == 77).all()


def test_bad_folders(tmp_path):
    with pytest.raises(ValueError, match=r"`data_dir` must be a folder.*nowhere"):
        image_folders.load_image_folder(tmp_path / "nowhere", 4)
    write(tmp_path / "1.png")  # An image, but of no class.
    with pytest.raises(
        ValueError, match=r"sub-folder of images for each class.* with none"
    ):
        image_folders.load_image_folder(tmp_path, 4)
    write(tmp_path / "cat" / "1.png")
    for name in ("dog", "emu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"with 2 empty ones: dog, emu$"):
        image_folders.load_image_folder(tmp_path, 4)


def test_unreadable_images_are_named_and_counted(tmp_path):
    names = ("cat/1.png", "cat/2.jpg", "cat/3.png", "dog/3.png", "dog/4.png")
    write(tmp_path / names[0], 50)
    break_file(tmp_path / names[1])
    (tmp_path / names[2]).write_bytes(b"")
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), "uint8")
    write(tmp_path / names[3])
    Image.fromarray(noise).save(tmp_path / names[3])
    whole = (tmp_path / names[3]).read_bytes()
    (tmp_path / names[3]).write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.full((4, 6), 40000, "uint16")).save(tmp_path / names[4])
    with pytest.raises(ValueError, match="at most 8 bits a channel") as caught:
        image_folders.load_image_folder(tmp_path, 4)
    listed = ", ".join(str(tmp_path / name) for name in names[1:])
    assert str(caught.value).endswith(f"Received: 4 of 5 images cannot be read: {listed}")


def test_a_message_names_ten_at_most(tmp_path):
    for number in range(12):
        break_file(tmp_path / "a" / f"{number:02}.png")
    with pytest.raises(ValueError, match=r"12 of 12 .*09\.png and 2 more$"):
        image_folders.load_image_folder(tmp_path, 4)

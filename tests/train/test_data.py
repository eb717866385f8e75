"""Loaders read what their formats say, refuse the rest, and repeat themselves."""

import gzip
import io
import struct
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elsa_train._errors import BadData, BadRecipe
from elsa_train.data import load
from elsa_train.data.augment import random_flip, random_shift
from elsa_train.data.cifar import FILES
from elsa_train.data.imagefolder import random_crop

RNG = np.random.default_rng(0)


def idx(array):
    return (
        b"\0\0\x08"
        + bytes([array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


@pytest.mark.parametrize("zipped", [False, True])
def test_idx(tmp_path, zipped):
    images = RNG.integers(0, 256, (5, 28, 28)).astype(np.uint8)
    labels = np.arange(5, dtype=np.uint8)
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = gzip.compress(idx(array)) if zipped else idx(array)
            (tmp_path / f"{prefix}-{kind}-ubyte{'.gz' if zipped else ''}").write_bytes(content)
    data = load("fashion-mnist", tmp_path)
    found = data.batch("test", np.array([3, 1]), 0)
    np.testing.assert_array_equal(found[0][..., 0], images[[3, 1]])
    assert found[1].tolist() == [3, 1]
    assert (data.shape(), data.num_classes, data.size("train")) == ((28, 28, 1), 5, 5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04", "not an IDX"),
        (b"\0\0\x08\x03\0", "header"),
        (b"\0\0\x08\x01\0\0\0\x05ab", "expected 5"),
    ],
)
def test_broken_idx(tmp_path, content, reason):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(BadData, match=reason):
        load("mnist", tmp_path)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("archived", [False, True])
def test_cifar(tmp_path, classes, archived):
    pixels = RNG.integers(0, 256, (3, 3072)).astype(np.uint8)
    labels = np.array([[0], [7], [9]], np.uint8)
    if classes == 100:
        labels = np.concatenate([np.full_like(labels, 19), labels * 11], axis=1)
    content = np.concatenate([labels, pixels], axis=1).tobytes()
    names = [name for group in FILES[classes] for name in group]
    if archived:
        with tarfile.open(tmp_path / f"cifar-{classes}-binary.tar.gz", "w:gz") as tar:
            for name in names:
                member = tarfile.TarInfo(f"folder/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        for name in names:
            (tmp_path / name).write_bytes(content)
    data = load(f"cifar{classes}", tmp_path)
    images, found = data.batch("test", np.arange(3), 0)
    assert found.tolist() == labels[:, -1].tolist()
    np.testing.assert_array_equal(images[1, :, :, 2].ravel(), pixels[1, 2048:])
    assert data.size("train") == 3 * len(FILES[classes][0])


def test_broken_cifar(tmp_path):
    with pytest.raises(BadData, match=r"data_batch_1.bin is missing"):
        load("cifar10", tmp_path)
    for name in FILES[10][0] + FILES[10][1]:
        (tmp_path / name).write_bytes(b"12345")
    with pytest.raises(BadData, match="whole number"):
        load("cifar10", tmp_path)


def test_imagefolder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for name, colour in (("cat", (250, 0, 0)), ("dog", (0, 0, 250))):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(2):
                image.new("RGB", (300, 260), colour).save(folder / f"{i}.JPEG")
    data = load("imagefolder", tmp_path)
    assert (data.num_classes, data.size("train"), data.shape()) == (2, 4, (224, 224, 3))
    images, labels = data.batch("train", np.array([3, 0]), 5)
    assert labels.tolist() == [1, 0]
    assert images.shape == (2, 224, 224, 3)
    assert images[0, 100, 100, 2] > 200
    np.testing.assert_array_equal(images, data.batch("train", np.array([3, 0]), 5)[0])
    with pytest.raises(BadData):
        load("imagefolder", tmp_path / "train")


def test_random_crops_stay_inside_and_cover_enough():
    rng = np.random.default_rng(0)
    for _ in range(200):
        left, top, right, bottom = random_crop(300, 200, rng)
        assert 0 <= left < right <= 300
        assert 0 <= top < bottom <= 200
        assert (right - left) * (bottom - top) >= 0.079 * 300 * 200


def test_digits_split_is_fixed_and_disjoint():
    data = load("digits")
    assert (data.size("train"), data.size("test")) == (1437, 360)
    train = {image.tobytes() for image in data.train[0]}
    assert sum(image.tobytes() in train for image in data.test[0]) == 0


def test_augmentation_moves_pixels_only():
    images = jnp.arange(2 * 8 * 8, dtype=jnp.float32).reshape(2, 8, 8, 1) + 1
    shifted = np.asarray(random_shift(jax.random.key(0), images, 2))
    assert shifted.shape == images.shape
    assert set(shifted.ravel()) <= set(np.asarray(images).ravel()) | {0.0}
    flipped = np.asarray(random_flip(jax.random.key(1), jnp.tile(images, (16, 1, 1, 1))))
    originals = np.tile(np.asarray(images), (16, 1, 1, 1))
    same = [np.array_equal(a, b) for a, b in zip(flipped, originals, strict=True)]
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in zip(flipped, originals, strict=True)]
    assert all(s != m for s, m in zip(same, mirrored, strict=True))
    assert any(same)
    assert any(mirrored)


def test_unknown_or_missing_data_is_said():
    with pytest.raises(BadRecipe, match="none such"):
        load("imaginary")
    with pytest.raises(BadRecipe, match="--data-dir"):
        load("cifar10")
    with pytest.raises(BadRecipe, match="no_such_module"):
        load("no_such_module:load")

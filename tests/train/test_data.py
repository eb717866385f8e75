"""Loaders read what their formats say, refuse the rest, and repeat themselves."""

import gzip
import io
import struct
import sys
import tarfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import BadData, BadRecipe, MissingData, TrainError

from elsa_train.data import load
from elsa_train.data.arrays import FILES
from elsa_train.data.augment import augmentation, normalize, random_flip, random_shift

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
        (b"\0\0\x08\x64" + b"\0\0\0\x01" * 100 + b"x", "at most 3 dimensions"),
        (idx(np.zeros((0, 2, 2), np.uint8)), "labels"),
        (idx(np.zeros((5, 2), np.uint8)), "labels"),
        (idx(np.zeros((5, 2, 2), np.uint8)), "std"),
    ],
)
def test_broken_idx(tmp_path, content, reason):
    for prefix in ("train", "t10k"):
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(content)
        labels = idx(np.zeros(0 if content[4:8] == bytes(4) else 5, np.uint8))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(BadData, match=reason) as found:
        load("mnist", tmp_path)
    assert found.value.exit_code == 3


def test_broken_gzip(tmp_path):
    packed = gzip.compress(idx(np.zeros((50, 28, 28), np.uint8)))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    for content in (packed[:-9], packed[:20] + b"\xff" * 20, b"plain", packed[:-4] + b"abcd"):
        path.write_bytes(content)
        with pytest.raises(BadData, match="train-images") as found:
            load("mnist", tmp_path)
        assert found.value.exit_code == 3


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
    with pytest.raises(MissingData, match=r"data_batch_1.bin is missing") as found:
        load("cifar10", tmp_path)
    assert found.value.exit_code == 1
    for name in FILES[10][0] + FILES[10][1]:
        (tmp_path / name).write_bytes(b"12345")
    with pytest.raises(BadData, match="whole number"):
        load("cifar10", tmp_path)


def archive(content, mode="w:gz"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def test_broken_archives(tmp_path):
    whole = archive(RNG.bytes(100_000))
    plain = bytearray(archive(b"x" * 512, "w"))
    plain[124:136] = b"7" * 11 + b"\0"  # 8 GiB, in octal
    plain[148:156] = b"%06o\0 " % (sum(plain[:148]) + 8 * 32 + sum(plain[156:512]))
    for content in (
        whole[:-50_000],
        whole[:500] + b"\xff" * 500 + whole[1000:],
        archive(RNG.bytes(100_000), "w:xz")[:-50_000],
        archive(RNG.bytes(100_000), "w:bz2")[:-50_000],
        bytes(plain),
        b"",
        b"nothing",
    ):
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(content)
        with pytest.raises(BadData, match="cifar-10-binary"):
            load("cifar10", tmp_path)


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


def test_cifar_images_have_a_black_border_as_the_paper_normalizes_last():
    images = jnp.full((64, 8, 8, 3), 200, jnp.uint8)
    mean, std = (125.0, 120.0, 110.0), (60.0, 61.0, 62.0)
    normal = partial(normalize, mean=mean, std=std)
    found = np.asarray(augmentation("crop-flip")(jax.random.key(0), images, normal))
    black, inside = ((np.array([[0.0], [200.0]]) - mean) / std).astype(np.float32)
    is_black = np.isclose(found, black, atol=1e-5).all(-1)
    assert (is_black | np.isclose(found, inside, atol=1e-5).all(-1)).all()
    assert 0.2 < is_black.mean() < 0.7
    assert not is_black.all((1, 2)).any()


def test_unknown_or_missing_data_is_said():
    with pytest.raises(BadRecipe, match="none such"):
        load("imaginary")
    with pytest.raises(BadRecipe, match="data_dir"):
        load("cifar10")
    with pytest.raises(BadRecipe, match="copy gs://bucket/data to a folder"):
        load("cifar10", "gs://bucket/data")
    with pytest.raises(BadRecipe, match="no_such_module"):
        load("no_such_module:load")


OWN = """
import numpy as np

class Squares:
    num_classes, mean, std = 2, (0.5,), (0.5,)

    def __init__(self, data_dir):
        self.data_dir = data_dir

    def size(self, split):
        return 64

    def shape(self):
        return 4, 4, 1

    def batch(self, split, indices, seed):
        labels = (indices % 2).astype(np.int32)
        return np.broadcast_to(labels[:, None, None, None], (len(indices), 4, 4, 1)), labels

class Outer:
    Inner = Squares

def load(data_dir):
    return Squares(data_dir)

def fails(data_dir):
    return {}["key"]

def made(**changes):
    def load(data_dir):
        data = Squares(data_dir)
        vars(data).update(changes)
        return data
    return load

classes = made(num_classes=0)
mean = made(mean=(0.0, 0.0))
std = made(std=(0.0,))
size = made(size=lambda split: 0)
shape = made(shape=lambda: (4, 4))
images = made(batch=lambda split, indices, seed: (np.zeros((len(indices), 4, 5, 1)), indices * 0))
text = made(batch=lambda split, indices, seed: (np.full((len(indices), 4, 4, 1), "x"), indices * 0))
labels = made(batch=lambda split, indices, seed: (np.zeros((len(indices), 4, 4, 1)), indices + 7))
floats = made(batch=lambda split, indices, seed: (np.zeros((len(indices), 4, 4, 1)), indices * 0.5))
raises = made(batch=lambda split, indices, seed: indices.nonsense)
single = made(batch=lambda split, indices, seed: 5)
missing = made(batch=lambda split, indices, seed: open("/no/such/file"))
constant = 5
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "owndata.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("owndata", None)


@pytest.mark.parametrize("name", ["Squares", "load", "Outer.Inner"])
def test_own_data_is_a_class_or_function_in_the_current_directory(own, name):
    data = load(f"owndata:{name}", "somewhere")
    assert data.data_dir == "somewhere"
    assert sys.path[-1] == str(own)  # last: it shadows nothing that is installed


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("nothing", 2, "owndata.py has no 'nothing'"),
        ("constant", 2, "class or function"),
        ("fails", 3, r"KeyError: 'key' \(owndata.py, line \d+\)"),
        ("made", 3, "TypeError"),
        ("Outer", 3, "TypeError"),
        ("classes", 3, "num_classes is 0"),
        ("mean", 3, "each channel"),
        ("std", 3, "above 0"),
        ("size", 3, r"size\('train'\) is 0"),
        ("shape", 3, "height, width, channels"),
        ("images", 3, r"train images are float64 \[1, 4, 5, 1\], expected numbers \[1, 4, 4, 1\]"),
        ("text", 3, "expected numbers"),
        ("labels", 3, "labels from 7 to 7, expected 0 to 1"),
        ("floats", 3, "expected integers"),
        ("raises", 3, "AttributeError.*owndata.py"),
        ("single", 3, "TypeError"),
    ],
)
def test_own_data_that_breaks_the_protocol_is_refused(own, name, code, reason):
    with pytest.raises(TrainError, match=reason) as found:
        load(f"owndata:{name}")
    assert found.value.exit_code == code


def test_errors_of_the_system_stay_what_they_are(own):
    with pytest.raises(FileNotFoundError):
        load("owndata:missing")


def test_own_data_that_cannot_be_imported_is_refused(own):
    for text in ("1 / 0", "def", "import nowhere_to_be_found"):
        (own / "brokendata.py").write_text(text)
        with pytest.raises(BadRecipe, match="brokendata"):
            load("brokendata:load")


def test_what_is_no_data_is_refused_by_what_it_lacks():
    with pytest.raises(BadData, match="list has no 'num_classes'"):
        load("builtins:list")

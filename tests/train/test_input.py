"""Images from folders and record files, and worker processes: the same bits by every way."""

import io
import json
import pickle
import struct
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from internals import BadData, BadRecipe, MissingData, Trainer, TrainError, make_recipe, train
from odd_data import Odd
from PIL import Image

from elsa_train.data import ArrayData, in_processes, load
from elsa_train.data.images import ImageFolder, center_crop, random_crop
from elsa_train.data.prefetch import Prefetch
from elsa_train.data.protocol import identity_of
from elsa_train.data.records import ImageRecords, record_files
from elsa_train.data.workers import Workers

RNG = np.random.default_rng(0)
SIZE = 24


def jpeg(mode="RGB", size=(40, 30)):
    out = io.BytesIO()
    pixels = RNG.integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(out, "JPEG", quality=90)
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 6), ("val", 2)):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                (root / split / label / f"{i}.JPEG").write_bytes(jpeg(size=(40 + i, 30 + 3 * i)))
    return root


def test_imagefolder(tmp_path):
    for split in ("train", "val"):
        for name, colour in (("cat", (250, 0, 0)), ("dog", (0, 0, 250))):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (300, 260), colour).save(folder / f"{i}.JPEG")
    data = load("imagefolder", tmp_path)
    assert (data.num_classes, data.size("train"), data.shape()) == (2, 4, (224, 224, 3))
    images, labels = data.batch("train", np.array([3, 0]), 5)
    assert labels.tolist() == [1, 0]
    assert images.shape == (2, 224, 224, 3)
    assert images[0, 100, 100, 2] > 200
    np.testing.assert_array_equal(images, data.batch("train", np.array([3, 0]), 5)[0])
    with pytest.raises(MissingData, match="no such folder"):
        load("imagefolder", tmp_path / "train")
    broken = tmp_path / "train" / "cat" / "0.JPEG"
    whole = broken.read_bytes()
    huge = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\2\0\0\0"
    for content in (b"", b"nothing", whole[: len(whole) // 2], huge + b"\x5b\xc3\x0c\x4a"):
        broken.write_bytes(content)
        with pytest.raises(BadData, match=r"0\.JPEG"):
            load("imagefolder", tmp_path)


def test_images_of_other_modes_become_rgb(tmp_path):
    grey = Image.new("L", (30, 30), 77)
    for split in ("train", "val"):
        (tmp_path / split / "one").mkdir(parents=True)
        for mode in ("L", "CMYK", "RGBA", "P"):
            kind = "JPEG" if mode in ("L", "CMYK") else "png"
            grey.convert(mode).save(tmp_path / split / "one" / f"{mode}.{kind}")
    images, _ = ImageFolder(tmp_path, SIZE).batch("test", np.arange(4), 0)
    assert abs(images.astype(int) - 77).max() <= 3


def boxes(width, height, count=4000):
    rng = np.random.default_rng(0)
    found = np.array([random_crop(width, height, rng) for _ in range(count)])
    left, top, right, bottom = found.T
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= width
    assert bottom.max() <= height
    return left, top, right - left, bottom - top


def test_random_crops_are_drawn_by_height_and_cover_a_tenth():
    _, _, w, h = boxes(500, 375)
    assert (w * h >= 0.1 * 500 * 375).all()
    ratio = w / h
    assert 0.74 < ratio.min() < 0.78
    assert 1.30 < ratio.max() < 1.35
    # The height is uniform, so its square, the area, is not: its median is far below the middle.
    near = h[(ratio > 0.98) & (ratio < 1.02)]
    expected = (np.sqrt(0.1 * 500 * 375) + 375) / 2
    assert np.mean(near) == pytest.approx(expected, rel=0.04)
    assert np.median(w * h) < 0.40 * 500 * 375


def test_where_no_box_fits_it_is_that_of_evaluation():
    rng = np.random.default_rng(0)
    assert random_crop(1000, 20, rng) == center_crop(1000, 20)
    assert all(random_crop(1, 1, rng) == (0, 0, 1, 1) for _ in range(20))


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(image, label, names=("image", "label"), packed=True):
    listed = field(1, varint(label)) if packed else b"\x08" + varint(label)
    features = {
        "file_name": field(1, field(1, b"a.JPEG")),
        "other": field(2, field(1, struct.pack("<f", 1.5))),
        names[0]: field(1, field(1, image)),
        names[1]: field(3, listed),
    }
    entries = [field(1, field(1, k.encode()) + field(2, v)) for k, v in features.items()]
    return field(1, b"".join(entries))


def tfrecord(records):
    around = [(struct.pack("<QI", len(r), 0), r, bytes(4)) for r in records]
    return b"".join(part for record in around for part in record)


def write_arrays(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


FEATURES = {"featuresDict": {"features": {"label": {"classLabel": {"numClasses": "2"}}}}}


def as_records(folder, root, suffix):
    """Write the images of a folder as TensorFlow Datasets does, in two shards."""
    data = ImageFolder(folder, SIZE)
    for split, name in (("train", "train"), ("test", "validation")):
        found = [data._examples[split][i] for i in range(data.size(split))]
        records = [example(Path(e.content).read_bytes(), e.label) for e in found]
        for shard in range(2):
            path = root / f"pets-{name}.{suffix}-{shard:05}-of-00002"
            some = (
                records[: len(records) // 2 + 1] if shard == 0 else records[len(records) // 2 + 1 :]
            )
            if suffix == "tfrecord":
                path.write_bytes(tfrecord(some))
            else:
                write_arrays(path, some)
    (root / "features.json").write_text(json.dumps(FEATURES))
    (root / "dataset_info.json").write_text("{}")
    return data


@pytest.mark.parametrize("suffix", ["tfrecord", "array_record"])
def test_record_files_give_the_images_of_a_folder(folder, tmp_path, suffix):
    (tmp_path / "5.1.0").mkdir()
    expected = as_records(folder, tmp_path / "5.1.0", suffix)
    found = ImageRecords(tmp_path / "5.1.0", record_files(tmp_path / "5.1.0"), SIZE)
    assert (found.num_classes, found.size("train"), found.size("test")) == (2, 12, 4)
    sent = pickle.loads(pickle.dumps(found))  # as to a worker
    for split in ("train", "test"):
        indices = np.array([3, 0, 2, 1, 3])
        for data in (found, sent):
            for one, other in zip(
                data.batch(split, indices, 7), expected.batch(split, indices, 7), strict=True
            ):
                np.testing.assert_array_equal(one, other)
    bundled = load("imagefolder", tmp_path)  # finds the folder of the only version
    assert bundled.shape() == (224, 224, 3)
    assert identity_of(bundled) == identity_of(found)


def test_older_imagenet_files(tmp_path):
    names = ("image/encoded", "image/class/label")
    for split in ("train", "validation"):
        content = tfrecord([example(jpeg(), label, names, packed=False) for label in (1, 1000)])
        (tmp_path / f"{split}-00000-of-00001").write_bytes(content)
    (tmp_path / "labels.txt").write_text("name\n" * 1000)
    data = load("imagefolder", tmp_path)
    assert data.num_classes == 1000
    assert data.batch("train", np.arange(2), 0)[1].tolist() == [0, 999]


def test_broken_record_files_are_named(tmp_path):
    good = tfrecord([example(jpeg(), 0)])
    for name in ("train.tfrecord", "test.tfrecord"):
        (tmp_path / name).write_bytes(good)
    with pytest.raises(MissingData, match=r"label\.labels\.txt"):
        load("imagefolder", tmp_path)
    (tmp_path / "label.labels.txt").write_text("cat\ndog\n")
    assert load("imagefolder", tmp_path).num_classes == 2
    for content, reason in (
        (good[:-1], "within a record"),
        (b"nothing at all, but text", "within a record"),
        (b"", "empty"),
        (tfrecord([b"\xff" * 20]), "record 0: not a tf.train.Example"),
        (tfrecord([example(b"no image", 0)]), "record 0: cannot identify"),
        (tfrecord([example(jpeg(), 2)]), "labels from 2 to 2"),
        (tfrecord([example(jpeg(), 0, ("picture", "label"))]), "expected 'image'"),
        (tfrecord([field(1, field(1, b"\x0a\x05image\x12\x02\x08"))]), "Example"),
    ):
        (tmp_path / "train.tfrecord").write_bytes(content)
        with pytest.raises(BadData, match=reason):
            load("imagefolder", tmp_path)
    (tmp_path / "train.tfrecord").rename(tmp_path / "train.tfrecord-00000-of-00002")
    with pytest.raises(MissingData, match="expected 2"):
        load("imagefolder", tmp_path)
    (tmp_path / "train.tfrecord-00000-of-00002").rename(tmp_path / "train.array_record")
    pytest.importorskip("array_record")
    with pytest.raises(BadData, match="not an ArrayRecord"):
        load("imagefolder", tmp_path)


@pytest.fixture(scope="module", params=[1, 3])
def pair(request, folder):
    data = ImageFolder(folder, SIZE)
    workers = Workers(data, request.param)
    yield data, workers
    workers.close()


def test_workers_give_the_bits_of_the_data(pair):
    data, workers = pair
    for split, indices, seed in (
        ("train", np.arange(12), 0),
        ("train", np.array([5, 5, 0]), 1),
        ("test", np.array([2]), 2),
        ("train", np.arange(12), 2**31 - 1),
    ):
        expected, found = data.batch(split, indices, seed), workers.batch(split, indices, seed)
        for one, other in zip(expected, found, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    assert identity_of(workers) == identity_of(data)
    assert (workers.shape(), workers.size("test"), workers.std) == (data.shape(), 4, data.std)


def test_memory_is_used_again_when_nothing_looks_at_it(pair):
    data, workers = pair
    indices = np.arange(12)
    kept = [workers.batch("train", indices, seed)[0][2:] for seed in range(3)]
    on_device = [jax.device_put(workers.batch("train", indices, seed)[0]) for seed in range(3)]
    size = workers._slots._size
    for seed in range(10):
        workers.batch("train", indices, 100 + seed)
    assert workers._slots._size <= size + size // 6 + 4096
    for seed in range(3):
        expected = data.batch("train", indices, seed)[0]
        np.testing.assert_array_equal(kept[seed], expected[2:])
        np.testing.assert_array_equal(np.asarray(on_device[seed]), expected)


def test_what_goes_wrong_in_a_worker_is_said():
    workers = Workers(Odd(), 2)
    assert workers.batch("train", np.arange(50), 0)[1].tolist() == [0, 1] * 25
    with pytest.raises(BadData, match=r"ValueError: sixty .*odd_data"):
        workers.batch("train", np.arange(55, 100), 0)
    with pytest.raises(TrainError, match="ended by SIGKILL"):
        workers.batch("train", np.arange(48, 59), 0)
    workers.close()
    with pytest.raises(BadRecipe, match="can't be sent"):
        Workers(ArrayData(None, lambda: 0, 10, (0.0,), (1.0,)), 1)


def test_batches_ahead_come_in_order_and_errors_in_their_place():
    started = []

    def call(number):
        started.append(number)
        if number == 3:
            raise ValueError("three")
        time.sleep(0.02 if number == 0 else 0)  # the second is done before the first
        return number

    with Prefetch((partial(call, number) for number in range(9)), threads=2) as ahead:
        assert [next(ahead) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="three"):
            next(ahead)
    assert max(started) <= 5  # no further ahead than two
    assert list(Prefetch([])) == []


def test_a_phase_has_the_same_batches_from_any_step_on_with_any_number_of_workers():
    images = (
        RNG.integers(0, 256, (50, 8, 8, 1)).astype(np.uint8),
        np.arange(50, dtype=np.int32) % 10,
    )
    data = ArrayData(images, images, 10, (0.0,), (1.0,))
    recipe = make_recipe({"batch_size": 8, "width": 4, "validation": 0})

    def batches(count, start):
        found = in_processes(data, count)
        with Trainer(recipe, found, seed=3).batches.phase(2, 14, start) as ahead:
            return [[np.asarray(part) for part in batch] for batch in ahead]

    whole = batches(0, 0)
    assert len(whole) == 14
    for count, start in ((0, 5), (1, 0), (2, 5)):
        for one, other in zip(whole[start:], batches(count, start), strict=True):
            for expected, found in zip(one, other, strict=True):
                np.testing.assert_array_equal(found, expected)


def test_a_run_writes_the_same_bytes_with_any_number_of_workers(tmp_path):
    options = "--levels 90 --width 8 --epochs 0.3 --sparsify-epochs 0.3 --densify-epochs 0 "
    options += "--warmup-epochs 0.1 --mask-every 2 --test-images 128 --plot none -q"
    files = []
    for count in (0, 2):
        out = tmp_path / str(count)
        arguments = ["digits", *options.split(), "--workers", str(count), "-o", str(out)]
        found = CliRunner().invoke(train, arguments)
        assert found.exit_code == 0, found.output
        files.append((out / "seed-0" / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_workers_are_for_data_that_is_decoded(folder):
    images = RNG.integers(0, 256, (5, 4, 4, 1)).astype(np.uint8), np.arange(5, dtype=np.int32)
    arrays = ArrayData(images, images, 5, (0.0,), (1.0,))
    assert in_processes(arrays) is arrays
    decoded = ImageFolder(folder, SIZE)
    assert in_processes(decoded, 0) is decoded
    workers = in_processes(arrays, 1)
    np.testing.assert_array_equal(workers.batch("test", np.array([4, 1]), 0)[0], images[0][[4, 1]])
    worker = workers._idle.get()
    workers._idle.put(worker)
    workers.close()
    assert worker.process.returncode == 0

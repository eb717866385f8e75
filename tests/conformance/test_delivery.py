"""Delivery files: the plain implementation on the vectors, their prefixes and their damage."""

import hashlib
import heapq
import random
import shutil
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vector_files import COMMITTED, ROOT, Vector, each, read_manifest

sys.path.insert(0, str(ROOT))

from spec import plain_delivery, plain_elsa
from spec.plain_delivery import Delivery

EXAMPLE = COMMITTED / "valid" / "delivery" / "example.ship.safetensors"


def error_of(action: Callable[[], object]) -> str | None:
    """The registry name of the error that an action gives; any other exception goes through."""
    try:
        action()
    except plain_elsa.Bad as bad:
        return bad.error
    return None


def digest(opened: Delivery, t: int) -> str:
    """The digest of a level (ELSA §7)."""
    nested = opened.source.profile["nested"]
    level = {
        name: plain_elsa.LevelTensor(dtype, shape, data, name in nested)
        for name, (dtype, shape, data) in opened.level(t).items()
    }
    return plain_elsa.level_digest(level)


def there(ends: list[int], length: int) -> tuple[str | None, int]:
    """What a prefix gives when it is opened, and how many of its parts are complete."""
    if length < ends[0]:
        return "Truncated", 0
    if length < ends[1]:
        return "Incomplete", 0
    return None, sum(end <= length for end in ends[2:])


def of_whole(vector: Vector) -> bool:
    """Whether an entry describes a file, rather than a shard that an index names."""
    return "ends" in vector


# --- Valid files ---------------------------------------------------------------------------------


@each("valid", "delivery", of_whole)
def test_whole_file_gives_its_source(vector: Vector) -> None:
    """ELSA-D-003, ELSA-D-004."""
    raw = vector.path.read_bytes()
    opened = plain_delivery.validate(raw)
    assert opened.parts_there == vector["levels"] + 1
    assert opened.document["block"] == vector["block"]
    whole = opened.whole()
    assert hashlib.sha256(whole).hexdigest() == vector["whole"]
    if "source" in vector:
        assert whole == (vector.root / vector["source"]).read_bytes()


@each("valid", "delivery", of_whole)
def test_each_prefix_gives_its_levels(vector: Vector) -> None:
    """Around the end of every part (ELSA-D-040), and each level by its digest (ELSA-D-006)."""
    raw, ends = vector.path.read_bytes(), vector["ends"]
    assert ends[-1] == len(raw)
    chosen = sorted({*ends[:6], *ends[-2:]})
    for length in sorted({end + step for end in chosen for step in (-1, 0, 1)}):
        if length > len(raw):
            assert error_of(lambda: Delivery(raw + b"\0")) == "TrailingData"
            continue
        error, parts = there(ends, length)
        prefix = raw[:length]
        assert error_of(lambda prefix=prefix: plain_delivery.validate(prefix)) == error  # type: ignore[misc]
        if error is None:
            opened = Delivery(prefix)
            assert opened.parts_there == parts
            if parts < vector["levels"]:
                assert error_of(lambda: opened.level(parts + 1)) == "Incomplete"  # noqa: B023
            if parts <= vector["levels"]:
                assert error_of(opened.whole) == "Incomplete"
    for level, wanted in vector.entry.get("digests", {}).items():
        t = int(level)
        if t < 3 or t == vector["levels"]:  # each from the bytes that it needs and no more
            assert digest(Delivery(raw[: ends[t + 1]]), t) == wanted


@each("valid", "delivery", lambda vector: "writer" in vector)
def test_writer_gives_the_parts(vector: Vector) -> None:
    """ELSA-D-002; the head's compression is free (ELSA-D-012)."""
    raw = vector.path.read_bytes()
    start = vector["ends"][1] - vector["ends"][0]
    whole = Delivery(raw).whole()
    made = Delivery(plain_delivery.ship(whole, vector["block"]))
    assert made.data[made.ends[0] :] == Delivery(raw).data[start:]
    assert made.document["parts"][1:] == Delivery(raw).document["parts"][1:]


def test_writer_gives_the_example() -> None:
    """All bytes, the header's too (ELSA-D-007, ELSA-D-010)."""
    raw = EXAMPLE.read_bytes()
    compress = plain_delivery.stored_zlib
    assert plain_delivery.ship(Delivery(raw).whole(), compress=compress) == raw


def test_vectors_use_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode, h and type, in what a Writer makes and in what it would not."""
    seen: Counter[tuple[bool, str, int]] = Counter()
    writer = False

    def watch(function: str) -> None:
        original = getattr(plain_delivery, function)

        def watched(fields: plain_delivery.Fields, *arguments: Any) -> Any:
            seen[writer, function, fields.data[fields.at]] += 1
            return original(fields, *arguments)

        monkeypatch.setattr(plain_delivery, function, watched)

    for function in ("read_positions", "read_values", "read_stream"):
        watch(function)
    stored = 0
    for vector in read_manifest(COMMITTED):
        if (vector["kind"], vector["verdict"]) == ("delivery", "valid") and "ends" in vector:
            writer = "writer" in vector
            opened = plain_delivery.validate(vector.path.read_bytes())
            nested = len(opened.plan.nested)
            if nested and vector["block"] == 18:
                payloads = opened.payloads(1)
                stored += sum(payload[1:2] == b"\4" for payload in payloads[-nested:])
    assert stored
    for writer, types in ((True, {0, 1, 2}), (False, {0, 2})):
        for function, wanted in (
            ("read_positions", {0, 1, 2, 3}),
            ("read_values", {0, 1, 2, 3, 4, 5, 255}),
            ("read_stream", types),
        ):
            assert wanted == {value for *key, value in seen if key == [writer, function]}


# --- ELSA files ----------------------------------------------------------------------------------


@each("valid", "elsa")
@pytest.mark.parametrize("block", [6, 18])
def test_valid_elsa_file_comes_back(vector: Vector, block: int) -> None:
    """ELSA-D-001, ELSA-D-004; and each level's digest from its prefix."""
    source = vector.path.read_bytes()
    raw = plain_delivery.ship(source, block)
    opened = plain_delivery.validate(raw)
    assert opened.whole() == source
    start = len(raw) - len(opened.data)
    for level, wanted in vector.entry.get("digests", {}).items():
        if int(level) <= 3 or int(level) == opened.levels:
            prefix = raw[: start + opened.ends[int(level)]]
            assert digest(Delivery(prefix), int(level)) == wanted


@each("invalid", "elsa")
def test_invalid_elsa_file_is_refused(vector: Vector) -> None:
    """ELSA-D-001."""
    raw = vector.path.read_bytes()
    assert error_of(lambda: plain_delivery.ship(raw)) == vector["error"]


def any_words(dtype: str, n: int, choose: random.Random) -> list[int]:
    """Finite words of one kind: any bits, a few values, or small ones."""
    sign, infinity = plain_elsa.sign_bit(dtype), plain_elsa.infinity(dtype)
    few = [choose.randrange(infinity) for _ in range(3)]
    kind = choose.randrange(3)
    words = []
    for _ in range(n):
        word = choose.choice(few)
        if kind == 0:
            word = choose.randrange(infinity)
        elif kind == 1:
            word = infinity // 2 - int(choose.expovariate(1 / infinity * 64)) % (infinity // 2)
        words.append(word | choose.choice((0, sign)))
    return words


@pytest.mark.parametrize("seed", range(60))
def test_any_network_comes_back(seed: int) -> None:
    """ELSA-D-004, and that a Writer's payload is never too long (ELSA-D-018)."""
    choose = random.Random(seed)
    tau = choose.randint(1, 7)
    levels = choose.randint(1, min(2**tau - 1, 20))
    entries, counts, data = {}, {}, b""
    for i in range(choose.randint(1, 4)):
        dtype = choose.choice(["F32", "BF16", "F16", "F64"])
        n = choose.choice([0, 1, 2, 63, 64, 65, choose.randint(3, 500)])
        words = any_words(dtype, n, choose)
        if i or seed % 2:
            frozen = choose.random()
            steps = [choose.randint(1, levels) * (choose.random() < frozen) for _ in words]
            words = [word >> tau << tau | step for word, step in zip(words, steps, strict=True)]
            counts[f"w{i}"] = [sum(0 < s <= t for s in steps) for t in range(1, levels + 1)]
        stored = plain_delivery.to_bytes(words, dtype)
        offsets = [len(data), len(data) + len(stored)]
        entries[f"w{i}"] = {"dtype": dtype, "shape": [n], "data_offsets": offsets}
        data += stored
    totals = [sum(count[t] for count in counts.values()) for t in range(levels)]
    profile = {
        "version": "1.0",
        "bits": tau,
        "levels": [{"name": "x", "nonzero": total} for total in totals],
        "nested": counts,
    }
    text = {"__metadata__": {"elsa": plain_delivery.dump(profile)}} | entries
    header = plain_delivery.dump(text).encode()
    source = len(header).to_bytes(8, "little") + header + data
    opened = plain_delivery.validate(plain_delivery.ship(source, choose.choice([6, 7, 18])))
    assert opened.whole() == source
    for t in {1, levels}:
        expected = plain_elsa.extract(plain_elsa.open_elsa(source), t)
        assert opened.level(t) == {
            name: (tensor.dtype, tensor.shape, tensor.data) for name, tensor in expected.items()
        }


@pytest.mark.parametrize("seed", range(40))
def test_code_is_shortest(seed: int) -> None:
    """The lengths of ELSA-D-037 are those of a Huffman code where 12 bits are enough."""
    choose = random.Random(seed)
    symbols = choose.sample(range(256), choose.choice([2, 3, 17, 40, 256]))
    steep = choose.choice([0.1, 0.5, 2, 40])
    count = {symbol: int(choose.paretovariate(1 / steep)) % 10**6 + 1 for symbol in symbols}
    lengths = plain_delivery.code_lengths(count)
    assert sum(2.0**-length for length in lengths.values()) == 1
    assert max(lengths.values()) <= 12
    heap, total = list(count.values()), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    spent = sum(count[symbol] * length for symbol, length in lengths.items())
    assert spent >= total
    if sum(count.values()) < 610:  # a tree of depth 13 has at least so much: Fibonacci numbers
        assert spent == total


# --- Broken files --------------------------------------------------------------------------------


@each("invalid", "delivery")
def test_invalid_file_is_rejected(vector: Vector) -> None:
    """The error of the manifest where it says, and the levels below load (ELSA-D-043, 44)."""
    raw, error = vector.path.read_bytes(), vector["error"]
    assert error_of(lambda: plain_delivery.validate(raw)) == error
    opens = error_of(lambda: Delivery(raw))
    if vector["checked_by"] == "reader":
        assert opens == error
        return
    assert opens is None
    opened = Delivery(raw)
    last = vector.entry.get("level", opened.levels)
    for t in range(1, opened.levels if last == "dense" else last):
        opened.level(t)
    if vector["checked_by"] == "level":
        read = opened.whole if last == "dense" else lambda: opened.level(last)
        assert error_of(read) == error


def test_every_prefix() -> None:
    """Every cut of a small file: the complete parts load, and nothing else (ELSA-D-040)."""
    raw = EXAMPLE.read_bytes()
    (entry,) = (v for v in read_manifest(COMMITTED) if v.path == EXAMPLE)
    whole = Delivery(raw)
    levels = {t: whole.level(t) for t in (1, 2)}
    for length in range(len(raw) + 1):
        prefix = raw[:length]
        error, parts = there(entry["ends"], length)
        assert error_of(lambda prefix=prefix: plain_delivery.validate(prefix)) == error  # type: ignore[misc]
        if error:
            continue
        opened = Delivery(prefix)
        assert opened.parts_there == parts
        for t, level in levels.items():
            if t <= parts:
                assert opened.level(t) == level
            else:
                assert error_of(lambda t=t: opened.level(t)) == "Incomplete"  # type: ignore[misc]  # noqa: B023
        assert (error_of(opened.whole) is None) == (length == len(raw))


def test_every_byte_changed() -> None:
    """All bytes of a file are under a checksum: no change of one goes unnoticed."""
    raw = EXAMPLE.read_bytes()
    for at in range(len(raw)):
        for mask in (1, 16, 128, 255):
            changed = raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]
            assert error_of(lambda changed=changed: plain_delivery.validate(changed)), at  # type: ignore[misc]


@pytest.mark.parametrize("case", ["example", "choices", "gaps", "per_level"])
def test_bytes_of_the_payloads_changed_with_their_checksums(case: str) -> None:
    """Where the checksum is right, a payload is refused by name or decodes to some words."""
    raw = (COMMITTED / "valid" / "delivery" / f"{case}.ship.safetensors").read_bytes()
    opened = Delivery(raw)
    verdicts: Counter[str | None] = Counter()
    for t in range(1, opened.levels + 2):
        payloads = opened.payloads(t)
        before, after = opened.data[: opened.ends[t - 1]], opened.data[opened.ends[t] :]
        for i, payload in enumerate(payloads):
            for at in range(0, len(payload), max(1, len(payload) // 30)):
                for mask in (1, 128):
                    changed = payload[:at] + bytes([payload[at] ^ mask]) + payload[at + 1 :]
                    all_of_them = [*payloads[:i], changed, *payloads[i + 1 :]]
                    part = plain_delivery.part_bytes(all_of_them, opened.head)
                    data = before + part + after
                    document = {k: v for k, v in opened.document.items() if k != "header"}
                    file = plain_delivery.write_file(document, data, pad=False)
                    verdicts[error_of(lambda file=file: plain_delivery.validate(file))] += 1  # type: ignore[misc]
    assert verdicts["InvalidDelivery"]
    assert set(verdicts) <= {
        *(None, "InvalidDelivery", "CountMismatch", "NonFinite"),
        *("ChecksumMismatch", "DigestMismatch"),
    }


def test_parts_of_two_files() -> None:
    """The parts of a file with another head are refused, whatever their sizes (ELSA-D-015)."""
    source = (EXAMPLE.parents[1] / "tau_2.safetensors").read_bytes()
    raw = plain_delivery.ship(source, compress=plain_delivery.stored_zlib)
    opened = Delivery(raw)
    start = len(raw) - len(opened.data)
    other = plain_delivery.part_bytes(opened.payloads(2), opened.head + b" ")
    assert len(other) == len(opened.part(2))
    mixture = raw[: start + opened.ends[1]] + other + raw[start + opened.ends[2] :]
    assert Delivery(mixture).level(1) == opened.level(1)
    assert error_of(lambda: Delivery(mixture).level(2)) == "ChecksumMismatch"


@pytest.mark.parametrize("case", ["head_bomb", "index_huge", "gaps_bomb"])
def test_bombs_are_small(case: str) -> None:
    """What a file declares is not allocated before it is there (ELSA-D-005)."""
    raw = (COMMITTED / "invalid" / "InvalidDelivery" / f"{case}.ship.safetensors").read_bytes()
    tracemalloc.start()
    assert error_of(lambda: plain_delivery.validate(raw)) == "InvalidDelivery"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 19


# --- Shards --------------------------------------------------------------------------------------


@each("valid", "delivery_index")
def test_sharded_network_gives_its_levels(vector: Vector, tmp_path: Path) -> None:
    """ELSA-D-042."""
    deliveries = plain_delivery.validate_index(vector.path)
    for t in range(1, vector["levels"] + 1):
        level: dict[str, plain_elsa.LevelTensor] = {}
        for opened in deliveries:
            level |= opened.extract(opened.decode(t), t)
        assert plain_elsa.level_digest(level) == vector["digests"][str(t)]
    # One shard has level 1 only: no level is there that the others have alone.
    for path in vector.path.parent.iterdir():
        shutil.copy(path, tmp_path)
    last = sorted(tmp_path.glob("*.ship.safetensors"))[-1]
    raw = last.read_bytes()
    start = len(raw) - len(deliveries[-1].data)
    last.write_bytes(raw[: start + deliveries[-1].ends[1]])
    found = plain_delivery.validate_index(tmp_path / vector.path.name)
    assert [opened.parts_there for opened in found] == [vector["levels"] + 1, 1]


@each("invalid", "delivery_index")
def test_invalid_index_is_rejected(vector: Vector) -> None:
    """ELSA-D-042."""
    assert error_of(lambda: plain_delivery.validate_index(vector.path)) == vector["error"]
    if vector["checked_by"] == "reader":
        assert error_of(lambda: plain_delivery.open_index(vector.path)) == vector["error"]

"""The specification holds together: vectors, requirements, registry, example and snippet."""

import hashlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from vector_files import COMMITTED, ROOT, SPEC, metadata, read_manifest, stored_tensors

import elsa_format

TEXT = (SPEC / "elsa-1.0.md").read_text(encoding="utf-8")
DELIVERY = (SPEC / "delivery-1.0.md").read_text(encoding="utf-8")
EXAMPLE = COMMITTED / "valid" / "example.safetensors"
CASES = ("checksums.json", "embed.json", "listings.json", "written.json")
DELIVERY_EXAMPLE = COMMITTED / "valid" / "delivery" / "example.ship.safetensors"
REQUIREMENT = re.compile(r"ELSA-[RD]-[0-9]{3}")


def test_vectors_are_what_the_script_makes() -> None:
    command = [sys.executable, str(SPEC / "make_vectors.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_manifest_lists_every_vector() -> None:
    listed = set()
    for vector in read_manifest(COMMITTED):
        listed.add(vector["file"])
        assert hashlib.sha256(vector.path.read_bytes()).hexdigest() == vector["sha256"]
    files = {p.relative_to(COMMITTED).as_posix() for p in COMMITTED.rglob("*") if p.is_file()}
    assert files - listed == {"manifest.json", *CASES}
    assert listed <= files
    assert sum((COMMITTED / file).stat().st_size for file in files) < 370_000


def test_every_requirement_is_cited() -> None:
    defined = []
    for letter, text in (("R", TEXT), ("D", DELIVERY)):
        found = re.findall(r"^- \*\*(ELSA-[A-Z]-[0-9]{3})\*\* ", text, re.MULTILINE)
        assert sorted(found) == [f"ELSA-{letter}-{i:03}" for i in range(1, len(found) + 1)]
        defined += found
    cited = set()
    for file in ("manifest.json", *CASES):
        cited |= set(REQUIREMENT.findall((COMMITTED / file).read_text(encoding="utf-8")))
    for path in (ROOT / "tests").rglob("*.py"):
        cited |= set(REQUIREMENT.findall(path.read_text(encoding="utf-8")))
    assert set(defined) - cited == set()
    assert cited - set(defined) == set()


def test_every_error_of_the_registry_has_a_class_and_a_vector() -> None:
    """ELSA-R-078."""
    registry = TEXT[TEXT.index("### 11.1") : TEXT.index("### 11.2")]
    errors = re.findall(r"^\| `([A-Za-z]+)` \| ", registry, re.MULTILINE)
    assert all(issubclass(getattr(elsa_format, error), elsa_format.FormatError) for error in errors)
    refused = json.loads((COMMITTED / "embed.json").read_text(encoding="utf-8"))["refused"]
    writing = {row[-1] for row in refused}
    registry = DELIVERY[DELIVERY.index("\n## 10 ") : DELIVERY.index("\n## 11 ")]
    errors += re.findall(r"^\| `([A-Za-z]+)` \| ", registry, re.MULTILINE)
    assert set(errors) == {path.name for path in (COMMITTED / "invalid").iterdir()} | writing


def printed(text: str) -> bytes:
    """The bytes of annotated hex; `20 × 9` is a byte nine times."""
    found = b""
    for line in text.splitlines():
        if match := re.match(r"([0-9a-f]{8})  ((?:[0-9a-f]{2}(?: |$))+)(?:× ([0-9]+))?", line):
            assert int(match.group(1), 16) == len(found)
            found += bytes.fromhex(match.group(2)) * int(match.group(3) or 1)
    return found


def test_annotated_hex_is_the_example() -> None:
    assert printed(TEXT[TEXT.index("\n## 13 ") : TEXT.index("\n## 14 ")]) == EXAMPLE.read_bytes()
    text = DELIVERY[DELIVERY.index("\n## 12 ") : DELIVERY.index("\n## 13 ")]
    assert printed(text) == DELIVERY_EXAMPLE.read_bytes()


def test_digest_snippet_gives_the_digests() -> None:
    """ELSA-R-058, ELSA-R-059."""
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    size = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    files = 0
    for vector in read_manifest(COMMITTED):
        if (vector["kind"], vector["verdict"]) == ("level", "valid") and "source" in vector:
            stored = stored_tensors(vector.path)
            document = json.loads(metadata(vector.path)["elsa_level"])
            if document["layout"] != "dense":
                continue
            nested = vector.beside(vector["source"])["counts"]
            level = {
                name: (t["dtype"], t["shape"], t["data"], size[t["dtype"]] if name in nested else 0)
                for name, t in stored.items()
            }
            assert scope["level_digest"](level) == vector["digests"][str(vector["level"])]
            files += 1
    assert files


@pytest.mark.parametrize("name", ["elsa-1.0.md", "delivery-1.0.md"])
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (SPEC / name).read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        assert (SPEC / path).exists()
        if heading:
            text = (SPEC / (path or name)).read_text(encoding="utf-8")
            slugs = {
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
                for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            }
            assert heading in slugs


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
def test_nearest_is_nearest(dtype: str) -> None:
    """ELSA-R-038 by trying every word in reach, not by the pseudocode."""
    cases = json.loads((COMMITTED / "embed.json").read_text(encoding="utf-8"))
    infinity = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00, "F64": 0x7FF << 52}[dtype]
    for group in cases["groups"]:
        step = 2 ** group["tau"]
        for word, counter, nearest, overwrite in group["cases"] if group["dtype"] == dtype else []:
            sign = 1 << (4 * len(word) - 1)
            value, found = int(word, 16), int(nearest, 16)
            magnitude = value & (sign - 1)
            near = range(max(magnitude - step, 0), min(magnitude + step + 1, infinity))
            wanted = [q for q in near if q % step == counter]
            best = min(wanted, key=lambda q: (abs(q - magnitude), q))
            assert found == (value & sign) | best, (group["tau"], word, counter)
            assert int(overwrite, 16) == value - value % step + counter

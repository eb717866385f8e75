"""The list of a directory, case by case (delivery specification §9.1)."""

import json

import jsonschema
import pytest
from internals import _manifest as listing
from vector_files import COMMITTED, SPEC

import elsa_format

CASES = json.loads((COMMITTED / "listings.json").read_text(encoding="utf-8"))
SCHEMA = json.loads((SPEC / "files.schema.json").read_text(encoding="utf-8"))


def fits(text: str) -> bool:
    """Whether a text fits the schema."""
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("text", CASES["valid"])
def test_valid(text: str) -> None:
    """What is read, and written in the form that Writers have (ELSA-D-049)."""
    document, found = json.loads(text), listing.parse(text.encode(), "list")
    assert found.weights == document["weights"]
    assert {name: (entry.size, entry.sha256) for name, entry in found.files.items()} == {
        name: (entry["size"], entry["sha256"]) for name, entry in document["files"].items()
    }
    assert listing.parse(found.to_bytes(), "list") == found
    files = {name: {"sha256": e.sha256, "size": e.size} for name, e in found.files.items()}
    written = {"files": files, "version": "1.0", "weights": found.weights}
    compact = json.dumps(written, separators=(",", ":"), ensure_ascii=False, sort_keys=True)
    assert found.to_bytes().decode() == compact
    assert fits(text)


@pytest.mark.parametrize(("error", "text"), CASES["invalid"])
def test_invalid(error: str, text: str) -> None:
    with pytest.raises(getattr(elsa_format, error)) as found:
        listing.parse(text.encode(), "list")
    assert type(found.value).__name__ == error
    assert "\n" not in str(found.value)
    if error not in ("InvalidJson", "DuplicateKey"):
        document = json.loads(text)
        both = str(document.get("weights")) in list(document.get("files") or [])
        assert fits(text) == both  # which the schema does not see

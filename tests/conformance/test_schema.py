"""The JSON Schemas against the documents in the vectors.

ELSA-R-048, ELSA-R-065, ELSA-R-101, ELSA-D-008.
"""

import json
from typing import Any

import jsonschema
import pytest
from vector_files import SPEC, Vector, each, metadata

SCHEMAS = {
    "elsa": ("elsa", "profile.schema.json"),
    "level": ("elsa_level", "level.schema.json"),
    "level_index": (None, "index.schema.json"),
    "delivery": ("elsa_delivery", "delivery.schema.json"),
}


def problems(vector: Vector) -> list[Any]:
    """What the schema finds wrong with a vector's document."""
    key, file = SCHEMAS[vector["kind"]]
    schema = json.loads((SPEC / file).read_text(encoding="utf-8"))
    text = metadata(vector.path)[key] if key else vector.path.read_text(encoding="utf-8")
    document = json.loads(text)
    return list(jsonschema.Draft202012Validator(schema).iter_errors(document))


@pytest.mark.parametrize("file", [file for _, file in SCHEMAS.values()])
def test_schema_is_a_schema(file: str) -> None:
    schema = json.loads((SPEC / file).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)


@each("valid", "elsa")
def test_valid_profile_fits(vector: Vector) -> None:
    assert problems(vector) == []


@each("valid", "level")
def test_valid_level_document_fits(vector: Vector) -> None:
    assert problems(vector) == []


@each("valid", "level_index")
def test_valid_index_fits(vector: Vector) -> None:
    assert problems(vector) == []


@each("invalid", "level_index")
def test_invalid_index_does_not_fit(vector: Vector) -> None:
    assert bool(problems(vector)) == ("schema" in vector)


@each("valid", "delivery")
def test_valid_delivery_document_fits(vector: Vector) -> None:
    assert problems(vector) == []


@each("invalid", "delivery")
def test_invalid_delivery_document_does_not_fit(vector: Vector) -> None:
    """Of an error in the document; what is wrong with a head or a part is no concern of it."""
    if vector["error"] in ("InvalidDelivery", "UnsupportedVersion", "UnsupportedFeature"):
        assert bool(problems(vector)) == ("schema" in vector)


@each("invalid", "elsa")
def test_invalid_profile_does_not_fit(vector: Vector) -> None:
    """Where the schema can see the error, and nowhere else, it finds it."""
    if vector["error"] in ("InvalidProfile", "UnsupportedVersion", "UnsupportedFeature"):
        assert bool(problems(vector)) == ("schema" in vector)


@each("invalid", "level")
def test_invalid_level_document_does_not_fit(vector: Vector) -> None:
    if vector["error"] in ("InvalidLayout", "UnsupportedVersion", "UnsupportedFeature"):
        if "elsa_level" not in metadata(vector.path):
            return
        assert bool(problems(vector)) == ("schema" in vector)

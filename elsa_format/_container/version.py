"""The version of a document, and what it requires of who reads it (spec §5.1)."""

import re
from collections.abc import Mapping
from typing import Any

from elsa_format._errors import FormatError, UnsupportedFeature, UnsupportedVersion


def check_version(document: Mapping[str, Any], where: str, malformed: type[FormatError]) -> None:
    """Refuse a document of another major version, or one that requires what 1.0 does not know."""
    version = document.get("version")
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", version):
        raise malformed(f"{where} version {version!r}, expected 'MAJOR.MINOR'")
    if not version.startswith("1."):  # as text: 01 is another major version
        raise UnsupportedVersion(f"{where} version {version}, expected 1.x")
    requires = document.get("requires", [])
    if not isinstance(requires, list) or not all(isinstance(item, str) for item in requires):
        raise malformed(f"{where} requires is not a list of strings")
    if requires:
        raise UnsupportedFeature(f"{where} requires {', '.join(requires)}, which 1.0 does not know")

"""The pages of the documentation run, lead somewhere, and say what to install."""

import hashlib
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, run

import elsa_format

NEEDED = {"pytorch.md": ["torch"], "huggingface.md": ["torch", "transformers", "accelerate"]}
"""What pages need that make test does without."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDED.get(page.name, []):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make test-torch)")
    monkeypatch.chdir(tmp_path)
    run(page, blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_says_what_to_install(page: Path) -> None:
    lines = [block.line for block in blocks(page) if block.kind == "python" and not block.installs]
    assert lines == []


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_reader_in_another_language_agrees(rich: Path, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    page = ROOT / "docs" / "other-languages.md"
    (code,) = [block.code for block in blocks(page) if block.kind == "javascript"]
    (tmp_path / "read_elsa.js").write_text(code)
    with elsa_format.open(rich) as file:
        for level in (1, 2, 3):
            done = subprocess.run(
                [node, tmp_path / "read_elsa.js", rich, str(level)],
                capture_output=True,
                text=True,
                check=True,
            )
            expected = [
                f"{name} {array.nbytes} {hashlib.sha256(array.tobytes()).hexdigest()}"
                for name, array in sorted(file.load(level).items())
            ]
            assert done.stdout.splitlines() == expected

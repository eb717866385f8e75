"""The pages of the documentation run, lead somewhere, and say what to install."""

import hashlib
import re
import shutil
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import PAGES, ROOT, Block, blocks, run

import elsa_format

NEEDED = {"pytorch.md": ["torch"], "huggingface.md": ["torch", "transformers", "accelerate"]}
"""What pages need that make test does without."""


SECTIONS = {"[torch]": "torch", "[transformers]": "transformers"}
"""What the blocks below an Install line need that make test does without, by what it installs."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDED.get(page.name, []):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make test-torch)")
    monkeypatch.chdir(tmp_path)
    run(page, [block for block in blocks(page) if can_run(block)])


def can_run(block: Block) -> bool:
    """Whether what its section installs is there."""
    asked = block.installs[-1] if block.installs else ""
    return all(find_spec(name) is not None for extra, name in SECTIONS.items() if extra in asked)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_says_what_to_install(page: Path) -> None:
    lines = [block.line for block in blocks(page) if block.kind == "python" and not block.installs]
    assert lines == []


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_versions_are_those_that_are_asked_for_and_run() -> None:
    """What a page says of versions, one file decides: pyproject.toml, the Makefile, or the code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = " ".join(word for words in project["optional-dependencies"].values() for word in words)
    make = (ROOT / "Makefile").read_text("utf-8")
    native = ROOT / "converters" / "elsa_converters" / "sparse" / "native" / "onnxruntime" / "ops.c"

    def asked(name: str, text: str = extras) -> str:
        (found,) = set(re.findall(rf"\b{name}[>=]=([\d.]+)", text)) - {""}
        return found

    def page(name: str) -> str:
        return " ".join((ROOT / name).read_text("utf-8").split())

    (library,) = re.findall(r"needs ONNX Runtime ([\d.]+) or newer", native.read_text("utf-8"))
    runtimes = re.findall(r"onnxruntime==([\d.]+):", make)
    (transformers,) = re.findall(r"TRANSFORMERS \?= ([\d.]+)", make)
    fast, readme = page("docs/fast.md"), page("README.md")
    assert f"The library needs {library} or newer" in fast
    assert f"the Python package asks for {asked('onnxruntime')}." in fast
    assert f"PyTorch {asked('torch')} is the oldest" in page("docs/pytorch.md")
    assert f"transformers {asked('transformers')} and newer" in page("docs/huggingface.md")
    assert f"| PyTorch {asked('torch', make)} with transformers {transformers} |" in readme
    assert f"| ONNX Runtime {', '.join(runtimes)} and the newest |" in readme


def test_links_name_the_repositories_of_today() -> None:
    for path in [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("spec/*.md"), *ROOT.glob("js/*.md")]:
        assert "github.com/huggingface/safetensors" not in path.read_text("utf-8"), path.name


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

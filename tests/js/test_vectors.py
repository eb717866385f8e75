"""The package against the vectors of the specification, in every runtime that is there.

All requirements ELSA-R-… and ELSA-D-… that a vector cites are tried here once more.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

HERE = Path(__file__).parent
RUN = HERE / "run_vectors.mjs"
BUGS: list[list[str]] = json.loads((HERE / "planted.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All vectors, with those that are made and not committed."""
    folder = tmp_path_factory.mktemp("vectors")
    make = ROOT / "spec" / "make_vectors.py"
    subprocess.run([sys.executable, make, "--extended", folder], check=True)
    return folder


def test_all_vectors(run_node: Callable[..., str], vectors: Path) -> None:
    (result,) = json.loads(run_node(RUN, vectors))
    assert result["failures"] == []
    assert result["kernels"] == "wasm"
    manifest = json.loads((vectors / "manifest.json").read_text("utf-8"))
    assert result["count"] == 4 * len(manifest["vectors"])


def test_all_vectors_without_webassembly(run_node: Callable[..., str], vectors: Path) -> None:
    (result,) = json.loads(run_node(RUN, vectors, "plain", "first"))
    assert result["failures"] == []
    assert result["kernels"] == "plain"


@pytest.mark.parametrize("command", [["deno", "run", "-A"], ["bun"]], ids=["deno", "bun"])
def test_all_vectors_elsewhere(command: list[str], vectors: Path) -> None:
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"{command[0]} is not installed")  # nobody needs it to work on the package
    done = subprocess.run(
        [program, *command[1:], RUN, vectors], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)[0]["failures"] == []


def test_rules_of_written_json_and_checksums(run_node: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "rules.mjs"
    script.write_text(
        f"""
        import {{ readFileSync }} from 'node:fs'
        import {{ checkHeader }} from '{(ROOT / "js/src/document.js").as_uri()}'
        import {{ compareText, writeJson }} from '{(ROOT / "js/src/written.js").as_uri()}'
        import {{ writeChecksum, xxh3 }} from '{(ROOT / "js/src/xxh3.js").as_uri()}'
        const read = name => JSON.parse(readFileSync('{ROOT}/spec/vectors/' + name, 'utf8'))
        const {{ numbers, strings, keys }} = read('written.json')
        const view = new DataView(new ArrayBuffer(8))
        const number = bits => (view.setBigUint64(0, BigInt('0x' + bits)), view.getFloat64(0))
        const wrong = []
        for (const [bits, text] of numbers) if (writeJson(number(bits)) !== text) wrong.push(text)
        for (const [points, text] of strings) if (writeJson(String.fromCodePoint(...points)) !== text) wrong.push(text)
        if (String([...keys].reverse().sort(compareText)) !== String(keys)) wrong.push('keys')
        for (const [n, sum] of read('checksums.json').cases) {{
          if (writeChecksum(xxh3(Uint8Array.from({{ length: n }}, (_, i) => (i * i + 7 * i + n) % 251))) !== sum) wrong.push(sum)
        }}
        for (const [header, digits, sum] of read('checksums.json').headers) {{
          // It states its own checksum only where that is by chance; the message has the one that was found.
          try {{
            checkHeader(new TextEncoder().encode(header), 'xxh3:' + digits)
          }} catch (error) {{
            if (!error.message.includes(sum + ',')) wrong.push(header)
          }}
        }}
        console.log(JSON.stringify(wrong))
        """,
        "utf-8",
    )
    assert json.loads(run_node(script)) == []


def test_planted_bugs_are_found(
    run_node: Callable[..., str], vectors: Path, tmp_path: Path
) -> None:
    """A vector for every rule: each of these bugs, alone, makes at least one of them fail."""
    folders = []
    for number, (file, code, bug) in enumerate(BUGS):
        folder = tmp_path / f"{number}"
        shutil.copytree(ROOT / "js" / "src", folder)
        text = (folder / file).read_text("utf-8")
        assert text.count(code) == 1, f"{file} has {code!r} {text.count(code)} times"
        (folder / file).write_text(text.replace(code, bug), "utf-8")
        folders.append(folder)
    results: list[dict[str, Any]] = json.loads(run_node(RUN, vectors, "first", "plain", *folders))
    missed = [BUGS[i] for i, result in enumerate(results) if not result["failures"]]
    assert missed == []

"""The package as its users get it, and the tests that are written in JavaScript."""

import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, missing

import elsa_format

HERE = Path(__file__).parent
SOURCES = ROOT / "js" / "src"
SIZES = {
    "{ load, ElsaError }": 10_700,
    "{ load, openDelivery, ElsaError }": 15_900,
    "{ load, extract, loadLevelFile, ElsaError }": 14_600,
    "*": 20_500,
}
"""Bytes of gzip that a bundle with these exports may have."""
OTHERS = {"transformers": 18_500, "model": 18_000, "run": 42_500}
"""The same of other modules, without what they load later."""
RUNTIME = 25_000
"""Bytes of gzip that elsa-format/run adds, with its kernels."""
CONSUMER = """
import { ElsaError, extract, load, openDelivery, validate } from 'elsa-format'
import { readFile } from 'node:fs/promises'

const file: Uint8Array = await readFile(process.argv[2])
const { level, profile, tensors } = await load(file, { level: p => p.levels[0].name, verify: true })
const kept: number = profile.levels[0].nonzero
const counts: number[] | undefined = profile.nested.get('conv/kernel')
const shape: number[] = tensors.get('conv/kernel')!.shape
const blob = new Blob([file as BlobPart])
const stream: ReadableStream<Uint8Array> = extract(blob, { level: 1, layout: 'csr' })
let size = 0
for await (const piece of stream as unknown as AsyncIterable<Uint8Array>) size += piece.length
try {
  await openDelivery(file)
} catch (error) {
  if (!(error instanceof ElsaError) || error.code !== 'NotElsa') throw error
}
// @ts-expect-error there is no such layout
extract(file, { level: 1, layout: 'coo' }).cancel().catch(() => {})
// @ts-expect-error a level has to be chosen
const missing: Promise<unknown> = load(file).catch(() => {})
const report: { kind: string, digests: number } = await validate(file)
console.log(JSON.stringify({ level, kept, counts, shape, size, report }))
"""


@pytest.mark.parametrize("name", ["api", "http", "memory", "rules"])
def test_in_javascript(node: str, name: str) -> None:
    command = [node, "--expose-gc", "--test", HERE / f"{name}.test.mjs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^# pass [1-9]", done.stdout, re.MULTILINE), done.stdout


def imported(module: str) -> set[str]:
    """The modules that one needs, itself included."""
    found, queue = set(), [module]
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            code = (SOURCES / name).read_text("utf-8")
            static = re.findall(r"^(?:import|export) .*'(\.[\w./]+)'$", code, re.MULTILINE)
            later = re.findall(r"await import\('(\.[\w./]+)'\)", code)
            queue += [os.path.normpath(Path(name).parent / path) for path in static + later]
    return found


def test_every_module_is_used_and_needs_no_other_package() -> None:
    package = json.loads((ROOT / "js" / "package.json").read_text("utf-8"))
    entries = [Path(entry["default"]).name for entry in package["exports"].values()]
    paths = list(SOURCES.rglob("*.js"))
    names = {path.relative_to(SOURCES).as_posix() for path in paths}
    assert set().union(*map(imported, entries)) == names
    for path in paths:
        assert re.findall(r"from '(?!\.)", path.read_text("utf-8")) == []
    assert "dependencies" not in package


def test_version_is_that_of_the_python_package() -> None:
    package = json.loads((ROOT / "js" / "package.json").read_text("utf-8"))
    assert package["version"] == elsa_format.__version__


@pytest.fixture(scope="module")
def npm(node: str) -> Callable[..., str]:
    """npm, where it can install; what it installs is kept in .cache."""
    program = shutil.which("npm")
    modules = ROOT / ".cache" / "js"
    if program is None:
        missing("needs npm")

    def run(*arguments: object, folder: Path) -> str:
        command = [str(program), "--silent", "--no-audit", "--no-fund", *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    modules.mkdir(parents=True, exist_ok=True)
    package = json.loads((ROOT / "js" / "package.json").read_text("utf-8"))
    wanted = [f"{name}@{version}" for name, version in package["devDependencies"].items()]
    try:
        run("install", "--prefix", modules, *wanted, folder=modules)
    except AssertionError as error:
        missing(f"npm cannot install {' '.join(wanted)}: {str(error).strip()[-200:]}")
    bin_folder = modules / "node_modules" / ".bin"
    os.environ["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    return run


def test_packed_package_in_typescript(
    npm: Callable[..., str], run_node: Callable[..., str], rich: Path, tmp_path: Path
) -> None:
    source = tmp_path / "js"
    shutil.copytree(ROOT / "js", source, ignore=shutil.ignore_patterns("node_modules", "types"))
    npm("run", "check", folder=source)
    packed = npm("pack", "--pack-destination", tmp_path, folder=source).split()[-1]
    consumer = tmp_path / "consumer"
    consumer.mkdir()
    (consumer / "package.json").write_text('{"type": "module"}')
    npm("install", tmp_path / packed, folder=consumer)
    inside = consumer / "node_modules" / "elsa-format"
    names = {str(path.relative_to(inside)) for path in inside.rglob("*") if path.is_file()}
    assert {"package.json", "README.md", "src/index.js", "types/index.d.ts"} <= names
    assert all(
        name.startswith(("src/", "types/")) for name in names - {"package.json", "README.md"}
    )
    (consumer / "main.ts").write_text(CONSUMER, "utf-8")
    types = ROOT / ".cache" / "js" / "node_modules"
    (consumer / "node_modules" / "@types").symlink_to(types / "@types")
    options = "--strict --module nodenext --target es2022 --lib ES2023,DOM,DOM.AsyncIterable"
    check = ["tsc", *options.split(), "--types", "node", "main.ts"]
    done = subprocess.run(check, cwd=consumer, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found = json.loads(run_node("main.js", rich, cwd=consumer))
    assert found["level"] == 1
    assert found["shape"] == [3, 3, 4, 8]
    assert found["report"] == {"kind": "elsa", "digests": 3}


@pytest.mark.parametrize("exports", SIZES)
def test_size_as_bundlers_ship_it(npm: Callable[..., str], tmp_path: Path, exports: str) -> None:
    """One who loads levels pays for that alone."""
    assert size(bundled(exports, tmp_path)) <= SIZES[exports]


def test_sizes_of_other_modules(npm: Callable[..., str], tmp_path: Path) -> None:
    """Levels for transformers.js cost no runtime, and the runtime little."""
    sizes = {module: size(bundled("*", tmp_path, module)) for module in OTHERS}
    for module, found in sizes.items():
        assert found <= OTHERS[module], module
    assert sizes["run"] - sizes["model"] <= RUNTIME


def size(bundle: Path) -> int:
    """Bytes of gzip."""
    return len(gzip.compress(bundle.read_bytes(), 9))


def bundled(exports: str, folder: Path, module: str = "index") -> Path:
    """What esbuild makes of some exports for browsers, without what is imported later."""
    entry, out = folder / "entry.js", folder / "bundle"
    entry.write_text(f"export {exports} from '{(SOURCES / module).as_posix()}.js'")
    options = ["--bundle", "--minify", "--splitting", "--format=esm", "--log-level=error"]
    subprocess.run(["esbuild", entry, *options, f"--outdir={out}"], check=True)
    return merged(out)


def merged(out: Path) -> Path:
    """The entry, and the chunks that it imports at once."""
    code, queue = "", [out / "entry.js"]
    while queue:
        part = queue.pop().read_text("utf-8")
        code += part
        queue += [out / name for name in re.findall(r"from\"\./([\w.-]+)\"", part)]
    bundle = out.with_suffix(".mjs")
    bundle.write_text(code)
    shutil.rmtree(out)
    return bundle


def test_bundle_for_browsers_takes_no_path(
    npm: Callable[..., str], run_node: Callable[..., str], tmp_path: Path
) -> None:
    bundle = bundled("{ load }", tmp_path)
    assert b"node:" not in bundle.read_bytes()
    (tmp_path / "main.mjs").write_text(
        "import { load } from './bundle.mjs'\n"
        "await load('file:///net.safetensors', { level: 1 }).catch(e => console.log(e.message))"
    )
    said = run_node(tmp_path / "main.mjs")
    expected = "a path, expected an http(s) URL, a File or other bytes"
    assert said == f"file:///net.safetensors: {expected}\n"


def test_pack_without_typescript_says_what_to_run(npm: Callable[..., str], tmp_path: Path) -> None:
    source = tmp_path / "js"
    shutil.copytree(ROOT / "js", source, ignore=shutil.ignore_patterns("node_modules", "types"))
    cached = str(ROOT / ".cache")
    path = [entry for entry in os.environ["PATH"].split(os.pathsep) if cached not in entry]
    if shutil.which("tsc", path=os.pathsep.join(path)):
        pytest.skip("TypeScript is installed")
    done = subprocess.run(
        ["npm", "pack"],
        cwd=source,
        env=os.environ | {"PATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "TypeScript is missing. Run: npm install" in done.stdout
    assert not list(source.glob("*.tgz"))

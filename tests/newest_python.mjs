// Compile Python sources with a newer Python, which runs in Node, every warning an error: PYODIDE FOLDER ...
const [, , pyodide, ...folders] = process.argv
const { loadPyodide } = await import(`file://${process.cwd()}/${pyodide}/pyodide.mjs`)
const python = await loadPyodide()
python.mountNodeFS('/tree', process.cwd())
python.globals.set('folders', folders)
try {
  console.log(python.runPython(`
import sys, warnings
from pathlib import Path

warnings.simplefilter("error")
paths = [path for folder in folders for path in Path("/tree", folder).rglob("*.py")]
for path in paths:
    compile(path.read_bytes(), path, "exec", dont_inherit=True)
f"Python {sys.version.split()[0]} compiles {len(paths)} files without a warning"
`))
} catch (error) {
  console.error(error.message)
  process.exit(1)
}

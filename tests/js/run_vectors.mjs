// node run_vectors.mjs VECTORS [plain] [first] [SOURCES…]: prints what fails, as JSON. Runs in Node.js, Deno and Bun.
// `first` is quick: chunks of one size, and only until something fails.
import { readFile } from 'node:fs/promises'
import process from 'node:process'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { checkVectors } from './vectors.js'

const [root, ...flags] = process.argv.slice(2)
const sources = flags.filter(flag => flag.includes('/'))
if (flags.includes('plain')) {
  // As a Content-Security-Policy without 'wasm-unsafe-eval' has it.
  WebAssembly.Module = class {
    constructor() {
      throw new WebAssembly.CompileError('forbidden')
    }
  }
}
const read = async path => {
  try {
    return new Uint8Array(await readFile(`${root}/${path}`))
  } catch {
    return undefined
  }
}
const results = []
for (const source of sources.length ? sources : [fileURLToPath(new URL('../../js/src', import.meta.url))]) {
  const elsa = await import(pathToFileURL(`${source}/index.js`).href)
  const { makeKernels } = await import(pathToFileURL(`${source}/kernels.js`).href)
  const options = flags.includes('first') ? { first: true, sizes: [7] } : {}
  results.push({ source, kernels: makeKernels().kind, ...await checkVectors(elsa, read, options) })
}
console.log(JSON.stringify(results))

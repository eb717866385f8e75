// node run_vectors.mjs VECTORS [plain] [first] [kinds=…] [SOURCES…]: prints what fails, as JSON. Runs in Node.js, Deno and Bun.
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
  const kinds = flags.find(flag => flag.startsWith('kinds='))?.slice(6).split(',')
  const options = flags.includes('first') ? { first: true, sizes: [7], only: vector => !kinds || kinds.includes(vector.kind) } : {}
  results.push({ source, kernels: (makeKernels().memory ? 'wasm' : 'plain'), ...await checkVectors(elsa, read, options) })
}
console.log(JSON.stringify(results))

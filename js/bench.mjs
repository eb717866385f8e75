// What the package costs, against the least that the same runtime can do. Run by benchmarks/javascript.py:
//   node bench.mjs net.safetensors f32.ship.safetensors bf16.ship.safetensors SECONDS
import { fork } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { createServer } from 'node:http'
import process from 'node:process'

const [role, ...rest] = process.argv.slice(2)
if (role === 'serve') {
  const data = readFileSync(rest[0])
  const server = createServer((request, response) => response.setHeader('Content-Length', data.length).end(data))
  server.listen(0, '127.0.0.1', () => process.send(server.address().port))
} else if (role === 'plain') {
  WebAssembly.Module = class {
    constructor() {
      throw new WebAssembly.CompileError('forbidden')
    }
  }
  process.send(await kernels(rest))
  process.exit()
} else await main(role, ...rest)

/** Milliseconds that processors worked for this process: others that are busy do not matter. */
function clock() {
  const { user, system } = process.cpuUsage()
  return (user + system) / 1000
}

/** The least work of each, in turn. */
async function race(seconds, ways) {
  const best = ways.map(() => Infinity)
  const end = clock() + 1000 * seconds
  for (let round = 0; round < 10 || clock() < end; round++) {
    for (const [i, way] of ways.entries()) {
      const start = clock()
      await way()
      best[i] = Math.min(best[i], clock() - start)
    }
  }
  return best
}

async function drain(stream) {
  const reader = stream.getReader()
  while (!(await reader.read()).done);
}

/** Gigabytes a second of the kernels, and how much of a part of a delivery file is decoded. */
async function kernels([f32, bf16, seconds]) {
  const { BLOCK, makeKernels } = await import('./src/kernels.js')
  const { compact } = await import('./src/sift.js')
  const { openDelivery } = await import('./src/index.js')
  const k = makeKernels()
  const rates = {}
  const blocks = 400
  const work = {
    'masking, F32': () => k.mask(4, BLOCK, 3, 2),
    'masking, BF16': () => k.mask(2, BLOCK, 3, 2),
    'XXH3-64': () => k.stripes(BLOCK / 64),
    'compaction, F32': () => compact(k, 4, BLOCK),
  }
  for (const [name, run] of Object.entries(work)) {
    crypto.getRandomValues(k.block)
    const [time] = await race(seconds / 4, [() => {
      for (let i = 0; i < blocks; i++) run()
    }])
    rates[name] = blocks * BLOCK / time / 1e6
  }
  for (const [name, path] of Object.entries({ F32: f32, BF16: bf16 })) {
    const file = new Uint8Array(readFileSync(path))
    const opened = await openDelivery(file)
    for (const level of [1, 'dense']) {
      let best = Infinity
      const end = clock() + 500 * seconds
      for (let round = 0; round < 20 || clock() < end; round++) {
        const delivery = await openDelivery(file)
        const start = clock()
        await delivery.load(level, { final: true })
        best = Math.min(best, clock() - start)
      }
      rates[`delivery, ${name}, ${level === 1 ? 'level 1' : level}`] = opened.bytes(level) / best / 1e3
    }
  }
  return rates
}

async function main(path, f32, bf16, time) {
  const seconds = Number(time)
  const { extract, load } = await import('./src/index.js')
  const server = fork(new URL(import.meta.url).pathname, ['serve', path])
  const port = await new Promise(resolve => server.once('message', resolve))
  const url = `http://127.0.0.1:${port}/`
  const bytes = new Uint8Array(readFileSync(path))
  const [loaded, collected, buffered] = await race(3 * seconds, [
    () => load(url, { level: 2 }),
    async () => {
      const pieces = []
      let size = 0
      const reader = (await fetch(url)).body.getReader()
      for (let step; !(step = await reader.read()).done; size += step.value.length) pieces.push(step.value)
      const whole = new Uint8Array(size)
      size = 0
      for (const piece of pieces) {
        whole.set(piece, size)
        size += piece.length
      }
    },
    async () => (await fetch(url)).arrayBuffer(),
  ])
  const layouts = ['dense', 'bitmask', 'csr']
  const extracted = await race(3 * seconds, layouts.map(layout => () => drain(extract(bytes, { level: 2, layout }))))
  server.kill()
  const fast = await kernels([f32, bf16, time])
  const child = fork(new URL(import.meta.url).pathname, ['plain', f32, bf16, time])
  const plain = await new Promise(resolve => child.once('message', resolve))
  const megabytes = bytes.length / 1e6
  console.log(JSON.stringify({
    version: process.version,
    megabytes,
    load: loaded,
    collect: collected,
    buffer: buffered,
    extract: Object.fromEntries(layouts.map((layout, i) => [layout, megabytes / extracted[i]])),
    wasm: fast,
    plain,
  }))
}

// Answers questions of the tests, one JSON line each: what the package makes of a text, a file, a level.
import { createHash } from 'node:crypto'
import { open, readFile, writeFile } from 'node:fs/promises'
import process from 'node:process'
import { createInterface } from 'node:readline'

const root = new URL('../../js/src/', import.meta.url)
if (process.argv.includes('plain')) WebAssembly.Module = class {
  constructor() {
    throw new WebAssembly.CompileError('forbidden')
  }
}
const elsa = await import(new URL('index.js', root).href)
const { Real, parseJson } = await import(new URL('json.js', root).href)
const { makeKernels } = await import(new URL('kernels.js', root).href)
const { xxh3, writeChecksum } = await import(new URL('xxh3.js', root).href)
const { plainSha256 } = await import(new URL('sha256.js', root).href)

const bytesOf = base64 => new Uint8Array(Buffer.from(base64, 'base64'))

/** A value with all that JSON.stringify would hide: kinds of numbers, order of keys, names like __proto__. */
function spell(value) {
  if (value instanceof Map) return { object: [...value].map(([key, v]) => [key, spell(v)]) }
  if (Array.isArray(value)) return { array: value.map(spell) }
  if (value instanceof Real) {
    const view = new DataView(new ArrayBuffer(8))
    view.setFloat64(0, Number(value))
    return { real: view.getBigUint64(0).toString(16) }
  }
  return typeof value === 'number' || typeof value === 'bigint' ? { integer: String(value) } : value
}

async function* chunksOf(path, size) {
  const bytes = new Uint8Array(await readFile(path))
  for (let at = 0; at < bytes.length; at += size) yield bytes.subarray(at, at + size)
}

async function delivered(path, use) {
  const delivery = await elsa.openDelivery(path)
  try {
    return await use(delivery)
  } finally {
    await delivery.close()
  }
}

const answers = {
  json: ({ text, header }) => spell(parseJson(bytesOf(text), 'text', header)),
  xxh3: ({ bytes, seed }) => writeChecksum(xxh3(bytesOf(bytes), BigInt(seed))),
  sha256: ({ bytes, size }) => {
    const hash = plainSha256()
    const all = bytesOf(bytes)
    for (let at = 0; at < all.length; at += size) hash.update(all.subarray(at, at + size))
    return hash.hex()
  },
  kernels: () => (makeKernels().memory ? 'wasm' : 'plain'),
  async validate({ bytes, path, kind }) {
    return (await elsa.validate(path ?? bytesOf(bytes), { kind })).digests
  },
  async load({ path, kind, level }) {
    const { tensors } = kind === 'level' ? await elsa.loadLevelFile(path)
      : kind === 'delivery' ? await delivered(path, delivery => delivery.load(level)) : await elsa.load(path, { level })
    return hashed(tensors)
  },
  async extract({ path, level, layout, chunk, output }) {
    const file = await open(output, 'w')
    try {
      const source = chunk ? chunksOf(path, chunk) : new Uint8Array(await readFile(path))
      return (await elsa.extractTo(source, (piece, position) => file.write(piece, 0, piece.length, position), { level, layout })).size
    } finally {
      await file.close()
    }
  },
  async loadAll({ path, kind }) {
    const bytes = new Uint8Array(await readFile(path))
    if (kind === 'level') return hashed((await elsa.loadLevelFile(bytes)).tensors)
    const delivery = kind === 'delivery' && await elsa.openDelivery(bytes)
    const { profile } = delivery || await elsa.inspect(bytes)
    const result = {}
    for (const level of [...profile.levels.map(l => l.level), 'dense']) {
      result[level] = hashed((delivery ? await delivery.load(level) : await elsa.load(bytes, { level })).tensors)
    }
    return result
  },
  async image({ path, kind, level, output }) {
    await writeFile(output, kind === 'delivery' ? await delivered(path, delivery => delivery.image(level)) : await elsa.loadImage(path, { level }))
  },
}

/** Tensors as dtype, shape and the hash of their bytes. */
function hashed(tensors) {
  return Object.fromEntries([...tensors].map(([name, { dtype, shape, data }]) =>
    [name, [dtype, shape.map(Number), createHash('sha256').update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength)).digest('hex')]]))
}

for await (const line of createInterface({ input: process.stdin })) {
  const question = JSON.parse(line)
  let answer
  try {
    answer = { value: await answers[question.ask](question) }
  } catch (error) {
    answer = error.name === 'ElsaError' ? { error: error.code, message: error.message } : { crash: error.stack }
  }
  console.log(JSON.stringify(answer))
}

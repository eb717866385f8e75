// What callers see: sources of every kind, options, and that nothing is left open.
import assert from 'node:assert/strict'
import { createReadStream, openAsBlob } from 'node:fs'
import { copyFile, mkdtemp, readFile, readdir, rm, symlink } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { dirname, join, relative } from 'node:path'
import process from 'node:process'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import * as elsa from '../../js/src/index.js'

const url = new URL('../../spec/vectors/valid/per_level.safetensors', import.meta.url)
const path = fileURLToPath(url)
const bytes = new Uint8Array(await readFile(url))
const stream = () => new Blob([bytes]).stream()

test('the public names', () => {
  assert.deepEqual(Object.keys(elsa).sort(),
    ['ElsaError', 'extract', 'extractTo', 'inspect', 'load', 'loadImage', 'loadLevelFile', 'openDelivery', 'validate'])
})

test('every kind of source gives the same', async () => {
  const { tensors } = await elsa.load(bytes, { level: 1 })
  const odd = new Uint8Array(bytes.length + 3)
  odd.set(bytes, 3)
  const sources = {
    buffer: bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length),
    view: new DataView(odd.buffer, 3),
    blob: new Blob([bytes]),
    file: await openAsBlob(path),
    stream: stream(),
    response: new Response(bytes),
    node: createReadStream(path),
    pieces: [bytes.subarray(0, 9), new Uint8Array(0), bytes.subarray(9)],
    data: `data:application/octet-stream;base64,${Buffer.from(bytes).toString('base64')}`,
  }
  for (const [kind, source] of Object.entries(sources)) {
    assert.deepEqual((await elsa.load(source, { level: 1 })).tensors, tensors, kind)
  }
})

test('a level by number, name, or a function of the profile', async () => {
  const { profile } = await elsa.inspect(bytes)
  const [{ name }] = profile.levels
  for (const level of [1, name, p => p.levels[0].level]) assert.equal((await elsa.load(bytes, { level })).level, 1)
  for (const level of [0, 9, 1.5, 'x', undefined, null]) {
    await assert.rejects(elsa.load(bytes, { level }), { name: 'ElsaError', code: 'NoSuchLevel' })
  }
})

test('the sparsest level that has a metric', async () => {
  const file = await readFile(new URL('metrics.safetensors', url))
  const level = async wanted => (await elsa.load(file, wanted)).level
  assert.equal(await level({ min: { 10: 0.25 } }), 1)
  assert.equal(await level({ min: { accuracy: 1 } }), 'dense')
  assert.equal(await level({ max: { accuracy: 1 } }), 'dense') // no direction is recorded
  assert.equal((await elsa.inspect(file)).profile.metrics.loss.better, 'lower')
  const refused = (wanted, code, message) => assert.rejects(level(wanted), { code, message })
  await refused({ min: { accuracy: 1.5 } }, 'NoSuchLevel', 'levels have [[null],[null],[1]], expected ["accuracy >= 1.5"]')
  await refused({ min: { accuracy: 1, 10: 0 } }, 'NoSuchLevel', /^levels have \[\[0.25,null\]/)
  await refused({ min: { accuracy: NaN } }, 'NoSuchLevel', /^levels have/)
  await refused({ min: { valueOf: 1 } }, 'NoSuchLevel', /^no level records "valueOf", .*elsa-record/)
  await refused({ max: { 10: 1 } }, 'InvalidOption', '"higher" "10" is better, expected "min"')
  await refused({ level: 1, min: { 10: 0 } }, 'InvalidOption', 'a level and its metrics, expected one of them')
})

test('a source is cancelled when it is no longer wanted', async () => {
  for (const use of [
    source => elsa.inspect(source),
    source => assert.rejects(elsa.load(source, { level: 99 })),
    source => assert.rejects(elsa.extractTo(source, () => { throw Error('disk full') }, { level: 1 }), /disk full/),
  ]) {
    let cancelled = false
    let at = 0
    const source = new ReadableStream({
      pull: controller => controller.enqueue(bytes.slice(at, at += 64)),
      cancel: () => { cancelled = true },
    }, { highWaterMark: 0 })
    await use(source)
    assert.ok(cancelled)
  }
})

test('an extract that fails ends in its error', async () => {
  const damaged = bytes.slice()
  damaged[damaged.length - 1] ^= 64
  const reader = elsa.extract(damaged, { level: 1 }).getReader()
  await assert.rejects(async () => {
    while (!(await reader.read()).done);
  }, { code: 'ChecksumMismatch' })
})

test('wrong options are said to be', async () => {
  const write = () => {}
  await assert.rejects(elsa.extractTo(bytes, write, { level: 1, layout: 'coo' }), { code: 'InvalidOption' })
  await assert.rejects(elsa.extractTo(bytes, write, { level: 'dense', layout: 'csr' }), { code: 'InvalidOption' })
})

test('aborting', async () => {
  await assert.rejects(elsa.load(stream(), { level: 1, signal: AbortSignal.abort(new Error('no')) }), /no/)
})

test('progress is told', async () => {
  const told = []
  await elsa.load(bytes, { level: 1, onProgress: (...args) => told.push(args) })
  assert.deepEqual(told.at(-1), [bytes.length, bytes.length])
})

test('a file that promises more memory than there is', async () => {
  const header = new TextEncoder().encode('{"w":{"dtype":"F32","shape":[1000000000000000],"data_offsets":[0,4000000000000000]}}')
  const profile = { version: '1.0', bits: 2, levels: [{ name: 'a', nonzero: 0 }], nested: { w: [0] } }
  const text = JSON.stringify({ __metadata__: { elsa: JSON.stringify(profile) }, ...JSON.parse(new TextDecoder().decode(header)) })
  const start = new Uint8Array(8 + text.length)
  new DataView(start.buffer).setBigUint64(0, BigInt(text.length), true)
  start.set(new TextEncoder().encode(text), 8)
  await assert.rejects(elsa.load(start, { level: 1 }), { code: 'Truncated' })
  await assert.rejects(elsa.load([start, new Uint8Array(9)], { level: 1 }), { code: 'TooLarge' })
  await assert.rejects(elsa.validate([start, new Uint8Array(9)]), { code: 'Truncated' })
})

const shipped = async name => new Uint8Array(await readFile(new URL(`../../spec/vectors/valid/delivery/${name}.ship.safetensors`, import.meta.url)))
const NAMES = ['trained', 'dtypes', 'stored']

async function* single(whole) {
  for (const byte of whole) yield Uint8Array.of(byte)
}

test('deliveries that arrive at the same time do not mix', async () => {
  const files = await Promise.all(NAMES.map(shipped))
  const alone = []
  for (const file of files) alone.push((await (await elsa.openDelivery(file)).load('dense')).tensors)
  const together = await Promise.all(files.map(async file => (await (await elsa.openDelivery(single(file))).load('dense')).tensors))
  assert.deepEqual(together, alone)
})

test('calls for levels of one delivery wait for each other', async () => {
  const file = await shipped(NAMES[0])
  const { profile } = await elsa.openDelivery(file)
  const levels = [...profile.levels.map(({ level }) => level), 'dense']
  const alone = []
  for (const level of levels) alone.push(await (await elsa.openDelivery(file)).load(level))
  const one = await elsa.openDelivery(single(file))
  assert.deepEqual(await Promise.all(levels.map(level => one.load(level))), alone)
})

test('a machine whose numbers begin with the highest byte is told', async () => {
  const { of } = Uint32Array
  Uint32Array.of = number => of.call(Uint32Array, number << 24)
  try {
    await assert.rejects(elsa.inspect(bytes), /expected a little-endian/)
  } finally {
    Uint32Array.of = of
  }
})

test('a source of something else than bytes is told', async () => {
  for (const piece of ['text', 7, null, [1, 2], new Float32Array(2)]) {
    await assert.rejects(elsa.inspect([piece]), { code: 'InvalidOption', message: /the source gave .*, expected a Uint8Array/ })
  }
})

test('an error tells the files apart from the problem, however they are called', async () => {
  const raw = new Uint8Array(bytes)
  raw[raw.length - 1] ^= 1
  for (const name of ['net.safetensors', 'c', 'checksum', 'a b: c']) {
    await assert.rejects(elsa.load(new File([raw], name), { level: 'dense' }), ({ message, files, problem }) => {
      assert.deepEqual(files, [name])
      assert.match(problem, /^checksum of "/)
      assert.equal(message, `${name}: ${problem}`)
      return true
    })
  }
  const index = join(dirname(path), '../invalid/InvalidIndex/missing_shard.safetensors.index.json')
  await assert.rejects(elsa.validate(index), ({ message, files, problem }) => {
    assert.equal(files[0], index)
    assert.equal(message, [...files, problem].join(': '))
    return true
  })
})

test('messages are one line that says the file, what was found and what was expected (ELSA-R-078)', async () => {
  const root = new URL('../../spec/vectors/', import.meta.url)
  const read = async name => new File([await readFile(new URL(name, root))], name.split('/').at(-1))
  const { vectors } = JSON.parse(await (await read('manifest.json')).text())
  for (const { file, kind, verdict } of vectors) {
    if (verdict !== 'invalid') continue
    const source = await read(file)
    const files = kind.endsWith('index') ? name => read(new URL(name, new URL(file, root)).href).catch(() => undefined) : undefined
    await assert.rejects(elsa.validate(source, { kind: kind.replace(/_?index$/, '') || 'elsa', files }), ({ message }) => {
      assert.ok(message.startsWith(`${source.name}: `), message)
      assert.match(message, /^[ -~]+, expected [ -~]+$|: no JSON: "[ -~]+$/)
      assert.doesNotMatch(message, /undefined|\[object/)
      return true
    })
  }
})

test('a path or file: URL is a file, and an index finds its shards', async () => {
  const { tensors } = await elsa.load(bytes, { level: 1 })
  for (const source of [path, relative(process.cwd(), path), url, url.href]) {
    assert.deepEqual((await elsa.load(source, { level: 1 })).tensors, tensors, `${source}`)
  }
  const vectors = join(dirname(path), '..')
  assert.equal((await elsa.validate(join(vectors, 'valid/sharded/model.safetensors.index.json'))).digests, 2)
  assert.equal((await elsa.validate(join(vectors, 'valid/delivery/sharded/model.ship.safetensors.index.json'), { kind: 'delivery' })).digests, 2)
  const net = await elsa.openDelivery(join(vectors, 'valid/delivery/example.ship.safetensors'))
  assert.equal((await net.load(2)).level, 2)
  await assert.rejects(elsa.load('/no/such/file', { level: 1 }), { code: 'ENOENT' })
  await assert.rejects(elsa.validate(join(vectors, 'invalid/InvalidIndex/missing_shard.safetensors.index.json')), { code: 'InvalidIndex' })
})

test('a link to a file elsewhere is no shard (ELSA-R-077)', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'elsa-'))
  try {
    const from = join(dirname(path), 'sharded')
    for (const name of await readdir(from)) await (name.includes('00002-of') ? symlink(join(from, name), join(folder, name)) : copyFile(join(from, name), join(folder, name)))
    await assert.rejects(elsa.inspect(join(folder, 'model.safetensors.index.json')), { code: 'UnsafePath' })
  } finally {
    await rm(folder, { recursive: true })
  }
})

test('in a page, what has no scheme is a URL, and no file', async () => {
  globalThis.location = new URL('http://127.0.0.1:9/page')
  const { fetch } = globalThis
  globalThis.fetch = async source => {
    assert.equal(source, 'net.safetensors')
    return new Response(bytes)
  }
  try {
    assert.equal((await elsa.load('net.safetensors', { level: 1 })).level, 1)
  } finally {
    delete globalThis.location
    globalThis.fetch = fetch
  }
})

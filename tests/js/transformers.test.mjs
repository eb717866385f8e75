// elsa-format/transformers without the library: what is downloaded, kept, resumed and dropped.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { mkdtemp, readFile, readdir, rm, writeFile } from 'node:fs/promises'
import { createServer } from 'node:http'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, beforeEach, test } from 'node:test'
import { ElsaError, openDelivery } from '../../js/src/index.js'
import { elsa } from '../../js/src/transformers.js'

const file = new Uint8Array(await readFile(process.env.ELSA_TEST_FILE))
const reference = await openDelivery(file)

/** Bytes of the first request. */
const FIRST = 1 << 16

let server
let place
let cache
let sent
let asked
/** Of the file now, and after how many bytes the next answer breaks off. */
let etag
let breaks

before(async () => {
  server = createServer((request, response) => {
    asked.push(`${request.method} ${request.url}`)
    if (request.url === '/net/elsa-files.json') return response.end(JSON.stringify({ files: {}, version: '1.0', weights: 'model ?.ship.safetensors' }))
    if (etag) response.setHeader('ETag', etag)
    if (request.url !== '/net/model%20%3F.ship.safetensors') return response.writeHead(404).end()
    if (request.method === 'HEAD') return response.end()
    const [, from, to] = /bytes=(\d+)-(\d*)/.exec(request.headers.range ?? 'bytes=0-').map(Number)
    if (from >= file.length) return response.writeHead(416).end()
    const whole = request.headers['if-range'] && request.headers['if-range'] !== etag
    const body = whole ? file : file.subarray(from, to ? to + 1 : undefined)
    const part = body.subarray(0, breaks)
    sent += part.length
    response.writeHead(whole ? 200 : 206, whole ? {} : { 'Content-Range': `bytes ${from}-${from + body.length - 1}/${file.length}`, 'Content-Length': body.length })
    if (part.length === body.length) return response.end(part)
    response.write(part, () => setTimeout(() => response.destroy(), 20))
  })
  await new Promise(resolve => server.listen(0, '127.0.0.1', resolve))
  place = `http://127.0.0.1:${server.address().port}/net/`
  cache = await mkdtemp(join(tmpdir(), 'elsa-'))
})
after(async () => {
  server.close()
  server.closeAllConnections()
  await rm(cache, { recursive: true })
})
beforeEach(async () => {
  asked = []
  sent = 0
  etag = '"one"'
  breaks = undefined
  for (const name of await readdir(cache)) await rm(join(cache, name), { recursive: true })
})

/** What was sent, but for what was under way when a request gave place to a larger one. */
function about(bytes) {
  assert.ok(sent >= bytes && sent <= bytes + FIRST, `${sent} bytes were sent, expected about ${bytes}`)
}

const digest = bytes => createHash('sha256').update(bytes).digest('hex')

async function check(net, level) {
  const { tensors } = await reference.load(level)
  const given = new Map(net.options.session_options.externalData.map(({ path, data }) => [path, digest(data)]))
  const expected = new Map([...tensors].map(([name, { data }]) => [`elsa.${encodeURIComponent(name)}`, digest(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))]))
  assert.deepEqual(given, expected)
}

test('a level, its upgrade, and a second visit without a byte of weights', async () => {
  const events = []
  const net = await elsa(place, { level: 1, cache, progress_callback: event => events.push(event) })
  assert.equal(net.level, 1)
  assert.equal(net.options.dtype, 'fp32')
  await check(net, 1)
  about(net.bytes(1))
  assert.equal(events.at(-1).status, 'done')
  assert.equal(events.at(-1).loaded, net.bytes(1))
  await net.upgrade('dense')
  await check(net, 'dense')
  about(file.length)
  assert.ok(events.every(({ loaded, total, name, file }) => loaded <= total && name === place && file === 'model ?.ship.safetensors'))
  await net.close()
  sent = 0
  asked = []
  await check(await elsa(place, { level: 2, cache }), 2)
  assert.deepEqual(asked, ['GET /net/elsa-files.json', 'HEAD /net/model%20%3F.ship.safetensors'])
  await check(await elsa(place, { level: 'dense', cache }), 'dense')
  assert.equal(sent, 0)
})

test('another version on the server replaces what is kept', async () => {
  await (await elsa(place, { cache })).close()
  etag = '"two"'
  sent = 0
  await check(await elsa(place, { cache }), 1)
  about(reference.bytes(1))
  sent = 0
  await check(await elsa(place, { cache }), 1)
  assert.equal(sent, 0)
})

test('a file that changes between two levels is an error, then a new start', async () => {
  const net = await elsa(place, { cache })
  etag = '"two"'
  await assert.rejects(net.upgrade('dense'), /has changed/)
  await check(await elsa(place, { cache }), 1)
})

test('without a network what is kept serves', async () => {
  await (await elsa(place, { cache })).upgrade(2)
  const { fetch } = globalThis
  globalThis.fetch = async (url, options) => {
    if (options?.method === 'HEAD') throw new TypeError('fetch failed')
    return fetch(url, options)
  }
  sent = 0
  try {
    await check(await elsa(place, { level: 2, cache }), 2)
  } finally {
    globalThis.fetch = fetch
  }
  assert.equal(sent, 0)
})

test('an interrupted download resumes where it broke', async () => {
  breaks = 250_000
  const signal = { tries: 0 }
  const { fetch } = globalThis
  globalThis.fetch = async (url, options) => {
    if (options?.headers?.Range && signal.tries++ > 1) throw new TypeError('fetch failed')
    return fetch(url, options)
  }
  try {
    await assert.rejects(elsa(place, { level: 'dense', cache }), ElsaError)
  } finally {
    globalThis.fetch = fetch
  }
  assert.equal(sent, FIRST + 250_000)
  breaks = undefined
  await check(await elsa(place, { level: 'dense', cache }), 'dense')
  about(file.length)
})

test('an upgrade that is interrupted goes on in the same visit', async () => {
  const net = await elsa(place, { level: 1, cache })
  breaks = 50_000
  const { fetch } = globalThis
  let tries = 0
  globalThis.fetch = async (url, options) => {
    if (tries++) throw new TypeError('fetch failed')
    return fetch(url, options)
  }
  try {
    await assert.rejects(net.upgrade('dense'), ElsaError)
  } finally {
    globalThis.fetch = fetch
  }
  assert.equal(net.level, 1)
  await check(net, 1)
  breaks = undefined
  await net.upgrade('dense')
  await check(net, 'dense')
  about(file.length)
})

test('a signal stops it, and what arrived is kept', async () => {
  const controller = new AbortController()
  controller.abort()
  await assert.rejects(elsa(place, { cache, signal: controller.signal }), { name: 'AbortError' })
  assert.equal(sent, 0)
  const later = new AbortController()
  await assert.rejects(elsa(place, { level: 'dense', cache, signal: later.signal, progress_callback: ({ loaded }) => loaded > 300_000 && later.abort() }), { name: 'AbortError' })
  sent = 0
  await check(await elsa(place, { level: 'dense', cache }), 'dense')
  assert.ok(sent <= file.length - 300_000)
})

test('bytes that were damaged on the device are downloaded anew', async () => {
  await (await elsa(place, { level: 2, cache })).close()
  const [folder] = await readdir(cache)
  const path = join(cache, folder, '0')
  const bytes = await readFile(path)
  for (const at of [10, bytes.length - 20]) {
    await writeFile(path, bytes.map((byte, i) => i === at ? byte ^ 1 : byte))
    sent = 0
    await check(await elsa(place, { level: 2, cache }), 2)
    assert.ok(sent > 0)
  }
  await assert.rejects(elsa(place, { level: 9, cache }), { code: 'NoSuchLevel' })
  assert.deepEqual((await readdir(join(cache, folder))).sort(), ['0', 'etag'])
})

test('nothing is kept without a version, or where nothing can be written', async () => {
  etag = ''
  await check(await elsa(place, { cache }), 1)
  assert.deepEqual(await readdir(cache).then(([folder]) => readdir(join(cache, folder))), [])
  etag = '"one"'
  await writeFile(join(cache, 'file'), '')
  await check(await elsa(place, { cache: join(cache, 'file') }), 1)
})

test('a folder of this machine', async () => {
  const folder = join(cache, 'net #1')
  const { mkdir } = await import('node:fs/promises')
  await mkdir(folder)
  await writeFile(join(folder, 'elsa-files.json'), '{"weights": "a.ship.safetensors"}')
  await writeFile(join(folder, 'a.ship.safetensors'), file)
  await check(await elsa(folder), 1)
  await check(await elsa(`${folder}/`, { level: 'dense' }), 'dense')
  assert.deepEqual(asked, [])
})

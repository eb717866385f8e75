// Delivery over HTTP: a level by its own bytes, upgrades by the difference, breaks that are mended, files that changed.
import assert from 'node:assert/strict'
import { readFile } from 'node:fs/promises'
import { createServer } from 'node:http'
import { after, before, test } from 'node:test'
import { ElsaError, load, openDelivery } from '../../js/src/index.js'

const VECTORS = new URL('../../spec/vectors/valid/', import.meta.url)
const file = new Uint8Array(await readFile(new URL('delivery/example.ship.safetensors', VECTORS)))
const sharded = new URL('sharded/', VECTORS)

let server
let base
/** What was asked for, and how to answer next: (request, response, range) → whether it did. */
let asked = []
let answer

before(async () => {
  server = createServer(async (request, response) => {
    const found = /bytes=(\d+)-(\d+)/.exec(request.headers.range ?? '')
    const range = found ? [Number(found[1]), Math.min(Number(found[2]) + 1, file.length)] : undefined
    asked.push({ url: request.url, range, ifRange: request.headers['if-range'] })
    if (answer?.(request, response, range)) return
    if (request.url.startsWith('/sharded/')) {
      const body = await readFile(new URL(decodeURIComponent(request.url.slice(9)), sharded)).catch(() => undefined)
      response.writeHead(body ? 200 : 404).end(body)
      return
    }
    response.setHeader('ETag', '"one"')
    if (!range) return response.end(file)
    if (range[0] >= file.length) return response.writeHead(416).end()
    response.writeHead(206, { 'Content-Range': `bytes ${range[0]}-${range[1] - 1}/${file.length}` }).end(file.subarray(...range))
  })
  await new Promise(resolve => server.listen(0, '127.0.0.1', resolve))
  base = `http://127.0.0.1:${server.address().port}/`
})
after(() => server.close())

function reset(how) {
  asked = []
  answer = how
}

async function expected(level) {
  return (await (await openDelivery(file)).load(level)).tensors
}

const refusal = (code, words) => error => error instanceof ElsaError && error.code === code && words.test(error.message)

test('what is asked for is what is missing', async () => {
  reset()
  // A short header: everything but the first 64 kB would be asked for; make the first answer short instead.
  answer = (request, response, range) => {
    const end = Math.min(range[1], range[0] + 1100)
    response.setHeader('ETag', '"one"')
    response.writeHead(206, { 'Content-Range': `bytes ${range[0]}-${end - 1}/${file.length}` }).end(file.subarray(range[0], end))
    return true
  }
  const delivery = await openDelivery(`${base}net`)
  const loaded = []
  for await (const { level, tensors } of delivery.levels()) {
    assert.deepEqual(tensors, await expected(level))
    loaded.push(level)
  }
  assert.deepEqual(loaded, [1, 2, 'dense'])
  let at = 0
  for (const { range, ifRange } of asked) {
    assert.equal(range[0], at, 'no byte twice')
    assert.equal(ifRange, at ? '"one"' : undefined)
    at = Math.min(range[1], at + 1100)
  }
})

test('bytes on the device are not asked for again, and new ones are saved', async () => {
  reset()
  const opened = await openDelivery(file)
  const have = new Blob([file.subarray(0, opened.bytes(1))])
  const saved = []
  const delivery = await openDelivery(`${base}net`, { have, etag: '"one"', save: (bytes, at) => void saved.push([at, bytes.slice()]) })
  assert.deepEqual((await delivery.load(1)).tensors, await expected(1))
  const before = asked.length
  assert.deepEqual((await delivery.load(2)).tensors, await expected(2))
  await delivery.load('dense')
  assert.equal(delivery.etag, '"one"')
  assert.ok(asked.every(({ range }) => range[0] >= have.size), JSON.stringify(asked))
  assert.ok(before <= 1)
  const whole = new Uint8Array(file.length)
  whole.set(new Uint8Array(await have.arrayBuffer()))
  for (const [at, bytes] of saved) whole.set(bytes, at)
  assert.deepEqual(whole, file)
})

test('a connection that breaks is taken up where it broke', async () => {
  let left = 3
  reset((request, response, range) => {
    if (!left--) return left = 0, false
    response.writeHead(206, { ETag: '"one"', 'Content-Range': `bytes ${range[0]}-${range[1] - 1}/${file.length}`, 'Content-Length': range[1] - range[0] })
    response.write(file.subarray(range[0], range[0] + 300))
    setTimeout(() => response.destroy(), 20)
    return true
  })
  const delivery = await openDelivery(`${base}net`)
  assert.deepEqual((await delivery.load('dense')).tensors, await expected('dense'))
  assert.deepEqual(asked.map(({ range }) => range[0]).slice(0, 4), [0, 300, 600, 900])
})

test('a server that is gone is an error of one line, and the levels that are here stay', async () => {
  reset()
  const delivery = await openDelivery(new Blob([file]))
  const first = await delivery.load(1)
  const copy = structuredClone(first.tensors)
  reset((request, response) => (response.destroy(), true))
  await assert.rejects(openDelivery(`${base}net`), refusal('RemoteError', /^http\S+: broke off at byte 0/))
  await delivery.load('dense')
  assert.deepEqual(first.tensors, copy, 'arrays that were given do not change')
})

test('a server without ranges will do', async () => {
  reset((request, response) => (response.writeHead(200, { 'Content-Length': file.length }).end(file), true))
  const delivery = await openDelivery(`${base}net`)
  for (const level of [1, 2, 'dense']) assert.deepEqual((await delivery.load(level)).tensors, await expected(level))
})

test('another version of the file is noticed', async () => {
  reset()
  const have = new Blob([file.subarray(0, 1100)])
  const delivery = await openDelivery(`${base}net`, { have, etag: '"other"' })
  await assert.rejects(delivery.load('dense'), refusal('RemoteError', /has changed/))
})

test('a part that is damaged on its way leaves the levels before it', async () => {
  reset()
  const opened = await openDelivery(file)
  const damaged = file.slice()
  damaged[opened.bytes('dense') - 1] ^= 1
  const delivery = await openDelivery(damaged)
  await assert.rejects(delivery.load('dense'), refusal('ChecksumMismatch', /dense|part/))
  assert.deepEqual((await delivery.load(2)).tensors, await expected(2))
  await assert.rejects(delivery.load('dense'), refusal('ChecksumMismatch', /part/))
  assert.deepEqual((await delivery.load(1)).tensors, await expected(1))
})

test('answers that make no sense are refused', async () => {
  reset((request, response) => (response.writeHead(404).end(), true))
  await assert.rejects(openDelivery(`${base}net`), refusal('RemoteError', /404/))
  assert.equal(asked.length, 1, 'not asked again')
  reset((request, response) => (response.writeHead(206, { 'Content-Range': 'bytes 5-99/100' }).end(file), true))
  await assert.rejects(openDelivery(`${base}net`), refusal('RemoteError', /byte 5/))
})

test('who stops waiting gets the reason that was given', async () => {
  reset((request, response) => (response.writeHead(206, { 'Content-Range': `bytes 0-65535/${file.length}` }).write(file.subarray(0, 600)), true))
  const controller = new AbortController()
  setTimeout(() => controller.abort(new Error('enough')), 50)
  await assert.rejects(openDelivery(`${base}net`, { signal: controller.signal }), /enough/)
})

test('shards are found beside their index', async () => {
  reset()
  const { tensors } = await load(`${base}sharded/model.safetensors.index.json`, { level: 1 })
  assert.ok(tensors.size > 2)
  reset((request, response) => request.url.includes('00002') && (response.writeHead(404).end(), true))
  await assert.rejects(load(`${base}sharded/model.safetensors.index.json`, { level: 1 }), refusal('InvalidIndex', /00002.* is missing/))
})

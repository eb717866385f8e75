// Delivery over HTTP: a level by its own bytes, upgrades by the difference, breaks that are mended, files that changed.
import assert from 'node:assert/strict'
import { readFile, readdir } from 'node:fs/promises'
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
    const range = found ? [Number(found[1]), Number(found[2]) + 1] : undefined
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
    range[1] = Math.min(range[1], file.length)
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

test('a file that ends too soon has the levels that it has', async () => {
  const short = file.subarray(0, (await openDelivery(file)).bytes(1) + 10)
  const ways = {
    ranges: (response, [begin, end]) => response.writeHead(206, { 'Content-Range': `bytes ${begin}-${Math.min(end, short.length) - 1}/${short.length}` })
      .end(short.subarray(begin, end)),
    none: response => response.writeHead(200, { 'Content-Length': short.length }).end(short),
    chunked: response => response.writeHead(200).end(short),
  }
  for (const [way, send] of Object.entries(ways)) {
    reset((request, response, range) => (range[0] < short.length ? send(response, range) : response.writeHead(416).end(), true))
    const delivery = await openDelivery(`${base}net`)
    assert.deepEqual((await delivery.load(1)).tensors, await expected(1), way)
    await assert.rejects(delivery.load(2), refusal('Incomplete', /expected [0-9]+ for level 2/), way)
    assert.deepEqual((await delivery.load(1)).tensors, await expected(1), way)
  }
})

test('a file that changes between two levels is noticed, and the level that is here stays', async () => {
  const changed = file.map(byte => byte ^ 255)
  const served = { etag: '"one"', bytes: file }
  reset((request, response, range) => {
    const same = (request.headers['if-range'] ?? served.etag) === served.etag
    response.setHeader('ETag', served.etag)
    // Little at a time, so that the next level has to be asked for.
    const end = Math.min(range[1], range[0] + 1100)
    if (!same) response.writeHead(200, { 'Content-Length': file.length }).end(served.bytes)
    else response.writeHead(206, { 'Content-Range': `bytes ${range[0]}-${end - 1}/${file.length}` }).end(served.bytes.subarray(range[0], end))
    return true
  })
  const delivery = await openDelivery(`${base}net`)
  await delivery.load(1)
  Object.assign(served, { etag: '"two"', bytes: changed })
  await assert.rejects(delivery.load('dense'), refusal('RemoteError', /has changed/))
  assert.deepEqual((await delivery.load(1)).tensors, await expected(1))
})

test('a part that breaks off in its middle can be had again, whatever is in its blocks', async () => {
  const folder = new URL('delivery/', VECTORS)
  for (const name of (await readdir(folder)).filter(name => name.endsWith('.safetensors'))) {
    const bytes = new Uint8Array(await readFile(new URL(name, folder)))
    const whole = await openDelivery(bytes)
    const levels = [...whole.profile.levels.map(({ level }) => level), 'dense']
    if (whole.bytes('dense') !== bytes.length || levels.length > 9) continue
    for (const [i, level] of levels.entries()) {
      const before = i ? whole.bytes(levels[i - 1]) : 0
      let limit = i ? Math.floor((before + whole.bytes(level)) / 2) : bytes.length
      reset((request, response, [begin, end]) => {
        const stop = Math.min(end, limit, bytes.length)
        if (begin >= stop) return response.destroy(), true
        response.writeHead(206, { 'Content-Range': `bytes ${begin}-${end - 1}/${bytes.length}` }).end(bytes.subarray(begin, stop))
        return true
      })
      const delivery = await openDelivery(`${base}net`)
      if (i) {
        await delivery.load(levels[i - 1])
        if (limit > before) await assert.rejects(delivery.load(level), { code: 'RemoteError' }, `${name}, ${level}`)
        limit = bytes.length
      }
      assert.deepEqual((await delivery.load(level)).tensors, (await whole.load(level)).tensors, `${name}, ${level}`)
      assert.deepEqual((await delivery.load('dense')).tensors, (await (await openDelivery(bytes)).load('dense')).tensors, `${name}, ${level}`)
    }
  }
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
  await assert.rejects(openDelivery(`${base}net`), refusal('RemoteError', /first byte of the answer is 5, expected 0/))
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
  // As a variant has it, too; other names are files, and here a text is none.
  const variant = (request, response) => {
    if (request.url.includes('.json')) request.url = '/sharded/model.safetensors.index.json'
  }
  for (const name of ['model.safetensors.index.fp16.json', 'model.safetensors.index.fp16.ship.json?download=true']) {
    reset(variant)
    assert.deepEqual((await load(`${base}sharded/${name}`, { level: 1 })).tensors, tensors)
  }
  for (const name of ['model.safetensors.json', 'model.index.json.txt', 'index.json']) {
    reset(variant)
    await assert.rejects(load(`${base}sharded/${name}`, { level: 1 }), { name: 'ElsaError', code: /HeaderTooLarge|InvalidJson|Truncated|RemoteError/ })
  }
  reset((request, response) => request.url.includes('00002') && (response.writeHead(404).end(), true))
  await assert.rejects(load(`${base}sharded/model.safetensors.index.json`, { level: 1 }), refusal('InvalidIndex', /00002.* is missing/))
})

// ELSA-R-004: a Streaming Extractor stays within 64 MiB, whatever the size of the data; buffers are used again.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { extractTo, load } from '../../js/src/index.js'

const ELEMENTS = 1 << 26
const encode = text => new TextEncoder().encode(text)

/** A file of 256 MiB that is made while it is read: a quarter of its weights is kept. */
function* file() {
  const profile = { version: '1.0', bits: 2, levels: [{ name: 'a', nonzero: ELEMENTS / 4 }], nested: { w: [ELEMENTS / 4] } }
  const text = encode(JSON.stringify({
    __metadata__: { elsa: JSON.stringify(profile) },
    w: { dtype: 'F32', shape: [ELEMENTS / 64, 64], data_offsets: [0, 4 * ELEMENTS] },
  }))
  const length = new Uint8Array(8)
  new DataView(length.buffer).setBigUint64(0, BigInt(text.length), true)
  yield length
  yield text
  const chunk = new Uint32Array(1 << 14).map((_, i) => 0x3f800000 | (i % 4 === 0 ? 1 : 0))
  for (let i = 0; i < ELEMENTS / chunk.length; i++) yield new Uint8Array(chunk.buffer)
}

for (const layout of ['dense', 'bitmask', 'csr']) {
  test(`${layout}, 256 MiB`, async () => {
    globalThis.gc()
    const before = process.memoryUsage()
    let peak = 0
    let size = 0
    let count = 0
    const { size: promised } = await extractTo(file(), bytes => {
      size += bytes.length
      if (count++ % 64) return
      const { heapUsed, arrayBuffers } = process.memoryUsage()
      peak = Math.max(peak, heapUsed + arrayBuffers - before.heapUsed - before.arrayBuffers)
    }, { level: 1, layout })
    assert.equal(size, promised, 'every byte was written once')
    assert.ok(peak < 64 * 2 ** 20, `${(peak / 2 ** 20).toFixed(1)} MiB`)
  })
}

test('a level in memory takes what it consists of', async () => {
  globalThis.gc()
  const before = process.memoryUsage().arrayBuffers
  const { tensors } = await load(file(), { level: 1 })
  const taken = process.memoryUsage().arrayBuffers - before
  assert.ok(taken < 1.1 * tensors.get('w').data.byteLength, `${(taken / 2 ** 20).toFixed(1)} MiB`)
})

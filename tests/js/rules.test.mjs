// Single rules of the specification, from the case files beside the vectors.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { test } from 'node:test'
import { checkHeader } from '../../js/src/document.js'
import { compareText, writeJson } from '../../js/src/written.js'
import { writeChecksum, xxh3 } from '../../js/src/xxh3.js'

const read = name => JSON.parse(readFileSync(new URL(`../../spec/vectors/${name}`, import.meta.url), 'utf8'))

test('written JSON (ELSA-R-030, ELSA-R-085, ELSA-R-086)', () => {
  const { numbers, strings, keys } = read('written.json')
  const view = new DataView(new ArrayBuffer(8))
  for (const [bits, text] of numbers) {
    view.setBigUint64(0, BigInt(`0x${bits}`))
    // The package writes no other numbers.
    if (Number.isSafeInteger(view.getFloat64(0))) assert.equal(writeJson(view.getFloat64(0)), text)
  }
  for (const [points, text] of strings) assert.equal(writeJson(String.fromCodePoint(...points)), text)
  assert.deepEqual([...keys].reverse().sort(compareText), keys)
})

test('checksums (ELSA-R-063, ELSA-R-089)', () => {
  const { cases, headers } = read('checksums.json')
  for (const [n, checksum] of cases) {
    assert.equal(writeChecksum(xxh3(Uint8Array.from({ length: n }, (_, i) => (i * i + 7 * i + n) % 251))), checksum)
  }
  for (const [header, digits, checksum] of headers) {
    // None of them states its own checksum; the message has the one that was found.
    assert.throws(() => checkHeader(new TextEncoder().encode(header), `xxh3:${digits}`), error => error.message.includes(checksum))
  }
})

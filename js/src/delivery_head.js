import { CHECKSUM, checkHeader, checkVersion, integer, listOf, readFields } from './document.js'
import { expect, fail } from './errors.js'
import { lengthOf, parseHeader, readHeader, typeOf } from './header.js'
import { inflate } from './inflate.js'
import { parseJson } from './json.js'
import { readProfile } from './profile.js'
import { checkSum, xxh3 } from './xxh3.js'

/** @import { Header } from './header.js' */
/** @import { Profile } from './profile.js' */
/** @import { Bytes } from './source.js' */

const CODE = 'InvalidDelivery'
const FIRST = 65536

/**
 * What stands before the parts of a delivery file (delivery-1.0.md §3, §4.1).
 * @typedef {object} DeliveryHead
 * @property {number} block words of a block
 * @property {number[]} ends where the head, parts 1…T and the dense part end in the file
 * @property {Uint8Array} start the source's first bytes
 * @property {bigint} seed of the checksums of payloads
 * @property {Header} header of the source
 * @property {Profile} profile of the source
 */

/**
 * @param {Bytes} bytes
 * @param {boolean} shard
 * @returns {Promise<DeliveryHead>}
 */
export async function readHead(bytes, shard) {
  if (bytes.seekable) bytes.limit = FIRST
  const { text, metadata, tensors } = await readHeader(bytes)
  const document = metadata.get('elsa_delivery') ??
    fail(shard ? 'InvalidIndex' : 'NotElsa', 'no "elsa_delivery" in the metadata, expected a delivery file')
  const map = parseJson(document, 'delivery document')
  checkVersion(map, CODE)
  checkHeader(text, readFields(map, CODE, { header: CHECKSUM }).header)
  const { block, parts, source, head } = readFields(map, CODE, {
    block: integer(6, 20),
    parts: listOf(integer(0), 3, 257),
    source: integer(10, 100_000_008),
    head: CHECKSUM,
  })
  const sum = parts.reduce((/** @type {bigint} */ all, /** @type {number} */ part) => all + BigInt(part), 0n)
  expect(CODE, 'list of tensors', [...tensors.values()].map(tensor => `${tensor.name} ${typeOf(tensor)}`).join(), `__elsa__.delivery U8 [${sum}]`)
  let end = 8 + text.length
  const ends = parts.map((/** @type {number} */ part) => end += part)
  checkEnd(bytes.size, end)
  await bytes.reach(ends[0])
  const packed = await bytes.all(parts[0], 'Incomplete', 'head')
  checkSum('checksum of the head', xxh3(packed), head)
  const start = await inflate(packed, source)
  if (!start || lengthOf(start) !== source - 8) fail(CODE, `head is broken, expected a zlib stream of ${source} bytes`)
  const header = parseHeader(start.subarray(8))
  const profile = readProfile(header)
  expect(CODE, 'number of parts', ends.length, profile.levels.length + 2)
  return { block: 2 ** block, ends, start, seed: xxh3(start), header, profile }
}

/** Refuse bytes behind the last part. @param {number | undefined} size of the file, as far as it is known @param {number} end */
export function checkEnd(size = 0, end) {
  if (size > end) expect('TrailingData', 'size of the file', size, end)
}

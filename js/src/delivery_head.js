import { CHECKSUM, arrayOf, checkHeader, checkVersion, field, integer } from './document.js'
import { fail } from './errors.js'
import { parseHeader, readHeader } from './header.js'
import { inflate } from './inflate.js'
import { parseJson } from './json.js'
import { readProfile } from './profile.js'
import { writeChecksum, xxh3 } from './xxh3.js'

/** @import { Feed } from './feed.js' */
/** @import { Header } from './header.js' */
/** @import { Profile } from './profile.js' */

const CODE = 'InvalidDelivery'
const FIRST = 65536

/**
 * What stands before the parts of a delivery file (delivery-1.0.md §3, §4.1).
 * @typedef {object} DeliveryHead
 * @property {number} block words of a block
 * @property {number[]} ends where the head, parts 1…T and the dense part end in the file
 * @property {Uint8Array} source the source's first bytes
 * @property {bigint} seed of the checksums of payloads
 * @property {Header} header of the source
 * @property {Profile} profile of the source
 */

/**
 * @param {Feed} feed
 * @param {AbortSignal} [signal]
 * @returns {Promise<DeliveryHead>}
 */
export async function readDeliveryHead(feed, signal) {
  let bytes = await feed.reach(FIRST, signal)
  if (await bytes.more() && bytes.rest.length >= 8) {
    // The first request may not reach as far as the header does.
    const length = new DataView(bytes.rest.buffer, bytes.rest.byteOffset).getBigUint64(0, true)
    if (length <= 100_000_000n) bytes = await feed.reach(8 + Number(length), signal)
  }
  const outer = await readHeader(bytes)
  const document = readDocument(outer)
  const start = 8 + outer.bytes.length
  const ends = []
  let end = start
  for (const size of document.parts) ends.push(end += size)
  if (feed.size !== undefined && feed.size > end) fail('TrailingData', `${feed.size} bytes, expected ${end}`)
  bytes = await feed.reach(ends[0], signal)
  const head = await bytes.take(document.parts[0])
  if (head.length < document.parts[0]) fail('Incomplete', `${head.length} bytes of the head, expected ${document.parts[0]}`)
  const found = writeChecksum(xxh3(head))
  if (found !== document.head) fail('ChecksumMismatch', `the head has the checksum ${found}, expected ${document.head}`)
  const source = inflate(head, document.source)
  if (!source) fail(CODE, `the head is no zlib stream of ${document.source} bytes`)
  const length = new DataView(source.buffer).getBigUint64(0, true)
  if (length !== BigInt(document.source - 8)) fail(CODE, `the source has a header of ${length} bytes, expected ${document.source - 8}`)
  const header = parseHeader(source.subarray(8))
  const profile = readProfile(header)
  if (profile.levels.length + 2 !== ends.length) fail(CODE, `${ends.length} parts for ${profile.levels.length} levels`)
  return { block: 2 ** document.block, ends, source, seed: xxh3(source), header, profile }
}

/** @param {Header} outer */
function readDocument(outer) {
  const text = outer.metadata.get('elsa_delivery')
  if (text === undefined) fail('NotElsa', 'a safetensors file without a delivery document')
  const map = parseJson(text, 'delivery document')
  checkVersion(map, CODE)
  checkHeader(outer.bytes, field(map, 'header', CHECKSUM, CODE))
  const document = {
    block: field(map, 'block', integer(6, 20), CODE),
    /** @type {number[]} */
    parts: field(map, 'parts', arrayOf(integer(0), 3, 257), CODE),
    source: field(map, 'source', integer(10, 100_000_008), CODE),
    head: field(map, 'head', CHECKSUM, CODE),
  }
  const tensor = outer.tensors.get('__elsa__.delivery')
  if (outer.tensors.size !== 1 || tensor?.dtype !== 'U8' || tensor.shape.length !== 1) {
    fail(CODE, 'expected one tensor, __elsa__.delivery, of dtype U8 and one dimension')
  }
  const sum = document.parts.reduce((all, size) => all + BigInt(size), 0n)
  if (sum !== BigInt(tensor.shape[0])) fail(CODE, `the parts have ${sum} bytes, the tensor ${tensor.shape[0]}`)
  return document
}

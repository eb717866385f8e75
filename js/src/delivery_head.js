import { CHECKSUM, arrayOf, checkHeader, checkVersion, fieldsOf, integer } from './document.js'
import { fail } from './errors.js'
import { lengthOf, parseHeader, readHeader } from './header.js'
import { inflate } from './inflate.js'
import { parseJson } from './json.js'
import { readProfile } from './profile.js'
import { checkSum, xxh3 } from './xxh3.js'

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
  // The first request may not reach as far as the header does.
  if (await bytes.more() && bytes.rest.length >= 8) bytes = await feed.reach(8 + Math.min(lengthOf(bytes.rest), 1e8), signal)
  const outer = await readHeader(bytes)
  const { block, parts, size, checksum } = readDocument(outer)
  let end = 8 + outer.bytes.length
  const ends = parts.map(part => end += part)
  if (feed.size !== undefined && feed.size > end) fail('TrailingData', `${feed.size} bytes, expected ${end}`)
  bytes = await feed.reach(ends[0], signal)
  const head = await bytes.take(parts[0])
  if (head.length < parts[0]) fail('Incomplete', `${head.length} bytes of the head, expected ${parts[0]}`)
  checkSum('the head', xxh3(head), checksum)
  const source = await inflate(head, size)
  if (!source || lengthOf(source) !== size - 8) fail(CODE, `the head is no zlib stream of a header of ${size} bytes`)
  const header = parseHeader(source.subarray(8))
  const profile = readProfile(header)
  if (profile.levels.length + 2 !== ends.length) fail(CODE, `${ends.length} parts for ${profile.levels.length} levels`)
  return { block, ends, source, seed: xxh3(source), header, profile }
}

/** @param {Header} outer */
function readDocument({ bytes, metadata, tensors }) {
  const document = metadata.get('elsa_delivery')
  if (document === undefined) fail('NotElsa', 'a safetensors file without a delivery document')
  const map = parseJson(document, 'delivery document')
  checkVersion(map, CODE)
  const get = fieldsOf(map, CODE)
  checkHeader(bytes, get('header', CHECKSUM))
  const block = 2 ** get('block', integer(6, 20))
  /** @type {number[]} */
  const parts = get('parts', arrayOf(integer(0), 3, 257))
  const size = get('source', integer(10, 100_000_008))
  const checksum = get('head', CHECKSUM)
  const tensor = tensors.get('__elsa__.delivery')
  const sum = parts.reduce((all, part) => all + BigInt(part), 0n)
  if (tensors.size !== 1 || tensor?.dtype !== 'U8' || String(tensor.shape) !== String(sum)) {
    fail(CODE, `expected one tensor, __elsa__.delivery, U8 of shape [${sum}] as the parts have it`)
  }
  return { block, parts, size, checksum }
}

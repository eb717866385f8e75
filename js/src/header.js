import { DTYPES } from './dtypes.js'
import { fail, show } from './errors.js'
import { parseJson } from './json.js'

/** @import { Bytes } from './source.js' */

/**
 * One tensor as the header describes it.
 * @typedef {object} Entry
 * @property {string} name
 * @property {string} dtype
 * @property {(number | bigint)[]} shape
 * @property {number} begin its place in the data section
 * @property {number} size in bytes
 * @property {number} elements
 */

/**
 * @typedef {object} Header
 * @property {Uint8Array} bytes the header's text
 * @property {Map<string, string>} metadata
 * @property {Map<string, Entry>} tensors
 * @property {Entry[]} order tensors in the order of their data
 * @property {number} size of the data section
 */

const LIMIT = 100_000_000

/**
 * Read the beginning of a file, up to the data section (elsa-1.0.md §3).
 * @param {Bytes} bytes
 * @returns {Promise<Header>}
 */
export async function readHeader(bytes) {
  const length = await bytes.take(8)
  if (length.length < 8) fail('Truncated', `${length.length} bytes, expected the 8 of the header's length`)
  const n = Number(new DataView(length.buffer, length.byteOffset).getBigUint64(0, true))
  if (n > LIMIT) fail('HeaderTooLarge', `a header of ${n} bytes, expected at most ${LIMIT}`)
  const text = await bytes.take(n)
  if (text.length < n) fail('Truncated', `${text.length} bytes of the header, expected ${n}`)
  return parseHeader(text)
}

/**
 * @param {Uint8Array} text
 * @returns {Header}
 */
export function parseHeader(text) {
  const header = parseJson(text, 'header', true)
  const metadata = header.has('__metadata__') ? header.get('__metadata__') : new Map()
  if (!(metadata instanceof Map)) fail('InvalidHeader', `__metadata__ is ${show(metadata)}, expected an object`)
  for (const [key, value] of metadata) {
    if (typeof value !== 'string') fail('InvalidHeader', `__metadata__[${show(key)}] is ${show(value)}, expected a string`)
  }
  header.delete('__metadata__')
  for (const [name, entry] of header) checkEntry(name, entry)
  const found = [...header].map(([name, entry]) => place(name, entry))
  const tensors = new Map(found.map(({ entry }) => [entry.name, entry]))
  found.sort((a, b) => compare(a.begin, b.begin) || compare(a.end, b.end))
  let end = 0n
  for (const tensor of found) {
    if (tensor.begin !== end) {
      fail('InvalidOffsets', `tensor ${show(tensor.entry.name)} begins at ${tensor.begin}, expected ${end}`)
    }
    end = tensor.end
  }
  return { bytes: text, metadata, tensors, order: found.map(({ entry }) => entry), size: Number(end) }
}

/** @param {string} name @param {any} entry */
function checkEntry(name, entry) {
  /** @param {unknown} value @param {number} [length] */
  const integers = (value, length) => Array.isArray(value) && (length ?? value.length) === value.length &&
    value.every(x => typeof x === 'number' || typeof x === 'bigint')
  if (!(entry instanceof Map) || entry.size !== 3 || typeof entry.get('dtype') !== 'string' ||
      !integers(entry.get('shape')) || !integers(entry.get('data_offsets'), 2)) {
    fail('InvalidHeader', `tensor ${show(name)} is ${show(entry)}, expected exactly dtype, shape and two data_offsets`)
  }
  if (!DTYPES[entry.get('dtype')]) fail('UnknownDtype', `tensor ${show(name)} has the dtype ${show(entry.get('dtype'))}`)
}

/** @param {string} name @param {Map<string, any>} entry */
function place(name, entry) {
  const [dtype, shape] = [entry.get('dtype'), entry.get('shape')]
  /** @type {bigint[]} */
  const [begin, end] = entry.get('data_offsets').map(BigInt)
  const bits = BigInt(DTYPES[dtype][0])
  const elements = countElements(shape, bits)
  if (elements === undefined) fail('InvalidOffsets', `tensor ${show(name)} of shape [${shape}] exceeds 2^63 bits`)
  if (8n * (end - begin) !== elements * bits) {
    fail('InvalidOffsets', `tensor ${show(name)} has ${end - begin} bytes, expected ${elements} × ${bits} bits`)
  }
  /** @type {Entry} */
  const result = { name, dtype, shape, begin: Number(begin), size: Number(end - begin), elements: Number(elements) }
  return { begin, end, entry: result }
}

/**
 * The elements of a shape, or undefined where they, without the zeros, are too many (ELSA-R-025).
 * @param {(number | bigint)[]} shape
 * @param {bigint} bits
 * @returns {bigint | undefined}
 */
export function countElements(shape, bits) {
  let product = 1n
  for (const dimension of shape) {
    if (dimension) product *= BigInt(dimension)
    if (product * bits >> 63n) return undefined
  }
  return shape.some(dimension => !dimension) ? 0n : product
}

/** @param {bigint} a @param {bigint} b */
function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0
}

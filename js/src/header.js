import { OBJECT, TEXT, listOf, mapOf, optional, readFields } from './document.js'
import { bitsOf } from './dtypes.js'
import { expect, fail, say, within } from './errors.js'
import { parseJson } from './json.js'

/** @import { ErrorCode } from './errors.js' */
/** @import { Kind } from './document.js' */
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
 * @property {Uint8Array} text
 * @property {Map<string, string>} metadata
 * @property {Map<string, Entry>} tensors
 * @property {Entry[]} order tensors in the order of their data
 * @property {number} size of the data section
 */

const CODE = 'InvalidHeader'
const LIMIT = 100_000_000

/**
 * Read the beginning of a file, up to the data section (elsa-1.0.md §3).
 * @param {Bytes} bytes
 * @returns {Promise<Header>}
 */
export async function readHeader(bytes) {
  if (!new Uint8Array(Uint32Array.of(1).buffer)[0]) throw Error('a big-endian machine, expected a little-endian one')
  const length = checkLength(lengthOf(await bytes.all(8, 'Truncated', 'file')))
  await bytes.reach(8 + length)
  return parseHeader(await bytes.all(length, 'Truncated', 'header'))
}

/**
 * The length of the header, in the first 8 bytes of a buffer.
 * @param {Uint8Array} bytes
 */
export const lengthOf = ({ buffer }) => Number(new BigUint64Array(/** @type {ArrayBuffer} */ (buffer), 0, 1)[0])

/** @param {number} length */
export function checkLength(length) {
  within('HeaderTooLarge', 'size of the header', length, 0, LIMIT)
  return length
}

/** @type {Kind} */
const ENTRY = ['dtype, shape and two data_offsets alone', entry => OBJECT[1](entry) && entry.size === 3 && TEXT[1](entry.get('dtype')) &&
  SIZES[1](entry.get('shape')) && SIZES[1](entry.get('data_offsets')) && entry.get('data_offsets').length === 2]
const SIZES = listOf(['', value => typeof value === 'number' || typeof value === 'bigint'])

/**
 * @param {Uint8Array} text
 * @returns {Header}
 */
export function parseHeader(text) {
  const map = parseJson(text, 'header', true)
  const { __metadata__: metadata } = readFields(map, CODE, { ['__metadata__']: optional(OBJECT, new Map()) })
  map.delete('__metadata__')
  mapOf(metadata, CODE, TEXT, '__metadata__: ')
  for (const [name, entry] of mapOf(map, CODE, ENTRY)) {
    if (!bitsOf(entry.get('dtype'))) fail('UnknownDtype', say`dtype of ${name} is ${entry.get('dtype')}, expected one of safetensors`)
  }
  /** @type {Map<string, any>} */
  const tensors = new Map([...map].map(([name, entry]) => {
    const { dtype, shape, data_offsets } = Object.fromEntries(entry)
    /** @type {bigint[]} */
    const [begin, end] = data_offsets.map(BigInt)
    const bits = BigInt(bitsOf(dtype))
    expect('InvalidOffsets', say`size of ${name} in bits`, 8n * (end - begin), countBits({ name, dtype, shape }, 'InvalidOffsets'))
    return [name, { name, dtype, shape, begin, end, size: Number(end - begin), elements: Number(8n * (end - begin) / bits) }]
  }))
  const order = [...tensors.values()].sort((a, b) => Number(a.begin - b.begin || a.end - b.end))
  let size = 0n
  for (const entry of order) {
    expect('InvalidOffsets', say`begin of ${entry.name}`, entry.begin, size)
    entry.begin = Number(size)
    size = entry.end
  }
  return { text, metadata, tensors, order, size: Number(size) }
}

/**
 * The bits of a tensor, which must not be too many without dimensions of 0 either (ELSA-R-025).
 * @param {{name: string, dtype: string, shape: (number | bigint)[]}} tensor
 * @param {ErrorCode} code
 * @returns {bigint}
 */
export function countBits({ name, dtype, shape }, code) {
  let bits = BigInt(bitsOf(dtype))
  for (const dimension of shape) {
    if (dimension) bits *= BigInt(dimension)
    if (bits >> 63n) fail(code, say`shape of ${name} is ${shape}, expected less than 2^63 bits`)
  }
  return shape.every(Boolean) ? bits : 0n
}

/** Dtype and shape, as digests and messages have them. @param {{dtype: string, shape: (number | bigint)[]}} tensor */
export const typeOf = ({ dtype, shape }) => `${dtype} [${shape}]`

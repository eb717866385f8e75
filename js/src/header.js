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
const SIZE = ['an integer', value => typeof value === 'number' || typeof value === 'bigint']
const ENTRY = { dtype: TEXT, shape: listOf(SIZE), data_offsets: listOf(SIZE, 2, 2) }

/**
 * @param {Uint8Array} text
 * @returns {Header}
 */
export function parseHeader(text) {
  const map = parseJson(text, 'header', true)
  const { __metadata__: metadata } = readFields(map, CODE, { ['__metadata__']: optional(OBJECT, new Map()) })
  map.delete('__metadata__')
  mapOf(metadata, CODE, TEXT, '__metadata__: ')
  /** @type {any[]} */
  const entries = [...mapOf(map, CODE, OBJECT)].map(([name, entry]) => {
    const fields = readFields(entry, CODE, ENTRY, say`${name}: `)
    expect(CODE, say`number of fields of ${name}`, entry.size, 3)
    return { name, ...fields }
  })
  for (const { name, dtype } of entries) {
    if (!bitsOf(dtype)) fail('UnknownDtype', say`dtype of ${name} is ${dtype}, expected one of safetensors`)
  }
  /** @type {Map<string, any>} */
  const tensors = new Map(entries.map(({ name, dtype, shape, data_offsets }) => {
    /** @type {bigint[]} */
    const [begin, end] = data_offsets.map(BigInt)
    const bits = 8n * (end - begin)
    expect('InvalidOffsets', say`size of ${name} in bits`, bits, countBits({ name, dtype, shape }, 'InvalidOffsets'))
    return [name, { name, dtype, shape, begin, end, size: Number(bits) / 8, elements: Number(bits) / bitsOf(dtype) }]
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

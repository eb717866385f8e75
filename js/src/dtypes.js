/** @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | BigUint64Array | BigInt64Array
 *   | Float32Array | Float64Array} TypedArray */

const KNOWN = /^(BOOL|[UI](8|16|32|64)|F4|F6_E2M3|F6_E3M2|F8_E8M0|F8_E(4M3|5M2)(FNUZ)?|B?F16|F32|[FC]64)$/

/**
 * What JavaScript has no type for is given as stored: C64 as pairs, and else as words: F16 and BF16 as the bits of each
 * element, elements of at most 8 bits as bytes.
 * @type {Record<string, any>}
 */
const ARRAYS = {
  I8: Int8Array, I16: Int16Array, I32: Int32Array, I64: BigInt64Array, F32: Float32Array, F64: Float64Array, C64: Float32Array,
}

/** Bits of the mantissa, of dtypes that can carry counters (elsa-1.0.md §4.1). @type {Record<string, number>} */
export const MANTISSA = { F32: 23, BF16: 7, F16: 10, F64: 52 }

/** Bits of an element (§3.3), which are in the name of its dtype; 0 for a dtype that there is not. @param {string} dtype */
export const bitsOf = dtype => KNOWN.test(dtype) ? Number(dtype.match(/\d+/)) || 8 : 0

/** Unsigned words. @param {number} bits @returns {any} */
const typeOfWords = bits => bits < 16 ? Uint8Array : bits < 32 ? Uint16Array : bits < 64 ? Uint32Array : BigUint64Array

/** Memory as unsigned words. @param {number} bits @param {any} buffer @param {number[]} where @returns {any} */
export const wordsOf = (bits, buffer, ...where) => new (typeOfWords(bits))(buffer, ...where)

/** @param {string} dtype @param {Uint8Array} bytes @returns {TypedArray} */
export function arrayOf(dtype, { buffer, byteOffset, length }) {
  const Type = ARRAYS[dtype] ?? typeOfWords(bitsOf(dtype))
  return new Type(buffer, byteOffset, length / Type.BYTES_PER_ELEMENT)
}

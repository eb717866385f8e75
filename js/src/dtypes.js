/** @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | BigUint64Array | BigInt64Array
 *   | Float32Array | Float64Array} TypedArray */

/**
 * Bits of each dtype and the array that holds it (elsa-1.0.md §3.3). What JavaScript has no type for is given as stored:
 * F16 and BF16 as the bits of each element, C64 as pairs, elements below 8 bits as bytes.
 * @type {Record<string, [bits: number, array: new (buffer: ArrayBufferLike, at?: number, length?: number) => TypedArray]>}
 */
export const DTYPES = {
  __proto__: /** @type {any} */ (null),
  F4: [4, Uint8Array], F6_E2M3: [6, Uint8Array], F6_E3M2: [6, Uint8Array],
  BOOL: [8, Uint8Array], U8: [8, Uint8Array], I8: [8, Int8Array],
  F8_E5M2: [8, Uint8Array], F8_E4M3: [8, Uint8Array], F8_E8M0: [8, Uint8Array],
  F8_E4M3FNUZ: [8, Uint8Array], F8_E5M2FNUZ: [8, Uint8Array],
  I16: [16, Int16Array], U16: [16, Uint16Array], F16: [16, Uint16Array], BF16: [16, Uint16Array],
  I32: [32, Int32Array], U32: [32, Uint32Array], F32: [32, Float32Array],
  I64: [64, BigInt64Array], U64: [64, BigUint64Array], F64: [64, Float64Array], C64: [64, Float32Array],
}

/**
 * Dtypes that can carry counters (§4.1): bytes of a word, bits of the mantissa, the highest 16 bits of +Inf.
 * @type {Record<string, {width: 2 | 4 | 8, mantissa: number, exponent: number}>}
 */
export const FLOATS = {
  __proto__: /** @type {any} */ (null),
  F32: { width: 4, mantissa: 23, exponent: 0x7f80 },
  BF16: { width: 2, mantissa: 7, exponent: 0x7f80 },
  F16: { width: 2, mantissa: 10, exponent: 0x7c00 },
  F64: { width: 8, mantissa: 52, exponent: 0x7ff0 },
}

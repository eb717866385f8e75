import { text } from './document.js'

/**
 * @typedef {'dense' | 'bitmask' | 'csr'} Layout
 * @typedef {{name: string, dtype: string, shape: (number | bigint)[]}} Stored a tensor, or a part of one
 */

export const LAYOUT = text(/^(dense|bitmask|csr)$/)
const WIDEST = 2 ** 31 - 1

/**
 * The rows and columns of a tensor that is seen as a matrix (ELSA-R-093).
 * @param {(number | bigint)[]} shape
 * @returns {[rows: bigint, columns: bigint]}
 */
export function matrixOf(shape) {
  const [rows, ...others] = (shape.length < 2 ? [1, ...shape] : shape).map(BigInt)
  return [rows, others.reduce((all, dimension) => all * dimension, 1n)]
}

/**
 * What a nested tensor is stored as, the values last (elsa-1.0.md §9.2, §9.3).
 * @param {Stored} tensor
 * @param {Layout} layout
 * @param {number | bigint} kept
 * @returns {Stored[]}
 */
export function partsOf({ name, dtype, shape }, layout, kept) {
  if (layout === 'dense') return [{ name, dtype, shape }]
  const [rows, columns] = matrixOf(shape)
  const index = kept > WIDEST || columns > WIDEST ? 'I64' : 'I32'
  /** @type {[string, string, number | bigint][]} */
  const parts = layout === 'csr' ? [['indptr', index, rows + 1n], ['indices', index, kept]] : [['bitmask', 'U8', (rows * columns + 7n) / 8n]]
  return [...parts, ['values', dtype, kept]].map(([part, dtype, length]) =>
    ({ name: `__elsa__.${part}.${name}`, dtype: String(dtype), shape: [/** @type {bigint} */ (length)] }))
}

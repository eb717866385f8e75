import { indexDtype, matrixOf } from './csr.js'
import { DIGEST, NAME, OBJECT, TEXT, checkVersion, field, integer } from './document.js'
import { FLOATS } from './dtypes.js'
import { fail, show } from './errors.js'
import { countElements } from './header.js'
import { parseJson } from './json.js'
import { isReserved } from './profile.js'

/** @import { ErrorCode } from './errors.js' */
/** @import { Layout } from './extract.js' */
/** @import { Header } from './header.js' */

/**
 * What a level file, or the index of one, says of its level (elsa-1.0.md §9.1).
 * @typedef {object} LevelFields
 * @property {number} level
 * @property {string} name
 * @property {Layout} layout
 * @property {string} [digest]
 */

/**
 * A nested tensor of a level file, and the names of what it is stored as.
 * @typedef {{dtype: string, shape: number[], elements: bigint, parts: string[]}} Nested
 * @typedef {LevelFields & {nested?: Map<string, Nested>}} LevelDocument
 */

const CODE = 'InvalidLayout'
const PARTS = { dense: [], bitmask: ['bitmask', 'values'], csr: ['indptr', 'indices', 'values'] }

/**
 * The level document of a file with all checks that need no data; nothing for a plain checkpoint.
 * @param {Header} header
 * @returns {LevelDocument | undefined}
 */
export function readLevelDocument(header) {
  if (header.metadata.has('elsa')) fail(CODE, 'an ELSA file, expected a level file')
  const text = header.metadata.get('elsa_level')
  if (text === undefined) return undefined
  const map = parseJson(text, 'level document')
  const fields = readLevelFields(map, CODE)
  const listed = field(map, 'tensors', OBJECT, CODE, ...fields.layout === 'dense' ? [undefined] : [])
  const nested = listed && new Map([...listed].map(([name, tensor]) => [name, readNested(name, tensor, fields.layout)]))
  checkStored(fields.layout, nested ?? new Map(), header)
  return { ...fields, nested }
}

/**
 * @param {Map<string, any>} map
 * @param {ErrorCode} code
 * @returns {LevelFields}
 */
export function readLevelFields(map, code) {
  checkVersion(map, code)
  return {
    level: field(map, 'level', integer(1, 255), code),
    name: field(map, 'name', NAME, code),
    layout: field(map, 'layout', ['dense, bitmask or csr', value => TEXT[1](value) && Object.hasOwn(PARTS, value)], code),
    digest: field(map, 'digest', DIGEST, code, undefined),
  }
}

/**
 * @param {string} name
 * @param {any} tensor
 * @param {Layout} layout
 * @returns {Nested}
 */
function readNested(name, tensor, layout) {
  if (isReserved(name)) fail(CODE, `the name ${show(name)} is reserved`)
  if (!(tensor instanceof Map)) fail(CODE, `tensor ${show(name)} is ${show(tensor)}, expected an object`)
  const dtype = field(tensor, 'dtype', ['a dtype of nested tensors', value => TEXT[1](value) && FLOATS[value] !== undefined], CODE)
  const shape = field(tensor, 'shape', ['integers', value => Array.isArray(value) && value.every(integer(0)[1])], CODE)
  const elements = countElements(shape, BigInt(8 * FLOATS[dtype].width))
  if (elements === undefined) fail(CODE, `tensor ${show(name)} of shape [${shape}] exceeds 2^63 bits`)
  return { dtype, shape, elements, parts: PARTS[layout].map(part => `__elsa__.${part}.${name}`) }
}

/**
 * What is stored against what is listed (ELSA-R-066, 067, 069, 071, 072).
 * @param {Layout} layout
 * @param {Map<string, Nested>} nested
 * @param {Header} header
 */
function checkStored(layout, nested, { tensors }) {
  const parts = new Set()
  /** @param {string} name @param {string} dtype @param {unknown[]} shape */
  const expect = (name, dtype, shape) => {
    const found = tensors.get(name)
    if (!found || found.dtype !== dtype || String(found.shape) !== String(shape)) {
      fail(CODE, `tensor ${show(name)} is ${found ? `${found.dtype} [${found.shape}]` : 'missing'}, expected ${dtype} [${shape}]`)
    }
    parts.add(name)
  }
  for (const [name, { dtype, shape, elements, parts: [first, second, third] }] of nested) {
    if (layout === 'dense') {
      expect(name, dtype, shape)
      continue
    }
    if (tensors.has(name)) fail(CODE, `tensor ${show(name)} is stored as such and in parts`)
    const values = third ?? second
    const stored = tensors.get(values)?.shape
    const kept = stored?.length === 1 ? BigInt(stored[0]) : 0n
    expect(values, dtype, [kept])
    if (layout === 'bitmask') expect(first, 'U8', [(elements + 7n) / 8n])
    else {
      const [rows, columns] = matrixOf(shape)
      expect(first, indexDtype(kept, columns), [rows + 1n])
      expect(second, indexDtype(kept, columns), [kept])
    }
  }
  for (const name of tensors.keys()) {
    if (isReserved(name) && !parts.has(name)) fail(CODE, `the name ${show(name)} is reserved`)
  }
}

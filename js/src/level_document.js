import { indexDtype, matrixOf } from './csr.js'
import { DIGEST, NAME, OBJECT, arrayOf, checkVersion, fieldsOf, integer, mapOf, text } from './document.js'
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
export function readLevelDocument({ metadata, tensors }) {
  if (metadata.has('elsa')) fail(CODE, 'an ELSA file, expected a level file')
  const document = metadata.get('elsa_level')
  if (document === undefined) return undefined
  const map = parseJson(document, 'level document')
  const fields = readLevelFields(map, CODE)
  const { layout } = fields
  /** @type {Map<string, any> | undefined} */
  const listed = fieldsOf(map, CODE)('tensors', OBJECT, ...layout === 'dense' ? [undefined] : [])
  const nested = listed && new Map([...mapOf(listed, OBJECT, CODE)].map(([name, tensor]) => [name, readNested(name, tensor, layout)]))
  checkStored(layout, nested ?? new Map(), tensors)
  return { ...fields, nested }
}

/**
 * @param {Map<string, any>} map
 * @param {ErrorCode} code
 * @returns {LevelFields}
 */
export function readLevelFields(map, code) {
  checkVersion(map, code)
  const get = fieldsOf(map, code)
  return {
    level: get('level', integer(1, 255)),
    name: get('name', NAME),
    layout: get('layout', text('dense, bitmask or csr', /^(dense|bitmask|csr)$/)),
    digest: get('digest', DIGEST, undefined),
  }
}

/**
 * @param {string} name
 * @param {Map<string, any>} tensor
 * @param {Layout} layout
 * @returns {Nested}
 */
function readNested(name, tensor, layout) {
  if (isReserved(name)) fail(CODE, `the name ${show(name)} is reserved`)
  const get = fieldsOf(tensor, CODE)
  const dtype = get('dtype', text('a dtype of nested tensors', /^(F32|BF16|F16|F64)$/))
  const shape = get('shape', arrayOf(integer(0)))
  const elements = countElements(shape, BigInt(8 * FLOATS[dtype].width))
  if (elements === undefined) fail(CODE, `tensor ${show(name)} of shape [${shape}] exceeds 2^63 bits`)
  return { dtype, shape, elements, parts: PARTS[layout].map(part => `__elsa__.${part}.${name}`) }
}

/**
 * What is stored against what is listed (ELSA-R-066, 067, 069, 071, 072).
 * @param {Layout} layout
 * @param {Map<string, Nested>} nested
 * @param {Header['tensors']} tensors
 */
function checkStored(layout, nested, tensors) {
  const expected = new Set()
  /** @param {string} name @param {string} dtype @param {unknown[]} shape */
  const expect = (name, dtype, shape) => {
    const found = tensors.get(name)
    const [is, wanted] = [found && `${found.dtype} [${found.shape}]`, `${dtype} [${shape}]`]
    if (is !== wanted) fail(CODE, `tensor ${show(name)} is ${is ?? 'missing'}, expected ${wanted}`)
    expected.add(name)
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
    if (!third) expect(first, 'U8', [(elements + 7n) / 8n])
    else {
      const [rows, columns] = matrixOf(shape)
      expect(first, indexDtype(kept, columns), [rows + 1n])
      expect(second, indexDtype(kept, columns), [kept])
    }
  }
  for (const name of tensors.keys()) if (isReserved(name) && !expected.has(name)) fail(CODE, `the name ${show(name)} is reserved`)
}

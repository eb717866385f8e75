import { allocate, bytesOf, collect, makeTensor, readData } from './data.js'
import { checkDigest, lineOf } from './digest.js'
import { DIGEST, NAME, OBJECT, checkVersion, integer, listOf, mapOf, optional, readFields, text } from './document.js'
import { bitsOf, wordsOf } from './dtypes.js'
import { about, expect, fail, say, within } from './errors.js'
import { checkTotal, nameOf, openFiles } from './files.js'
import { countBits, typeOf } from './header.js'
import { parseJson } from './json.js'
import { makeKernels } from './kernels.js'
import { LAYOUT, matrixOf, partsOf } from './layouts.js'
import { readFile } from './network.js'
import { checkReserved, ownMetadata } from './profile.js'

/** @import { Tensor } from './data.js' */
/** @import { ErrorCode } from './errors.js' */
/** @import { ReadOptions } from './files.js' */
/** @import { Header } from './header.js' */
/** @import { Layout } from './layouts.js' */
/** @import { Source } from './source.js' */

/**
 * What a level file, or the index of one, says of its level (elsa-1.0.md §9.1).
 * @typedef {{level: number, name: string, layout: Layout, digest?: string}} LevelFields
 */

/**
 * A nested tensor of a level file, and the names of what it is stored as.
 * @typedef {{dtype: string, shape: number[], parts: string[]}} Nested
 * @typedef {LevelFields & {nested?: Map<string, Nested>}} LevelDocument
 */

/**
 * One level file in memory as it is stored.
 * @typedef {{name: string, header: Header, document: LevelDocument | undefined, stored: Map<string, Tensor>}} LevelFile
 */

const CODE = 'InvalidLayout'

/**
 * The tensors of a level file in any layout, or of the index of one in shards.
 * @param {Source} source
 * @param {ReadOptions & {verify?: boolean}} [options] `verify: false` leaves the digest out
 * @returns {Promise<LevelFields & {metadata: Map<string, string>, tensors: Map<string, Tensor>}>}
 */
export async function loadLevelFile(source, options = {}) {
  const tensors = new Map()
  const { files, fields } = await readLevelFiles(source, options, (name, tensor) => tensors.set(name, tensor))
  return { ...fields, metadata: ownMetadata(files.map(({ header }) => header)), tensors }
}

/**
 * Read all of a level, decode it, and compare the digests that can be recomputed: where `tensors` is given (ELSA-R-068,
 * ELSA-R-102).
 * @param {Source} source
 * @param {ReadOptions & {verify?: boolean}} options
 * @param {(name: string, tensor: Tensor) => void} take
 * @returns {Promise<{files: LevelFile[], fields: LevelFields, compared: number}>} and how many digests were compared
 */
export async function readLevelFiles(source, options, take) {
  const kernels = makeKernels()
  const { files, fields, whole } = await openFiles(source, options, async bytes => {
    const file = await readFile(bytes, readDocument, 'document')
    const stored = new Map()
    await readData({ name: '', bytes, ...file }, kernels, false, entry => collect(entry, tensor => stored.set(entry.name, tensor)))
    return { ...file, stored }
  }, joinLevel)
  const verify = options.verify ?? true
  const all = new Map()
  const together = verify && whole && files.every(file => file.document?.nested)
  let compared = 0
  for (const { name, document, stored } of files) {
    await about(name, async () => {
      const { digest, nested = new Map() } = document ?? {}
      const hashed = verify && document?.nested && digest
      const lines = new Map()
      for (const [name, tensor] of decode(nested, stored)) {
        take(name, tensor)
        if (together || hashed) lines.set(name, lineOf(kernels, name, tensor, nested.has(name)))
      }
      if (hashed) compared++, checkDigest(fields.level, lines, digest)
      for (const [name, line] of lines) all.set(name, line)
    })
  }
  if (together) {
    compared++
    await about(nameOf(source), async () => checkDigest(fields.level, all, whole))
  }
  return { files, fields, compared }
}

/**
 * The level document of a file with all checks that need no data; nothing for a plain checkpoint.
 * @param {Header} header
 * @returns {LevelDocument | undefined}
 */
function readDocument({ metadata, tensors }) {
  if (metadata.has('elsa')) fail(CODE, '"elsa" in the metadata, expected a level file')
  const document = metadata.get('elsa_level')
  if (document === undefined) return undefined
  const map = parseJson(document, 'level document')
  const fields = readLevel(map, CODE)
  const { layout } = fields
  /** @type {Map<string, any> | undefined} */
  const listed = readFields(map, CODE, { tensors: layout === 'dense' ? optional(OBJECT) : OBJECT }).tensors
  const expected = new Set()
  for (const [name, tensor] of mapOf(listed ?? new Map(), CODE, OBJECT, 'tensors: ')) {
    const nested = readFields(tensor, CODE, { dtype: text(/^(F32|BF16|F16|F64)$/), shape: listOf(integer(0)) })
    const { dtype, shape } = nested
    checkReserved(name, CODE)
    countBits({ name, dtype, shape }, CODE)
    if (layout !== 'dense' && tensors.has(name)) fail(CODE, say`${name} is stored as such and in parts, expected parts alone`)
    const parts = partsOf({ name, dtype, shape }, layout, BigInt(tensors.get(`__elsa__.values.${name}`)?.shape[0] ?? 0))
    for (const part of parts) {
      const found = tensors.get(part.name)
      expect(CODE, say`type of ${part.name}`, found && typeOf(found), typeOf(part))
      expected.add(part.name)
    }
    listed?.set(name, { dtype, shape, parts: parts.map(({ name }) => name) })
  }
  for (const name of tensors.keys()) if (!expected.has(name)) checkReserved(name, CODE)
  return { ...fields, nested: listed }
}

/**
 * @param {Map<string, any>} map
 * @param {ErrorCode} code
 * @returns {LevelFields}
 */
function readLevel(map, code) {
  checkVersion(map, code)
  return /** @type {LevelFields} */ (readFields(map, code, {
    level: integer(1, 255),
    name: NAME,
    layout: LAYOUT,
    digest: optional(DIGEST),
  }))
}

/**
 * What files say of their level; shards are compared (§10.3).
 * @param {LevelFile[]} files
 * @param {Map<string, any>} [metadata] of the index
 * @returns {{files: LevelFile[], fields: LevelFields, whole?: string}} and the digest of all files together
 */
function joinLevel(files, metadata) {
  const code = 'InvalidIndex'
  /** @type {Map<string, any> | undefined} */
  const stated = metadata && readFields(metadata, code, { elsa_level: optional(OBJECT) }).elsa_level
  const fields = stated && readLevel(stated, code)
  /** @type {LevelDocument} */
  const known = fields ?? files.find(file => file.document)?.document ?? fail('NotElsa', 'no "elsa_level" in the metadata, expected a level file')
  const { nested, ...level } = known
  if (!metadata) return { files, fields: level }
  for (const { name, document, header } of files) {
    expect(code, say`level of ${name}`, describe(document), describe(known))
    for (const { document } of files) {
      // The index has every stored name once; one that is stored in parts must not be stored as such too.
      for (const [tensor, { parts }] of document?.nested ?? []) {
        if (parts.length > 1 && header.tensors.has(tensor)) fail(code, say`${tensor} is stored as such and in parts, expected parts alone`)
      }
    }
  }
  checkTotal(metadata, files)
  const digest = fields?.digest
  return { files, fields: { ...level, digest }, whole: digest }
}

/** @param {LevelFields | undefined} document */
const describe = document => document && `${document.level}, ${document.name}, ${document.layout}`

/**
 * The tensors of a file, one after the other; the parts of nested ones against ELSA-R-070, 073 and 092.
 * @param {Map<string, Nested>} nested
 * @param {Map<string, Tensor>} stored
 * @returns {Generator<[string, Tensor]>}
 */
function* decode(nested, stored) {
  const used = new Set()
  for (const [name, { dtype, shape, parts }] of nested) {
    if (parts.length < 2) continue
    for (const part of parts) used.add(part)
    const [first, second, third] = parts.map(part => /** @type {Tensor} */ (stored.get(part)).data)
    const [rows, columns] = matrixOf(shape).map(Number)
    const bits = bitsOf(dtype)
    const bytes = allocate(rows * columns * bits / 8)
    const words = wordsOf(bits, bytes.buffer)
    const values = wordsOf(bits, (third ?? second).buffer)
    if (!values.every(Boolean)) fail(CODE, say`values of ${name} have a zero, expected none`)
    let found = 0
    /** @param {number} place */
    const put = place => {
      if (found < values.length) words[place] = values[found]
      found++
    }
    if (third) putRows(name, columns, first, second, put)
    else {
      const bitmask = bytesOf(first)
      const { length } = words
      for (let i = 0; i < 8 * bitmask.length; i++) if (bitmask[i >> 3] >> (i & 7) & 1) put(i)
      if (bitmask[length >> 3] >> (length & 7)) fail(CODE, say`bitmask of ${name} has bits behind element ${length}, expected none`)
    }
    expect(CODE, say`number of values of ${name}`, values.length, found)
    yield [name, makeTensor({ dtype, shape }, bytes)]
  }
  for (const [name, tensor] of stored) if (!used.has(name)) yield [name, tensor]
}

/**
 * @param {string} name
 * @param {number} columns
 * @param {any} pointers
 * @param {any} indices
 * @param {(place: number) => void} put
 */
function putRows(name, columns, pointers, indices, put) {
  let end = 0
  for (let row = 0; row < pointers.length; row++) {
    // Row −1 has no elements, and ends where row 0 begins.
    let begin = end
    end = Number(pointers[row])
    if (end < begin || end > (row ? indices.length : 0)) within(CODE, say`indptr of ${name} at ${row}`, end, begin, row ? indices.length : 0)
    for (let last = -1; begin < end; begin++) {
      const column = Number(indices[begin])
      if (column <= last || column >= columns) within(CODE, say`index of ${name} at ${begin}`, column, last + 1, columns - 1)
      put((row - 1) * columns + column)
      last = column
    }
  }
}

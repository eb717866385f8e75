import { allocate, bytesOf, makeTensor, readData } from './data.js'
import { checkDigest, lineOf } from './digest.js'
import { FLOATS } from './dtypes.js'
import { about, fail, show } from './errors.js'
import { makeKernels } from './kernels.js'
import { matrixOf } from './csr.js'
import { readLevelDocument, readLevelFields } from './level_document.js'
import { openFile } from './network.js'
import { ownMetadata } from './profile.js'
import { checkMap, openAll, readIndex } from './shards.js'
import { isIndex, nameOf } from './source.js'

/** @import { Tensor } from './data.js' */
/** @import { TypedArray } from './dtypes.js' */
/** @import { Header } from './header.js' */
/** @import { LevelDocument, LevelFields, Nested } from './level_document.js' */
/** @import { ReadOptions } from './network.js' */
/** @import { Source } from './source.js' */

/**
 * One level file in memory as it is stored.
 * @typedef {{name: string, header: Header, document: LevelDocument | undefined, stored: Map<string, Tensor>}} Stored
 */

const CODE = 'InvalidLayout'

/**
 * The tensors of a level file in any layout, or of the index of one in shards.
 * @param {Source} source
 * @param {ReadOptions & {verify?: boolean}} [options] `verify: false` leaves the digest out
 * @returns {Promise<LevelFields & {metadata: Map<string, string>, tensors: Map<string, Tensor>}>}
 */
export async function loadLevelFile(source, options = {}) {
  const { files, fields } = await readLevelFiles(source, options)
  const tensors = new Map()
  await decodeAll(files, fields, options.verify ?? true, (name, tensor) => tensors.set(name, tensor))
  const { level, name, layout, digest } = fields
  return { level, name, layout, digest, metadata: ownMetadata(files.map(({ header }) => header)), tensors }
}

/**
 * @param {Source} source
 * @param {ReadOptions} options
 * @returns {Promise<number>} of the digests that were compared
 */
export async function validateLevelFile(source, options) {
  const { files, fields } = await readLevelFiles(source, options)
  return decodeAll(files, fields, true, () => {})
}

/**
 * Read all of a level, with all checks but those of contents.
 * @param {Source} source
 * @param {ReadOptions} options
 * @returns {Promise<{files: Stored[], fields: LevelFields}>}
 */
async function readLevelFiles(source, options) {
  const name = nameOf(source)
  if (!isIndex(source, options)) {
    const file = await readStored(source, name, options)
    return about(name, async () => {
      const fields = file.document ?? fail('NotElsa', 'a safetensors file without a level document')
      return { files: [file], fields }
    })
  }
  const index = await readIndex(source, options)
  const files = await openAll(index, (shard, name) => readStored(shard, name, { ...options, files: undefined }))
  return about(name, async () => {
    checkMap(index, files)
    return { files, fields: joinLevel(index.metadata.get('elsa_level'), files) }
  })
}

/**
 * @param {unknown} stated what the index says
 * @param {Stored[]} files
 * @returns {LevelFields}
 */
function joinLevel(stated, files) {
  const code = 'InvalidIndex'
  if (stated !== undefined && !(stated instanceof Map)) fail(code, `elsa_level is ${show(stated)}, expected an object`)
  const fields = stated && readLevelFields(stated, code)
  const known = fields ?? files.find(file => file.document)?.document
  if (!known) fail('NotElsa', 'an index of files without a level document')
  const names = new Set()
  for (const { name, document, header } of files) {
    if (!document) fail(code, `shard ${show(name)} has no level document, others have`)
    for (const key of /** @type {const} */ (['level', 'name', 'layout'])) {
      if (document[key] !== known[key]) fail(code, `shard ${show(name)} has the ${key} ${show(document[key])}, expected ${show(known[key])}`)
    }
    const nested = document.nested ?? new Map()
    const parts = new Set([...nested.values()].flatMap(({ parts }) => parts))
    for (const tensor of new Set([...header.tensors.keys(), ...nested.keys()])) {
      if (names.has(tensor)) fail(code, `tensor ${show(tensor)} is in two shards`)
      if (!parts.has(tensor)) names.add(tensor)
    }
  }
  return { ...known, digest: fields?.digest }
}

/**
 * @param {Source} source
 * @param {string} name
 * @param {ReadOptions} options
 * @returns {Promise<Stored>}
 */
async function readStored(source, name, options) {
  const { header, bytes, document } = await openFile(source, name, options, async (header, bytes) =>
    ({ header, bytes, document: readLevelDocument(header) }))
  const stored = new Map()
  await about(name, () => readData(bytes, header, makeKernels(), undefined, entry => {
    const target = allocate(entry.size)
    stored.set(entry.name, makeTensor(entry, target))
    return (piece, at) => target.set(piece, at)
  }))
  return { name, header, document, stored }
}

/**
 * Decode all tensors, and compare the digests that can be recomputed: where `tensors` is given (ELSA-R-068, 102).
 * @param {Stored[]} files
 * @param {LevelFields} fields
 * @param {boolean} verify
 * @param {(name: string, tensor: Tensor) => void} take
 * @returns {Promise<number>} of digests that were compared
 */
async function decodeAll(files, fields, verify, take) {
  const kernels = makeKernels()
  const all = new Map()
  const whole = verify && fields !== files[0].document && files.every(file => file.document?.nested) && fields.digest
  let compared = 0
  for (const { name, document, stored } of files) {
    await about(name, async () => {
      const { digest, nested } = document ?? {}
      const hashed = whole || verify && nested && digest
      const lines = new Map()
      for (const [name, tensor] of decode(nested ?? new Map(), stored)) {
        take(name, tensor)
        if (hashed) lines.set(name, lineOf(kernels, name, tensor, Boolean(nested?.has(name))))
      }
      if (hashed && checkDigest(fields.level, lines, digest)) compared++
      for (const [name, line] of lines) all.set(name, line)
    })
  }
  if (whole && checkDigest(fields.level, all, whole)) compared++
  return compared
}

/**
 * The tensors of a file, one after the other; the parts of nested ones against ELSA-R-070, 073 and 092.
 * @param {Map<string, Nested>} nested
 * @param {Map<string, Tensor>} stored
 * @returns {Generator<[string, Tensor]>}
 */
function* decode(nested, stored) {
  const used = new Set()
  for (const [name, { dtype, shape, elements, parts }] of nested) {
    if (!parts.length) continue
    for (const part of parts) used.add(part)
    const bytes = allocate(Number(elements) * FLOATS[dtype].width)
    const [first, second, third] = parts.map(part => /** @type {Tensor} */ (stored.get(part)).data)
    const words = wordsOf(bytes, dtype)
    const values = wordsOf(bytesOf(third ?? second), dtype)
    if (!values.every(Boolean)) fail(CODE, `tensor ${show(name)} has a zero among its values`)
    if (third) decodeCsr(name, shape, first, second, words, values)
    else decodeBitmask(name, bytesOf(first), words, values)
    yield [name, makeTensor({ dtype, shape }, bytes)]
  }
  for (const [name, tensor] of stored) if (!used.has(name)) yield [name, tensor]
}

/**
 * @param {Uint8Array} bytes
 * @param {string} dtype
 * @returns {any} an array of unsigned words
 */
function wordsOf({ buffer }, dtype) {
  const { width } = FLOATS[dtype]
  return new (width === 2 ? Uint16Array : width === 4 ? Uint32Array : BigUint64Array)(/** @type {ArrayBuffer} */ (buffer))
}

/**
 * @param {string} name
 * @param {Uint8Array} bitmask
 * @param {any} words
 * @param {any} values
 */
function decodeBitmask(name, bitmask, words, values) {
  let found = 0
  for (let i = 0; i < bitmask.length; i++) {
    for (let bits = bitmask[i], j = 8 * i; bits; bits >>= 1, j++) {
      if (!(bits & 1)) continue
      if (j >= words.length) fail(CODE, `the bitmask of ${show(name)} has bits behind its end`)
      if (found < values.length) words[j] = values[found]
      found++
    }
  }
  if (found !== values.length) fail(CODE, `the bitmask of ${show(name)} has ${found} bits set, expected ${values.length}`)
}

/**
 * @param {string} name
 * @param {number[]} shape
 * @param {TypedArray} pointers
 * @param {TypedArray} indices
 * @param {any} words
 * @param {any} values
 */
function decodeCsr(name, shape, pointers, indices, words, values) {
  const columns = Number(matrixOf(shape)[1])
  let end = 0
  for (let row = 0; row < pointers.length; row++) {
    // Row −1 has no elements, and ends where row 0 begins.
    let begin = end
    end = Number(pointers[row])
    if (end < begin || end > (row ? values.length : 0)) fail(CODE, `indptr of ${show(name)} has ${end} after ${begin}`)
    for (let last = -1; begin < end; begin++) {
      const column = Number(indices[begin])
      if (column <= last || column >= columns) fail(CODE, `row ${row - 1} of ${show(name)} has the column ${column} after ${last}`)
      words[(row - 1) * columns + column] = values[begin]
      last = column
    }
  }
  if (end < values.length) fail(CODE, `indptr of ${show(name)} ends with ${end}, expected ${values.length}`)
}

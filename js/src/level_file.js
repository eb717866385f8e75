import { allocate, bytesOf, checkSize, makeTensor, readData } from './data.js'
import { digestLine, levelDigest, NestedHash } from './digest.js'
import { DTYPES, FLOATS } from './dtypes.js'
import { about, fail, show } from './errors.js'
import { readHeader } from './header.js'
import { BLOCK, makeKernels } from './kernels.js'
import { matrixOf } from './csr.js'
import { readLevelDocument, readLevelFields } from './level_document.js'
import { sha256 } from './sha256.js'
import { checkMap, openAll, readIndex } from './shards.js'
import { isIndex, nameOf, openBytes } from './source.js'

/** @import { Tensor } from './data.js' */
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
  if (options.verify ?? true) checkDigests(files, fields)
  const tensors = new Map()
  const metadata = new Map()
  for (const { header, document, stored } of files) {
    for (const [key, value] of header.metadata) {
      if (key !== 'elsa_level' && !metadata.has(key)) metadata.set(key, value)
    }
    const parts = new Set()
    for (const [name, nested] of document?.nested ?? []) {
      if (!nested.parts.length) continue
      tensors.set(name, decode(nested, stored))
      for (const part of nested.parts) parts.add(part)
    }
    for (const [name, tensor] of stored) if (!parts.has(name)) tensors.set(name, tensor)
  }
  const { level, name, layout, digest } = fields
  return { level, name, layout, digest, metadata, tensors }
}

/**
 * @param {Source} source
 * @param {ReadOptions} options
 * @returns {Promise<number>} of the digests that were compared
 */
export async function validateLevelFile(source, options) {
  const { files, fields } = await readLevelFiles(source, options)
  return checkDigests(files, fields)
}

/**
 * Read all of a level, with all checks but that of the digest.
 * @param {Source} source
 * @param {ReadOptions} options
 * @returns {Promise<{files: Stored[], fields: LevelFields}>}
 */
async function readLevelFiles(source, options) {
  if (!isIndex(source, options)) {
    const file = await readStored(source, nameOf(source), options)
    const fields = file.document ?? about(file.name, async () => fail('NotElsa', 'a safetensors file without a level document'))
    return { files: [file], fields: await fields }
  }
  const index = await readIndex(source, options)
  const files = await openAll(index, (shard, name) => readStored(shard, name, { ...options, files: undefined }, false))
  return about(nameOf(source), async () => {
    checkMap(index, files)
    const fields = joinLevel(index.metadata.get('elsa_level'), files)
    for (const file of files) checkContents(file)
    return { files, fields }
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
    const parts = new Set([...document.nested?.values() ?? []].flatMap(nested => nested.parts))
    for (const tensor of new Set([...header.tensors.keys(), ...document.nested?.keys() ?? []])) {
      if (parts.has(tensor)) continue
      if (names.has(tensor)) fail(code, `tensor ${show(tensor)} is in two shards`)
      names.add(tensor)
    }
  }
  return { ...known, digest: fields?.digest }
}

/**
 * @param {Source} source
 * @param {string} name
 * @param {ReadOptions} options
 * @param {boolean} [check] the contents of parts too
 * @returns {Promise<Stored>}
 */
async function readStored(source, name, options, check = true) {
  return about(name, async () => {
    const bytes = await openBytes(source, options)
    try {
      const header = await readHeader(bytes)
      const document = readLevelDocument(header)
      checkSize(header, bytes.left())
      const stored = new Map()
      await readData(bytes, header, makeKernels(), new Map(), entry => {
        const tensor = makeTensor(entry)
        const target = bytesOf(tensor)
        stored.set(entry.name, tensor)
        return (piece, at) => target.set(piece, at)
      })
      const file = { name, header, document, stored }
      if (check) checkContents(file)
      return file
    } finally {
      await bytes.close()
    }
  })
}

/**
 * The parts of nested tensors against ELSA-R-070, 073 and 092.
 * @param {Stored} file
 */
function checkContents({ document, stored }) {
  for (const [name, nested] of document?.nested ?? []) {
    if (!nested.parts.length) continue
    const parts = nested.parts.map(part => /** @type {Tensor} */ (stored.get(part)))
    const values = parts[parts.length - 1]
    const { width } = FLOATS[nested.dtype]
    const kept = values.data.byteLength / width
    if (countNonzero(values, width) !== kept) fail(CODE, `tensor ${show(name)} has a zero among its values`)
    if (parts.length === 2) {
      const bits = bytesOf(parts[0])
      let found = 0
      for (const byte of bits) found += ONES[byte]
      const unused = Number(nested.elements % 8n)
      if (unused && bits[bits.length - 1] >> unused) fail(CODE, `the bitmask of ${show(name)} has bits behind its end`)
      if (found !== kept) fail(CODE, `the bitmask of ${show(name)} has ${found} bits set, expected ${kept}`)
    } else checkCsr(name, nested.shape, parts[0].data, parts[1].data)
  }
}

const ONES = Uint8Array.from({ length: 256 }, (_, i) => i.toString(2).replaceAll('0', '').length)

/** @param {Tensor} tensor @param {number} width */
function countNonzero(tensor, width) {
  const words = new (width === 2 ? Uint16Array : width === 4 ? Uint32Array : BigUint64Array)(/** @type {ArrayBuffer} */ (tensor.data.buffer))
  let count = 0
  for (let i = 0; i < words.length; i++) count += words[i] ? 1 : 0
  return count
}

/**
 * @param {string} name
 * @param {number[]} shape
 * @param {import('./dtypes.js').TypedArray} pointers
 * @param {import('./dtypes.js').TypedArray} indices
 */
function checkCsr(name, shape, pointers, indices) {
  const [, columns] = matrixOf(shape)
  const kept = indices.length
  if (Number(pointers[0]) !== 0 || Number(pointers[pointers.length - 1]) !== kept) fail(CODE, `indptr of ${show(name)} does not go from 0 to ${kept}`)
  for (let row = 1; row < pointers.length; row++) {
    const [begin, end] = [Number(pointers[row - 1]), Number(pointers[row])]
    if (end < begin || end > kept) fail(CODE, `indptr of ${show(name)} decreases at row ${row - 1}`)
    for (let i = begin, last = -1; i < end; i++) {
      const column = Number(indices[i])
      if (column <= last || column >= columns) fail(CODE, `row ${row - 1} of ${show(name)} has the column ${column} after ${last}`)
      last = column
    }
  }
}

/**
 * The bitmask of a nested tensor in a sparse layout, piece by piece.
 * @param {Nested} nested
 * @param {Map<string, Tensor>} stored
 * @returns {Generator<Uint8Array>}
 */
function* bitmaskOf({ parts, shape, elements }, stored) {
  const [first, second] = parts.map(part => /** @type {Tensor} */ (stored.get(part)))
  if (parts.length === 2) {
    yield bytesOf(first)
    return
  }
  const [, columns] = matrixOf(shape).map(Number)
  const size = Math.ceil(Number(elements) / 8)
  let row = 0
  let i = 0
  for (let at = 0; at < size; at += BLOCK) {
    const piece = new Uint8Array(Math.min(BLOCK, size - at))
    for (; i < second.data.length; i++) {
      while (Number(first.data[row + 1]) <= i) row++
      const element = row * columns + Number(second.data[i]) - 8 * at
      if (element >= 8 * piece.length) break
      piece[Math.floor(element / 8)] |= 1 << element % 8
    }
    yield piece
  }
}

/**
 * @param {Nested} nested
 * @param {Map<string, Tensor>} stored
 * @returns {Tensor}
 */
function decode(nested, stored) {
  const { dtype, shape, elements, parts } = nested
  const { width } = FLOATS[dtype]
  const buffer = allocate(Number(elements) * width)
  const words = new (width === 2 ? Uint16Array : width === 4 ? Uint32Array : BigUint64Array)(buffer)
  const source = /** @type {Tensor} */ (stored.get(parts[parts.length - 1])).data.buffer
  const values = new (width === 2 ? Uint16Array : width === 4 ? Uint32Array : BigUint64Array)(/** @type {ArrayBuffer} */ (source))
  let at = 0
  let next = 0
  for (const piece of bitmaskOf(nested, stored)) {
    for (let i = 0; i < piece.length; i++, at += 8) {
      for (let bits = piece[i], j = at; bits; bits >>= 1, j++) if (bits & 1) words[j] = values[next++]
    }
  }
  return { dtype, shape, data: new DTYPES[dtype][1](buffer) }
}

/**
 * Compare the digests that can be recomputed: where `tensors` is given (ELSA-R-068, 102).
 * @param {Stored[]} files
 * @param {LevelFields} fields
 * @returns {number} how many
 */
function checkDigests(files, fields) {
  const all = new Map()
  let compared = 0
  /** @param {string} where @param {Map<string, string>} lines @param {string | undefined} stated */
  const compare = (where, lines, stated) => {
    if (!stated) return
    const found = levelDigest(lines)
    if (found !== stated) fail('DigestMismatch', `${where ? `${where}: ` : ''}level ${fields.level} has the digest ${found}, expected ${stated}`)
    compared++
  }
  const wanted = files.every(file => file.document?.nested)
  for (const file of files) {
    if (!file.document?.nested || !(wanted && fields.digest) && !file.document.digest) continue
    const lines = linesOf(file)
    compare(file.name, lines, file.document.digest)
    for (const [name, line] of lines) all.set(name, line)
  }
  if (wanted && fields !== files[0].document) compare('', all, fields.digest)
  return compared
}

/** @param {Stored} file */
function linesOf({ document, stored }) {
  const lines = new Map()
  const parts = new Set()
  const kernels = makeKernels()
  for (const [name, nested] of document?.nested ?? []) {
    let hashes
    if (nested.parts.length) {
      const [bitmask, values] = [sha256(), sha256()]
      for (const piece of bitmaskOf(nested, stored)) bitmask.update(piece)
      for (const part of nested.parts) parts.add(part)
      values.update(bytesOf(/** @type {Tensor} */ (stored.get(nested.parts[nested.parts.length - 1]))))
      hashes = [bitmask.hex(), values.hex()]
    } else {
      hashes = hashNested(kernels, nested.dtype, bytesOf(/** @type {Tensor} */ (stored.get(name))))
    }
    lines.set(name, digestLine(name, nested, hashes))
  }
  for (const [name, tensor] of stored) {
    if (parts.has(name) || lines.has(name)) continue
    const hash = sha256()
    hash.update(bytesOf(tensor))
    lines.set(name, digestLine(name, tensor, [hash.hex()]))
  }
  return lines
}

/**
 * The two hashes of a nested tensor in memory.
 * @param {import('./kernels.js').Kernels} kernels
 * @param {string} dtype
 * @param {Uint8Array} bytes
 * @returns {string[]}
 */
export function hashNested(kernels, dtype, bytes) {
  const hash = new NestedHash(kernels, dtype)
  for (let at = 0; at < bytes.length; at += BLOCK) {
    const piece = bytes.subarray(at, at + BLOCK)
    kernels.block.set(piece)
    hash.update(piece.length)
  }
  return hash.hashes()
}

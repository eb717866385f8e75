import { readData } from './data.js'
import { openDelivery } from './delivery.js'
import { checkDigest, lineOf, startLine } from './digest.js'
import { FLOATS } from './dtypes.js'
import { ElsaError, about, show } from './errors.js'
import { BLOCK, makeKernels } from './kernels.js'
import { validateLevelFile } from './level_file.js'
import { openNetwork } from './network.js'
import { isReserved, storedName } from './profile.js'
import { compact } from './sift.js'
import { Bytes } from './source.js'
import { checkCount, checkWords, report } from './words.js'
import { checkSum, xxh3 } from './xxh3.js'

/** @import { Visitor } from './data.js' */
/** @import { Delivery } from './delivery.js' */
/** @import { DeliveryFile } from './delivery_file.js' */
/** @import { Entry } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Network, Part, ReadOptions } from './network.js' */
/** @import { Profile } from './profile.js' */
/** @import { Source } from './source.js' */
/** @import { Findings } from './words.js' */

/**
 * Check everything that the specification requires of a file; throws what is wrong with it.
 * @param {Source} source
 * @param {ReadOptions & {kind?: 'elsa' | 'level' | 'delivery'}} [options] what the file has to be; an ELSA file unless told
 * @returns {Promise<{kind: string, digests: number}>} what it is, and how many digests of levels were compared
 */
export async function validate(source, options = {}) {
  const { kind = 'elsa' } = options
  const digests = kind === 'level' ? validateLevelFile(source, options)
    : kind === 'delivery' ? validateDelivery(await openDelivery(source, options))
      : validateNetwork(await openNetwork(source, options))
  return { kind, digests: await digests }
}

/**
 * All data of an ELSA file, or of all shards of one.
 * @param {Pick<Network, 'profile' | 'parts'>} network
 * @returns {Promise<number>} of digests compared
 */
async function validateNetwork({ profile, parts }) {
  /** @type {Findings} */
  const findings = []
  const kernels = makeKernels()
  // Hash only for levels that state a digest; of each, one line for each tensor.
  const lines = new Map(digested(profile).map(({ level }) => [level, new Map()]))
  for (const part of parts) {
    const { name, header, profile, data } = part
    await about(name, async () => readData(await data(), header, kernels, profile.checksums, entry => visit(kernels, part, entry, findings, lines)))
  }
  return conclude(parts, profile, findings, lines)
}

/** The levels whose digest can be compared. @param {Profile} profile */
function digested({ levels, shard }) {
  return shard ? [] : levels.filter(({ digest }) => digest)
}

/**
 * Report what was found; the digests, which come last, are compared only where there is nothing.
 * @param {{name: string}[]} files
 * @param {Profile} profile
 * @param {Findings} findings
 * @param {Map<number, Map<string, string>>} lines of each level
 * @returns {Promise<number>} of digests compared
 */
async function conclude(files, { levels }, findings, lines) {
  await about(files.length === 1 ? files[0].name : '', async () => {
    report(findings)
    for (const [level, found] of lines) checkDigest(level, found, levels[level - 1].digest)
  })
  return lines.size
}

/**
 * @param {Kernels} kernels
 * @param {Part} part
 * @param {Entry} entry
 * @param {Findings} findings
 * @param {Map<number, Map<string, string>>} lines
 * @returns {Visitor}
 */
function visit(kernels, { profile }, entry, findings, lines) {
  const { name, dtype, size } = entry
  if (!profile.nested.has(name)) {
    // A variant is of one level, and has its plain name there.
    const [, only, plain] = isReserved(name) ? name.split(/^__elsa__\.(\d+)\./) : ['', '', name]
    const owners = [...lines.keys()].filter(level => only ? level === Number(only) : storedName(profile, name, level) === name)
    const line = owners.length ? startLine(kernels, plain, entry, false) : undefined
    return (piece, at) => {
      line?.update(piece)
      if (!line || at + piece.length < size) return
      const text = line.end()
      for (const level of owners) lines.get(level)?.set(plain, text)
    }
  }
  const { width } = FLOATS[dtype]
  // From the last level down each is what the one before leaves over, in place.
  const levels = profile.levels.map(({ level }) =>
    ({ level, kept: 0, line: lines.has(level) ? startLine(kernels, name, entry, true) : undefined })).reverse()
  return (piece, at) => {
    checkWords(kernels, entry, profile, piece.length, findings)
    for (const one of levels) {
      kernels.mask(width, piece.length, 2 ** profile.bits - 1, one.level)
      one.kept += one.line ? one.line.update(piece) : compact(kernels, width, piece.length)
    }
    if (at + piece.length < size) return
    for (const { level, kept, line } of levels) {
      checkCount(entry, profile, level, kept / width, findings)
      if (line) lines.get(level)?.set(name, line.end())
    }
  }
}

/**
 * All parts of a delivery file that are there (ELSA-D-006).
 * @param {Delivery} delivery
 * @returns {Promise<number>} of digests compared
 */
async function validateDelivery({ files, profile }) {
  for (const file of files) {
    try {
      await about(file.name, () => file.decode(file.partOf('dense')))
    } catch (error) {
      if (!(error instanceof ElsaError && error.code === 'Incomplete')) throw error
    } finally {
      await file.feed.close()
    }
  }
  const there = Math.min(...files.map(file => file.parts))
  if (there > profile.levels.length) {
    // All of it: the source in one piece, which is validated as such.
    const parts = files.map(file => ({ ...file, data: async () => new Bytes(file.source().slice(1).values()) }))
    return validateNetwork({ profile, parts })
  }
  /** @type {Findings} */
  const findings = []
  for (const file of files) checkArrays(file, findings)
  const lines = new Map(digested(profile).filter(({ level }) => level <= there).map(({ level }) => [level, linesOf(files, level)]))
  return conclude(files, profile, findings, lines)
}

/**
 * What can be said of the tensors of a prefix.
 * @param {DeliveryFile} file
 * @param {Findings} findings
 */
function checkArrays(file, findings) {
  const { header, profile, arrays, parts, kernels } = file
  for (const entry of parts ? header.order : []) {
    const { name, size } = entry
    const bytes = arrays.get(name) ?? new Uint8Array(0)
    const stated = profile.checksums.get(name)
    if (profile.nested.has(name)) {
      for (let at = 0; at < bytes.length; at += BLOCK) {
        const piece = bytes.subarray(at, at + BLOCK)
        kernels.block.set(piece)
        checkWords(kernels, entry, profile, piece.length, findings)
      }
    } else if (stated && bytes.length === size) checkSum(`tensor ${show(name)}`, xxh3(bytes, 0n, kernels), stated)
  }
  file.checkCounts(parts, findings)
}

/**
 * The lines of a level's digest.
 * @param {DeliveryFile[]} files
 * @param {number} level
 * @returns {Map<string, string>}
 */
function linesOf(files, level) {
  return new Map(files.flatMap(file => [...file.tensors(level, true)].map(([name, tensor]) =>
    [name, lineOf(file.kernels, name, tensor, file.profile.nested.has(name))])))
}

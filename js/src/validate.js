import { readData } from './data.js'
import { openDelivery } from './delivery.js'
import { NestedHash, digestLine, levelDigest } from './digest.js'
import { FLOATS } from './dtypes.js'
import { ElsaError, about, show } from './errors.js'
import { BLOCK, makeKernels } from './kernels.js'
import { hashNested, validateLevelFile } from './level_file.js'
import { openNetwork } from './network.js'
import { isReserved, storedName } from './profile.js'
import { sha256 } from './sha256.js'
import { Bytes } from './source.js'
import { Findings, checkCount, checkWords } from './words.js'
import { writeChecksum, xxh3 } from './xxh3.js'

/** @import { Visitor } from './data.js' */
/** @import { Delivery } from './delivery.js' */
/** @import { DeliveryFile } from './delivery_file.js' */
/** @import { Entry } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Network, Part, ReadOptions } from './network.js' */
/** @import { Source } from './source.js' */

/**
 * Check everything that the specification requires of a file; throws what is wrong with it.
 * @param {Source} source
 * @param {ReadOptions & {kind?: 'elsa' | 'level' | 'delivery'}} [options] what the file has to be; an ELSA file unless told
 * @returns {Promise<{kind: string, digests: number}>} what it is, and how many digests of levels were compared
 */
export async function validate(source, options = {}) {
  const { kind = 'elsa' } = options
  if (kind === 'level') return { kind, digests: await validateLevelFile(source, options) }
  if (kind === 'delivery') return { kind, digests: await validateDelivery(await openDelivery(source, options)) }
  return { kind, digests: await validateNetwork(await openNetwork(source, options)) }
}

/**
 * All data of an ELSA file, or of all shards of one.
 * @param {Network} network
 * @returns {Promise<number>} of digests compared
 */
export async function validateNetwork({ profile, parts }) {
  const findings = new Findings()
  const kernels = makeKernels()
  const stated = profile.shard ? [] : profile.levels.filter(level => level.digest)
  // Hash only for levels that state a digest; of each, one line for each tensor.
  const lines = new Map(stated.map(({ level }) => [level, new Map()]))
  for (const part of parts) {
    await about(part.name, async () => {
      const bytes = await part.data()
      try {
        await readData(bytes, part.header, kernels, part.profile.checksums, entry => visit(kernels, part, entry, findings, lines))
      } finally {
        await bytes.close()
      }
    })
  }
  for (const { level, digest } of stated) {
    const found = levelDigest(/** @type {Map<string, string>} */ (lines.get(level)))
    if (found !== digest) findings.note(18, 'DigestMismatch', `level ${level} has the digest ${found}, expected ${digest}`)
  }
  await about(parts.length === 1 ? parts[0].name : '', async () => findings.report())
  return stated.length
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
  if (!profile.nested.has(entry.name)) {
    const owners = [...lines.keys()].filter(level => isReserved(entry.name) ? entry.name.startsWith(`__elsa__.${level}.`)
      : storedName(profile, entry.name, level) === entry.name)
    const hash = owners.length ? sha256() : undefined
    return (piece, at) => {
      hash?.update(piece)
      if (!hash || at + piece.length < entry.size) return
      const name = isReserved(entry.name) ? entry.name.slice(`__elsa__.${owners[0]}.`.length) : entry.name
      const line = digestLine(name, entry, [hash.hex()])
      for (const level of owners) lines.get(level)?.set(name, line)
    }
  }
  const { width } = FLOATS[entry.dtype]
  const low = 2 ** profile.bits - 1
  const levels = profile.levels.map(({ level }) => ({ level, kept: 0, hash: lines.has(level) ? new NestedHash(kernels, entry.dtype) : undefined }))
  // From the last level down each is what the one before leaves over, in place.
  levels.reverse()
  return (piece, at) => {
    checkWords(kernels, entry, profile, piece.length, findings)
    for (const one of levels) {
      kernels.mask(width, piece.length, low, one.level)
      one.kept += one.hash ? one.hash.update(piece.length) : kernels.compact(width, piece.length) / width
    }
    if (at + piece.length < entry.size) return
    for (const { level, kept, hash } of levels) {
      checkCount(entry, profile, level, kept, findings)
      if (hash) lines.get(level)?.set(entry.name, digestLine(entry.name, entry, hash.hashes()))
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
    return validateNetwork({
      profile,
      metadata: new Map(),
      parts: files.map(file => {
        const [, ...data] = file.source()
        return { ...file, data: async () => new Bytes(data.values(), file.header.size) }
      }),
    })
  }
  const findings = new Findings()
  for (const file of files) checkArrays(file, findings)
  const stated = profile.shard ? [] : profile.levels.filter(({ level, digest }) => digest && level <= there)
  for (const { level, digest } of stated) {
    const found = levelDigest(new Map(files.flatMap(file => [...linesOf(file, level)])))
    if (found !== digest) findings.note(18, 'DigestMismatch', `level ${level} has the digest ${found}, expected ${digest}`)
  }
  await about(files.length === 1 ? files[0].name : '', async () => findings.report())
  return stated.length
}

/**
 * What can be said of the tensors of a prefix.
 * @param {DeliveryFile} file
 * @param {Findings} findings
 */
function checkArrays({ header, profile, arrays, counts, parts, kernels }, findings) {
  if (!parts) return
  for (const entry of header.order) {
    const bytes = arrays.get(entry.name) ?? new Uint8Array(0)
    if (profile.nested.has(entry.name)) {
      for (let at = 0; at < bytes.length; at += BLOCK) {
        const piece = bytes.subarray(at, at + BLOCK)
        kernels.block.set(piece)
        checkWords(kernels, entry, profile, piece.length, findings)
      }
      let kept = 0
      for (let level = 1; level <= parts; level++) {
        kept += counts.get(entry.name)?.[level] ?? 0
        checkCount(entry, profile, level, kept, findings)
      }
    } else if (bytes.length === entry.size) {
      const stated = profile.checksums.get(entry.name)
      const found = writeChecksum(xxh3(bytes, 0n, kernels))
      if (stated && found !== stated) {
        findings.note(15, 'ChecksumMismatch', `tensor ${show(entry.name)}: checksum ${found}, expected ${stated}`)
      }
    }
  }
}

/**
 * The lines of a level's digest.
 * @param {DeliveryFile} file
 * @param {number} level
 * @returns {Map<string, string>}
 */
function linesOf(file, level) {
  const lines = new Map()
  for (const [name, { dtype, shape, data }] of file.tensors(level, true)) {
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
    const hash = sha256()
    if (!file.profile.nested.has(name)) hash.update(bytes)
    const hashes = file.profile.nested.has(name) ? hashNested(file.kernels, dtype, bytes) : [hash.hex()]
    lines.set(name, digestLine(name, { dtype, shape }, hashes))
  }
  return lines
}

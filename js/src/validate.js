import { readData } from './data.js'
import { NestedHash, digestLine, levelDigest } from './digest.js'
import { about, fail, show } from './errors.js'
import { readHeader } from './header.js'
import { makeKernels } from './kernels.js'
import { validateLevelFile } from './level_file.js'
import { openNetwork } from './network.js'
import { isReserved, storedName } from './profile.js'
import { sha256 } from './sha256.js'
import { Findings, Words } from './words.js'

/** @import { Visitor } from './data.js' */
/** @import { Entry } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Network, Part, ReadOptions } from './network.js' */
/** @import { Source } from './source.js' */

/**
 * Check everything that the specification requires of a file; throws what is wrong with it.
 * @param {Source} source
 * @param {ReadOptions & {kind?: 'elsa' | 'level'}} [options] what the file has to be
 * @returns {Promise<{kind: string, digests: number}>} what it is, and how many digests of levels were compared
 */
export async function validate(source, options = {}) {
  const { kind = 'elsa' } = options
  if (kind === 'level') return { kind, digests: await validateLevelFile(source, options) }
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
function visit(kernels, { header, profile }, entry, findings, lines) {
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
  const words = new Words(entry, profile, findings)
  const low = 2 ** profile.bits - 1
  // From the last level down each is what the one before leaves over, in place.
  const hashes = [...lines.keys()].sort((a, b) => b - a).map(level => ({ level, hash: new NestedHash(kernels, entry.dtype) }))
  return (piece, at) => {
    words.check(piece)
    for (const { level, hash } of hashes) {
      kernels.mask(words.width, piece.length, low, level)
      hash.update(piece.length)
    }
    if (at + piece.length < entry.size) return
    words.finish()
    for (const { level, hash } of hashes) lines.get(level)?.set(entry.name, digestLine(entry.name, entry, hash.hashes()))
  }
}

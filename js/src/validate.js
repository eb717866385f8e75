import { readData } from './data.js'
import { openDelivery, partOf } from './delivery.js'
import { asPart } from './delivery_file.js'
import { checkDigest, startLine } from './digest.js'
import { bitsOf } from './dtypes.js'
import { ElsaError, about } from './errors.js'
import { makeKernels } from './kernels.js'
import { readLevelFiles } from './level_file.js'
import { withNetwork } from './network.js'
import { isReserved, storedName } from './profile.js'
import { compact } from './sift.js'
import { checkCount, checkWords, report } from './words.js'

/** @import { Visitor } from './data.js' */
/** @import { Delivery } from './delivery.js' */
/** @import { ReadOptions } from './files.js' */
/** @import { Entry } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Network } from './network.js' */
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
  const digests = kind === 'level' ? (await readLevelFiles(source, options, () => {})).compared
    : kind === 'delivery' ? await validateDelivery(await openDelivery(source, options))
      : await withNetwork(source, options, network => validateNetwork(network, Infinity))
  return { kind, digests }
}

/**
 * All data of an ELSA file, or of all shards of one.
 * @param {Pick<Network, 'profile' | 'parts'>} network
 * @param {number} last level that is there
 * @returns {Promise<number>} of digests compared
 */
async function validateNetwork({ profile: { levels, shard }, parts }, last) {
  /** @type {Findings} */
  const findings = []
  const kernels = makeKernels()
  // Hash only for levels that state a digest, which is not about a shard by itself; of each, one line for each tensor.
  const lines = new Map(levels.filter(({ level, digest }) => digest && !shard && level <= last).map(({ level }) => [level, new Map()]))
  for (const part of parts) {
    const { profile } = part
    await readData(part, kernels, profile.checksums, entry => visit(kernels, profile, entry, last, findings, lines))
  }
  await about(parts.length > 1 ? '' : parts[0].name, async () => {
    report(findings)
    // They come last, and are compared only where nothing else was found.
    for (const [level, found] of lines) checkDigest(level, found, levels[level - 1].digest)
  })
  return lines.size
}

/**
 * @param {Kernels} kernels
 * @param {Profile} profile
 * @param {Entry} entry
 * @param {number} last level that is there
 * @param {Findings} findings
 * @param {Map<number, Map<string, string>>} lines
 * @returns {Visitor}
 */
function visit(kernels, profile, entry, last, findings, lines) {
  const { name, dtype, size } = entry
  if (!profile.nested.has(name)) {
    // A variant is of one level, and has its plain name there.
    const [, only, plain] = isReserved(name) ? name.split(/^__elsa__\.(\d+)\./) : ['', '', name]
    const owners = [...lines.keys()].filter(level => only ? level === Number(only) : storedName(profile, name, level) === name)
    const line = owners.length && startLine(kernels, plain, entry, false)
    return (piece, at) => {
      if (line) line.update(piece)
      if (!line || at + piece.length < size) return
      const text = line.end()
      for (const level of owners) lines.get(level)?.set(plain, text)
    }
  }
  const width = bitsOf(dtype) / 8
  // From the last level down each is what the one before leaves over, in place.
  const levels = profile.levels.filter(({ level }) => level <= last).map(({ level }) =>
    ({ level, kept: 0, line: lines.has(level) && startLine(kernels, name, entry, true) })).reverse()
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
 * All parts of a delivery file that are there (ELSA-D-006): what they hold is validated as the beginning of an ELSA file.
 * @param {Delivery} delivery
 * @returns {Promise<number>} of digests compared
 */
async function validateDelivery(delivery) {
  const { files, profile } = delivery
  const all = partOf(profile, 'dense')
  for (const { name, decode } of files) {
    try {
      await about(name, () => decode(all))
    } catch (error) {
      if (!(error instanceof ElsaError && error.code === 'Incomplete')) throw error
    } finally {
      await delivery.close()
    }
  }
  const there = Math.min(...files.map(({ parts }) => parts))
  const parts = files.map(file => {
    const { profile, arrays } = file
    const checksums = new Map([...profile.checksums].filter(([name]) => there === all || arrays.has(name) && !profile.nested.has(name)))
    return { ...asPart(file), profile: { ...profile, checksums } }
  })
  return validateNetwork({ profile, parts }, there)
}

import { readData } from './data.js'
import { openDelivery, partOf } from './delivery.js'
import { asPart } from './delivery_file.js'
import { checkDigest, startLine } from './digest.js'
import { ElsaError, about } from './errors.js'
import { nameOf } from './files.js'
import { makeKernels } from './kernels.js'
import { readLevelFiles } from './level_file.js'
import { withNetwork } from './network.js'
import { storedName } from './profile.js'
import { checkWords, report, sifter } from './words.js'

/** @import { Delivery } from './delivery.js' */
/** @import { Line } from './digest.js' */
/** @import { ReadOptions } from './files.js' */
/** @import { Part } from './network.js' */
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
    : kind === 'delivery' ? await about(nameOf(source), async () => validateDelivery(await openDelivery(source, options)))
      : await withNetwork(source, options, network => validateNetwork(network))
  return { kind, digests }
}

/**
 * All data of an ELSA file, or of all shards of one.
 * @param {{profile: Profile, parts: (Part & {last?: number})[]}} network `last`: the last level that is there
 * @returns {Promise<number>} of digests compared
 */
async function validateNetwork({ profile: { levels, shard }, parts }) {
  /** @type {Findings} */
  const findings = []
  const kernels = makeKernels()
  // A level is there if it is in every shard; a shard may have more.
  const common = Math.min(...parts.map(({ last = Infinity }) => last))
  // Hash only for levels that state a digest, which is not about a shard by itself.
  /** @type {Map<number, Map<string, Line>>} */
  const lines = new Map(levels.filter(({ level, digest }) => digest && !shard && level <= common).map(({ level }) => [level, new Map()]))
  for (const part of parts) {
    const { profile, last = Infinity } = part
    await readData(part, kernels, profile.checksums, entry => {
      const { name } = entry
      if (!profile.nested.has(name)) {
        // A variant is of one level, and has its plain name there.
        const plain = name.replace(/^__elsa__\.\d+\./, '')
        const line = startLine(plain, entry)
        const owners = [...lines].filter(([level]) => storedName(profile, plain, level) === name)
        for (const [, found] of owners) found.set(plain, line)
        return owners.length ? piece => line.update(piece) : undefined
      }
      for (const [, found] of lines) found.set(name, startLine(name, entry))
      const there = levels.map(({ level }) => level).filter(level => level <= last).reverse()
      const sift = sifter(kernels, profile, entry, there, findings, (level, bits, values) => lines.get(level)?.get(name)?.update(bits, values))
      return (piece, at) => {
        checkWords(kernels, entry, profile, piece.length, findings)
        return sift(piece, at)
      }
    })
  }
  report(findings)
  // They come last, and are compared only where nothing else was found.
  for (const [level, found] of lines) checkDigest(level, found, levels[level - 1].digest)
  return lines.size
}

/**
 * All parts of a delivery file that are there (ELSA-D-006): what they hold is validated as the beginning of an ELSA file.
 * @param {Delivery} delivery
 * @returns {Promise<number>} of digests compared
 */
async function validateDelivery(delivery) {
  const { files, profile } = delivery
  const all = partOf(profile, 'dense')
  for (const { name, bytes, decode } of files) {
    try {
      await about(name, () => decode(all))
    } catch (error) {
      if (!(error instanceof ElsaError && error.code === 'Incomplete')) throw error
    } finally {
      await bytes.close()
    }
  }
  const parts = files.map(file => {
    const { profile, arrays, parts } = file
    const checksums = new Map([...profile.checksums].filter(([name]) => parts === all || arrays.has(name) && !profile.nested.has(name)))
    return { ...asPart(file), profile: { ...profile, checksums }, last: parts }
  })
  return validateNetwork({ profile, parts })
}

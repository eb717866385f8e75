import { CHECKSUM, DIGEST, NAME, NUMBERS, OBJECT, STRINGS, TEXT, arrayOf, checkHeader, checkVersion, field, integer, numbers } from './document.js'
import { FLOATS } from './dtypes.js'
import { fail, show } from './errors.js'
import { Real, parseJson } from './json.js'
import { compareText } from './written.js'

/** @import { Entry, Header } from './header.js' */

/**
 * @typedef {object} Level
 * @property {number} level its number, from 1 on; 1 is the sparsest
 * @property {string} name
 * @property {number} nonzero weights that it keeps, of all nested tensors
 * @property {number} [target] the fraction of zeros that was asked for
 * @property {string} [pattern] the N:M pattern that was asked for
 * @property {string} [digest]
 * @property {Record<string, number>} metrics
 */

/**
 * What an ELSA file says of its networks (elsa-1.0.md §5).
 * @typedef {object} Profile
 * @property {string} version
 * @property {number} bits of a counter
 * @property {Level[]} levels
 * @property {{metrics: Record<string, number>}} dense
 * @property {Map<string, number[]>} nested weights kept at each level, of each nested tensor
 * @property {Set<string>} perLevel tensors with a variant for each level
 * @property {Map<string, string>} checksums
 * @property {{number: number, of: number}} [shard]
 */

const RESERVED = '__elsa__.'
const CODE = 'InvalidProfile'

/** @param {string} name */
export const isReserved = name => name.startsWith(RESERVED)

/**
 * The stored name of a tensor at a level.
 * @param {Profile} profile
 * @param {string} name
 * @param {number | 'dense'} level
 */
export const storedName = (profile, name, level) =>
  level !== 'dense' && profile.perLevel.has(name) ? `${RESERVED}${level}.${name}` : name

/**
 * The number of a level that is asked for by its number, its name, or a function of the profile.
 * @typedef {number | string | ((profile: Profile) => number | string)} LevelChoice
 */

/**
 * @param {Profile} profile
 * @param {LevelChoice} choice
 * @returns {number | 'dense'}
 */
export function chooseLevel(profile, choice) {
  const level = typeof choice === 'function' ? choice(profile) : choice
  if (level === 'dense') return level
  const found = profile.levels.filter(l => l.level === level || l.name === level)
  if (found.length !== 1) {
    const known = profile.levels.map(l => `${l.level} (${show(l.name)})`).join(', ')
    fail('NoSuchLevel', `level ${show(level)}, expected one of ${known}, or "dense"`)
  }
  return found[0].level
}

/**
 * The profile of a file, with all checks that need no data.
 * @param {Header} header
 * @returns {Profile}
 */
export function readProfile(header) {
  const text = header.metadata.get('elsa')
  if (text === undefined) fail('NotElsa', 'a safetensors file without an ELSA profile')
  const map = parseJson(text, 'profile')
  const version = checkVersion(map, CODE)
  checkHeader(header.bytes, field(map, 'header', CHECKSUM, CODE, undefined))
  const profile = { version, ...readFields(map) }
  checkTensors(profile, header)
  checkSums(profile)
  return profile
}

/**
 * @param {Map<string, any>} map
 * @returns {Omit<Profile, 'version'>}
 */
function readFields(map) {
  const bits = field(map, 'bits', integer(1, 8), CODE)
  const levels = field(map, 'levels', arrayOf(OBJECT, 1, 2 ** bits - 1), CODE).map(readLevel)
  const dense = field(map, 'dense', OBJECT, CODE, new Map())
  const nested = field(map, 'nested', OBJECT, CODE)
  for (const [name, counts] of nested) {
    field(nested, name, arrayOf(integer(0), levels.length), CODE)
    for (let t = 1; t < counts.length; t++) {
      if (counts[t] < counts[t - 1]) fail(CODE, `the counts of ${show(name)} decrease from ${counts[t - 1]} to ${counts[t]}`)
    }
  }
  const perLevel = field(map, 'per_level', STRINGS, CODE, [])
  for (const [i, name] of perLevel.entries()) {
    if (i && compareText(perLevel[i - 1], name) >= 0) fail(CODE, `per_level is not sorted at ${show(name)}`)
    if (nested.has(name)) fail(CODE, `${show(name)} is both nested and per-level`)
  }
  for (const name of [...nested.keys(), ...perLevel]) {
    if (isReserved(name)) fail(CODE, `the name ${show(name)} is reserved`)
  }
  const checksums = field(map, 'checksums', OBJECT, CODE, new Map())
  for (const name of checksums.keys()) field(checksums, name, CHECKSUM, CODE)
  const shard = field(map, 'shard', OBJECT, CODE, undefined)
  return {
    bits,
    levels,
    dense: { metrics: numbers(field(dense, 'metrics', NUMBERS, CODE, new Map())) },
    nested,
    perLevel: new Set(perLevel),
    checksums,
    shard: shard && readShard(shard),
  }
}

/** @param {Map<string, any>} map */
function readShard(map) {
  const of = field(map, 'of', integer(1), CODE)
  return { number: field(map, 'number', integer(1, of), CODE), of }
}

/**
 * @param {Map<string, any>} map
 * @param {number} index
 * @returns {Level}
 */
function readLevel(map, index) {
  /** @type {import('./document.js').Kind} */
  const fraction = ['a number 0…1', value => {
    const number = value instanceof Real ? value.value : value
    return typeof number === 'number' && number >= 0 && number <= 1
  }]
  /** @type {import('./document.js').Kind} */
  const pattern = ['N:M', value => TEXT[1](value) && /^[1-9][0-9]*:[1-9][0-9]*$/.test(value)]
  const target = field(map, 'target', fraction, CODE, undefined)
  return {
    level: index + 1,
    name: field(map, 'name', NAME, CODE),
    nonzero: field(map, 'nonzero', integer(0), CODE),
    target: target instanceof Real ? target.value : target,
    pattern: field(map, 'pattern', pattern, CODE, undefined),
    digest: field(map, 'digest', DIGEST, CODE, undefined),
    metrics: numbers(field(map, 'metrics', NUMBERS, CODE, new Map())),
  }
}

/**
 * The profile against the tensors of the file (§5.3, §6).
 * @param {Profile} profile
 * @param {Header} header
 */
function checkTensors(profile, { tensors, order }) {
  const code = 'ProfileMismatch'
  for (const name of [...profile.nested.keys(), ...profile.perLevel, ...profile.checksums.keys()]) {
    if (!tensors.has(name)) fail(code, `the profile names ${show(name)}, which is not in the file`)
  }
  for (const [name, counts] of profile.nested) {
    const { dtype, elements } = /** @type {Entry} */ (tensors.get(name))
    if (!FLOATS[dtype] || profile.bits > FLOATS[dtype].mantissa) {
      fail(code, `nested tensor ${show(name)} is ${dtype}, which cannot hold counters of ${profile.bits} bits`)
    }
    const most = counts[counts.length - 1]
    if (most > elements) fail(code, `nested tensor ${show(name)} keeps ${most} of ${elements} weights`)
  }
  const variants = new Set()
  for (const name of profile.perLevel) {
    const plain = /** @type {Entry} */ (tensors.get(name))
    for (const { level } of profile.levels) {
      const variant = tensors.get(storedName(profile, name, level))
      if (!variant || variant.dtype !== plain.dtype || String(variant.shape) !== String(plain.shape)) {
        fail(code, `level ${level} has no variant of ${show(name)} with its dtype and shape`)
      }
      variants.add(variant)
    }
  }
  let others = false
  for (const tensor of order) {
    const isVariant = variants.has(tensor)
    if (isReserved(tensor.name) && !isVariant) fail(code, `the name ${show(tensor.name)} is reserved, and no variant`)
    if (isVariant && tensor.size && others) fail(code, `the variant ${show(tensor.name)} stands behind other tensors`)
    others ||= !isVariant && tensor.size > 0
  }
}

/** `nonzero` against the counts (ELSA-R-055). @param {Profile} profile */
function checkSums({ levels, nested, shard }) {
  for (const { level, nonzero } of levels) {
    let sum = 0n
    for (const counts of nested.values()) sum += BigInt(counts[level - 1])
    if (shard ? sum > BigInt(nonzero) : sum !== BigInt(nonzero)) {
      fail('CountMismatch', `level ${level} keeps ${sum} weights in all tensors, nonzero says ${nonzero}`)
    }
  }
}

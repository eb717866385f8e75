import { CHECKSUM, DIGEST, NAME, NUMBER, OBJECT, TEXT, checkHeader, checkVersion, integer, listOf, mapOf, optional, readFields } from './document.js'
import { MANTISSA } from './dtypes.js'
import { expect, fail, say } from './errors.js'
import { typeOf } from './header.js'
import { parseJson } from './json.js'
import { compareText } from './written.js'

/** @import { Kind } from './document.js' */
/** @import { ErrorCode } from './errors.js' */
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
 * @property {Record<string, number>} errors standard errors of metrics
 */

/**
 * How a metric was measured (elsa-1.0.md §5.4).
 * @typedef {{better: 'higher' | 'lower', samples?: number, recorded?: string}} MetricInfo
 */

/**
 * What an ELSA file says of its networks (elsa-1.0.md §5).
 * @typedef {object} Profile
 * @property {string} version
 * @property {number} bits of a counter
 * @property {Level[]} levels
 * @property {Pick<Level, 'metrics' | 'errors'>} dense
 * @property {Record<string, MetricInfo>} metrics
 * @property {Map<string, number[]>} nested weights kept at each level, of each nested tensor
 * @property {Set<string>} perLevel tensors with a variant for each level
 * @property {Map<string, string>} checksums
 * @property {{number: number, of: number}} [shard]
 */

const RESERVED = '__elsa__.'
const CODE = 'InvalidProfile'

/** @param {string} name */
export const isReserved = name => name.startsWith(RESERVED)

/** Refuse a name that is the format's own. @param {string} name @param {ErrorCode} code */
export function checkReserved(name, code) {
  if (isReserved(name)) fail(code, say`the name ${name} is reserved, expected another`)
}

/**
 * The stored name of a tensor at a level.
 * @param {Profile} profile
 * @param {string} name
 * @param {number | 'dense'} level
 */
export const storedName = (profile, name, level) =>
  level !== 'dense' && profile.perLevel.has(name) ? `${RESERVED}${level}.${name}` : name

/**
 * The metadata of a file but for the format's own. Of several files the first that has a key counts.
 * @param {Header[]} headers
 * @returns {Map<string, string>}
 */
export const ownMetadata = headers => new Map([...headers].reverse().flatMap(({ metadata }) => [...metadata])
  .filter(([key]) => !/^elsa(_level|_delivery)?$/.test(key)))

/**
 * The number of a level that is asked for by its number, its name, or a function of the profile.
 * @typedef {number | string | ((profile: Profile) => number | string)} LevelChoice
 */

/**
 * What a level has to have.
 * @typedef {object} Wanted
 * @property {LevelChoice} [level]
 * @property {Record<string, number>} [min] metrics of the level, the sparsest that has them: at least these
 * @property {Record<string, number>} [max] and at most these
 */

/**
 * @param {Profile} profile
 * @param {Wanted} wanted
 * @returns {number | 'dense'}
 */
export function pickLevel(profile, { level, min = {}, max = {} }) {
  /** @type {[name: string, bound: number, sign: number, worse: string][]} */
  const bounds = [...Object.entries(min).map(([name, bound]) => /** @type {any} */ ([name, bound, 1, 'lower'])), ...Object.entries(max).map(([name, bound]) => [name, bound, -1, 'higher'])]
  if (!bounds.length) return chooseLevel(profile, /** @type {LevelChoice} */ (level))
  if (level !== undefined) fail('InvalidOption', 'a level and its metrics, expected one of them')
  const all = [...profile.levels, { level: /** @type {const} */ ('dense'), ...profile.dense }]
  for (const [name, , , worse] of bounds) {
    if (Object.hasOwn(profile.metrics, name) && profile.metrics[name].better === worse) fail('InvalidOption', say`${worse} ${name} is better, expected ${worse === 'lower' ? 'max' : 'min'}`)
    if (!all.some(({ metrics }) => Object.hasOwn(metrics, name))) fail('NoSuchLevel', say`no level records ${name}, expected it of some: elsa-record records it`)
  }
  const found = all.find(({ metrics }) => bounds.every(([name, bound, sign]) => Object.hasOwn(metrics, name) && sign * metrics[name] >= sign * bound))
  return found?.level ?? fail('NoSuchLevel', say`levels have ${all.map(({ metrics }) => bounds.map(([name]) => Object.hasOwn(metrics, name) ? metrics[name] : null))}, expected ${bounds.map(([name, bound, sign]) => `${name} ${sign > 0 ? '>=' : '<='} ${bound}`)}`)
}

/**
 * @param {Profile} profile
 * @param {LevelChoice} choice
 * @returns {number | 'dense'}
 */
export function chooseLevel(profile, choice) {
  const wanted = typeof choice === 'function' ? choice(profile) : choice
  if (wanted === 'dense') return wanted
  const [found, other] = profile.levels.filter(({ level, name }) => level === wanted || name === wanted)
  if (!found || other) fail('NoSuchLevel', say`level is ${wanted}, expected ${profile.levels.map(({ name }) => name)}, 1 to ${profile.levels.length} or "dense"`)
  return found.level
}

/**
 * The profile of a file, with all checks that need no data.
 * @param {Header} header
 * @returns {Profile}
 */
export function readProfile(header) {
  const document = header.metadata.get('elsa') ?? fail('NotElsa', 'no "elsa" in the metadata, expected an ELSA file')
  const map = parseJson(document, 'profile')
  const version = checkVersion(map, CODE)
  checkHeader(header.text, readFields(map, CODE, { header: optional(CHECKSUM) }).header)
  const fields = readFields(map, CODE, {
    bits: integer(1, 8),
    levels: listOf(OBJECT, 1, 2 ** map.get('bits') - 1),
    dense: optional(OBJECT, new Map()),
    metrics: optional(OBJECT, new Map()),
    nested: OBJECT,
    per_level: optional(listOf(TEXT), []),
    checksums: optional(OBJECT, new Map()),
    shard: optional(OBJECT),
  })
  /** @type {Level[]} */
  const levels = fields.levels.map(readLevel)
  /** @type {string[]} */
  const perLevel = fields.per_level
  const profile = {
    version,
    bits: fields.bits,
    levels,
    dense: readMetrics(fields.dense),
    metrics: Object.fromEntries([...mapOf(fields.metrics, CODE, OBJECT, 'metrics: ')].map(([name, map]) => [name, /** @type {any} */ (readFields(map, CODE, METRIC, 'metrics: '))])),
    nested: mapOf(fields.nested, CODE, listOf(integer(0), levels.length, levels.length), 'nested: '),
    perLevel: new Set(perLevel),
    checksums: mapOf(fields.checksums, CODE, CHECKSUM, 'checksums: '),
    shard: fields.shard && readFields(fields.shard, CODE, { of: integer(1), number: integer(1, fields.shard.get('of')) }, 'shard: '),
  }
  for (const [name, counts] of profile.nested) {
    for (const [t, count] of counts.entries()) if (count < counts[t - 1]) fail(CODE, say`counts of ${name} are ${counts}, expected rising counts`)
  }
  for (const [i, name] of perLevel.entries()) {
    if (i && compareText(perLevel[i - 1], name) >= 0) fail(CODE, say`${name} is behind ${perLevel[i - 1]} in per_level, expected rising names`)
    if (profile.nested.has(name)) fail(CODE, say`${name} is in nested and in per_level, expected in one`)
  }
  for (const name of [...profile.nested.keys(), ...perLevel]) checkReserved(name, CODE)
  checkTensors(profile, header)
  checkSums(profile)
  return profile
}

/** @type {Record<string, Kind>} */
const METRIC = {
  better: ['"higher" or "lower"', value => value === 'higher' || value === 'lower'],
  samples: optional(integer(0)),
  recorded: optional(TEXT),
}

/**
 * @param {Map<string, any>} map
 * @returns {any}
 */
function readMetrics(map) {
  const { metrics, errors } = readFields(map, CODE, { metrics: optional(OBJECT, new Map()), errors: optional(OBJECT, new Map()) })
  mapOf(errors, CODE, ['a number from 0 on, of a metric', value => NUMBER[1](value) && value >= 0], 'errors: ')
  for (const name of errors.keys()) readFields(metrics, CODE, { [name]: NUMBER }, 'metrics: ')
  const numbers = (/** @type {Map<string, any>} */ map) => Object.fromEntries([...map].sort().map(([key, value]) => [key, Number(value)]))
  return { metrics: numbers(mapOf(metrics, CODE, NUMBER, 'metrics: ')), errors: numbers(errors) }
}

/** @type {Kind} */
const PATTERN = ['a string N:M with 1 <= N <= M', value => {
  const [, n, m] = /^([1-9][0-9]*):([1-9][0-9]*)$/.exec(typeof value === 'string' ? value : '') ?? []
  return !!n && (n.length < m.length || n.length === m.length && n <= m)
}]

/**
 * @param {Map<string, any>} map
 * @param {number} index
 * @returns {any}
 */
function readLevel(map, index) {
  const fields = readFields(map, CODE, {
    name: NAME,
    nonzero: integer(0),
    target: optional(['a number 0 to 1', value => NUMBER[1](value) && value >= 0 && value <= 1]),
    pattern: optional(PATTERN),
    digest: optional(DIGEST),
  }, `level ${index + 1}: `)
  return { level: index + 1, ...fields, target: fields.target && Number(fields.target), ...readMetrics(map) }
}

/**
 * The profile against the tensors of the file (§5.3, §6).
 * @param {Profile} profile
 * @param {Header} header
 */
function checkTensors(profile, { tensors, order }) {
  const code = 'ProfileMismatch'
  const { bits, levels, nested, perLevel, checksums } = profile
  for (const name of [...nested.keys(), ...perLevel, ...checksums.keys()]) {
    if (!tensors.has(name)) fail(code, say`${name} is missing, expected by the profile`)
  }
  for (const [name, counts] of nested) {
    const { dtype, elements } = /** @type {Entry} */ (tensors.get(name))
    if (!(bits <= MANTISSA[dtype])) fail(code, say`dtype of ${name} is ${dtype}, expected one with room for ${bits} bits`)
    const most = counts[counts.length - 1]
    if (most > elements) fail(code, say`counts of ${name} are ${counts}, expected at most ${elements}`)
  }
  const variants = new Set()
  for (const name of perLevel) {
    const tensor = /** @type {Entry} */ (tensors.get(name))
    for (const { level } of levels) {
      const variant = tensors.get(storedName(profile, name, level))
      expect(code, say`variant ${level} of ${name}`, variant && typeOf(variant), typeOf(tensor))
      variants.add(variant)
    }
  }
  let others = false
  for (const tensor of order) {
    const isVariant = variants.has(tensor)
    if (!isVariant) checkReserved(tensor.name, code)
    if (isVariant && tensor.size && others) fail(code, say`variant ${tensor.name} is behind other tensors, expected before`)
    others ||= !isVariant && tensor.size > 0
  }
}

/** `nonzero` against the counts (ELSA-R-055). @param {Pick<Profile, 'levels' | 'nested' | 'shard'>} profile */
export function checkSums({ levels, nested, shard }) {
  for (const { level, nonzero } of levels) {
    let sum = 0n
    for (const counts of nested.values()) sum += BigInt(counts[level - 1])
    if (shard ? sum > BigInt(nonzero) : sum !== BigInt(nonzero)) {
      fail('CountMismatch', `level ${level} keeps ${sum} weights, expected ${nonzero}`)
    }
  }
}

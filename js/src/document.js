import { fail, show } from './errors.js'
import { Real } from './json.js'
import { writeChecksum, xxh3 } from './xxh3.js'

/** @import { ErrorCode } from './errors.js' */

/**
 * What a field may be: words for it, and the test.
 * @typedef {readonly [expected: string, test: (value: any) => boolean]} Kind
 */

/** @type {Kind} */
export const TEXT = ['a string', value => typeof value === 'string']
/** @type {Kind} */
export const NAME = ['a non-empty string', value => typeof value === 'string' && value !== '']
/** @type {Kind} */
export const OBJECT = ['an object', value => value instanceof Map]
/** @type {Kind} */
export const STRINGS = ['an array of strings', value => Array.isArray(value) && value.every(TEXT[1])]
/** @type {Kind} */
export const CHECKSUM = ['xxh3: and 16 hex digits', value => TEXT[1](value) && /^xxh3:[0-9a-f]{16}$/.test(value)]
/** @type {Kind} */
export const DIGEST = ['sha256: and 64 hex digits', value => TEXT[1](value) && /^sha256:[0-9a-f]{64}$/.test(value)]
/** @type {Kind} */
export const NUMBERS = ['an object of numbers', value => value instanceof Map &&
  [...value.values()].every(x => typeof x === 'number' || x instanceof Real)]

/** @param {number} least @param {number} most @returns {Kind} */
export const integer = (least, most = Number.MAX_SAFE_INTEGER) => [`an integer ${least}…${most}`, value =>
  typeof value === 'number' && value >= least && value <= most]

/** @param {Kind} kind @param {number} least @param {number} most @returns {Kind} */
export const arrayOf = ([expected, test], least, most = least) => [`an array of ${least}…${most}: ${expected}`, value =>
  Array.isArray(value) && value.length >= least && value.length <= most && value.every(test)]

/**
 * A field of a document, checked; its default where it is missing and may be.
 * @param {Map<string, any>} map
 * @param {string} key
 * @param {Kind} kind
 * @param {ErrorCode} code
 * @param {[any?]} fallback
 * @returns {any}
 */
export function field(map, key, [expected, test], code, ...fallback) {
  if (!map.has(key) && fallback.length) return fallback[0]
  const value = map.get(key)
  if (!test(value)) fail(code, `${show(key)} is ${show(value)}, expected ${expected}`)
  return value
}

/**
 * Whether a document is one that can be read (elsa-1.0.md §5.1).
 * @param {Map<string, any>} map
 * @param {ErrorCode} code of what is malformed
 * @returns {string} its version
 */
export function checkVersion(map, code) {
  const version = field(map, 'version', ['MAJOR.MINOR', v => TEXT[1](v) && /^[0-9]+\.[0-9]+$/.test(v)], code)
  if (version.split('.')[0] !== '1') fail('UnsupportedVersion', `version ${show(version)}, expected 1`)
  for (const feature of field(map, 'requires', STRINGS, code, [])) {
    fail('UnsupportedFeature', `the file requires ${show(feature)}`)
  }
  return version
}

/**
 * Compare the checksum of the header with the one that it states (§8.2).
 * @param {Uint8Array} header
 * @param {string | undefined} stated
 */
export function checkHeader(header, stated) {
  if (!stated) return
  const digits = stated.slice(5)
  const zeroed = header.slice()
  const first = digits.charCodeAt(0)
  for (let at = 0; (at = header.indexOf(first, at)) >= 0;) {
    let same = 1
    while (same < 16 && header[at + same] === digits.charCodeAt(same)) same++
    if (same === 16) zeroed.fill(48, at, at + 16)
    at += same === 16 ? 16 : 1
  }
  const found = writeChecksum(xxh3(zeroed))
  if (found !== stated) fail('ChecksumMismatch', `the header has the checksum ${found}, expected ${stated}`)
}

/**
 * Numbers of a document, by name.
 * @param {Map<string, number | Real>} map
 * @returns {Record<string, number>}
 */
export function numbers(map) {
  return Object.fromEntries([...map].map(([key, value]) => [key, Number(value instanceof Real ? value.value : value)]))
}

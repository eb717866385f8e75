import { fail, range, say, show } from './errors.js'
import { Real } from './json.js'
import { checkSum, xxh3 } from './xxh3.js'

/** @import { ErrorCode } from './errors.js' */

/**
 * What a field may be: what messages call it, the test, and what a field is that is missing and may be.
 * @typedef {readonly [expected: unknown, test: (value: any) => boolean, ...fallback: any[]]} Kind
 */

/** @param {RegExp} pattern @returns {Kind} */
export const text = (pattern, expected = `a string like ${pattern.source.slice(1, -1)}`) => [expected, value => typeof value === 'string' && pattern.test(value)]
export const TEXT = text(/.*/, 'a string')
export const NAME = text(/./s, 'a string, not empty')
export const CHECKSUM = text(/^xxh3:[0-9a-f]{16}$/)
export const DIGEST = text(/^sha256:[0-9a-f]{64}$/)
/** @type {Kind} */
export const OBJECT = ['an object', value => value instanceof Map]
/** @type {Kind} */
export const NUMBER = ['a number', value => typeof value === 'number' || value instanceof Real]

/** @param {number} least @param {number} most @returns {Kind} */
export const integer = (least, most = Infinity) => [`an integer ${range(least, most)}`, value =>
  typeof value === 'number' && value >= least && value <= most]

/** @param {Kind} kind @param {number} least @param {number} most @returns {Kind} */
export const listOf = ([expected, test], least = 0, most = Infinity) => [`a list of length ${range(least, most)}, each ${expected}`, value =>
  Array.isArray(value) && value.length >= least && value.length <= most && value.every(test)]

/** @param {Kind} kind @param {any} [fallback] @returns {Kind} */
export const optional = ([expected, test], fallback) => [expected, test, fallback]

/**
 * Fields of a document, checked.
 * @param {Map<string, any>} map
 * @param {ErrorCode} code of what is malformed
 * @param {Record<string, Kind>} kinds
 * @param {string} [where] the document, for messages
 * @returns {Record<string, any>}
 */
export function readFields(map, code, kinds, where = '') {
  return Object.fromEntries(Object.entries(kinds).map(([key, [expected, test, ...fallback]]) => {
    const missing = fallback.length && !map.has(key)
    const value = missing ? fallback[0] : map.get(key)
    if (!missing && !test(value)) fail(code, `${where + show(key)} is ${show(value)}, expected ${expected}`)
    return [key, value]
  }))
}

/**
 * A map all of whose values are of one kind.
 * @param {Map<string, any>} map
 * @param {ErrorCode} code
 * @param {Kind} kind
 * @param {string} [where]
 * @returns {Map<string, any>}
 */
export function mapOf(map, code, kind, where) {
  for (const key of map.keys()) readFields(map, code, { [key]: kind }, where)
  return map
}

/**
 * Whether a document is one that can be read (elsa-1.0.md §5.1).
 * @param {Map<string, any>} map
 * @param {ErrorCode} code of what is malformed
 * @returns {string} its version
 */
export function checkVersion(map, code) {
  const { version } = readFields(map, code, { version: text(/^[0-9]+\.[0-9]+$/) })
  if (!/^1\./.test(version)) fail('UnsupportedVersion', say`version is ${version}, expected 1`)
  const { requires: [feature] } = readFields(map, code, { requires: optional(listOf(TEXT), []) })
  if (feature !== undefined) fail('UnsupportedFeature', say`the file requires ${feature}, expected nothing unknown`)
  return version
}

/**
 * Compare the checksum of the header with the one that it states (§8.2).
 * @param {Uint8Array} header
 * @param {string | undefined} stated
 */
export function checkHeader(header, stated) {
  if (!stated) return
  const zeroed = new TextDecoder().decode(header).replaceAll(stated.slice(5), '0'.repeat(16))
  checkSum('checksum of the header', xxh3(new TextEncoder().encode(zeroed)), stated)
}

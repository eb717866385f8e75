/**
 * What can be wrong with a file (elsa-1.0.md §11, delivery-1.0.md §10), and what else may go wrong in reading one.
 * @typedef {'Truncated'|'HeaderTooLarge'|'InvalidJson'|'DuplicateKey'|'InvalidHeader'|'UnknownDtype'|'InvalidOffsets'
 *   |'TrailingData'|'NotElsa'|'UnsupportedVersion'|'UnsupportedFeature'|'InvalidProfile'|'ProfileMismatch'
 *   |'CountMismatch'|'CounterOutOfRange'|'NonFinite'|'ChecksumMismatch'|'DigestMismatch'|'InvalidLayout'
 *   |'InvalidIndex'|'UnsafePath'|'InvalidDelivery'|'Incomplete'
 *   |'NoSuchLevel'|'InvalidOption'|'RemoteError'|'TooLarge'} ErrorCode
 */

/** The one error of this package; `code` is its name in the registry, `message` one line: `files`, then the `problem`. */
export class ElsaError extends Error {
  /**
   * @param {ErrorCode} code
   * @param {string} message
   * @param {number} [status] what a server answered
   */
  constructor(code, message, status) {
    super(message)
    this.name = 'ElsaError'
    this.code = code
    this.status = status
    /** What is wrong, without the names of files. */
    this.problem = message
    /** The names of the files it is about, an index before its shard. @type {string[]} */
    this.files = []
  }
}

/**
 * @param {ErrorCode} code
 * @param {string} message what was found, what was expected
 * @param {number} [status] what a server answered
 * @returns {never}
 */
export function fail(code, message, status) {
  throw new ElsaError(code, message, status)
}

/**
 * Compare what was found with what has to be.
 * @param {ErrorCode} code
 * @param {string} what
 * @param {unknown} found
 * @param {unknown} expected
 */
export function expect(code, what, found, expected) {
  if (found !== expected) fail(code, `${what} is ${show(found)}, expected ${show(expected)}`)
}

/** @param {number} least @param {number} most */
export const range = (least, most) => least < most ? most < Infinity ? `${least} to ${most}` : `at least ${least}` : most < least ? 'none' : `${most}`

/**
 * Refuse a number that is too small or too large.
 * @param {ErrorCode} code
 * @param {string} what
 * @param {number} found
 * @param {number} least
 * @param {number} [most]
 */
export function within(code, what, found, least, most = least) {
  if (!(found >= least && found <= most)) fail(code, `${what} is ${found}, expected ${range(least, most)}`)
}

/**
 * Say which file an error is about.
 * @template T
 * @param {string} name
 * @param {() => Promise<T>} action
 * @returns {Promise<T>}
 */
export async function about(name, action) {
  try {
    return await action()
  } catch (error) {
    if (error instanceof ElsaError && name && !error.files.includes(name)) {
      error.files.unshift(name)
      error.message = [...error.files, error.problem].join(': ')
    }
    throw error
  }
}

/** The text of a message: a tag that shows the values in it. @param {TemplateStringsArray} raw @param {unknown[]} values */
export const say = (raw, ...values) => String.raw({ raw }, ...values.map(show))

/**
 * A value as it may stand in a message: as JSON, escaped, not too long.
 * @param {any} value
 * @returns {string}
 */
export function show(value) {
  // Names are arbitrary Unicode: none of it may reach a terminal as control or direction marks.
  const plain = (/** @type {string} */ _, /** @type {any} */ one) => one instanceof Map ? Object.fromEntries(one) : typeof one === 'bigint' ? Number(one) : one
  const text = (value?.written ?? JSON.stringify(value, plain) ?? 'missing')
    .replace(/[^ -~]/g, (/** @type {string} */ c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`)
  return text.length > 120 ? `${text.slice(0, 117)}...` : text
}

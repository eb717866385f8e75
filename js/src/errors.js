/**
 * What can be wrong with a file (elsa-1.0.md §11, delivery-1.0.md §10), and what else may go wrong in reading one.
 * @typedef {'Truncated'|'HeaderTooLarge'|'InvalidJson'|'DuplicateKey'|'InvalidHeader'|'UnknownDtype'|'InvalidOffsets'
 *   |'TrailingData'|'NotElsa'|'UnsupportedVersion'|'UnsupportedFeature'|'InvalidProfile'|'ProfileMismatch'
 *   |'CountMismatch'|'CounterOutOfRange'|'NonFinite'|'ChecksumMismatch'|'DigestMismatch'|'InvalidLayout'
 *   |'InvalidIndex'|'UnsafePath'|'InvalidDelivery'|'Incomplete'
 *   |'NoSuchLevel'|'InvalidOption'|'RemoteError'|'TooLarge'} ErrorCode
 */

/** The one error of this package; `code` is its name in the registry, `message` one line. */
export class ElsaError extends Error {
  /**
   * @param {ErrorCode} code
   * @param {string} message
   */
  constructor(code, message) {
    super(message)
    this.name = 'ElsaError'
    this.code = code
  }
}

/**
 * @param {ErrorCode} code
 * @param {string} message what was found, what was expected
 * @param {unknown[]} values that end the message
 * @returns {never}
 */
export function fail(code, message, ...values) {
  throw new ElsaError(code, [message, ...values.map(show)].join(' '))
}

/**
 * Compare what was found with what has to be.
 * @param {ErrorCode} code
 * @param {string} what
 * @param {unknown} found
 * @param {unknown} expected
 */
export function expect(code, what, found, expected) {
  if (found !== expected) fail(code, `${show(what)} is ${show(found)}, expected`, expected)
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
    if (error instanceof ElsaError && name && !error.message.startsWith(name)) error.message = `${name}: ${error.message}`
    throw error
  }
}

/**
 * A value as it may stand in a message: quoted, escaped, not too long.
 * @param {unknown} value
 * @returns {string}
 */
export function show(value) {
  if (typeof value !== 'string') return typeof value === 'object' ? 'no integer or string' : String(value)
  // Names are arbitrary Unicode: none of it may reach a terminal as control or direction marks.
  const text = JSON.stringify(value).replace(/[^ -~]/g, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`)
  return text.length > 120 ? `${text.slice(0, 117)}…"` : text
}

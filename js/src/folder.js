import { openLocal } from './local.js'
import { Bytes, isLocal } from './source.js'

/** @import { BytesOptions, Source } from './source.js' */

const LIMIT = 1 << 30

/** A directory that `elsa-export --web` wrote, or any other that `elsa-ship` made: at a URL, or on this machine. */
export class Folder {
  /** @param {string | URL} place */
  constructor(place) {
    this.place = isLocal(place) ? place : new Request(place).url
    this.local = isLocal(place)
  }

  /** Where a file of it is. @param {string} name with slashes @returns {string | URL} */
  file(name) {
    const base = `${this.place}`.replace(/\/?$/, '/')
    // Encoded, a name cannot be taken for a scheme, a query or a fragment.
    return this.local && !/^file:/i.test(base) ? base + name : new URL(name.split('/').map(encodeURIComponent).join('/'), base)
  }

  /** The bytes of a file. @param {string} name @param {BytesOptions} [options] */
  async read(name, options) {
    /** @type {Source} */
    let source = this.file(name)
    if (this.local) ({ source } = await openLocal(source))
    return new Bytes(source, options).take(LIMIT)
  }

  /** The name of the delivery file, or of the index of several, as the manifest has it (delivery-1.0.md §9.1). @param {BytesOptions} [options] */
  async weights(options) {
    const { weights } = JSON.parse(new TextDecoder().decode(await this.read('elsa-files.json', options)))
    return String(weights)
  }
}

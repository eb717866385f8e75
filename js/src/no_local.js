import { fail } from './errors.js'

/** In place of local.js in bundles for browsers (package.json). @returns {Promise<any>} */
export async function openLocal() {
  fail('InvalidOption', 'a path, expected an http(s) URL, a File or other bytes')
}

/** Nor is there a folder for bytes. @returns {Promise<any>} */
export const openPlace = openLocal

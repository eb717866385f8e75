import { fail, say } from './errors.js'
import { openLocal as refuse } from './no_local.js'

/** @import { Place } from './kept.js' */
/** @import { Source } from './source.js' */

// Loaded where a path is given, in Node.js, Deno and Bun alone, by names that bundlers do not follow.
const MODULES = ['node:fs', 'node:path', 'node:url', 'node:os']
const PIECE = 1 << 18

/**
 * Open a file of this machine, and what is beside it.
 * @param {string | URL} place a path or a file: URL
 * @returns {Promise<{source: Source, check: (names: string[]) => void, files: (name: string) => Source | undefined}>}
 */
export async function openLocal(place) {
  if (!(/** @type {any} */ (globalThis).process?.versions?.node)) return refuse()
  const [fs, { dirname, join, sep }, { fileURLToPath }] = await Promise.all(MODULES.map(name => import(name)))
  const path = /^file:/i.test(`${place}`) ? fileURLToPath(`${place}`) : place
  const folder = dirname(path)

  /** @param {string} path @param {number} at */
  async function* read(path, at) {
    const file = await fs.promises.open(path)
    try {
      for (let count; ; at += count) {
        const piece = new Uint8Array(PIECE)
        count = (await file.read(piece, 0, PIECE, at)).bytesRead
        if (!count) return
        yield piece.subarray(0, count)
      }
    } finally {
      await file.close()
    }
  }

  /** @param {string} path @param {number} size @param {number} at */
  const slice = (path, size, at) => ({
    size,
    slice: (/** @type {number} */ begin) => slice(path, size - begin, at + begin),
    stream: () => read(path, at),
  })

  /** A file as a Blob would be, or what cannot seek, such as a pipe. @param {string} path @returns {any} */
  const open = path => {
    const about = fs.statSync(path)
    return about.isFile() ? slice(path, about.size, 0) : fs.createReadStream(path)
  }

  return {
    source: open(path),
    // A link must not lead out of the folder (ELSA-R-077).
    check(names) {
      const folders = [fs.realpathSync(folder), dirname(fs.realpathSync(path))]
      for (const name of names) {
        const target = join(folder, name)
        const inside = !fs.existsSync(target) || folders.includes(dirname(fs.realpathSync(target)))
        if (!inside || sep === '\\' && name.includes(':')) fail('UnsafePath', say`${name} leads out of the folder, expected a file beside the index`)
      }
    },
    files: name => fs.existsSync(join(folder, name)) ? open(join(folder, name)) : undefined,
  }
}

/**
 * A folder of kept bytes (kept.js), in the user's cache unless another is named.
 * @param {string} name
 * @param {true | string} cache
 * @returns {Promise<Place>}
 */
export async function openPlace(name, cache) {
  const { process } = /** @type {any} */ (globalThis)
  if (!process?.versions?.node) return refuse()
  const [{ promises: fs }, { join }, , { homedir }] = await Promise.all(MODULES.map(name => import(name)))
  const folder = join(cache === true ? join(process.env.XDG_CACHE_HOME || join(homedir(), '.cache'), 'elsa') : cache, name)
  await fs.mkdir(folder, { recursive: true })
  return {
    names: () => fs.readdir(folder),
    read: async name => new Blob([await fs.readFile(join(folder, name))]),
    async write(name, data) {
      const path = join(folder, name)
      await fs.writeFile(`${path}.new`, new Uint8Array(await data.arrayBuffer()))
      await fs.rename(`${path}.new`, path)
    },
    async clear() {
      for (const name of await fs.readdir(folder)) await fs.rm(join(folder, name))
    },
  }
}

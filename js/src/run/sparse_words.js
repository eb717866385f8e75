import { allocate, bytesOf } from '../data.js'
import { wordsOf } from '../dtypes.js'

/** @import { Storage } from '../delivery_file.js' */

/**
 * What a tensor of few words consists of: the places of those that are not zero, in order, or no places if all words are there.
 * @typedef {{words: any, places?: Uint32Array}} SparseWords
 */

/** Storage that keeps of a nested tensor only what is not zero, so that no dense array of it is ever made. @returns {Storage} */
export function sparseWords() {
  /** Room for the words of one block, for words of each width. @type {Map<number, any>} */
  const rooms = new Map()

  /** @param {number} bits @param {number} size */
  function roomFor(bits, size) {
    let room = rooms.get(bits)
    if (!(room?.length >= size)) rooms.set(bits, room = wordsOf(bits, allocate(size * bits / 8).buffer))
    return room.subarray(0, size).fill(bits > 32 ? 0n : 0)
  }

  /** @param {any} words @returns {SparseWords} */
  function pack(words) {
    let count = 0
    for (const word of words) if (word) count++
    if (2 * count > words.length) return { words: words.slice() }
    const places = new Uint32Array(count)
    const kept = new words.constructor(count)
    for (let i = 0, at = 0; i < words.length; i++) {
      if (!words[i]) continue
      places[at] = i
      kept[at++] = words[i]
    }
    return { words: kept, places }
  }

  /** @type {Storage['open']} */
  function open({ bits, kept }, first, size) {
    const room = roomFor(bits, size)
    const { words, places } = kept?.get(first) ?? { words: [] }
    if (places) for (let i = 0; i < places.length; i++) room[places[i]] = words[i]
    else room.set(words)
    return room
  }

  return {
    open,
    close: ({ kept }, first, words) => kept?.set(first, pack(words)),
    read({ bits, kept = new Map() }, block, from, to, mask) {
      /** @type {[first: number, found: SparseWords][]} */
      const blocks = []
      let count = 0
      for (let first = from - from % block; first < to; first += block) {
        const all = kept.get(first)
        const words = mask ? all.words.slice() : all.words
        mask?.(bytesOf(words), bits)
        const length = all.places?.length ?? words.length
        for (let i = 0; i < length; i++) {
          const at = first + (all.places?.[i] ?? i)
          if (at >= from && at < to && words[i]) count++
        }
        blocks.push([first, { words, places: all.places }])
      }
      const dense = 2 * count > to - from
      const places = dense ? undefined : new Uint32Array(count)
      const words = wordsOf(bits, allocate((dense ? to - from : count) * bits / 8).buffer)
      let next = 0
      for (const [first, found] of blocks) {
        const length = found.places?.length ?? found.words.length
        for (let i = 0; i < length; i++) {
          const at = first + (found.places?.[i] ?? i) - from
          if (at < 0 || at >= to - from || !found.words[i]) continue
          if (places) places[next] = at
          words[places ? next++ : at] = found.words[i]
        }
      }
      return { words, places }
    },
  }
}

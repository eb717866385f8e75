// node run_transformers.mjs LIBRARY BASE CACHE [run]: prints what transformers_tasks.js finds; with elsa-format/run.
import { elsa } from '../../js/src/transformers.js'
import { tasks } from './transformers_tasks.js'

const [library, base, cacheDir, how] = process.argv.slice(2)
const run = how === 'run'
if (run) await (await elsa(`${base}bert/`, { run, cache: false })).close() // before the library is imported
const transformers = await import(library)
const { env } = transformers
if (base.startsWith('http')) {
  Object.assign(env, { allowLocalModels: false, remoteHost: base, remotePathTemplate: '{model}/', cacheDir })
} else {
  Object.assign(env, { allowRemoteModels: false, localModelPath: base })
}
console.log(JSON.stringify(await tasks(transformers, elsa, base, { run })))
process.exit()

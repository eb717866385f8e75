// node run_transformers.mjs LIBRARY BASE CACHE: prints what transformers_tasks.js finds.
import { elsa } from '../../js/src/transformers.js'
import { tasks } from './transformers_tasks.js'

const [library, base, cacheDir] = process.argv.slice(2)
const transformers = await import(library)
const { env } = transformers
if (base.startsWith('http')) {
  Object.assign(env, { allowLocalModels: false, remoteHost: base, remotePathTemplate: '{model}/', cacheDir })
} else {
  Object.assign(env, { allowRemoteModels: false, localModelPath: base })
}
console.log(JSON.stringify(await tasks(transformers, elsa, base)))
process.exit()

// node run_kernels.mjs BASE: prints what run_tasks.js finds.
import { open } from '../../js/src/run.js'
import { runTasks } from './run_tasks.js'

console.log(JSON.stringify(await runTasks(open, process.argv[2])))

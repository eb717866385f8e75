#!/bin/sh
# Builds the kernels of elsa-format/run into ../../src/run/wasm.js. Needs clang 19 and its linker (Debian: clang-19, lld-19):
# the same bytes every time, and others are half as fast.
set -eu
cd "$(dirname "$0")"
native=../../../converters/elsa_converters/sparse/native
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cc() {
  clang-19 --target=wasm32 -msimd128 -mbulk-memory -std=gnu11 -nostdlib -ffunction-sections -Wall -Wextra -Werror \
    -Wno-unused-function -I libc -I $native -c "$@"
}
cc -O3 -fno-unroll-loops sparse.c -o "$out/sparse.o"
cc -O2 -fno-unroll-loops operators.c -o "$out/operators.o"
# With vectors of 4 floats, what is packed has to fit the first-level cache (measured: up to 1.17 times as fast).
cc -Os -DELSA_LARGE_CHUNK='(28 << 10)' $native/plan.c -o "$out/plan.o"
for name in memory.c $native/matmul.c $native/layer.c $native/conv.c; do
  cc -Os $name -o "$out/$(basename $name).o"
done
wasm-ld-19 --no-entry --strip-all --gc-sections --stack-first -z stack-size=16384 --initial-memory=131072 \
  "$out"/*.o -o "$out/run.wasm"
{
  echo "// Made by wasm/run/build.sh from its C files and those of converters/elsa_converters/sparse/native, then by gzip."
  echo "export const WASM ="
  gzip -9n < "$out/run.wasm" | base64 -w 100 | sed "s/.*/  '&' +/; \$s/ +\$//"
} > "${1:-../../src/run/wasm.js}"
wc -c < "$out/run.wasm"

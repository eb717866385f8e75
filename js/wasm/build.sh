#!/bin/sh
# Builds kernels.c into ../src/wasm.js. Needs clang and wasm-ld (Debian: clang, lld).
set -eu
cd "$(dirname "$0")"
out=$(mktemp)
trap 'rm -f "$out"' EXIT
clang --target=wasm32 -msimd128 -Os -nostdlib -ffreestanding -Wall -Wextra -Werror -Wno-int-to-pointer-cast \
  -Wl,--no-entry,--strip-all,--stack-first,-z,stack-size=1024,--initial-memory=262144,--max-memory=262144 \
  kernels.c -o "$out"
{
  echo "// Made by wasm/build.sh from wasm/kernels.c."
  echo "export const WASM ="
  base64 -w 100 "$out" | sed "s/.*/  '&' +/; \$s/ +\$//"
} > ../src/wasm.js
wc -c < "$out"

#!/usr/bin/env bash
# The package on 64-bit ARM, emulated: the C module built for it, the tests of its kernels and codec,
# and the vectors of the specification. Python and its libraries are Debian's, laid into a folder;
# nothing is installed on this machine but a compiler and an emulator.
set -euo pipefail
cd "$(dirname "$0")/../.."
arm=$PWD/.cache/arm
native=(elsa_format/native/*.c)
for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
  command -v "$tool" > /dev/null || { echo "$tool is missing: apt-get install gcc-aarch64-linux-gnu qemu-user" >&2; exit 1; }
done

if [ ! -e "$arm/ready" ]; then
  rm -rf "$arm" && mkdir -p "$arm"/{state/lists/partial,cache/archives/partial,system} && : > "$arm/status"
  get=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root
    -o Dir::State="$arm/state" -o Dir::State::status="$arm/status" -o Dir::Cache="$arm/cache")
  "${get[@]}" update
  "${get[@]}" install --yes --download-only --no-install-recommends libpython3-dev libstdc++6 python3-minimal > /dev/null
  for package in "$arm"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$arm/system"; done
  touch "$arm/ready"
fi
printf '#!/bin/sh\nexec qemu-aarch64 -L %s %s "$@"\n' "$arm/system" "$(readlink -f "$arm"/system/usr/bin/python3)" \
  > "$arm/python"
chmod +x "$arm/python"
version=$("$arm/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
platforms=()
for glibc in 17 24 26 27 28; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
if [ ! -e "$arm/site/ready" ]; then
  "${1:-python3}" -m pip install --quiet --target "$arm/site" --python-version "$version" "${platforms[@]}" \
    --only-binary=:all: --constraint constraints.txt \
    click hypothesis jsonschema ml_dtypes numpy pytest safetensors xxhash
  touch "$arm/site/ready"
fi

rm -rf "$arm/package" && mkdir "$arm/package"
cp -r elsa_format spec tests pyproject.toml "$arm/package"
rm -f "$arm"/package/elsa_format/*.so
aarch64-linux-gnu-gcc -std=c11 -O3 -shared -fPIC -DPy_LIMITED_API=0x030b0000 \
  -isystem "$arm/system/usr/include/python$version" -isystem "$arm/system/usr/include" \
  "${native[@]}" -o "$arm/package/elsa_format/_native.abi3.so"
cd "$arm/package"
export PYTHONPATH=$PWD:$arm/site PYTHONDONTWRITEBYTECODE=1 CI=1
"$arm/python" -c 'import platform, elsa_format; print(platform.machine(), elsa_format.kernels())'
# Tests that start Python start it in the emulator, too.
"$arm/python" -c "import pytest, sys; sys.executable = '$arm/python'; sys.exit(pytest.main(sys.argv[1:]))" \
  -q -p no:cacheprovider -k 'not fork' tests/unit/test_kernels.py tests/unit/test_delivery_codec.py \
  tests/conformance/test_vectors.py tests/conformance/test_delivery_files.py

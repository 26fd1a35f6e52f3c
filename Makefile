# Needs Python >= 3.11, make and a package index. Everything else goes into .venv, once.
#
#   make demo PYTHON=/path/to/python3.12     another interpreter than the first one found

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
# JAX, TensorFlow and Horovod, which would bring two gigabytes into everybody's .venv.
FRAMEWORKS := build/frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
# The one that the pins were tested with first.
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python)

# Three, since they wait for each other's servers and for deadlines; in the order of tests/conftest.py.
# What fails is tried once more, alone: tools/test_run.py.
TESTS := $(BIN)/python -m tools.test_run -n 3 --dist loadgroup --no-loadscope-reorder

# pip applies -c to what it installs, and these to the isolated environment that builds gpuctl itself (pip before 25.3
# reads the first, later ones the second). A relative path, because pip splits these at spaces.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start thousands of short programs, and each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# A .venv that was copied here, was never finished or has lost its interpreter is made anew.
healthy = [ "$$($(BIN)/python -c 'import gpuctl; print(gpuctl.__file__)' 2>/dev/null)" = "$(CURDIR)/src/gpuctl/__init__.py" ]
ifneq ($(shell $(healthy) && echo yes),yes)
SICK := sick
endif

# Also ends when the shell that began it was killed.
busy_loop = sh -c 'while kill -0 $$PPID 2>/dev/null; do :; done'

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-exhaustive test-torch test-busy test-bare frameworks test-times test-machines mutate bench bench-checkpoint bench-rendezvous bench-strategies bench-needs preview catalog docs lint types contracts unit format constraints clean sick
.NOTPARALLEL:

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-25s %s\n", $$1, $$2 }'

demo: $(STAMP) ## Four nodes on this machine, two of them lost on the way
	$(BIN)/gpuctl demo

test: lint types contracts preview unit ## Before each commit: linters, types, contracts, plans, all that is quick

preview: $(STAMP) ## Plans of the three clouds, beside the goldens (RENEW=1 writes those)
	$(BIN)/python -m tests.stacks.preview $(if $(RENEW),--renew)

catalog: $(STAMP) ## stacks/catalog/catalog.json anew, from what is newest (FROM=DIR: from files that are there)
	$(BIN)/python -m tools.catalog $(if $(FROM),--from $(FROM),--fetch build/catalog)

test-machines: $(STAMP) ## Only the tests on machines that boot (root, Linux; the first run makes their file system)
	$(BIN)/python -m pytest -m "" tests/machines

mutate: $(STAMP) ## Bugs put in one by one: a test must fail for each (ONLY=ledger: those that name it)
	$(BIN)/python -m tools.mutate $(if $(ONLY),--only $(ONLY))

bench: $(STAMP) ## Measure against the references, side by side (build/bench.json)
	$(BIN)/python tests/bench/main.py

bench-checkpoint: $(STAMP) ## The same for saves and restores (build/bench-checkpoint.json)
	$(BIN)/python tests/bench/checkpoint/main.py

bench-rendezvous: $(STAMP) ## The same for machines without a cluster (root, Linux; build/bench-rendezvous.json)
	$(BIN)/python tests/bench/rendezvous/main.py

bench-strategies: $(STAMP) ## What ways of exchanging gradients bring on slow links (root, Linux)
	$(BIN)/python tests/bench/strategies/main.py $(if $(ROWS),--only $(ROWS))

bench-needs: $(STAMP) ## What a script's packages cost on the first node, a replacement and in a round
	$(BIN)/python tests/bench/needs/main.py $(if $(ROWS),--only $(ROWS))

docs: $(DOCS_STAMP) ## The documentation as a site, in build/site; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "make: open build/site/index.html, or: $(BIN)/python -m http.server --directory build/site"

setup: $(STAMP) ## Only make .venv

frameworks: $(FRAMEWORKS_STAMP) ## JAX, TensorFlow and Horovod, for the tests that train with them (2 GB)

lint: $(STAMP) ## Formatting and lint rules
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .

types: $(STAMP) ## Strict types
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy tests tools $(wildcard examples/*.py)

contracts: $(STAMP) ## Imports go down only
	$(BIN)/lint-imports --no-logo --no-cache

unit: $(STAMP) ## The quick tests and nothing else
	$(TESTS)

test-all: lint types contracts preview $(FRAMEWORKS_STAMP) ## The same as test, with what is slow, depends on time or boots something
	$(TESTS) -m "not exhaustive"

# Some gigabytes, where torch is built for CUDA.
test-torch: TORCH ?= 2.9.0
test-torch: $(STAMP) ## What touches torch, with another one: the oldest that is supported, or TORCH=2.11.0
	$(BIN)/python -m venv build/torch-$(TORCH)
	PIP_CONSTRAINT= build/torch-$(TORCH)/bin/python -m pip install --quiet torch==$(TORCH)
	build/torch-$(TORCH)/bin/python -m pip install --quiet --no-deps -e .
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(build/torch-$(TORCH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"
	build/torch-$(TORCH)/bin/python -m pytest -n 3 --dist loadgroup -m "not exhaustive" tests/trainers \
		tests/bootstrap/launch tests/bootstrap/torchrun_plugin \
		$(addprefix tests/e2e/test_,gpus.py ends.py training.py strategies.py mingle.py)

test-exhaustive: $(STAMP) ## `up` broken off at every resource in every way, on three clouds: hours
	$(TESTS) -m exhaustive

test-busy: $(STAMP) ## The quick tests beside two busy loops: none may need a machine of its own
	@$(busy_loop) & one=$$!; $(busy_loop) & other=$$!; \
	trap "kill $$one $$other" EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; trap 'exit 129' HUP; \
	$(TESTS)

test-bare: $(STAMP) ## The quick tests on a Debian with Python and make and nothing else (root, Linux, mmdebstrap)
	$(BIN)/python -m tools.test_bare

test-times: $(STAMP) ## Of the last run of tests, the thirty that took longest, and slow ones without a mark
	$(BIN)/python -m tools.test_run --times

format: $(STAMP) ## Format, and fix what can be fixed
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

# Not compiled: of the clouds' packages, thousands of modules, a few are ever imported, and each is compiled by that.
$(STAMP): pyproject.toml constraints.txt $(SICK)
	@$(healthy) || { $(find_python) && "$$chosen" -m venv --clear $(VENV); }
	@echo "make: installing into $(VENV) (only this once; torch is large)"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

# A stamp of its own: the tests need none of it, and the site needs no torch.
$(DOCS_STAMP): pyproject.toml constraints.txt $(SICK)
	@$(healthy) || { $(find_python) && "$$chosen" -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# tf_keras without its dependencies, or it brings a second TensorFlow.
$(FRAMEWORKS_STAMP): pyproject.toml constraints.txt tools/horovod.sh
	@$(find_python) && "$$chosen" -m venv --clear $(FRAMEWORKS)
	@echo "make: installing into $(FRAMEWORKS) (only this once; 2 GB, and Horovod is built)"
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[train,jax,tensorflow]'
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-compile -c constraints.txt --no-deps tf_keras
	tools/horovod.sh $(FRAMEWORKS)/bin/python
	@touch $@

constraints: ## Pin anew: the newest versions that pyproject.toml allows (then run the tests)
	@$(find_python) && "$$chosen" -m venv --clear build/pins
	PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT= build/pins/bin/python -m pip install --quiet '.[dev,docs,jax,tensorflow]'
	PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT= build/pins/bin/python -m pip install --quiet --no-deps tf_keras
	@sed '/^[^#]/d' constraints.txt > build/constraints.txt
	@build/pins/bin/python -m pip freeze --all | $(portable_pins) >> build/constraints.txt
	@mv build/constraints.txt constraints.txt
	@rm -rf build/pins

clean: ## Remove .venv and all that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Not gpuctl and pip, not the local part of "2.13.0+cpu", and nothing that only torch for CUDA brings (it pins that
# itself); NVML's package is ours.
portable_pins = sed -E -e '/^nvidia-ml-py=/!{/^(gpuctl|pip|nvidia|cuda|triton)[-_= ]/d;}' -e 's/\+[a-z0-9.]+$$//'

define find_python
found=; chosen=; \
for python in $(CANDIDATES); do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	found="$$python"; \
	"$$python" -c 'import venv, ensurepip' 2>/dev/null && chosen="$$python" && break; \
done; \
if [ -z "$$found" ]; then \
	echo "make: no Python >= 3.11 among: $(CANDIDATES); install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; \
elif [ -z "$$chosen" ]; then \
	echo "make: $$found lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; \
fi
endef

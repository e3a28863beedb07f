# make install   the environment, in .venv
# make train     the demo from nothing: prepare, train on two processes (or all GPUs), evaluate, export, retrieve
# make test      lint and the tests: what a change must pass
# make quick     one case of each test that starts no process, trains no run and exports none: a minute
# make lint      ruff, mypy, import-linter
# make docs      the site of the documentation, in build/site; warnings are errors
# make soak      the long proofs
# make gpu       proves a machine with NVIDIA GPUs and measures it, into docs/gpu.md

PYTHON ?= python3
ACCELERATOR ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
PROCESSES ?= $(if $(filter cuda,$(ACCELERATOR)),$(shell nvidia-smi --list-gpus | wc -l),2)

LOCKED := .venv/locked-$(ACCELERATOR)
INSTALLED := .venv/installed-$(ACCELERATOR)
PACKAGES := comm common launch modules serving trainer
RUN := runs/demo-mol
EXPORT := exports/demo-mol
HISTORY := item-0000,item-0001,item-0002

# torchx starts the python that it finds here.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# The tests start some hundred processes, each of which would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install train test quick lint docs soak gpu
.DELETE_ON_ERROR:

install: $(INSTALLED)

# --no-deps: requirements/common.txt says why. --clear: the lists' wheels would overwrite each other.
$(LOCKED): $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "logitmix needs Python 3.11 or newer: make PYTHON=…")'
	$(PYTHON) -m venv --clear .venv
	@list=$(ACCELERATOR); small=$$(grep -o '^torch==[^ ]*' requirements/torch-cpu.txt); \
	if [ $$list = cpu ] && ! .venv/bin/pip install --quiet --dry-run --no-deps $$small >/dev/null 2>&1; then \
	  echo "pip finds no $$small: installing the public build with its CUDA libraries (5 GB). For the small one (1 GB)," \
	    'set PIP_EXTRA_INDEX_URL to the index of CPU wheels (docs/install.md), remove .venv and start again.'; \
	  list=cpu-public; \
	fi; \
	echo "Installing the wheels of requirements/$$list.txt; this takes a few minutes."; \
	.venv/bin/pip install --quiet --quiet --no-deps -r requirements/$$list.txt -r requirements/dev.txt
	@touch $@

$(INSTALLED): $(LOCKED) pyproject.toml setup.py $(wildcard common/*.[ch] comm/*.c modules/*.[ch] modules/*/*.[ch]) | build/namespace/logitmix
	.venv/bin/pip install --quiet --quiet --no-deps --no-build-isolation --editable .
	@.venv/bin/python -W ignore -c 'from logitmix.common import driver; driver.has_driver(); import torchrec' 2>/dev/null \
	  || { echo 'torch, fbgemm and torchrec do not load together: see .venv/bin/logitmix doctor.'; exit 1; }
	@touch $@

# Type checkers and editors do not read the mapping of an editable install: they get the folders under their namespace.
build/namespace/logitmix: Makefile
	@mkdir -p $@
	@for package in $(PACKAGES); do ln -sfn ../../../$$package $@/$$package; done
	@touch $@

train: install data/demo/dataset.json
	torchx run --scheduler local_cwd logitmix.train -j 1x$(PROCESSES) -- demo-mol --run $(RUN)
	logitmix evaluate $(RUN)
	logitmix export $(RUN) --out $(EXPORT) --overwrite --filterable actions,new
	logitmix retrieve $(EXPORT) --history $(HISTORY) -k 10
	@echo
	@echo 'Curves:         .venv/bin/tensorboard --logdir $(RUN)/tensorboard'
	@echo 'Exported model: .venv/bin/logitmix retrieve $(EXPORT) --history $(HISTORY) -k 10'

data/demo/dataset.json: | install
	logitmix prepare demo --out data/demo

# Three processes for two cores, because some tests wait; four take as long. Each gets a file at a time, in order, so
# that what a file's tests share is made once.
test: lint
	pytest $(if $(filter cuda,$(ACCELERATOR)),-m 'not slow',--numprocesses 3 --dist loadfile --no-loadscope-reorder)

quick: install
	pytest -m quick --hypothesis-profile quick --durations 10

soak: install
	pytest -m '(slow or hypothesis)$(if $(filter cuda,$(ACCELERATOR)),, and not gpu)' --hypothesis-profile many --timeout 3600

gpu:
	@nvidia-smi >/dev/null 2>&1 || { echo 'make gpu: no NVIDIA GPU here; nvidia-smi finds none.' >&2; exit 1; }
	$(MAKE) install
	.venv/bin/python -m benchmarks.gpu

lint: install
	ruff check
	ruff format --check
	mypy
	PYTHONPATH=build/namespace lint-imports --no-cache --no-logo

# The site has the files where the repository has them, so that a link leads to the same place in both.
docs: build/namespace/logitmix build/docs-installed
	@rm -rf build/pages && mkdir build/pages
	@ln -s $(addprefix ../../,$(PACKAGES) $(wildcard *.md) benchmarks docs examples LICENSE Dockerfile) build/pages
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict

build/docs-installed: requirements/docs.txt
	$(PYTHON) -m venv --clear build/docs-venv
	build/docs-venv/bin/pip install --quiet --no-deps -r $<
	@touch $@

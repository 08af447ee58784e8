# The README's commands. The first call sets everything up in .venv; later calls start at once.
#   make demo   an agent conversation on the embedded model, checked token by token
#   make test   the whole test suite
#   make serve  the server on the embedded model, http://127.0.0.1:8000/v1
#   make bench  the README's tables
#   make test-gpu   what needs a CUDA card: kernels, graphs, capsules on the card
#   make bench-gpu  the card's table, at the 27B and 9B shapes with random weights
#   make bench-reuse  how many tokens are read again, over fourteen scenes
#   make clients  four agent clients at fixed versions, by npm, against the embedded model
#   make fuzz   5,000 requests made from the served OpenAPI document
#   make fuzz-bytes  an hour of changed bytes against every parser
#   make lint   ruff, mypy --strict, import contracts

VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0
# For the interpreter, in which the card's kernels are tested without one. torch's CUDA builds bring
# the Triton that they were made with, and keep it.
TRITON := triton==3.6.0
LOCK   := requirements/lock.txt
READY  := $(VENV)/.ready
# The first interpreter that runs and is new enough; override with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
	done)

.PHONY: setup demo test serve test-gpu bench bench-gpu bench-reuse clients fuzz fuzz-bytes lint clean
.DEFAULT_GOAL := demo

setup: $(READY)

# torch goes first and by its exact version: a range, or a later resolution, may pull another build.
$(READY): pyproject.toml $(LOCK)
	@test -n "$(PYTHON)" || { echo "capserve needs Python 3.11 or newer" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(LOCK)
	$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(TRITON)" || \
		echo "no Triton for this platform: the card's kernels are not tested"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

demo: setup
	$(BIN)/capserve demo

# One process a core; a file's tests stay together, as its servers and engines do.
test: setup
	$(BIN)/python -m pytest -n auto --dist loadfile

test-gpu: setup
	$(BIN)/python -m pytest -n 4 --dist loadfile tests/gpu tests/kernels

serve: setup
	$(BIN)/capserve serve

bench: setup
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.turns

bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu --size 27B --peer --profile
	$(BIN)/python -m benchmarks.gpu --size 27B --form fp8 --profile
	$(BIN)/python -m benchmarks.gpu --size 9B --peer
	$(BIN)/python -m benchmarks.kernels --json benchmarks/results/kernels.json

bench-reuse: setup
	$(BIN)/python -m benchmarks.reuse

# CAPSERVE_CLIENTS_DIR keeps the programs for the next run.
clients: setup
	$(BIN)/python -m benchmarks.clients

fuzz: setup
	$(BIN)/python -m tests.fuzz.run_api --cases 5000

# Guided by coverage, which takes a package that nothing else needs.
fuzz-bytes: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	$(BIN)/python -m tests.fuzz.run_bytes --seconds 3600

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist src/*.egg-info

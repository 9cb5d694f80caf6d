# make demo    creates .venv, installs Turnstile and runs the incident on the simulator
# make test    the same for the tests
# make soak    explores for as long as it is told to: SEEDS=100000, or TIME=3600 (seconds); FIRST=0 is the first seed
# make bench   speed and memory, as ratios measured in one run
# make lint    style
# make clean   removes .venv and whatever else was generated
#
# PYTHON=... picks the interpreter; otherwise the first that runs and is 3.11 or newer.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NEWEST_FIRST := python3.13 python3.12 python3.11 python3 python

.PHONY: demo test soak bench lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/sim.installed
	$(BIN)/python -m scenarios.overlap_2gpu --backend sim

test: $(VENV)/test.installed
	$(BIN)/python -m pytest

soak: $(VENV)/sim.installed
	$(BIN)/python -m scenarios.explore --first-seed $(or $(FIRST),0) --seeds $(or $(SEEDS),$(if $(TIME),1000000000,10000)) \
	  $(if $(TIME),--time $(TIME))

bench: $(VENV)/test.installed
	$(BIN)/python -m benchmarks

lint: $(VENV)/lint.installed
	$(BIN)/python -m ruff check .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp a set of extras: a second call installs nothing, a changed pyproject.toml installs again.
$(VENV)/%.installed: pyproject.toml $(VENV)/created
	$(PIP) install --editable '.[$*]'
	@touch $@

$(VENV)/lint.installed: pyproject.toml $(VENV)/created
	$(PIP) install ruff
	@touch $@

# A name on the PATH may be a shim that starts nothing, so each candidate has to run and tell its version.
$(VENV)/created:
	@for python in $(or $(PYTHON),$(NEWEST_FIRST)); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$("$$python" --version) ($$python)"; \
	    "$$python" -m venv --clear $(VENV) && touch $@ && exit 0; \
	    echo "error: $$python cannot create a virtual environment; install its venv module (Debian: python3-venv)" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "error: Turnstile needs Python 3.11 or newer; tried: $(or $(PYTHON),$(NEWEST_FIRST))" >&2; exit 1

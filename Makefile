# make demo | test | test-fast | test-gpu | test-faults | bench | docs | release: each installs .venv first when it is missing or
# stale. make tests: pytest alone, without ruff and mypy. CONSTRAINTS names the file of pinned versions to install.
PYTHON ?= python3
FAST_TESTS = $(wildcard tests/library/test_*.py) $(addprefix tests/library/adapters/test_,product.py moored_products.py) \
	tests/test_tree.py tests/test_architecture.py src/mooring --ignore=src/mooring/integrations
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test tests test-fast test-gpu test-faults lint types browser bench docs release release-torch test-cli-versions clean

demo: $(READY)
	$(BIN)/mooring compare --stream digits --methods all --seeds 5 --baseline plain \
		--study demo/digits.sqlite --report demo/report

test: lint types tests

tests: $(READY) browser
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The inner loop: the library and the shape of the tree, without laboratory runs, other processes, other libraries and a
# browser. The folders of tests/library that need those are left out, because importing them alone takes long.
test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not faults and not slow" $(FAST_TESTS)

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

test-faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults --durations=5

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
		echo "installing chromium, which a test opens the report in"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/fleet.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# Both wheels and the source archive, in a folder: the library, and the laboratory with the reproduction.
WHEELS = $(BIN)/python -m hatchling build -d $(1) && cd laboratory && $(CURDIR)/$(BIN)/python -m hatchling build -t wheel -d ../$(1)

release: $(READY)
	rm -rf dist
	$(call WHEELS,dist)
	$(PYTHON) -m venv --clear dist/venv
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
		"$$(ls dist/mooring-*.whl)[dev]" dist/mooring_lab-*.whl
	cd dist && rm -rf as-installed && mkdir as-installed && tar xzf mooring-*.tar.gz --strip-components=1 -C as-installed
	rm -rf dist/as-installed/src
	cd dist/as-installed && ../venv/bin/python -m pytest -n 2 --dist worksteal tests

# The wheel in an empty environment with one version of torch: make release-torch TORCH=2.6.0
TORCH ?= 2.6.0
CORE_TESTS := $(addprefix tests/library/test_,$(addsuffix .py,import pulls importance conformance state saved_states estimation \
	works_with_optimizers works_with_models works_with_dtypes kronecker measured_budget stability budget))
release-torch: $(READY)
	rm -rf dist/$(TORCH)
	$(call WHEELS,dist/$(TORCH))
	$(PYTHON) -m venv --clear dist/$(TORCH)/venv
	cd dist/$(TORCH) && venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" \
		mooring-*.whl mooring_lab-*.whl pytest hypothesis
	cd dist/$(TORCH) && mkdir as-installed && tar xzf mooring-*.tar.gz --strip-components=1 -C as-installed
	rm -rf dist/$(TORCH)/as-installed/src
	cd dist/$(TORCH)/as-installed && ../venv/bin/python -m pytest $(CORE_TESTS)

# The tests of the command line with the oldest libraries that mooring-lab allows, and with the newest there are.
CLI_LIBRARIES := typer|rich|jinja2|huggingface_hub
OLDEST = $$(sed -nE 's/^ *"($(CLI_LIBRARIES))>=([0-9.]+)".*/\1==\2/p' laboratory/pyproject.toml)
test-cli-versions: $(READY)
	for libraries in "$(OLDEST)" "--upgrade $$(echo '$(CLI_LIBRARIES)' | tr '|' ' ')"; do \
		$(BIN)/python -m venv --clear dist/cli || exit 1; \
		(cd dist/cli/lib/python* && echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python*)/site-packages')" \
			> site-packages/zz_shared.pth); \
		dist/cli/bin/python -m pip install --quiet --disable-pip-version-check $$libraries || exit 1; \
		dist/cli/bin/python -m pytest -W ignore::DeprecationWarning tests/laboratory/cli || exit 1; \
	done

$(READY): pyproject.toml laboratory/pyproject.toml $(CONSTRAINTS)
	@echo "installing into $(VENV), which takes 2 or 3 minutes"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]" -e laboratory
	touch $(READY)

clean:
	rm -rf $(VENV) demo dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

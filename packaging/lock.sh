#!/bin/bash
# Writes packaging/requirements.txt (what the service needs), requirements-dev.txt (what the tests need besides) and
# requirements-fuzz.txt (what `make fuzz` needs besides), pinned and hashed, without any registry's address. Run it to take newer versions.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-/usr/bin/python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pip-tools
common=(--quiet --generate-hashes --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links
        --no-emit-trusted-host --no-header --no-annotate)
"$work/venv/bin/pip-compile" "${common[@]}" -o packaging/requirements.txt pyproject.toml
"$PYTHON" - <<'EOF' >"$work/dev.in"
import tomllib
for name in tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"]:
    print(name)
EOF
cp packaging/requirements.txt "$work/requirements.txt"
(echo "-c requirements.txt"; cat "$work/dev.in") >"$work/requirements-dev.in"
"$work/venv/bin/pip-compile" "${common[@]}" -o packaging/requirements-dev.txt "$work/requirements-dev.in"
# The fuzzer is apart from them: it is a native extension that not every machine has a wheel of.
echo atheris >"$work/requirements-fuzz.in"
"$work/venv/bin/pip-compile" "${common[@]}" -o packaging/requirements-fuzz.txt "$work/requirements-fuzz.in"

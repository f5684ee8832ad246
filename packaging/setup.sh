#!/bin/bash
# Prepares a checkout for `make demo` and `make test`: system packages, a virtual environment in .venv, pinned and
# hashed requirements, the package itself (editable). Safe to run again; does nothing where nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-/usr/bin/python3}
# Debian packages: the first line builds pystemd and the simulated NVML, the second boots lab hosts (openssl
# makes the certificates of a test), the third runs containers in them (18 MB to fetch, 89 MB on disk).
NEEDED="gcc libc6-dev libsystemd-dev pkg-config python3-dev python3-venv
systemd-container systemd dbus util-linux debootstrap openssl
podman"
say() { printf 'setup: %s\n' "$*" >&2; }

missing=()
for package in $NEEDED; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
    if ((EUID)); then
        say "not root, so these system packages cannot be installed: ${missing[*]}"
    else
        say "installing ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get -qq update
        apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
    fi
fi

stamp=.venv/.setup-stamp
wanted=$(cat packaging/requirements*.txt pyproject.toml packaging/setup.sh | sha256sum; "$PYTHON" -V; pwd)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    say "building the virtual environment in .venv"
    "$PYTHON" -m venv --clear .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
        -r packaging/requirements.txt -r packaging/requirements-dev.txt
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
    printf '%s' "$wanted" >"$stamp"
fi
# In a lab host hundreds of short-lived processes import these, and most of them may not write a cache.
.venv/bin/python -m compileall -q -x '/(corpus|found)/' watchdog tests

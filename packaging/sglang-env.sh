#!/bin/bash
# Makes the virtual environments in which the tests run a released SGLang on the CPU, once, in a cache outside the
# checkout. Safe to run again and from several checkouts at once; does nothing where nothing has changed.
#   usage: sglang-env.sh [RELEASE...]        (0.5.16; also 0.5.9, 0.5.23)
# 0.5.16 is whole, about 2.3 GB with torch. Every other release is laid over it and holds what differs alone. Prints
# the paths, one a line, to standard output; the cache is SGLANG_ENVS or the default below.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-/usr/bin/python3}
SGLANG_ENVS=${SGLANG_ENVS:-/var/cache/sglang-watchdog}
WHOLE=0.5.16
# A CPU build, if pip's settings offer one; the default build works too, with several GB more.
TORCH=torch==2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK=1
say() { printf 'sglang-env: %s\n' "$*" >&2; }

folder() { echo "$SGLANG_ENVS/sglang-$1"; }
requirements() { echo "tests/sglang_real/requirements-$1.txt"; }
wanted() { sha256sum <"$(requirements "$1")"; echo "$TORCH"; "$PYTHON" -V; }
current() { local stamp; stamp=$(folder "$1")/.stamp; [[ -f $stamp && $(<"$stamp") == "$(wanted "$1")" ]]; }

fill() {  # RELEASE FOLDER: scripts in bin/ keep the temporary path, so only `bin/python -m` is of use afterwards
    local pip=("$2/bin/python" -m pip install --quiet --no-warn-conflicts)
    if [[ $1 == "$WHOLE" ]]; then
        "$PYTHON" -m venv "$2"
    else  # with pip and all the rest from the whole one, of which nothing is taken out for what is put over it
        "$PYTHON" -m venv --without-pip "$2"
        echo "$(folder "$WHOLE")"/lib/python*/site-packages >"$(echo "$2"/lib/python*/site-packages)/whole.pth"
        pip+=(--ignore-installed)
    fi
    "${pip[@]}" --require-hashes --no-deps -r "$(requirements "$1")"
    if [[ $1 == "$WHOLE" ]]; then "${pip[@]}" "$TORCH"; fi
}

make() {  # RELEASE
    local env
    env=$(folder "$1")
    new=$env.new  # not local: the trap outlives this function
    if current "$1"; then say "$env is current"; return; fi
    mkdir -p "$SGLANG_ENVS"
    exec 9>"$env.lock"
    flock -n 9 || { say "waiting for another maker of $env"; flock 9; }
    if current "$1"; then return; fi
    say "building $env (some minutes)"
    rm -rf "$new" "$env.old"
    trap 'rm -rf "$new"' EXIT
    fill "$1" "$new"
    wanted "$1" >"$new/.stamp"
    if [[ -e $env ]]; then mv -T "$env" "$env.old"; fi
    mv -T "$new" "$env"
    rm -rf "$env.old"
    flock -u 9
}

[[ $# -gt 0 ]] || set -- "$WHOLE"
for release in "$@"; do
    if [[ ! -f $(requirements "$release") ]]; then say "no requirements for SGLang $release"; exit 2; fi
done
make "$WHOLE"
for release in "$@"; do
    if [[ $release != "$WHOLE" ]]; then make "$release"; fi
done
for release in "$@"; do folder "$release"; done

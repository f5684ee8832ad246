#!/bin/bash
# Makes the virtual environment in which `make test-sglang` runs a released SGLang on the CPU: about 2.3 GB, once, in a
# cache outside the checkout. Safe to run again and from several checkouts at once; does nothing where nothing has
# changed. Prints the path, SGLANG_ENV or the default below, to standard output.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-/usr/bin/python3}
SGLANG_ENV=${SGLANG_ENV:-/var/cache/sglang-watchdog/sglang-0.5.16}
# A CPU build, if pip's settings offer one; the default build works too, with several GB more.
TORCH=torch==2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK=1
say() { printf 'sglang-env: %s\n' "$*" >&2; }

wanted=$(sha256sum <tests/sglang_real/requirements.txt; echo "$TORCH"; "$PYTHON" -V)
current() { [[ -f $SGLANG_ENV/.stamp && $(<"$SGLANG_ENV/.stamp") == "$wanted" ]]; }
done_already() { say "$SGLANG_ENV is current"; echo "$SGLANG_ENV"; exit 0; }
if current; then done_already; fi

mkdir -p "$(dirname "$SGLANG_ENV")"
exec 9>"$SGLANG_ENV.lock"
flock -n 9 || { say "waiting for another maker of $SGLANG_ENV"; flock 9; }
if current; then done_already; fi

say "building $SGLANG_ENV (about 2.3 GB, some minutes)"
new=$SGLANG_ENV.new
trap 'rm -rf "$new"' EXIT
rm -rf "$new" "$SGLANG_ENV.old"
"$PYTHON" -m venv "$new"
# Scripts in bin/ keep the temporary path, so only `bin/python -m` is of use, here and afterwards.
"$new/bin/python" -m pip install --quiet --require-hashes --no-deps -r tests/sglang_real/requirements.txt
"$new/bin/python" -m pip install --quiet --no-warn-conflicts "$TORCH"
printf '%s' "$wanted" >"$new/.stamp"
if [[ -e $SGLANG_ENV ]]; then mv -T "$SGLANG_ENV" "$SGLANG_ENV.old"; fi
mv -T "$new" "$SGLANG_ENV"
rm -rf "$SGLANG_ENV.old"
echo "$SGLANG_ENV"

#!/bin/sh
# Makes the kit that the machine with a GPU needs, where nothing can be fetched: Debian 12's systemd as packages, the
# wheel of this checkout, and its dependencies for CPython 3.12 (pystemd has no wheel and is built here).
# usage: kit.sh FOLDER PYTHON3.12    (on Debian 12 with libsystemd-dev, from a checkout after `make setup`)
set -eu
kit=$(realpath -m "$1") python312=$2
checkout=$(cd "$(dirname "$0")/../../.." && pwd)
here="$checkout/.venv/bin/python"
mkdir -p "$kit/debs" "$kit/whl"

cd "$kit/debs"
[ -n "$(ls)" ] || apt-get download systemd libsystemd-shared libsystemd0 systemd-container systemd-oomd dbus dbus-daemon dbus-bin \
    dbus-system-bus-common dbus-session-bus-common libdbus-1-3 libcryptsetup12 libip4tc2 libkmod2 libapparmor1 \
    libseccomp2 libdevmapper1.02.1 libargon2-1 libjson-c5 libfdisk1 libexpat1 libssl3
for deb in *%*; do [ ! -e "$deb" ] || mv "$deb" "$(echo "$deb" | tr -d '%')"; done

cd "$kit"
rm -f whl/sglang_watchdog-*.whl
"$here" -m build --wheel --no-isolation --outdir whl "$checkout" >/dev/null
ls whl/pystemd-* >/dev/null 2>&1 || "$python312" -m pip wheel -q --no-deps -w whl pystemd==0.15.3
platforms=$(for n in 2_28 2_27 2_26 2_17; do echo "--platform manylinux_${n}_x86_64"; done)
# Of what this environment holds, so that both are the same versions.
"$here" -m pip list --format=freeze | grep -iE '^(psutil|nvidia-ml-py|structlog|prometheus_client|aio.*|attrs|frozenlist|multidict|propcache|yarl|idna|pydantic.*|annotated-.*|typing[_-].*|rich|markdown-it-py|mdurl|pygments|click|msgspec|shellingham|setproctitle|lxml)==' >wanted.txt
# shellcheck disable=SC2086
"$here" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
    --platform manylinux2014_x86_64 -d whl -r wanted.txt
tar -cf kit.tar debs whl
ls -l kit.tar

#!/bin/bash
# Fetches Debian's Docker (engine, containerd, runc) for `make test-docker` into a cache outside the checkout (see
# unpacked.sh). Prints the folder to standard output.
set -euo pipefail

. /etc/os-release
. "$(dirname "$0")/unpacked.sh"
FOLDER=${SGLANG_WATCHDOG_DOCKER:-/var/cache/sglang-watchdog/docker-${VERSION_CODENAME:-unknown}}
unpacked "$FOLDER" "65 MB" "docker.io containerd runc" usr/sbin/dockerd usr/bin/containerd usr/sbin/runc
echo "$FOLDER"

#!/bin/bash
# Fetches Debian's Prometheus and Alertmanager (promtool and amtool come with them), and nginx, for `make
# test-prometheus` into a cache outside the checkout (see unpacked.sh). Prints the folder with the programs of
# the first two to standard output.
set -euo pipefail

. /etc/os-release
. "$(dirname "$0")/unpacked.sh"
FOLDER=${SGLANG_WATCHDOG_PROMETHEUS:-/var/cache/sglang-watchdog/prometheus-${VERSION_CODENAME:-unknown}}
unpacked "$FOLDER" "30 MB" "prometheus prometheus-alertmanager nginx" \
    usr/bin/prometheus usr/bin/prometheus-alertmanager usr/sbin/nginx
echo "$FOLDER/usr/bin"

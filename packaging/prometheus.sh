#!/bin/bash
# Fetches Debian's Prometheus and Alertmanager (promtool and amtool come with them), and nginx, for `make
# test-prometheus` into a cache outside the checkout. They are unpacked, not installed: nothing is configured or started
# on this machine. Safe to run again and from several checkouts at once. Prints the folder with the programs of the
# first two to standard output.
set -euo pipefail

. /etc/os-release
FOLDER=${SGLANG_WATCHDOG_PROMETHEUS:-/var/cache/sglang-watchdog/prometheus-${VERSION_CODENAME:-unknown}}
PACKAGES=(prometheus prometheus-alertmanager nginx)
say() { printf 'prometheus: %s\n' "$*" >&2; }

mkdir -p "$(dirname "$FOLDER")"
exec 9>"$FOLDER.lock"
flock -w 300 9
if [[ -x $FOLDER/usr/bin/prometheus && -x $FOLDER/usr/bin/prometheus-alertmanager && -x $FOLDER/usr/sbin/nginx ]]; then
    echo "$FOLDER/usr/bin"
    exit 0
fi

say "fetching ${PACKAGES[*]} into $FOLDER (about 30 MB)"
new=$FOLDER.new
trap 'rm -rf "$new"' EXIT
rm -rf "$new" "$FOLDER"
mkdir -p "$new/packages"
fetch() { (cd "$new/packages" && apt-get -qq -o APT::Sandbox::User=root download "${PACKAGES[@]}"); }
fetch 2>/dev/null || { apt-get -qq update && fetch; }
for package in "$new"/packages/*.deb; do dpkg-deb --extract "$package" "$new"; done
rm -r "$new/packages"
mv -T "$new" "$FOLDER"
echo "$FOLDER/usr/bin"

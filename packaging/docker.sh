#!/bin/bash
# Fetches Debian's Docker (engine, containerd, runc) for `make test-docker` into a cache outside the checkout. It is
# unpacked, not installed: nothing is configured or started on this machine. Safe to run again and from several checkouts
# at once. Prints the folder to standard output.
set -euo pipefail

. /etc/os-release
FOLDER=${SGLANG_WATCHDOG_DOCKER:-/var/cache/sglang-watchdog/docker-${VERSION_CODENAME:-unknown}}
PACKAGES=(docker.io containerd runc)
say() { printf 'docker: %s\n' "$*" >&2; }

mkdir -p "$(dirname "$FOLDER")"
exec 9>"$FOLDER.lock"
flock -w 300 9
if [[ -x $FOLDER/usr/sbin/dockerd && -x $FOLDER/usr/bin/containerd && -x $FOLDER/usr/sbin/runc ]]; then
    echo "$FOLDER"
    exit 0
fi

say "fetching ${PACKAGES[*]} into $FOLDER (about 65 MB)"
new=$FOLDER.new
trap 'rm -rf "$new"' EXIT
rm -rf "$new" "$FOLDER"
mkdir -p "$new/packages"
fetch() { (cd "$new/packages" && apt-get -qq -o APT::Sandbox::User=root download "${PACKAGES[@]}"); }
fetch 2>/dev/null || { apt-get -qq update && fetch; }
for package in "$new"/packages/*.deb; do dpkg-deb --extract "$package" "$new"; done
rm -r "$new/packages"
mv -T "$new" "$FOLDER"
echo "$FOLDER"

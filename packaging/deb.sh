#!/bin/bash
# dist/sglang-watchdog_VERSION_amd64.deb for Debian 12 and 13. Needs root, for the build roots of packaging/deb-sites.sh.
# One package for both: a virtual environment finds its packages by the version of the Python that runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
PY=$PWD/.venv/bin/python
umask 022
version=$("$PY" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
lib=$tree/usr/lib/sglang-watchdog
mkdir -p "$tree/DEBIAN" "$lib/bin" dist

"$PY" -m build --wheel --no-isolation --outdir "$work" . >/dev/null
for release in bookworm:3.11 trixie:3.13; do
    site=$lib/lib/python${release#*:}/site-packages
    mkdir -p "$site"
    cp -r --no-preserve=ownership "$(packaging/deb-sites.sh "${release%:*}")/." "$site"
    "$PY" -m zipfile -e "$work"/sglang_watchdog-*.whl "$site"
done
ln -s /usr/bin/python3 "$lib/bin/python3"
printf 'home = /usr/bin\ninclude-system-site-packages = false\n' >"$lib/pyvenv.cfg"
install -D -m 0755 packaging/deb/sglang-watchdog "$tree/usr/bin/sglang-watchdog"

for unit in sglang-watchdog.service sglang-watchdog-hand-back.service; do
    install -D -m 0644 "contrib/systemd/$unit" "$tree/usr/lib/systemd/system/$unit"
    # By the time of its last change, so that an upgrade that does not change it asks for no daemon-reload.
    changed=$(git log -1 --format=%cI -- "contrib/systemd/$unit" 2>/dev/null || true)
    touch --no-create --date="${changed:-2026-01-01}" "$tree/usr/lib/systemd/system/$unit"
done
install -D -m 0644 contrib/systemd/sglang-watchdog.catalog "$tree/usr/lib/systemd/catalog/sglang-watchdog.catalog"
doc=$tree/usr/share/doc/sglang-watchdog
install -D -m 0644 contrib/systemd/sglang.service "$doc/examples/sglang.service"
install -D -m 0644 LICENSE "$doc/copyright"
install -D -m 0644 CHANGELOG.md "$doc/CHANGELOG.md"
"$PY" packaging/manual.py "$tree"
gzip -n9 "$tree"/usr/share/man/man*/*

install -m 0755 packaging/deb/prerm packaging/deb/postinst packaging/deb/postrm "$tree/DEBIAN/"
echo /etc/sglang-watchdog/config.toml >"$tree/DEBIAN/conffiles"
(cd "$tree" && find usr etc -type f -print0 | sort -z | xargs -0 md5sum) >"$tree/DEBIAN/md5sums"
sed -e "s/@VERSION@/$version/" -e "s/@SIZE@/$(du -sk "$tree" | cut -f1)/" packaging/deb/control.in >"$tree/DEBIAN/control"
find "$tree" -type d -exec chmod 755 {} +
dpkg-deb --root-owner-group -Zxz --build "$tree" "dist/sglang-watchdog_${version}_amd64.deb"

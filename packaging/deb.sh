#!/bin/bash
# dist/sglang-watchdog_VERSION_amd64.deb for Debian 12 and 13; prints its path. Needs root, for the build roots of
# packaging/deb-sites.sh. One package for both: a virtual environment finds its packages by the version of the Python
# that runs it. Each content is built once and kept in the cache of the lab.
set -euo pipefail
cd "$(dirname "$0")/.."
PY=$PWD/.venv/bin/python
umask 022
cache=${SGLANG_WATCHDOG_LAB_CACHE:-/var/cache/sglang-watchdog-lab}
KEPT=5
version=$("$PY" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
package=dist/sglang-watchdog_${version}_amd64.deb
mkdir -p dist "$cache"

# Of its last change, wherever and whenever it was checked out.
changed() { git log -1 --format="$1" -- "$2" 2>/dev/null | grep . || date --utc --date=2026-01-01 "$3"; }
units=(sglang-watchdog.service sglang-watchdog-hand-back.service sglang-failed@.service sglang-watchdog-backoff.conf)
content() {
    find watchdog/sglang_watchdog contrib/systemd packaging/{deb*,documents.py,manual.py,requirements.txt} tests/deb/roots.py \
        pyproject.toml README.md CHANGELOG.md LICENSE \
        -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
    changed %aD CHANGELOG.md -R
    for unit in "${units[@]}"; do changed %cI "contrib/systemd/$unit" -Iseconds; done
}
key=$(content | sha256sum | cut -c1-16)
if [[ -f $cache/deb-$key.deb ]]; then
    touch "$cache/deb-$key.deb"
    install -m 0644 "$cache/deb-$key.deb" "$package"
    echo "$package"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
lib=$tree/usr/lib/sglang-watchdog
mkdir -p "$tree/DEBIAN" "$lib/bin"

"$PY" -m build --wheel --no-isolation --outdir "$work" . >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
# Both at once: what is not in the cache yet is minutes of work.
packaging/deb-sites.sh trixie >/dev/null &
other=$!
packaging/deb-sites.sh bookworm >/dev/null
wait "$other"
for release in bookworm:3.11 trixie:3.13; do
    site=$lib/lib/python${release#*:}/site-packages
    mkdir -p "$site"
    cp -r --no-preserve=ownership "$(packaging/deb-sites.sh "${release%:*}")/." "$site"
    "$PY" -m zipfile -e "$work"/sglang_watchdog-*.whl "$site"
done
ln -s ../../../bin/python3 "$lib/bin/python3"
printf 'home = /usr/bin\ninclude-system-site-packages = false\n' >"$lib/pyvenv.cfg"
install -D -m 0755 packaging/deb/sglang-watchdog "$tree/usr/bin/sglang-watchdog"

for unit in "${units[@]}"; do
    case $unit in
        *.service) to=$tree/usr/lib/systemd/system/$unit ;;
        *) to=$lib/$unit ;;  # postinst links it where systemd knows its words
    esac
    install -D -m 0644 "contrib/systemd/$unit" "$to"
    # So that an upgrade that does not change it asks for no daemon-reload.
    touch --no-create --date="$(changed %cI "contrib/systemd/$unit" -Iseconds)" "$to"
done
install -D -m 0644 contrib/systemd/sglang-watchdog.catalog "$tree/usr/lib/systemd/catalog/sglang-watchdog.catalog"
install -D -m 0644 contrib/systemd/sglang.service "$tree/usr/share/doc/sglang-watchdog/examples/sglang.service"
install -D -m 0644 contrib/systemd/sglang-start-gate.conf \
    "$tree/usr/share/doc/sglang-watchdog/examples/sglang-start-gate.conf"
install -D -m 0644 packaging/deb/lintian-overrides "$tree/usr/share/lintian/overrides/sglang-watchdog"
"$PY" packaging/documents.py "$tree" "$version" "$(changed %aD CHANGELOG.md -R)"
"$PY" packaging/manual.py "$tree"
gzip -n9 "$tree"/usr/share/man/man*/*

install -m 0755 packaging/deb/prerm packaging/deb/postinst packaging/deb/postrm "$tree/DEBIAN/"
echo /etc/sglang-watchdog/config.toml >"$tree/DEBIAN/conffiles"
(cd "$tree" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$tree/DEBIAN/md5sums"
sed -e "s/@VERSION@/$version/" -e "s/@SIZE@/$(du -sk "$tree" | cut -f1)/" packaging/deb/control.in >"$tree/DEBIAN/control"
find "$tree" -type d -exec chmod 755 {} +
# The least level: docs/performance.md has the figures.
dpkg-deb --root-owner-group -Zxz -z1 --build "$tree" "$work/built.deb" >&2
install -m 0644 "$work/built.deb" "$package"
mv "$work/built.deb" "$cache/.deb-$key" && mv "$cache/.deb-$key" "$cache/deb-$key.deb"
find "$cache" -maxdepth 1 -name 'deb-*.deb' -printf '%T@ %p\n' | sort -rn | tail -n "+$((KEPT + 1))" | cut -d' ' -f2- |
    xargs -r rm -f
echo "$package"

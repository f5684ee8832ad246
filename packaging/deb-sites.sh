#!/bin/bash
# Makes, for the Debian release CODENAME, the site-packages that the .deb carries: once for each text of the pinned
# requirements, in the cache of the lab. Prints its folder. Needs root: it enters a root of that release.
set -euo pipefail
cd "$(dirname "$0")/.."
codename=$1
cache=${SGLANG_WATCHDOG_LAB_CACHE:-/var/cache/sglang-watchdog-lab}
say() { printf 'deb: %s\n' "$*" >&2; }

build=$(cd tests && ../.venv/bin/python -m deb.roots build "$codename")
digest=$(cat packaging/requirements.txt packaging/deb-site.sh <(basename "$build") | sha256sum | cut -c1-12)
site=$cache/site-$codename-$digest
if [[ -d $site ]]; then echo "$site"; exit 0; fi

say "building the environment for $codename (a minute or two)"
new=$(mktemp -d "$cache/.site-XXXXXX")
trap 'rm -rf "$new"' EXIT
mkdir "$new/site"
# pip's own settings of this machine, wherever they lie, hold in there as well.
known=()
for path in /etc/resolv.conf /etc/hosts /etc/ssl /etc/pip.conf /etc/xdg/pip "$HOME/.pip" "$HOME/.config/pip"; do
    if [[ -e $path ]]; then known+=("$path"); fi
done
# The root itself is not changed: an overlay takes what is written, and goes away with the mount namespace.
unshare --mount --pid --fork --kill-child --propagation private -- bash -euo pipefail -s \
    "$build" "$PWD" "$new" "${known[@]}" <<'ENTER' >&2
build=$1 source=$2 out=$3
shift 3
work=$(mktemp -d)
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=$build,upperdir=$work/upper,workdir=$work/work" "$work/root"
root=$work/root
mkdir -p "$root/src" "$root/out"
mount --bind -o ro "$source" "$root/src"
mount --bind "$out" "$root/out"
for path in "$@"; do
    if [[ -d $path ]]; then
        mkdir -p "$root$path"
    else
        mkdir -p "$(dirname "$root$path")"
        touch "$root$path"
    fi
    mount --bind -o ro "$path" "$root$path"
done
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
chroot "$root" bash /src/packaging/deb-site.sh
ENTER
chmod 755 "$new/site"
mv -T "$new/site" "$site"
echo "$site"

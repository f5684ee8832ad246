# Sourced by what needs Debian's programs for a test without installing them: nothing is configured or started on this
# machine. Safe to run again and from several checkouts at once.

# unpacked FOLDER SIZE "PACKAGE…" PROGRAM…: FOLDER holds the packages' files, and so the programs (paths within it).
unpacked() {
    local folder=$1 size=$2 packages=$3 new=$1.new program missing=""
    shift 3
    mkdir -p "$(dirname "$folder")"
    exec 9>"$folder.lock"
    flock -w 300 9
    for program; do [[ -x $folder/$program ]] || missing=$program; done
    [[ -n $missing ]] || return 0

    printf '%s: fetching %s into %s (about %s)\n' "$(basename "$0" .sh)" "$packages" "$folder" "$size" >&2
    trap "rm -rf '$new'" EXIT
    rm -rf "$new" "$folder"
    mkdir -p "$new/packages"
    # shellcheck disable=SC2086
    fetch() { (cd "$new/packages" && apt-get -qq -o APT::Sandbox::User=root download $packages); }
    fetch 2>/dev/null || { apt-get -qq update && fetch; }
    for package in "$new"/packages/*.deb; do dpkg-deb --extract "$package" "$new"; done
    rm -r "$new/packages"
    mv -T "$new" "$folder"
}

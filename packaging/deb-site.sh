#!/bin/bash
# Runs inside a build root of one Debian release (packaging/deb.sh enters it): installs what packaging/requirements.txt
# pins into /out/site, compiled against this release's Python and libsystemd.
set -euo pipefail
python3 -m venv /tmp/tools
/tmp/tools/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-compile --target /out/site \
    -r /src/packaging/requirements.txt
cd /out/site
# Commands of the dependencies, and what only a compiler or a type checker reads.
rm -rf bin
find . -type d -name tests -prune -exec rm -rf {} +
find . \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.pyi' -o -name '*.c' -o -name '*.cpp' -o -name '*.h' \
    -o -name '*.rng' -o -name '*.xsl' -o -name '*.typed' \) -delete
find . -name '*.so' -exec strip --strip-unneeded {} +

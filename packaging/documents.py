"""What Debian asks of a package, changelog.gz and copyright: `python packaging/documents.py TREE VERSION DATE` writes
both below TREE, from CHANGELOG.md and from the Python distributions that TREE carries. DATE, as `date -R` prints it, is
of what is not released yet."""

import gzip
import re
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path

PACKAGE = "sglang-watchdog"
AUTHORS = "The sglang-watchdog authors"
CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"
COPYRIGHT = f"""\
{PACKAGE}

Copyright 2026 {AUTHORS}
License: Apache-2.0
On Debian systems its text is in /usr/share/common-licenses/Apache-2.0.

The package carries the Python distributions below, as their authors released
them but for tests, sources of extension modules and type stubs. They lie in
/usr/lib/{PACKAGE}/lib/python3.*/site-packages, and beside them, in
NAME-VERSION.dist-info, their authors' notices and the texts of their licenses.
(LGPL-2.1: also in /usr/share/common-licenses/LGPL-2.1.)

"""


def main(tree: Path, version: str, date: str) -> None:
    folder = tree / "usr/share/doc" / PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    changelog = "\n".join(debian_changelog(CHANGELOG.read_text(), version, date))
    (folder / "changelog.gz").write_bytes(gzip.compress(changelog.encode(), 9, mtime=0))
    (folder / "copyright").write_text(COPYRIGHT + "".join(f"  {line}\n" for line in carried(tree)))


def debian_changelog(text: str, version: str, date: str) -> Iterator[str]:
    """An entry for each `## ` of the page, newest first. The one without a date of its own is `version`."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        released = re.search(r"(\d+\.\d+\.\d+)\S* - (\d{4}-\d{2}-\d{2})", heading)
        yield f"{PACKAGE} ({released[1] if released else version}) unstable; urgency=medium"
        yield ""
        for item in re.findall(r"^- (.+(?:\n  .+)*)", body, flags=re.MULTILINE):
            plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(item.split()))
            yield from textwrap.wrap(plain, 78, initial_indent="  * ", subsequent_indent="    ", break_on_hyphens=False)
        yield ""
        yield f" -- {AUTHORS} <>  {_midnight(released[2]) if released else date}"
        yield ""


def _midnight(day: str) -> str:
    return format_datetime(datetime.fromisoformat(day).replace(tzinfo=UTC))


def carried(tree: Path) -> list[str]:
    """Name, version and license of each distribution below the tree, in order, ourselves left out."""
    folders = [str(folder) for folder in tree.glob("usr/lib/*/lib/python3.*/site-packages")]
    found = {f"{one.name} {one.version}: {_license(one)}" for one in distributions(path=folders) if one.name != PACKAGE}
    return sorted(found, key=str.lower)


def _license(one: Distribution) -> str:
    """In the words of its metadata. Raises ValueError where it says nothing."""
    said = one.metadata.get("License-Expression") or one.metadata.get("License")
    classified = (line for line in one.metadata.get_all("Classifier", ()) if line.startswith("License ::"))
    said = said or next(classified, "").rpartition(" :: ")[2]
    if not said or "\n" in said:
        raise ValueError(f"{one.name} does not say what its license is")
    return str(said)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

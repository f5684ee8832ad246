"""The coverage-guided fuzzer over the readers and the diagnosis: `make fuzz`. Ends with the first breach that it finds.

It starts from the corpus, with the signatures' needles as its dictionary. Arguments are libFuzzer's.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["sglang_watchdog.diagnosis", "sglang_watchdog.domain"]):
    from fuzz.one_input import SHOW, check

from corpus_cases import everything
from sglang_watchdog.diagnosis.signatures import catalog

_LIMITS = ("-max_len=8192", "-timeout=10", "-rss_limit_mb=1024")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        seeds, words = Path(folder) / "seeds", Path(folder) / "words"
        seeds.mkdir()
        for case in everything():
            show = SHOW + case.show.encode()
            (seeds / f"{case.name}-journal").write_bytes(b"{" + case.journal + show)
            (seeds / f"{case.name}-text").write_bytes(b" " + "\n".join(case.text()).encode() + show)
        words.write_text("".join(f'"{_escaped(needle)}"\n' for s in catalog().signatures for needle in s.needles))
        found = Path(__file__).parent / "found"
        arguments = [sys.argv[0], str(seeds), *_LIMITS, f"-dict={words}", f"-artifact_prefix={found}/", *sys.argv[1:]]
        atheris.Setup(arguments, check)
        atheris.Fuzz()


def _escaped(needle: str) -> str:
    return needle.replace("\\", "\\\\").replace('"', '\\"')


if __name__ == "__main__":
    main()

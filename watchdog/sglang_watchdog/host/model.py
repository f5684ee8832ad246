"""What a proof is bound to beside the command: the model's content, and SGLang's version. A proof for one checkpoint or
release says nothing about another at the same path.

Read by `host.probe_worker`, because a file system may hang.
"""

import hashlib
from pathlib import Path

_LARGEST_BYTES = 64 * 1024 * 1024  # a weight index of a 600B model is about 10 MB


def model_digest(path: str) -> str:
    """SHA-256 over config.json and the weight indexes of a local model folder; empty for a hub name or where nothing
    can be read (the path itself is still part of the base)."""
    folder = Path(path)
    digest = hashlib.sha256()
    found = False
    for file in sorted([folder / "config.json", *folder.glob("*.index.json")]) if folder.is_dir() else []:
        try:
            if file.stat().st_size <= _LARGEST_BYTES:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
                found = True
        except OSError:
            continue
    return digest.hexdigest() if found else ""


def sglang_version(interpreter: str) -> str:
    """The version of the `sglang` distribution beside the interpreter; empty where there is none to be seen (a
    container, a source tree on PYTHONPATH)."""
    prefix = Path(interpreter).parent.parent
    found = sorted(prefix.glob("lib/python3.*/site-packages/sglang-*.dist-info"))
    return found[-1].name.removeprefix("sglang-").removesuffix(".dist-info") if found else ""

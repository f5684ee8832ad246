"""Builds the simulated libnvidia-ml.so.1 with gcc, once for each text of its source.

Owns the cache folder; knows nothing of what the library answers (nvml.c) or how its state is set (state.py).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "sim_nvml"
SONAME = "libnvidia-ml.so.1"
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-unused-variable", "-Werror", "-pthread")


def library() -> Path:
    """The folder to put on LD_LIBRARY_PATH; compiles the library if this source was not compiled yet.

    Raises subprocess.CalledProcessError with gcc's words in `stderr`, or FileNotFoundError where there is no gcc.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = CACHE / digest
    if not (folder / SONAME).exists():
        _compile(folder)
    return folder


def _compile(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Several test processes may build at once: each writes its own file, and the last rename wins with equal bytes.
    handle, made = tempfile.mkstemp(dir=folder, prefix=".building-")
    os.close(handle)
    command = ["gcc", *FLAGS, f"-Wl,-soname,{SONAME}", "-o", made, str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    os.chmod(made, 0o755)
    os.replace(made, folder / SONAME)

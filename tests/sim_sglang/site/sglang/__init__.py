"""Stands where the real package would: only what `python -m sglang.launch_server` and a version look-up need."""

import sys
from pathlib import Path

# The simulator lives beside this folder's parent; the real launch line knows nothing of it.
_TESTS = str(Path(__file__).resolve().parents[3])
if _TESTS not in sys.path:
    sys.path.append(_TESTS)

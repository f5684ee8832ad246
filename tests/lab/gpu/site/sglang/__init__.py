"""Stands where the real package would, as `sim_sglang/site` does, for the server whose memory is a real card's."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[4])
if _TESTS not in sys.path:
    sys.path.append(_TESTS)

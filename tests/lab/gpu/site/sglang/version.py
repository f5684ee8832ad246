"""The release that is simulated, where the real package keeps its version."""

from sim_sglang.settings import Settings

__version__ = str(Settings.from_environment().release)

"""Simulated GPUs below the product's own code: a libnvidia-ml.so.1 that answers from files.

`build.library()` is the folder for LD_LIBRARY_PATH; `SimNvml` sets and reads the state.
"""

from sim_nvml.state import GIB, MIB, Allocation, Gpu, GpuFull, SimNvml

__all__ = ["GIB", "MIB", "Allocation", "Gpu", "GpuFull", "SimNvml"]

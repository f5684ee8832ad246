"""A simulated SGLang server: the process tree, log lines, HTTP, memory and ends of the real one, without a GPU.

Started as `python -m sglang.launch_server FLAGS` with `tests/sim_sglang/site` on PYTHONPATH, so that command lines look
like the real ones. SGLang's own flags stay pure; the simulation is steered by SIM_SGLANG_* variables (settings.py) and
by a file of faults (faults.py). GPU memory is that of sim_nvml.
"""

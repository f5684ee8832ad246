"""The real server's entry point by name; the simulator behind it."""

import sys

# Spawned children import this module as well (under another name): nothing may happen at import.
if __name__ == "__main__":
    from sim_sglang.launcher import main

    sys.exit(main(sys.argv[1:]))

"""The real server's entry point by name; the simulator on a real card behind it."""

import sys

from lab.gpu import server

# Spawned children import this module as well (under another name), and have the card from it.
server.install()

if __name__ == "__main__":
    from sim_sglang.launcher import main

    server.start_strays()
    sys.exit(main(sys.argv[1:]))

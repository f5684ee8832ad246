"""Ports of loopback for the servers of tests. Hosts of the lab share the machine's, and so do tests side by side."""

import itertools
import os
import socket

# Below those that the kernel gives to outgoing connections (net.ipv4.ip_local_port_range): a port of that range may be
# a client's by the time that its server is up, and stays taken for a minute after the client has gone.
_RANGE = range(10_240, 29_000)
_EACH = 100  # of neighbouring processes
_numbers = itertools.count(os.getpid() * _EACH)


def free_port() -> int:
    """One that nobody has, and that was not handed out before by this process. Raises OSError where there is none."""
    for number in itertools.islice(_numbers, len(_RANGE)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", _RANGE[number % len(_RANGE)]))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port of loopback is free")

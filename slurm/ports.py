"""A port of the first node for the ranks to meet at.

Standard library only.
"""

import socket
from contextlib import suppress

# Below the kernel's ephemeral ports, so that no other process gets one by chance.
_PORTS = range(20000, 32000)


def free_port(head: str, job_id: str, attempt: int) -> int:
    """Return a free port of this host, the first node; the search starts from the job's id.

    Raises:
        OSError: the node's address cannot be resolved, or there is no free port.
    """
    start = int("".join(filter(str.isdigit, job_id)) or "0") * 31 + attempt
    here = socket.gethostname()
    try:
        family = socket.getaddrinfo(head, None, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror as error:
        message = f"{here} cannot resolve its address {head}: fix NodeAddr in slurm.conf"
        raise OSError(message) from error
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(("", port))
            return port
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop} on {here}")

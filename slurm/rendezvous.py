"""Prove on every node, before torchrun, that the first node's address leads to the first node.

Run by slurm/node.sh on each node. The first node listens on HEAD_PORT and waits until all others
have called; each other node calls until it is answered. Prints the network interface that carries
HEAD_ADDR here; ends with status 1 and one line that names the node where something fails.
Standard library only, and quick to start: it stands between the allocation and the training.
"""

import fcntl
import os
import socket
import struct
import sys
import time

WAIT_S = float(os.environ.get("RENDEZVOUS_WAIT_S", "120"))
SIOCGIFADDR = 0x8915


def main() -> None:
    node, rank = os.environ["NODE_NAME"], int(os.environ["NODE_RANK"])
    nodes, run = int(os.environ["NODES"]), os.environ["RUN_DIR"] + "#" + os.environ["ATTEMPT"]
    address, port = os.environ["HEAD_ADDR"], int(os.environ["HEAD_PORT"])
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        fail(
            f"node {node} cannot resolve the first node's address {address} ({error}): ask the "
            "site's administrators, or name a node's address in Slurm's NodeAddr"
        )
    if target[0].startswith(("127.", "::1")) and os.environ["ONE_HOST"] != "yes":
        fail(
            f"node {node} takes the first node's address {address} for a loopback ({target[0]}): "
            "mend /etc/hosts or NodeAddr"
        )
    started = time.monotonic()
    local = (
        listen(family, target, node, nodes, run)
        if rank == 0
        else call(family, target, node, rank, run)
    )
    print(
        f"cookbook: node {node} ({rank} of {nodes}) met the first node at {target[0]} in "
        f"{time.monotonic() - started:.1f} s",
        file=sys.stderr,
    )
    print(interface_of(local))


def listen(family: int, target: tuple, node: str, nodes: int, run: str) -> str:
    """Answer each other node once; return the address that was listened on."""
    deadline, met = time.monotonic() + WAIT_S, {0}
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(target)
        except OSError as error:
            fail(
                f"the first node {node} cannot listen on {target[0]}:{target[1]} "
                f"({error.strerror}): is that address its own?"
            )
        server.listen(nodes)
        while len(met) < nodes:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except OSError:
                missing = ", ".join(str(k) for k in range(nodes) if k not in met)
                fail(
                    f"no call from node number {missing} within {WAIT_S:.0f} s at the first node "
                    f"{node} ({target[0]}:{target[1]}): see logs of those nodes, and whether a "
                    "firewall stands between"
                )
            with connection:
                connection.settimeout(5)
                try:
                    said, _, rank = connection.recv(4096).decode().rpartition(" ")
                    if said == run:
                        connection.sendall(b"welcome")
                        met.add(int(rank))
                        # The caller hangs up first, so that this port stays free of TIME_WAIT.
                        connection.recv(1)
                except (OSError, ValueError):
                    continue
    return target[0]


def call(family: int, target: tuple, node: str, rank: int, run: str) -> str:
    """Call the first node until it answers; return this node's address on that road."""
    deadline, last = time.monotonic() + WAIT_S, "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(target[:2], timeout=5) as connection:
                connection.sendall(f"{run} {rank}".encode())
                if connection.recv(16) == b"welcome":
                    return connection.getsockname()[0]
                last = "somebody else answers there"
        except OSError as error:
            last = error.strerror or str(error)
        time.sleep(0.2)
    fail(
        f"node {node} does not reach the first node at {target[0]}:{target[1]} within "
        f"{WAIT_S:.0f} s ({last}): is a firewall between them?"
    )


def interface_of(address: str) -> str:
    """Return the name of the interface that has this IPv4 address, '' where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]
            except OSError:
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return ""


def fail(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()

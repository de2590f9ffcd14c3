"""Check on every node, before its ranks, that the first node's address leads to the first node.

Run by slurm/node.sh on each node. The first node listens on HEAD_PORT until all others have
connected; each other node tries until it is answered. Prints this node's own address of that
connection. If something fails, exit status 1 and one line that names the node.
Standard library only, and quick to start: the GPUs wait for it.
"""

import errno
import os
import socket
import sys
import time
from typing import Any, NoReturn

WAIT_S = float(os.environ.get("RENDEZVOUS_WAIT_S", "120"))
# Below the kernel's ephemeral ports, so that no other process gets one by chance.
PORTS = range(20000, 32000)

# (host, port), with two more fields for IPv6.
Address = tuple[Any, ...]


def port_of(job_id: str, attempt: int) -> int:
    """Return the first node's port for the ranks to meet at: another one for each attempt.

    If another program has it, the attempt fails with a message, and the next one has another port.
    """
    digits = "".join(filter(str.isdigit, job_id)) or "0"
    return PORTS[(int(digits) * 31 + attempt) % len(PORTS)]


def main() -> None:
    node, rank = os.environ["NODE_NAME"], int(os.environ["NODE_RANK"])
    nodes = int(os.environ["NODES"])
    run = f"{os.environ['RUN_DIR']}#{os.environ['COOKBOOK_ATTEMPT']}"
    address, port = os.environ["HEAD_ADDR"], int(os.environ["HEAD_PORT"])
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        fail(
            f"node {node} cannot resolve the first node's address {address} ({error}): ask the "
            "site's administrators, or set the node's address as NodeAddr in slurm.conf"
        )
    if str(target[0]).startswith(("127.", "::1")) and os.environ["ONE_HOST"] != "yes":
        fail(
            f"node {node} resolves the first node's address {address} to a loopback ({target[0]}): "
            "fix /etc/hosts or NodeAddr in slurm.conf"
        )
    started = time.monotonic()
    local = call(target, node, rank, run) if rank else listen(family, target, node, nodes, run)
    met = f"met the first node at {target[0]} in {time.monotonic() - started:.1f} s"
    print(f"cookbook: node {node} ({rank} of {nodes}) {met}", file=sys.stderr)
    print(local)


def listen(family: int, target: Address, node: str, nodes: int, run: str) -> str:
    """Answer each other node once; return the address on which this node listened."""
    deadline, met, place = time.monotonic() + WAIT_S, {0}, f"{target[0]}:{target[1]}"
    try:
        server = socket.create_server(target, family=family, backlog=nodes)
    except OSError as error:
        why = "check that this address is its own"
        if error.errno == errno.EADDRINUSE:
            why = "another program has taken the port, the next attempt uses another one"
        reason = os.strerror(error.errno or 0)
        fail(f"the first node {node} cannot listen on {place} ({reason}): {why}")
    with server:
        while len(met) < nodes:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except OSError:
                missing = ", ".join(str(k) for k in range(nodes) if k not in met)
                fail(
                    f"node number {missing} did not connect to the first node {node} ({place}) "
                    f"within {WAIT_S:.0f} s: see the logs of those nodes, and check for a firewall "
                    "between them"
                )
            with connection:
                connection.settimeout(5)
                try:
                    its_run, _, rank = connection.recv(4096).decode().rpartition(" ")
                    if its_run == run:
                        connection.sendall(b"welcome")
                        met.add(int(rank))
                        # The other side closes first, so that this port has no TIME_WAIT.
                        connection.recv(1)
                except (OSError, ValueError):
                    continue
    return str(target[0])


def call(target: Address, node: str, rank: int, run: str) -> str:
    """Connect to the first node until it answers; return this node's address of the connection."""
    deadline, last = time.monotonic() + WAIT_S, "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(target[:2], timeout=5) as connection:
                connection.sendall(f"{run} {rank}".encode())
                if connection.recv(16) == b"welcome":
                    return str(connection.getsockname()[0])
                last = "another program answers there"
        except OSError as error:
            last = error.strerror or str(error)
        time.sleep(0.2)
    fail(
        f"node {node} did not reach the first node at {target[0]}:{target[1]} within "
        f"{WAIT_S:.0f} s ({last}): check for a firewall between them"
    )


def fail(message: str) -> NoReturn:
    print(message)
    sys.exit(1)


if __name__ == "__main__":
    main()

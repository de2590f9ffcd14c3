"""Time in which rollout nodes have a version of the weights: sudo python -m benchmarks.transfer

Nodes are network namespaces of this host, which send and receive so many Mbit/s at most (tc). Each
count of nodes is measured in two ways: each node sends on to the next one (rollout_transfer:
network), and all of them ask the first. Needs root, and Debian's iproute2.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.objectives.network import Handler, Server, Store

SECRET, VERSION, PREFIX = "benchmark", "0.1.0", f"cb{os.getpid() % 10_000}"


def address(node: int) -> str:
    """The address of a node; the first one, 0, has the weights."""
    return f"10.213.0.{node + 1}"


@contextmanager
def nodes(count: int, mbit: int) -> Iterator[None]:
    """So many namespaces at one bridge."""

    def run(*line: str) -> None:
        subprocess.run(line, check=True)

    def limit(inside: list[str], device: str) -> None:
        rate = ["rate", f"{mbit}mbit", "burst", "1mb", "latency", "50ms"]
        run(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)

    bridge = f"{PREFIX}b"
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for node in range(count):
            name, host = f"{PREFIX}n{node}", f"{PREFIX}v{node}"
            inside = ["ip", "netns", "exec", name]
            run("ip", "netns", "add", name)
            run("ip", "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", host, "master", bridge, "up")
            run(*inside, "ip", "addr", "add", f"{address(node)}/24", "dev", "eth0")
            run(*inside, "ip", "link", "set", "eth0", "up")
            limit(inside, "eth0")
            limit([], host)
        yield
    finally:
        for node in range(count):
            subprocess.run(["ip", "link", "del", f"{PREFIX}v{node}"], check=False)
            subprocess.run(["ip", "netns", "del", f"{PREFIX}n{node}"], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)


def node_main(node: int, size: int, sources: list[str]) -> None:
    """One node: says where it listens, fetches when it is told to, and says how long it took."""
    store = Store(SECRET, str(node))
    server = Server(address(node), SECRET, Handler, store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if not node:
        path = store.folder / "weights.safetensors"
        path.write_bytes(os.urandom(1 << 20) * (size >> 20))
        store.add(VERSION, path)
    print(server.server_port, flush=True)
    ports = json.loads(sys.stdin.readline())
    if node:
        each = [{"host": address(int(one)), "port": ports[int(one)]} for one in sources]
        began = time.monotonic()
        store.fetch(VERSION, each)
        print(time.monotonic() - began, flush=True)
    sys.stdin.readline()


def measured(count: int, size: int, mbit: int, chain: bool) -> float:
    """Seconds until the last of so many rollout nodes has the weights."""
    with nodes(count + 1, mbit):
        started = []
        for node in range(count + 1):
            sources = ["0"] if node < 2 or not chain else [str(node - 1), "0"]
            inside = [
                "ip",
                "netns",
                "exec",
                f"{PREFIX}n{node}",
                sys.executable,
                "-m",
                __spec__.name,
            ]
            line = [*inside, "--node", str(node), str(size), *sources]
            started.append(
                subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        out = [each.stdout for each in started if each.stdout]
        ports = json.dumps([int(each.readline()) for each in out])
        for process in started:
            assert process.stdin is not None
            print(ports, file=process.stdin, flush=True)
        took = [float(each.readline()) for each in out[1:]]
        for process in started:
            process.communicate()
        return max(took)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--mbit", type=int, default=1000, help="of each node's network")
    parser.add_argument("--node", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node:
        node, size, *sources = given.node
        node_main(int(node), int(size), sources)
        return
    if os.geteuid() or not Path("/usr/sbin/tc").exists():
        sys.exit("error: needs root and tc (Debian: apt-get install iproute2)")
    print(f"{given.mib} MiB, {given.mbit} Mbit/s: {given.mib * 8.389 / given.mbit:.2f} s once")
    print("rollout nodes   in a chain   all from the first")
    for count in given.nodes:
        chain, star = (measured(count, given.mib << 20, given.mbit, way) for way in (True, False))
        print(f"{count:13}   {chain:8.2f} s   {star:8.2f} s", flush=True)


if __name__ == "__main__":
    main()

"""Versions of the weights over the network: stores of several nodes, here on one host."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runspec import files
from trainer.errors import RolloutError
from trainer.objectives import network
from trainer.objectives.network import Handler, Server, Store, before

SECRET = "the run's"
STRIPE = 1 << 20
# More than one stripe, and no multiple of anything.
SIZE = 2 * STRIPE + 12_345
NOBODY = {"host": "127.0.0.1", "port": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes of small files, and a neighbour that is not waited for."""
    monkeypatch.setattr(network, "_STRIPE_BYTES", STRIPE)
    monkeypatch.setattr(network, "BEGIN_S", 0.2)


def serve(server: Server) -> None:
    """Let it answer."""
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()


@pytest.fixture
def node() -> Iterator[Callable[[str], tuple[Store, Server]]]:
    """Makes the store and the server of a process on a node of this name."""
    servers = []

    def make(name: str, secret: str = SECRET) -> tuple[Store, Server]:
        store = Store(secret, name)
        server = Server("127.0.0.1", secret, Handler, store)
        servers.append(server)
        serve(server)
        return store, server

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def written(store: Store, version: str, size: int = SIZE) -> bytes:
    """Offer a version in two files, one of them empty; return the other's content."""
    content = os.urandom(1 << 20) * (size >> 20) + os.urandom(size % (1 << 20))
    folder = store.folder / f"weights_{version}"
    folder.mkdir()
    store.create(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(content)
    (folder / "empty").touch()
    store.add(version, folder)
    return content


def had(store: Store, version: str) -> bytes:
    """What a store has of a version."""
    folder = store.folder / f"weights_{version}"
    assert (folder / "empty").read_bytes() == b""
    return (folder / "model.safetensors").read_bytes()


def test_a_version_passes_from_node_to_node_and_is_shared_within_one(node: Any) -> None:
    first, first_at = node("n1")
    (one, one_at), (two, two_at), (beside, _), (late, _) = map(node, ("n2", "n3", "n2", "n4"))
    content = written(first, "0.1.0")
    sources = {
        one: [first_at.source],
        two: [one_at.source, first_at.source],
        beside: [one_at.source, first_at.source],
    }
    threads = [threading.Thread(target=s.fetch, args=("0.1.0", o)) for s, o in sources.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The first node is gone, and its neighbour has everything.
    first_at.shutdown()
    first_at.server_close()
    late.fetch("0.1.0", [two_at.source, first_at.source])
    for store in (*sources, late):
        assert had(store, "0.1.0") == content
    shared = beside.folder / "weights_0.1.0"
    assert shared.is_symlink() and shared.resolve() == one.folder / "weights_0.1.0"
    assert not (two.folder / "weights_0.1.0").is_symlink()


class Slow(Handler):
    """Sends the beginning of each stripe."""

    def do_GET(self) -> None:
        store = self.server.store
        if store is None or self.path.count("/") == 2:
            super().do_GET()
            return
        name = self.path.split("/", 4)[4]
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.end_headers()
        self.wfile.write((store.folder / name).read_bytes()[:1000])


def test_a_neighbour_that_breaks_off_is_passed_over(node: Any) -> None:
    first, first_at = node("n1")
    content = written(first, "0.1.0")
    broken = Server("127.0.0.1", SECRET, Slow, first)
    serve(broken)
    store, _ = node("n2")
    follower, _ = node("n3")
    store.fetch("0.1.0", [NOBODY, broken.source, first_at.source])
    assert had(store, "0.1.0") == content
    with pytest.raises(RolloutError, match=r"weights 0\.1\.0 did not arrive: .*refused.*ended"):
        follower.fetch("0.1.0", [NOBODY, broken.source])
    assert not [*follower.folder.iterdir()], "nothing half-made"
    broken.shutdown()
    broken.server_close()


def test_who_has_no_secret_gets_nothing(node: Any) -> None:
    first, first_at = node("n1")
    written(first, "0.1.0", 10)
    stranger, _ = node("n2", "another")
    with pytest.raises(RolloutError, match="the run's secret is missing"):
        stranger.fetch("0.1.0", [first_at.source])
    asker, _ = node("n2")
    with pytest.raises(RolloutError, match="does not have them"):
        asker.fetch("0.2.0", [first_at.source])
    for name in ("../secret", "secret", "weights_0.1.0/../secret"):
        assert not first.send(None, "0.1.0", 0, name)  # type: ignore[arg-type]


def test_the_newest_two_are_kept(node: Any) -> None:
    first, first_at = node("n1")
    store, _ = node("n2")
    for number in range(1, 5):
        content = written(first, f"0.{number}.0", 100)
        store.fetch(f"0.{number}.0", [first_at.source])
        assert had(store, f"0.{number}.0") == content
    kept = sorted(path.name for path in store.folder.glob("weights_*"))
    assert kept == ["weights_0.3.0", "weights_0.4.0"]
    # What is gone is fetched again: a request may be late.
    store.fetch("0.2.0", [first_at.source])
    assert (store.folder / "weights_0.2.0").exists()


def shared_memory() -> int:
    """Bytes of this host's memory that files in it have."""
    (line,) = [x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("Shmem:")]
    return int(line.split()[1]) * 1024


def test_memory_is_given_back(node: Any) -> None:
    """By versions that are removed, and by a process that is killed."""
    script = (
        "import time; from pathlib import Path; from trainer.objectives.network import Store;"
        "store = Store('', ''); path = store.folder / 'weights_0.1.0'; store.create(path);"
        "path.write_bytes(bytes(512 << 20)); print(path, flush=True); time.sleep(60)"
    )
    before = shared_memory()
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    path = Path(process.stdout.readline().decode().strip())
    assert path.stat().st_size == 512 << 20 and shared_memory() > before + (300 << 20)
    process.kill()
    process.wait(30)
    assert not path.exists() and shared_memory() < before + (200 << 20)
    first, _ = node("n1")
    written(first, "0.1.0")
    held = {file.descriptor for file in first._versions["0.1.0"].files.values()} - {None}
    first.remove_all_but("0.2.0")
    assert len(held) == 1 and not [*first.folder.iterdir()]
    for descriptor in held:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_a_version_that_memory_has_no_room_for_is_refused(node: Any) -> None:
    first, first_at = node("n1")
    huge = first.folder / "weights_0.1.0"
    os.truncate(first.create(huge), 1 << 50)
    first.add("0.1.0", huge)
    store, _ = node("n2")
    with pytest.raises(RolloutError, match=r"1,048,576\.0 GiB of weights, and .* of memory free"):
        store.fetch("0.1.0", [first_at.source])
    assert not [*store.folder.iterdir()]


@pytest.mark.parametrize(
    ("index", "name", "asked"),
    [(0, "a", None), (1, "a", 0), (2, "b", 0), (3, "b", 2), (4, "c", 2), (5, "c", 4)],
)
def test_the_replicas_nodes_are_a_chain(
    tmp_path: Path, index: int, name: str, asked: int | None
) -> None:
    for place, node in enumerate("aabbcc"):
        said = {"host": "h", "port": place, "node": node}
        (tmp_path / files.REPLICA.format(place)).write_text(json.dumps(said))
    assert [each["port"] for each in before(tmp_path, index, name)] == (
        [] if asked is None else [asked]
    )

"""One server of an endpoint, its backend and its front: -m plugins.serve.server <run>/train.yaml

torchrun starts it as each rank. The first rank of a node starts the backend on a Unix socket, waits
until it answers, opens the front on a port and writes the server's file; the node's other ranks
only hold their GPU. A backend that dies is restarted.
"""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from plugins.serve import backends, parameters
from plugins.serve import endpoint as endpoints
from plugins.serve.faults import Faults, stop_event
from plugins.serve.front import Front
from plugins.serve.journal import Journal
from plugins.serve.proxy import runner
from plugins.serve.recipe_keys import SERVE
from plugins.serve.upstream import BEAT_S, Upstream
from runspec import failure, files, progress
from runspec.processes import end_with_parent, end_with_torchrun
from runspec.storage import OF_A_DISK
from runspec.variables import without_torchrun

# A backend that dies more often than this, within a minute each time, is not restarted.
_DEATHS, _SHORT_S = 5, 60.0


class ServeError(Exception):
    """Why a server ends, in one line."""


def load(path: Path) -> dict[str, Any]:
    """Return the settings of train.yaml with the defaults of the keys."""
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = {key: entry.default for key, entry in SERVE.items()}
    return config | {key: value for key, value in given.items() if value is not None}


class Server:
    """A server's backend, front and file."""

    def __init__(self, config: dict[str, Any], run_dir: Path, number: int, gpus: list[int]) -> None:
        self.config, self.run_dir, self.number, self.gpus = config, run_dir, number, gpus
        self.name = f"{run_dir.name}-{number}"
        self.endpoint = Path(config["endpoint_dir"])
        key_file = Path(config["key_file"])
        if key_file.stat().st_mode & 0o077:
            raise ServeError(f"others may read {key_file}: chmod 600 {key_file}")
        self.place = Path(tempfile.mkdtemp(prefix="serve-"))
        self.backend = backends.command(config, self.place, len(gpus))
        self.proxy = Front(
            config,
            key_file.read_text(encoding="utf-8").strip(),
            Upstream(self.name, "http://backend", socket=str(self.backend.socket)),
            parameters.parameters_of(config, self.backend.model),
            Journal(self.endpoint / endpoints.REQUESTS, config["redact"] or ()),
        )
        self.faults = Faults()
        self.process: asyncio.subprocess.Process | None = None
        self.state, self.url = "starting", ""
        self.deaths: list[float] = []
        self.ready_since, self.start_s, self.minutes = 0.0, 0.0, -1

    async def run(self) -> str:
        """Serve until the stop file appears, or SIGTERM or SIGINT; return the state."""
        self.faults.allow_descriptors()
        ended, server = stop_event(), runner(self.proxy, shutdown_timeout=2)
        await server.setup()
        try:
            if self.config["port"]:
                # Before the backend, which takes minutes to start.
                await self._open(server)
            await self._start_backend(ended)
            if not ended.is_set():
                if not self.url:
                    await self._open(server)
                print(f"ready: {self.url}", flush=True)
                self.state, self.ready_since = "ready", time.monotonic()
                self.start_s = max(0.0, time.time() - _asked_at(self.run_dir))
            asked = False
            while not ended.is_set() and not asked:
                # In a thread: a shared filesystem may be slow.
                asked = await asyncio.to_thread(self._tell)
                await self._look_after(ended)
                self._look_at(self.proxy.journal)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 1.0)
            # The requests in flight are answered; new ones go to another server.
            self.state = "draining"
            self._tell()
            await self.proxy.drained()
            return "stopped"
        finally:
            # The files that others read come first: Slurm may leave only seconds.
            for path in (endpoints.server_file, endpoints.drain_mark):
                with suppress(OSError):
                    path(self.endpoint, self.name).unlink()
            await server.cleanup()
            self.proxy.journal.close()
            await self._end_backend()
            shutil.rmtree(self.place, ignore_errors=True)

    def _look_at(self, journal: Journal) -> None:
        """Say what the log lacks.

        Raises:
            OSError: requests cannot be logged, and they have to be.
        """
        if journal.fault is not None and self.config["log_required"]:
            raise journal.fault
        text = f"{journal.fault}; {journal.unlogged:,} lines are missing by now: free some space"
        self.faults.tell("the log of requests", text if journal.fault else "")

    async def _open(self, server: web.AppRunner) -> None:
        node = self.config["bind"] == "node"
        host = socket.gethostname() if node else "127.0.0.1"
        port = int(self.config["port"])
        try:
            # With port 0 the kernel chooses a free one.
            await web.TCPSite(server, "0.0.0.0" if node else host, port).start()
        except OSError as error:
            raise ServeError(
                f"port {port} of {socket.gethostname()} cannot be opened "
                f"({os.strerror(error.errno or 0)}): leave port out, or choose another"
            ) from None
        self.url = f"http://{host}:{server.addresses[0][1]}"

    def _tell(self) -> bool:
        """Write the server's file, and return whether the stop file exists.

        A filesystem that fails meanwhile does not end the service.
        """
        self.faults.trying("the server's file", self._renew)
        self.faults.trying("the minutes of service", self._count_minutes)
        return os.path.exists(self.run_dir / files.STOP)

    def _renew(self) -> None:
        if os.path.exists(endpoints.drain_mark(self.endpoint, self.name)):
            self.state = "draining"
        facts = {
            "state": self.state
            if self.proxy.backend.ready or self.state != "ready"
            else "starting",
            "url": self.url,
            "run": self.run_dir.name,
            "job_id": os.environ.get("SLURM_JOB_ID"),
            "host": os.environ.get("NODE_NAME") or socket.gethostname(),
            "version": self.config.get("version"),
            "start_s": round(self.start_s, 1),
            "model": self.config["model"],
            "in_flight": self.proxy.in_flight,
            "unlogged": self.proxy.journal.unlogged,
            "bind": self.config["bind"],
        }
        endpoints.tell(self.endpoint, self.name, facts)

    def _count_minutes(self) -> None:
        """Record the minutes of service: an attempt that served counts as progress."""
        passed = int((time.monotonic() - self.ready_since) / 60)
        if self.state != "ready" or passed == self.minutes or self.number:
            return
        path = self.run_dir / files.SERVED
        # Not patiently: meanwhile others would miss the server's file, and nobody would end it.
        before = files.read_object(path) or {}
        gained = passed - max(0, self.minutes)
        files.write_json(path, {"minutes": int(before.get("minutes", 0)) + gained})
        self.minutes = passed

    async def _start_backend(self, ended: asyncio.Event) -> None:
        """Start the backend and wait until it answers."""
        own = {"HF_HUB_OFFLINE": "1"}
        own[backends.VISIBLE] = backends.visible(self.gpus, os.environ.get(backends.VISIBLE))
        self.backend.socket.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            *backends.python(own),
            *self.backend.argv,
            env=without_torchrun(os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            # If the front is killed, the backend must not keep the GPU.
            preexec_fn=end_with_parent,
        )
        deadline = time.monotonic() + float(self.config["start_timeout_s"])
        written = 0.0
        while not ended.is_set() and not os.path.exists(self.run_dir / files.STOP):
            if (code := self.process.returncode) is not None:
                why, ended_so = (
                    self.place / backends.REASON,
                    f"the backend ended with status {code}",
                )
                raise ServeError(why.read_text() if why.exists() else f"{ended_so}: see above")
            if await self.proxy.backend.healthy():
                self.proxy.backend.ready = True
                return
            if time.monotonic() > deadline:
                limit = self.config["start_timeout_s"]
                raise ServeError(
                    f"the backend was not healthy within {limit} s: raise start_timeout_s"
                )
            if time.monotonic() - written > BEAT_S:
                written = time.monotonic()
                self._tell()
            await asyncio.sleep(0.3)

    async def _look_after(self, ended: asyncio.Event) -> None:
        """Restart a backend that has died."""
        if self.process is None or self.process.returncode is None:
            return
        self.proxy.backend.ready = False
        now = time.monotonic()
        self.deaths = [each for each in self.deaths if now - each < _SHORT_S * _DEATHS] + [now]
        code = self.process.returncode
        if len(self.deaths) > _DEATHS:
            raise ServeError(f"the backend died {len(self.deaths)} times, last with status {code}")
        print(f"the backend died with exit status {code}: it is restarted", flush=True)
        await self._start_backend(ended)
        print("the backend answers again", flush=True)

    async def _end_backend(self) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), 10)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def _asked_at(run_dir: Path) -> float:
    """Return when this start was requested: the submission, later the start of the attempt."""
    if os.environ.get("COOKBOOK_ATTEMPT", "0") == "0":
        with suppress(OSError):
            return (run_dir / files.SUBMISSION).stat().st_mtime
    status = files.peek(run_dir / files.STATUS)
    return float(status.get("started") or time.time())


def main(arguments: list[str]) -> int:
    """Serve by the given train.yaml; return the exit status."""
    end_with_torchrun()
    path = Path(arguments[0]).absolute()
    run_dir, attempt = path.parent, os.environ.get("COOKBOOK_ATTEMPT", "0")
    rank, local, per_node = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    try:
        config = load(path)
        if local:
            # The node's first rank serves; this one holds its GPU until that ends.
            while not os.path.exists(run_dir / files.STOP):
                time.sleep(1)
            return 0
        server = Server(config, run_dir, rank // per_node, list(range(per_node)))
        state = asyncio.run(server.run())
    except (ServeError, OSError, ValueError) as error:
        print(f"[rank {rank}] error: {error}", file=sys.stderr, flush=True)
        leave_fault(error, run_dir / files.LOGS / attempt, rank)
        return 1
    if rank == 0:
        number = int(attempt) if attempt.isdigit() else 0
        facts = {"state": state, "attempt": number, "step": 0, "total_steps": 0}
        progress.write(run_dir, facts)
    return 0


def leave_fault(error: Exception, logs: Path, rank: int) -> None:
    """Write the record of why a server ended."""
    full = OF_A_DISK.get(error.errno or 0) if isinstance(error, OSError) else None
    text = f"{error}: free some space, then: cookbook resume" if full else str(error)
    permanent = full is not None or isinstance(error, ServeError)
    failure.write(logs, rank, full or "ServeError", text, permanent=permanent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

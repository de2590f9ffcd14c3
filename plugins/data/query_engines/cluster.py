"""A Spark cluster in a job: python -m plugins.data.query_engines.cluster SETTINGS, on each node.

The first node runs the master, the driver and a worker; every other node runs a worker. They end
with the driver, and each ends its processes. It needs HEAD_ADDR, NODE_RANK and LOGS.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from plugins.data import job
from plugins.data.errors import DataError
from plugins.data.query_engines import java, spill
from runspec import files

_MASTER = "spark_master.json"
_ENDED = "spark_ended.json"
_START_S = 120


def main() -> None:
    rank, logs = int(os.environ.get("NODE_RANK", "0")), Path(os.environ["LOGS"])
    # srun's TERM must also end the processes that this one has started.
    signal.signal(signal.SIGTERM, job.stop)
    settings, local = Path(sys.argv[1]), None
    try:
        local = spill.make("spark", spill.parent_of(job.load(settings)["recipe"].get("temp_dir")))
        home = java.usable_home(java.home(), local)
        code = _first(settings, logs, home, local) if rank == 0 else _other(logs, home, local, rank)
    except DataError as error:
        for fault in error.faults:
            print(f"error: {fault}", flush=True)
        job.leave_fault(error, logs, rank)
        code = 1
    finally:
        if local is not None:
            spill.remove(local)
    sys.exit(code)


def _first(settings: Path, logs: Path, home: Path, local: Path) -> int:
    """Start the master and a worker, and run the driver to its end; return its exit status."""
    for name in (_MASTER, _ENDED):
        (logs / name).unlink(missing_ok=True)
    head = os.environ["HEAD_ADDR"]
    port, pages = _free_port(), _free_port()
    started = []
    try:
        argv = ["--host", head, "--port", str(port), "--webui-port", str(pages)]
        log = logs / "spark_master.log"
        started.append(_spark("org.apache.spark.deploy.master.Master", argv, log, home, local))
        _wait_for_port(head, port, started[0], log)
        master = f"spark://{head}:{port}"
        files.write_json(logs / _MASTER, {"master": master, "pages": f"http://{head}:{pages}"})
        print(f"Spark's master is {master}; its pages: http://{head}:{pages}", flush=True)
        user = os.environ.get("USER") or "me"
        print(f"  from home: ssh -L {pages}:{head}:{pages} {user}@LOGIN_NODE", flush=True)
        started.append(_worker(master, logs, home, local, 0))
        argv = [sys.executable, "-m", "plugins.data.run", str(settings), "--master", master]
        driver = subprocess.Popen(argv, env={**os.environ, "JAVA_HOME": str(home)})
        started.append(driver)
        return driver.wait()
    finally:
        files.write_json(logs / _ENDED, {"time": time.time()})
        _end(started)


def _other(logs: Path, home: Path, local: Path, rank: int) -> int:
    """Run a worker until the first node reports that the driver has ended."""
    deadline = time.monotonic() + _START_S
    while not (master := files.peek(logs / _MASTER)):
        if time.monotonic() > deadline or (logs / _ENDED).exists():
            raise DataError(
                f"the first node started no Spark master within {_START_S} s: see {logs}"
            )
        time.sleep(0.5)
    worker = _worker(master["master"], logs, home, local, rank)
    try:
        while not (logs / _ENDED).exists():
            if worker.poll() is not None:
                # It is restarted; meanwhile its tasks run on the others.
                print(
                    f"Spark's worker ended with {worker.returncode}: starting another", flush=True
                )
                worker = _worker(master["master"], logs, home, local, rank)
            time.sleep(1)
    finally:
        _end([worker])
    return 0


def _worker(master: str, logs: Path, home: Path, local: Path, rank: int) -> Any:
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK") or 0) or max(len(os.sched_getaffinity(0)), 1)
    argv = ["--cores", str(cores), "--webui-port", "0", "--work-dir", str(local / "work")]
    # All of the job's share of the node's memory.
    argv += ["--memory", f"{job.memory_bytes() // 2**20}m", master]
    log = logs / f"spark_worker_{rank}.log"
    return _spark("org.apache.spark.deploy.worker.Worker", argv, log, home, local)


def _spark(name: str, argv: list[str], log: Path, home: Path, local: Path) -> Any:
    """Start one of Spark's own classes with its output in a log."""
    import pyspark

    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    env = {**os.environ, "JAVA_HOME": str(home), "SPARK_LOCAL_DIRS": str(local)}
    env |= {"SPARK_DAEMON_MEMORY": "512m", "PYSPARK_PYTHON": sys.executable}
    with open(log, "ab") as output:
        return subprocess.Popen(
            [str(program), name, *argv],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _wait_for_port(host: str, port: int, process: Any, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.3)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise DataError(
        f"Spark's master did not start: {lines[-1] if lines else 'no message'}: see {log}"
    )


def _end(started: list[Any]) -> None:
    """End processes and their children, the newest first."""
    for process in reversed(started):
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + 10
    for process in started:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: Any, number: int) -> None:
    with suppress(ProcessLookupError):
        # A daemon leads a process group, with its executors in it; the driver does not.
        leads = os.getpgid(process.pid) == process.pid
        (os.killpg if leads else os.kill)(process.pid, number)


if __name__ == "__main__":
    main()

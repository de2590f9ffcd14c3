"""What nodes open on the shared filesystem until a run's first step: python -m benchmarks.start_up

A Slurm on this host whose nodes have mount namespaces of their own. In each, the checkout with its
virtual environment, its Python and the shared folder are mounted over themselves by delayed.c,
which writes down each operation and delays it. The nodes' ranks train the demo model for three
steps. Needs root, cgroups (v1), /dev/fuse, gcc, libfuse3-dev and squashfuse.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CLUSTER = ROOT / "slurm" / "dev-cluster" / "cluster.sh"
# Put in place of slurmd: its node's folders are mounted before it starts.
SLURMD = """#!/bin/bash
{variables}
case " $* " in *" -N "*) ;; *) exec "$REAL_SLURMD" "$@" ;; esac
[ -n "${INSIDE:-}" ] || INSIDE=yes exec unshare -m --propagation private bash "$0" "$@"
unset INSIDE
arguments="$* "
node=${arguments##* -N } node=${node%% *}
mkdir -p "$ACCOUNTS/$node" && echo $$ >"$ACCOUNTS/$node/cgroup.procs"
for folder in $FOLDERS; do
  "$TOOLS/delayed" "$folder" "$TOOLS/$node.log" "$DELAY_US" </dev/null >/dev/null 2>&1 &
  echo $! >>"$TOOLS/pids"
  for _ in {1..100}; do ! mountpoint -q "$folder" || break; sleep 0.1; done
done
exec "$REAL_SLURMD" "$@"
"""


@contextmanager
def cluster(
    folder: Path, shared: Path, nodes: int, ranks: int, delay_us: int
) -> Iterator[dict[str, str]]:
    """A Slurm of so many nodes, and the environment of its user."""
    tools = folder / "tools"
    tools.mkdir()
    flags = subprocess.check_output(["pkg-config", "--cflags", "--libs", "fuse3"], text=True)
    source, program = HERE / "delayed.c", tools / "delayed"
    subprocess.run(["gcc", "-O2", "-o", program, source, *flags.split()], check=True)
    path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("COOKBOOK_", "SLURM", "PYTHON"))
    }
    env |= {"PATH": f"{tools}:{path}", "COOKBOOK_ROOT": str(shared)}
    base, environment = Path(sys.base_prefix), Path(sys.prefix)
    folders = [ROOT, shared, *([] if base.is_relative_to("/usr") else [base])]
    folders += [] if environment.is_relative_to(ROOT) else [environment]
    own = {"TOOLS": tools, "DELAY_US": delay_us, "FOLDERS": f"'{' '.join(map(str, folders))}'"}
    own["ACCOUNTS"] = _accounts(folder)
    own |= {"REAL_SLURMD": shutil.which("slurmd", path=path)}
    lines = "\n".join(f"{name}={value}" for name, value in own.items())
    (tools / "slurmd").write_text(SLURMD.replace("{variables}", lines))
    (tools / "slurmd").chmod(0o755)
    place = ["--name", "startup", "--state", str(folder / "slurm")]
    size = ["--nodes", str(nodes), "--gpus", str(ranks)]
    try:
        subprocess.run([CLUSTER, "up", *place, *size], env=env, check=True, stdout=2)
        use = subprocess.check_output([CLUSTER, "env", *place], env=env, text=True)
        script = f'{use}\nprintf "%s\\n" "$SLURM_CONF"'
        conf = subprocess.check_output(["bash", "-c", script], env=env, text=True)
        yield {**env, "SLURM_CONF": conf.strip()}
    finally:
        subprocess.run([CLUSTER, "down", *place], env=env, check=False, stdout=2)
        with suppress(FileNotFoundError):
            for pid in (tools / "pids").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        # Until the last process of a node has ended, its cgroup is busy.
        time.sleep(1)
        for account in [*_accounts(folder).glob("n*/"), _accounts(folder)]:
            with suppress(OSError):
                account.rmdir()


def _accounts(folder: Path) -> Path:
    """The cgroups (v1) of the nodes: their CPU time, of the filesystem's daemons, too."""
    return Path("/sys/fs/cgroup/cpuacct", folder.name)


def _cpu_s(folder: Path) -> dict[str, float]:
    """CPU seconds that each node has used."""
    found = _accounts(folder).glob("n*/cpuacct.usage")
    return {file.parent.name: int(file.read_text()) / 1e9 for file in found}


def measure(
    shared: Path,
    nodes: int,
    ranks: int,
    start_from: str,
    delay_us: int,
    records: Path | None = None,
) -> dict[str, Any]:
    """Train on nodes with empty caches: figures per node until the first step, the first's apart.

    Args:
        ranks: of each node.
        records: a folder for each node's operations, which benchmarks.start_up.replay reads.
    """
    # Slurm's state folder has to have a short path.
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)
        (folder / "sites").mkdir()
        (folder / "sites" / "own.yaml").write_text(f"start_from: {start_from}\n")
        with cluster(folder, shared, nodes, ranks, delay_us) as env:
            env |= {"COOKBOOK_CLUSTERS": str(folder / "sites")}
            before = _cpu_s(folder)
            began, first, spent = _trained(folder, env, nodes, ranks)
        counts = {}
        for log in sorted((folder / "tools").glob("n*.log")):
            lines = list(_until_the_first_step(log, began, first))
            counts[log.stem] = _counts(lines)
            counts[log.stem]["cpu_s"] = round(spent[log.stem] - before[log.stem], 1)
            if records:
                records.mkdir(parents=True, exist_ok=True)
                (records / log.name).write_text(
                    "\n".join(lines) + f"\ns 0 0 {first - began} {first - began} -\n"
                )
    others = [counts[name] for name in counts if name != "n1"]
    mean = {key: sum(each[key] for each in others) / len(others) for key in counts["n1"]}
    return {"seconds": (first - began) / 1e6, "first": counts["n1"], "others": mean}


def _trained(
    folder: Path, env: dict[str, str], nodes: int, ranks: int
) -> tuple[int, int, dict[str, float]]:
    """Train once; the times of allocation and first step, and the nodes' CPU seconds then."""
    argv = [sys.executable, "-m", "launcher", "submit", "--json", "--recipe", "demo"]
    argv += ["--nodes", str(nodes), "--gpus-per-node", str(ranks), "--cluster", "own"]
    argv += ["max_steps=3", "log_every_n_steps=1", "save_every_n_steps=0", "~generate"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    submitted = json.loads(done.stdout)
    run = Path(submitted["path"])
    first = _first_step(run)
    spent = _cpu_s(folder)
    while json.loads((run / "status.json").read_text()).get("state") == "RUNNING":
        time.sleep(0.5)
    log = (folder / "slurm" / "startup" / "log" / "slurmctld.log").read_text()
    started = re.search(
        rf"^\[(\S+)\] .*(?:Started|Allocate) JobId={submitted['job_id']} ", log, re.M
    )
    if started is None:
        raise RuntimeError(f"slurmctld did not log the start of job {submitted['job_id']}")
    return int(datetime.fromisoformat(started[1]).timestamp() * 1e6), first, spent


def _first_step(run: Path) -> int:
    """Wait for the first step; its time in microseconds."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        with suppress(OSError, IndexError, ValueError):
            line = (run / "metrics.jsonl").read_text().splitlines()[0]
            return int(float(json.loads(line)["time"]) * 1e6)
        time.sleep(0.1)
    raise RuntimeError("\n".join(log.read_text() for log in run.glob("logs/**/*.log")))


def _until_the_first_step(log: Path, began: int, first: int) -> Iterator[str]:
    """Lines of delayed.c's log, with times since the allocation."""
    with log.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            kind, size, offset, start, end, path = line.rstrip("\n").split(" ", 5)
            if began <= int(start) and int(end) <= first:
                yield f"{kind} {size} {offset} {int(start) - began} {int(end) - began} {path}"


def _counts(lines: list[str]) -> dict[str, float]:
    """Operations of a node by kind."""
    kinds = Counter(line[0] for line in lines)
    size = sum(int(line.split(" ", 2)[1]) for line in lines if line[0] == "r")
    return {"opened": kinds["o"], "looked_for": kinds["l"], "reads": kinds["r"], "bytes": size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--start-from", nargs="+", default=["shared", "image"])
    parser.add_argument("--delay-us", type=int, default=1000)
    parser.add_argument("--shared", type=Path, help="a folder to use again, with its images")
    parser.add_argument("--records", type=Path, help="a folder for what each node did when")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shared = given.shared or Path(name)
        shared.mkdir(exist_ok=True)
        for start_from in given.start_from:
            # Makes the model and its tokens.
            measure(shared, 2, 1, start_from, 0)
            for nodes in given.nodes:
                records = given.records and given.records / f"{start_from}-{nodes}"
                figures = measure(shared, nodes, given.ranks, start_from, given.delay_us, records)
                print(start_from, nodes, json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What nodes open on the shared filesystem until a run's first step: python -m benchmarks.start_up

A Slurm on this host whose nodes have mount namespaces of their own. In each, the checkout with its
virtual environment, its Python and the shared folder are mounted over themselves by delayed.c,
which writes down each operation and delays it. One rank per node trains the demo model for three
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
def cluster(folder: Path, shared: Path, nodes: int, delay_us: int) -> Iterator[dict[str, str]]:
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
    size = ["--nodes", str(nodes), "--gpus", "1"]
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


def measure(shared: Path, nodes: int, start_from: str, delay_us: int) -> dict[str, Any]:
    """Train twice; the second's figures per node until its first step, the first node's apart."""
    # Slurm's state folder has to have a short path.
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)
        (folder / "sites").mkdir()
        (folder / "sites" / "own.yaml").write_text(f"start_from: {start_from}\n")
        with cluster(folder, shared, nodes, delay_us) as env:
            env |= {"COOKBOOK_CLUSTERS": str(folder / "sites")}
            return _trained(folder, env, nodes)


def _trained(folder: Path, env: dict[str, str], nodes: int) -> dict[str, Any]:
    argv = [sys.executable, "-m", "launcher", "submit", "--json", "--recipe", "demo"]
    argv += ["--nodes", str(nodes), "--gpus-per-node", "1", "--cluster", "own"]
    argv += ["max_steps=3", "log_every_n_steps=1", "save_every_n_steps=0", "~generate"]
    # The model and its tokens are made by a first run, which is not measured.
    for _ in range(2):
        for log in (folder / "tools").glob("n*.log"):
            os.truncate(log, 0)
        before = _cpu_s(folder)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        submitted = json.loads(done.stdout)
        first = _first_step(Path(submitted["path"]))
        spent = {node: used - before[node] for node, used in _cpu_s(folder).items()}
        sizes = {log: log.stat().st_size for log in (folder / "tools").glob("n*.log")}
        job = subprocess.check_output(
            ["scontrol", "show", "job", submitted["job_id"]], env=env, text=True
        )
        started = re.search(r"StartTime=(\S+)", job)
        _ended(Path(submitted["path"]))
    begun = datetime.fromisoformat(started[1]).timestamp() if started else float("nan")
    counts = {log.stem: _counts(log, sizes[log], folder) for log in sizes}
    counts = {node: each | {"cpu_s": round(spent[node], 1)} for node, each in counts.items()}
    others = [counts[name] for name in counts if name != "n1"]
    mean = {key: sum(each[key] for each in others) / len(others) for key in counts["n1"]}
    return {"seconds": first - begun, "first": counts["n1"], "others": mean}


def _first_step(run: Path) -> float:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        with suppress(OSError, IndexError, ValueError):
            return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["time"])
        time.sleep(0.1)
    raise RuntimeError("\n".join(log.read_text() for log in run.glob("logs/**/*.log")))


def _ended(run: Path) -> None:
    while json.loads((run / "status.json").read_text()).get("state") == "RUNNING":
        time.sleep(0.5)
    time.sleep(2)


def _counts(log: Path, size: int, folder: Path) -> dict[str, float]:
    """Operations of a node by kind, and opened files by what they belong to."""
    counts: Counter[str] = Counter(opened=0, looked_for=0, bytes=0)
    opened: Counter[str] = Counter()
    with log.open(encoding="utf-8", errors="replace") as file:
        for line in file.read(size).splitlines():
            kind, count, path = line.split(" ", 2)
            if kind == "o":
                counts["opened"] += 1
                opened[path] += 1
            elif kind == "l":
                counts["looked_for"] += 1
            elif kind == "r":
                counts["bytes"] += int(count)
    if keep := os.environ.get("KEEP_LOGS"):
        text = "".join(f"{count} {path}\n" for path, count in opened.most_common())
        Path(keep, f"{log.stem}-{folder.name}.txt").write_text(text)
    return dict(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--start-from", nargs="+", default=["shared", "image"])
    parser.add_argument("--delay-us", type=int, default=1000)
    parser.add_argument("--shared", type=Path, help="a folder to use again, with its images")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shared = given.shared or Path(name)
        shared.mkdir(exist_ok=True)
        for start_from in given.start_from:
            for nodes in given.nodes:
                figures = measure(shared, nodes, start_from, given.delay_us)
                print(start_from, nodes, json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The short job that asks a node about itself, and what it reports."""

import contextlib
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher import paths, slurm
from launcher.errors import PreflightFault
from launcher.site import Site
from launcher.venv import TorchBuild
from runspec import files

SCRIPT = paths.REPO_ROOT / "slurm" / "node_check.sh"


@dataclass
class NodeReport:
    """The report of one node: values by key; a key may have several."""

    name: str
    values: dict[str, list[str]] = field(default_factory=dict)
    seen_here: bool = False

    def one(self, key: str, default: str = "") -> str:
        return self.values.get(key, [default])[0]

    def yes(self, key: str) -> bool:
        return self.one(key) == "yes"

    @property
    def interfaces(self) -> list[str]:
        """Names of the interfaces that are not down."""
        pairs = (each.partition(" ") for each in self.values.get("interface", []))
        return [name for name, _, state in pairs if state != "down"]

    @property
    def gpus(self) -> list[list[str]]:
        """name, memory in MiB and driver of each GPU."""
        rows = [[cell.strip() for cell in row.split(",")] for row in self.values.get("gpu", [])]
        return [row for row in rows if len(row) == 3]


@dataclass(frozen=True)
class Question:
    """The questions to a node that srun's options choose."""

    cluster: Site
    srun: list[str]
    gpus_per_node: int
    # The build that the virtual environment has.
    torch: TorchBuild
    # How long the job may wait to start, and take in all.
    wait_s: float
    limit_s: float = 20


def ask(
    question: Question, settings: Mapping[str, object] | None = None, then: str = ""
) -> tuple[slurm.Step, list[NodeReport]]:
    """Run the node check as one job and return what Slurm and the node reported.

    settings: variables of the check beside those of the question. then: what runs after it. A
    folder in the shared root proves that it is shared; it is removed again.
    """
    token = f"cookbook-doctor-{secrets.token_hex(4)}"
    folder = question.cluster.root / f".{token}"
    made = [each for each in folder.parents if not each.exists()]
    try:
        folder.mkdir(mode=0o700, parents=True)
        (folder / "from_login").write_text(token)
        # slurm/node.sh takes a folder with this file for a run's.
        (folder / files.TRAIN).touch()
    except OSError as error:
        message = f"cannot write {folder} ({error.strerror})"
        raise PreflightFault(f"{message}: set COOKBOOK_ROOT to another folder") from error
    srun = [f"--job-name={token}", "--nodes=1", *question.srun]
    try:
        script = _script(question, folder, settings or {})
        step = slurm.run_on_nodes(
            srun, "\n".join([script, then]), question.wait_s, question.limit_s
        )
        reports = _reports(step)
        _look_for_answers(folder, reports)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # not empty: somebody has begun to use it
                parent.rmdir()
    return step, reports


def _script(question: Question, folder: Path, settings: Mapping[str, object]) -> str:
    interface = question.cluster.network_interface
    exported = dict(question.cluster.environment)
    if interface:
        exported |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    values = {
        "SHARED": folder,
        "VENV": paths.venv_root(),
        "COOKBOOK": paths.REPO_ROOT,
        **settings,
    }
    # As in a job script: the site's own variables and lines come before everything else.
    lines = [f"export {key}={shlex.quote(value)}" for key, value in exported.items()]
    lines += _setup(question.cluster)
    lines += [f"{key}={shlex.quote(str(value))}" for key, value in values.items()]
    return "\n".join([*lines, SCRIPT.read_text(encoding="utf-8")])


def _setup(cluster: Site) -> list[str]:
    """Return the site's job_setup, each line with what reports that it failed."""
    if not cluster.job_setup:
        return []
    lines = ["""printf '@ node %s\\n' "${SLURMD_NODENAME:-$(hostname -s)}\""""]
    for line in cluster.job_setup:
        place = shlex.quote(f"configs/clusters/{cluster.name}.yaml: {line!r}")
        report = f"printf '@ setup_fault %s %s\\n' $rc {place}"
        lines += [line, f"rc=$?; [ $rc = 0 ] || {report}"]
    # The other checks go on if they can.
    return [*lines, "set +eu"]


def _reports(step: slurm.Step) -> list[NodeReport]:
    """Sort lines such as '1: @ key value' by the task that wrote them."""
    reports: dict[str, NodeReport] = {}
    for line in step.lines:
        if not (match := re.match(r" *(\d+): @ (\S+) ?(.*)\Z", line)):
            continue
        task, key, value = match.groups()
        if key == "node":
            reports.setdefault(task, NodeReport(value))
        elif task in reports:
            reports[task].values.setdefault(key, []).append(value)
    return list(reports.values())


def _look_for_answers(folder: Path, reports: list[NodeReport]) -> None:
    """See whether the nodes' files show here, giving a network filesystem some seconds."""
    deadline = time.monotonic() + 5
    while True:
        for report in reports:
            report.seen_here = (folder / f"from_{report.name}").is_file()
        late = [each for each in reports if each.yes("shared_write") and not each.seen_here]
        if not late or time.monotonic() > deadline:
            return
        time.sleep(0.2)

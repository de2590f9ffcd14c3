"""The only file that runs Slurm's commands: argument lists in, small objects out."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launcher import limits
from launcher.errors import SlurmFault, SlurmMissing, SlurmTimeout
from launcher.limits import Rights, Rules

# Read from slurm.h's states; a word that stands in none of these means "keep watching".
ACTIVE = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "SUSPENDED",
        "STOPPED",
        "COMPLETING",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "REQUEUED",
        "POWER_UP_NODE",
        "REQUEUE_FED",
        "EXPEDITING",
        "UPDATE_DB",
    ]
)
HELD = frozenset(["REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"])
ENDED = frozenset(
    [
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
        "PREEMPTED",
        "REVOKED",
        "LAUNCH_FAILED",
        "RECONFIG_FAIL",
    ]
)

# What a job may inherit from the login shell. Everything else, tokens first of all, stays behind;
# SBATCH_* would override the script's own lines, and a stray SLURM_* is another job's.
_ENVIRONMENT = ("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "PATH", "TZ", "SLURM_CONF", "TMPDIR")
EXPORT = ("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "PATH", "TZ", "SLURM_CONF")

# Why a job waits, from Slurm's words (squeue's manual page, "JOB REASON CODES") to plain ones. The
# first pattern that matches counts.
REASONS: tuple[tuple[str, str], ...] = (
    (r"Priority", "other jobs come first"),
    (r"Resources", "the nodes that it needs are busy"),
    (r"BeginTime", "Slurm lets a requeued job wait about two minutes"),
    (r"Dependency", "it waits for another job; DependencyNeverSatisfied never ends: cancel it"),
    (
        r"ReqNodeNotAvail|Nodes_required_for_job",
        "nodes that it needs are down, drained or reserved",
    ),
    (
        r"Reservation",
        "its reservation has not begun, or maintenance is near: a shorter --time fits",
    ),
    (r"PartitionTimeLimit", "it asks for more time than the partition gives: lower --time"),
    (
        r"PartitionNodeLimit",
        "it asks for more, or fewer, nodes than the partition gives a job: change --nodes",
    ),
    (r"PartitionDown|PartitionInactive", "the partition takes no jobs to nodes now"),
    (r"BadConstraints", "no node has what is asked for: see resources.constraint and the GPU type"),
    (r"PartitionConfig", "the partition gives a job less than it asks for, or is not for it"),
    (
        r"AccountNotAllowed|InvalidAccount|Job's account",
        "the account may not use this partition: --account",
    ),
    (r"InvalidQOS|QOSNotAllowed|Job's QOS", "the QoS may not be used here: --qos"),
    (r"QOSTimeLimit", "the time that your QoS gives is used up"),
    (r"QOSUsageThreshold|QOSResourceLimit", "your QoS's limit is reached"),
    (r"JobArrayTaskLimit", "as many tasks of this array run as may"),
    (r"Licenses", "a licence that it needs is in use"),
    (r"JobHeldUser|JobHeldAdmin", "it is held"),
    (r"launch failed|JobLaunchFailure", "a node could not start it: it is held for a look"),
    (r"Cleaning|Prolog", "the nodes are being made ready"),
)

# Limits of accounting have names made of parts, such as QOSMaxGRESPerUser, MaxGRESPerAccount (a
# QoS's too) and AssocGrpCPURunMinutesLimit.
_LIMIT = re.compile(
    r"(?P<owner>QOS|Assoc|)(?P<kind>Grp|Max|Min)"
    r"(?P<what>SubmitJobs?|Jobs|WallDuration|Wall|GRES|CPU|Cpu|Memory|Mem|Node|[A-Z][A-Za-z]*?)"
    r"(?P<minutes>(?:Run)?Minutes)?(?:Per(?P<per>Job|Node|User|Account))?(?:Limit|NotSatisfied)?\Z"
)
_LIMITED = {
    "GRES": "GPUs",
    "CPU": "CPUs",
    "Cpu": "CPUs",
    "Node": "nodes",
    "Mem": "memory",
    "Memory": "memory",
}

_TIMED_OUT = re.compile(
    r"timed out|Unable to contact slurm controller|Transport endpoint", re.IGNORECASE
)
_UNCONFIGURED = re.compile(
    r"establish a configuration source|SLURM_CONF.*not|No such file.*slurm.conf"
)
_ELSEWHERE = (
    "run this on a login node, or start the job here with --local, or try a real one-host Slurm "
    "with: bash setup.sh --demo"
)
_JOB_ID = re.compile(r"\d+(?:_\d+)?\Z")


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue or sacct tells of it."""

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    comment: str = ""


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition that are alike. memory_mb and cpus are of one node."""

    count: int
    gpus: dict[str, int]
    memory_mb: int
    cpus: int


@dataclass(frozen=True)
class Partition:
    """A partition as sinfo tells of it: all its nodes, up or not, and its time limit as text."""

    name: str
    time_limit: str
    default: bool = False
    up: bool = True
    kinds: tuple[Nodes, ...] = ()

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)


@dataclass(frozen=True)
class Node:
    """A node as sinfo tells of it, in one of its partitions."""

    name: str
    partition: str
    state: str
    gres: str
    reason: str

    @property
    def usable(self) -> bool:
        """Whether a job can start on it now or once others have ended."""
        return re.sub(r"[^a-z-]", "", self.state) in ("idle", "mixed", "allocated", "completing")

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs by type, "" where Slurm knows none."""
        return gpus_of(self.gres)


@dataclass
class Step:
    """What a short job on some nodes printed, each line with the time at which it arrived."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    words: str = ""
    pending: bool = False
    cut_off: bool = False
    exit_code: int = 0


def environment() -> dict[str, str]:
    """Return the environment that Slurm's commands, and through them jobs, are given."""
    return {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}


def available() -> bool:
    """Whether Slurm's commands are installed here (not whether the controller answers)."""
    return shutil.which("sbatch") is not None


def _run(argv: Sequence[str], timeout_s: float = 30, merged: bool = False) -> str:
    """Return a Slurm command's standard output; SlurmFault with its own words where it fails.

    merged: what it says on standard error belongs to the answer.
    """
    try:
        done = subprocess.run(
            argv,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise SlurmMissing(f"there is no {argv[0]} on this machine: {_ELSEWHERE}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmTimeout(
            f"{argv[0]} did not answer within {timeout_s:.0f} s: try again later"
        ) from error
    output, message = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.returncode != 0:
        words = _one_line(message) or f"{argv[0]}: exit status {done.returncode} without a word"
        if _UNCONFIGURED.search(message):
            raise SlurmMissing(
                f"{argv[0]} is installed, but no cluster is configured on this machine "
                f'("{words}"): {_ELSEWHERE}'
            )
        if _TIMED_OUT.search(message):
            raise SlurmTimeout(f'Slurm says "{words}": see whether scontrol ping answers')
        raise SlurmFault(f'Slurm says "{words}"')
    return output + message if merged else output


def _one_line(message: str) -> str:
    return " | ".join(line.strip() for line in message.splitlines() if line.strip())


def submit(script: Path, token: str) -> str:
    """Submit a script and return its job id; exactly one job exists afterwards, or none.

    A controller that hangs may have taken the job all the same, so after a time-out the queue
    is searched for the run's token (the job's comment) before sbatch is tried again.
    """
    argv = ["sbatch", "--parsable", f"--comment={token}"]
    for _ in range(3):
        try:
            answer = _run([*argv, str(script)], timeout_s=60)
        except SlurmTimeout:
            found = _wait_for_token(token)
            if found:
                return found
            continue
        job_id = answer.strip().rpartition("\n")[2].split(";")[0]
        if not _JOB_ID.match(job_id):
            raise SlurmFault(
                f"sbatch answered {answer.strip()!r}, which is no job id: look with: squeue --me"
            )
        return job_id
    raise SlurmTimeout(
        "sbatch timed out three times and no job was made: see whether scontrol ping answers"
    )


def _wait_for_token(token: str) -> str | None:
    """Return the id of the job that carries token, None where none does, once Slurm answers."""
    answers = 0
    for pause_s in (0, 3, 3, 5, 10, 20):
        time.sleep(pause_s)
        try:
            # Any state: a short job may have ended while sbatch waited.
            found = [job for job in queue(all_states=True) if job.comment == token]
        except SlurmTimeout:
            continue
        if found:
            return found[-1].job_id
        # A controller that wakes up may answer this question before it reads sbatch's request.
        answers += 1
        if answers == 2:
            return None
    raise SlurmTimeout(
        "the controller does not answer and may hold a job of this run; once it does, look with: "
        f"squeue --me --states=all --format='%i %k' | grep {token}"
    )


def queue(all_states: bool = False) -> list[QueuedJob]:
    """Return this user's jobs, in one question to the controller."""
    # A job's name may hold anything, newlines too: only fields that cannot are asked for. The
    # comment comes last, and a row that is not made like ours is passed over.
    argv = ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%i|%T|%r|%N|%S|%k"]
    if all_states:
        argv.append("--states=all")
    return list(_rows(_run(argv)))


def _rows(text: str) -> Iterable[QueuedJob]:
    for line in text.splitlines():
        fields = line.split("|", 5)
        if len(fields) == 6 and _JOB_ID.match(fields[0]):
            yield QueuedJob(*(value.strip() for value in fields))


def accounting(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the states that sacct knows for these jobs; {} where accounting is off."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    argv = [
        "sacct",
        "--allocations",
        "--noheader",
        "--parsable2",
        "--format=JobID,State",
        f"--jobs={','.join(wanted)}",
    ]
    try:
        text = _run(argv, timeout_s=20)
    except SlurmFault:
        return {}
    states = {}
    for line in text.splitlines():
        job_id, _, state = line.partition("|")
        if job_id in wanted and state:
            states[job_id] = state.split()[0].rstrip("+")  # "CANCELLED by 1000"
    return states


def why_pending(reason: str) -> str:
    """Return Slurm's reason with what it means; a reason never seen before stands alone."""
    limit = _LIMIT.match(reason)
    if limit:
        return f"{reason}: {_limit_meaning(**limit.groupdict())}"
    for pattern, meaning in REASONS:
        if re.match(pattern, reason):
            return f"{reason}: {meaning}"
    return reason


def with_meaning(words: str) -> str:
    """Return Slurm's words with the meaning of the limit that they name, if they name one."""
    found = map(_LIMIT.match, re.findall(r"\b(?:QOS|Assoc|Grp|Max|Min)[A-Z]\w+", words))
    limit = next(filter(None, found), None)
    return f"{words} ({_limit_meaning(**limit.groupdict())})" if limit else words


def _limit_meaning(owner: str, kind: str, what: str, minutes: str | None, per: str | None) -> str:
    whose, option = ("account", "--account") if owner == "Assoc" else ("QoS", "--qos")
    things = _LIMITED.get(what, what.lower())
    never = f"it never starts as it is: cancel it and ask for less, or for another {option}"
    shared = "it waits until others end, and for ever where it alone asks for more than that"
    if what.startswith("Submit"):
        return f"your {whose} has as many jobs in the queue as it may: wait until one ends"
    if what == "Jobs":
        return f"as many jobs run as your {whose} lets run at a time: it waits until one ends"
    if what == "WallDuration":
        return f"its time limit is longer than your {whose} gives a job: lower --time, or {option}"
    if what == "Wall":
        return f"the time that your {whose} has for all its jobs is spent"
    if kind == "Min":
        return f"it asks for fewer {things} than your {whose} demands, so {never}"
    if kind == "Grp" and minutes:
        gone = "taken by jobs that run" if minutes.startswith("Run") else "spent"
        return f"the time on {things} that your {whose} has for all its jobs is {gone}"
    if kind == "Grp":
        return f"your {whose} limits the {things} of all its jobs together: {shared}"
    if per in ("User", "Account"):
        return f"your {whose} limits the {things} of one {per.lower()}'s jobs together: {shared}"
    asked = f"{things} x minutes" if minutes else f"{things} a node" if per == "Node" else things
    return f"it asks for more {asked} than your {whose} gives one job, so {never}"


def cancel(job_id: str) -> None:
    """Cancel a job; Slurm says nothing where the id is unknown."""
    _run(["scancel", job_id])


def partitions(hidden: bool = False) -> dict[str, Partition]:
    """Return the partitions that this user may see, by name; hidden: all others too."""
    found: dict[str, Partition] = {}
    argv = ["sinfo", "--noheader", "--format=%R|%P|%D|%l|%a|%G|%m|%c"]
    for line in _run([*argv, "--all"] if hidden else argv, timeout_s=20).splitlines():
        fields = line.strip().split("|")
        if len(fields) != 8:
            continue
        name, marked, count, limit, available, gres, memory, cpus = fields
        kind = Nodes(_number(count), gpus_of(gres), _number(memory), _number(cpus))
        # Nodes that differ come in several lines.
        kinds = (*found[name].kinds, kind) if name in found else (kind,)
        found[name] = Partition(name, limit, marked.endswith("*"), available == "up", kinds)
    return found


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)  # sinfo writes 256+ where alike nodes differ
    return int(digits.group()) if digits else 0


def gpus_of(gres: str) -> dict[str, int]:
    """Return the GPUs of a node by type ("" where Slurm knows no type), from its Gres text."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def rules() -> dict[str, Rules]:
    """Return the rules of every partition by name, also of those that are hidden from this user."""
    return limits.read_rules(_run(["scontrol", "--all", "--oneliner", "show", "partition"]))


def rights(configured: dict[str, str]) -> Rights | None:
    """Return what accounting lets this user do; None where the cluster keeps none or is silent.

    configured is the controller's configuration. What may be used is asked of the database; what
    the accounts' limits are and how much is left, of the controller, which enforces them.
    """
    if not keeps_accounting(configured):
        return None
    # Not at the top: few commands ask, and all would wait for it.
    from concurrent.futures import ThreadPoolExecutor

    user = pwd.getpwuid(os.getuid()).pw_name
    listed = ["sacctmgr", "--noheader", "--parsable2", "show"]
    places = [*listed, "user", f"name={user}", "withassoc", f"format={limits.PLACE_FIELDS}"]
    qos = [*listed, "qos", f"format={limits.QOS_FIELDS}"]
    accounts = ["scontrol", "--oneliner", "show", "assoc_mgr", f"users={user}", "flags=assoc"]
    try:
        # At once: the database takes its time for each.
        with ThreadPoolExecutor() as pool:
            texts = list(pool.map(partial(_run, timeout_s=10), (places, qos, accounts)))
    except SlurmFault:
        return None
    return limits.read_rights(configured, *texts)


def keeps_accounting(configured: dict[str, str]) -> bool:
    """Whether the cluster has a database of accounts."""
    return configured.get("AccountingStorageType", "").endswith("/slurmdbd")


def test_only(script: str) -> str:
    """Return when and where Slurm would start a script; SlurmFault with its words if it would not.

    The script is not queued. Slurm also refuses it while the nodes that it needs are down.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        # It answers on standard error.
        return _run(["sbatch", "--test-only", file.name], timeout_s=30, merged=True).strip()


def version() -> str | None:
    """Return Slurm's version, such as 22.05.8, or None where it is not installed."""
    try:
        return _run(["sbatch", "--version"], timeout_s=10).split()[-1]
    except (SlurmFault, IndexError):
        return None


# What cookbook doctor asks ------------------------------------------------------------------

_QUICK_S = 5


def controllers() -> dict[str, bool]:
    """Return the controllers' hosts and whether each answers, the primary first."""
    text = _run(["scontrol", "ping"], timeout_s=_QUICK_S)
    return {host: up == "UP" for host, up in re.findall(r" at (\S+) is (UP|DOWN)", text)}


def configuration() -> dict[str, str]:
    """Return slurm.conf as the controller runs it."""
    text = _run(["scontrol", "show", "config"], timeout_s=_QUICK_S)
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def nodes() -> list[Node]:
    """Return every node that this user may see, once for each of its partitions."""
    argv = ["sinfo", "--Node", "--noheader", "--format=%N|%R|%T|%G|%E"]
    rows = (line.split("|", 4) for line in _run(argv, timeout_s=_QUICK_S).splitlines())
    return [Node(*(value.strip() for value in row)) for row in rows if len(row) == 5]


def munge(configured: dict[str, str]) -> None:
    """Sign and read back a credential as Slurm does; SlurmFault where munged does not answer."""
    found = re.search(r"socket=([^, ]+)", configured.get("AuthInfo", ""))
    socket = [f"--socket={found.group(1)}"] if found else []
    try:
        signed = subprocess.run(
            ["munge", "--no-input", *socket],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_QUICK_S,
        )
        read = subprocess.run(
            ["unmunge", "--no-output", *socket],
            input=signed.stdout,
            capture_output=True,
            timeout=_QUICK_S,
        )
    except FileNotFoundError as error:
        raise SlurmMissing(f"there is no {error.filename} on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmTimeout(f"munged did not answer within {_QUICK_S} s") from error
    if signed.returncode or read.returncode:
        raise SlurmFault(_one_line((signed.stderr or read.stderr).decode(errors="replace")))


def run_on_nodes(options: Sequence[str], script: str, wait_s: float, limit_s: float) -> Step:
    """Run a shell script once on each node of a short job and return what it printed.

    The job is withdrawn where it has not started within wait_s, and ended where it takes longer
    than limit_s in all; nothing of it is left in the queue.
    """
    minutes = max(1, round(limit_s / 60 + 0.5))
    argv = ["srun", *options, "--ntasks-per-node=1", f"--time={minutes}", "--label"]
    argv += ["--unbuffered", f"--export={','.join(EXPORT)}", "bash", "-c", script]
    step = Step()
    try:
        process = subprocess.Popen(
            argv,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C is for us to hand on: once, and as a signal that srun does not question.
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise SlurmMissing(f"there is no srun on this machine: {_ELSEWHERE}") from error
    words: list[str] = []

    def read_output() -> None:
        for line in process.stdout or ():
            step.lines.append((time.time(), line.rstrip("\n")))

    def read_words() -> None:
        words.extend(process.stderr or ())

    readers = [threading.Thread(target=each, daemon=True) for each in (read_output, read_words)]
    for reader in readers:
        reader.start()
    started = time.monotonic()
    try:
        while process.poll() is None:
            waited = time.monotonic() - started
            step.pending = not step.lines and waited > wait_s
            step.cut_off = waited > limit_s
            if step.pending or step.cut_off:
                break
            time.sleep(0.02)
    finally:
        # srun withdraws a job that waits, and ends one that runs.
        process.terminate()
        try:
            step.exit_code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for reader in readers:
        reader.join(timeout=2)
    step.words = _one_line("".join(words))
    return step

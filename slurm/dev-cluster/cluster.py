#!/usr/bin/env python3
"""A real Slurm on one host, with fake GPU devices, for tests and experiments.

up      start a cluster and return when every node is ready. If it is already up with the same
        shape, start only the dead daemons
down    cancel its jobs, stop its daemons and job steps, and remove its state folder
status  list its nodes and jobs; exit 0 only if every daemon runs
env     print the shell line that makes sbatch, srun and squeue use it: eval "$(cluster.py env)"
"""

# One munged, one slurmctld and one slurmd per node, all run by the calling user (root or not), with
# their own configuration, munge key and socket, ports and state folder, so that several clusters
# can run side by side. Only processes of the named cluster are ever signalled. The host's own
# Python runs it too, which may be older than the kit's, and has no package of others.

from __future__ import annotations

import argparse
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

SCRIPT = Path(__file__).resolve()
DAEMONS = ("munged", "slurmctld", "slurmd")
PROGRAMS = (*DAEMONS, "slurmstepd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
PACKAGES_HINT = "On Debian and Ubuntu, as root: apt-get install slurm-wlm munge"
READY_TIMEOUT_S, STOP_TIMEOUT_S, LOCK_TIMEOUT_S = 30, 5, 120
# In sinfo's short form.
READY = ("idle", "mix", "alloc", "comp", "resv", "drain", "drng")
# Unix socket paths end at 107 characters, and slurmd adds up to 34 to the state folder.
MAX_STATE_LENGTH = 72


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    sys.exit(f"{SCRIPT.name}: {message}")


class Cluster:
    """A cluster: its place, its shape, and its daemons: munged, slurmctld, slurmd of n1 ..."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.name, self.root = given.name, Path(given.state)
        self.state, self.log = self.root / self.name, self.root / self.name / "log"
        self.conf, self.shape_file = self.state / "slurm.conf", self.state / "shape"
        self.gpus, self.delay = int(given.gpus), given.requeue_delay
        self.changed = dict(each.split("=", 1) for each in given.set)
        changed = "".join(f" {key}={self.changed[key]}" for key in sorted(self.changed))
        self.shape = f"nodes={given.nodes} gpus={self.gpus} requeue-delay={self.delay}{changed}"
        self.nodes = nodes_of(self.shape)
        self.place = f"--name {self.name} --state {self.root}"
        self.use_line = f'to use it: eval "$({SCRIPT} env {self.place})"'
        # Nothing of the caller's Slurm settings may reach the daemons.
        passed = ("PATH", "HOME", "LD_LIBRARY_PATH", "TZ")
        self.env = {"HOME": "/"} | {key: os.environ[key] for key in passed if os.environ.get(key)}
        self.env |= {"LC_ALL": "C", "SLURM_CONF": str(self.conf)}

    # Commands ------------------------------------------------------------------------------------

    def up(self) -> None:
        require_programs()
        self.make_root()
        self.lock()
        with ExitStack() as abandon:
            if not self.running():
                self.stop()
                shutil.rmtree(self.state, ignore_errors=True)
                self.write_state()
                # However `up` ends before it is done: a cluster that cannot be completed is
                # stopped, unless it was there before; its logs stay.
                abandon.callback(self.stop)
            elif (shape := self.shape_file.read_text()) != self.shape:
                first = f"first: {SCRIPT} down {self.place}"
                fail(f"cluster '{self.name}' is up as {shape}, not as {self.shape}; {first}")
            elif not self.dead():
                return say(f"cluster '{self.name}' is already up: {self.shape}")
            on_signals(lambda *_: self.give_up("slurmctld", "interrupted"))
            self.start()
            abandon.pop_all()
        say(f"cluster '{self.name}' is up: {self.shape}\n{self.use_line}")

    def down(self) -> None:
        if not self.state.exists():
            return say(f"cluster '{self.name}' is not up (nothing in {self.state})")
        if (owner := self.state.stat().st_uid) != os.geteuid():
            fail(f"{self.state} belongs to {user_name(owner)}, who must take it down")
        require_programs()
        self.lock()
        self.stop()
        shutil.rmtree(self.state)
        say(f"cluster '{self.name}' is down")

    def status(self) -> None:
        self.require_running()
        shape = self.shape_file.read_text()
        self.nodes = nodes_of(shape)
        print(f"cluster {self.name}: {shape}; state and logs: {self.state}", flush=True)
        if self.dead():
            again = "'up' with the same shape starts them again"
            fail(f"daemons of '{self.name}' are dead: {again}")
        require_programs()
        for argv in (["sinfo", "-o", "%P %N %t %c %m %G"], ["squeue"]):
            if self.run(["timeout", "5", *argv]).returncode:
                fail(f"{argv[0]} does not answer")
        print(self.use_line)

    def show_env(self) -> None:
        self.require_running()
        print(f"export SLURM_CONF={self.conf}")

    def require_running(self) -> None:
        if not (self.conf.is_file() and self.running()):
            start = f"to start it: {SCRIPT} up {self.place}"
            fail(f"cluster '{self.name}' is not up; {start}")

    # The state folder ----------------------------------------------------------------------------

    def make_root(self) -> None:
        if (length := len(str(self.state))) > MAX_STATE_LENGTH:
            limit = f"({length} characters, at most {MAX_STATE_LENGTH})"
            remedy = "pass a shorter --state or --name"
            fail(f"{self.state} is too long for unix sockets {limit}: {remedy}")
        # munged itself refuses folders that not everybody may enter, or that others may change.
        os.umask(0o066)
        with suppress(OSError):
            self.root.mkdir(parents=True, exist_ok=True)
        os.umask(0o022)
        if not self.root.is_dir():
            fail(f"cannot create the state folder {self.root}: pass another --state")
        if (owner := self.root.stat().st_uid) != os.geteuid():
            fail(f"{self.root} belongs to {user_name(owner)}, not to you: pass another --state")

    def lock(self) -> None:
        """Lock the root for as long as this process runs; see that the state folder is ours."""
        lock = os.open(self.root / ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
        taken = subprocess.run(["flock", "-w", str(LOCK_TIMEOUT_S), str(lock)], pass_fds=[lock])
        if taken.returncode:
            fail(f"another {SCRIPT.name} has been using {self.root} for 2 minutes: try again later")
        # A folder that this program did not make is never emptied.
        if self.state.exists() and not self.shape_file.is_file():
            fail(f"{self.state} is not a cluster's state folder: pass another --name or --state")

    def write_state(self) -> None:
        for folder in (self.state, self.state / "dev", self.state / "spool"):
            folder.mkdir(0o711)
        self.shape_file.write_text(self.shape)
        for folder in (self.state / "controller", self.log):
            folder.mkdir(0o700)
        for node in self.nodes:
            (self.state / "spool" / node).mkdir(0o755)
        # slurmd needs character devices, and anybody can make links to /dev/null.
        for gpu in range(self.gpus):
            (self.state / "dev" / f"nvidia{gpu}").symlink_to("/dev/null")
        key = os.open(self.state / "munge.key", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o400)
        with open(key, "wb") as file:
            file.write(os.urandom(128))
        self.write_configuration()

    def write_configuration(self) -> None:
        count, port = len(self.nodes), free_ports(len(self.nodes) + 1)
        template = SCRIPT.with_name("slurm.conf").read_text().partition("\n")[2]
        for key in self.changed:
            template = re.sub(f"^{key}=.*\n", "", template, flags=re.MULTILINE)
        configuration = template.format(
            **vars(self),
            port=port,
            ports=f"{port + 1}-{port + count}",
            user=user_name(os.geteuid()),
            first_job=random.randint(1, 60_000_000),
            count=count,
            host=os.uname().nodename.partition(".")[0],
            gres_types="GresTypes=gpu" if self.gpus else "",
            gres=f" Gres=gpu:h100:{self.gpus}" if self.gpus else "",
        )
        changed = (f"{key}={value}\n" for key, value in self.changed.items())
        self.conf.write_text("".join([configuration, *changed]))
        if self.gpus:
            files = f"{self.state}/dev/nvidia[0-{self.gpus - 1}]"
            (self.state / "gres.conf").write_text(f"Name=gpu Type=h100 File={files}\n")
        # Slurm knows it since 24.05, and without it asks for cgroups that a container lacks.
        release = re.search(r"(\d+)\.(\d+)", self.ask("slurmd", "-V").stdout)
        if release and (int(release[1]), int(release[2])) >= (24, 5):
            (self.state / "cgroup.conf").write_text("CgroupPlugin=disabled\n")

    # The daemons ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start each daemon that does not run, and wait for it."""
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "munge.seed"}
        options = (f"--{option}={self.state / file}" for option, file in files.items())
        self.start_daemon("munged", *options, "--num-threads=2")
        self.start_daemon("slurmctld", "-f", str(self.conf))
        # Ready, or dead, so that there is nothing to wait for.
        wait_until(lambda: self.answers() or twice(lambda: "slurmctld" in self.dead()))
        if not self.answers():
            self.give_up("slurmctld", "slurmctld does not answer")
        # slurmd itself would start the slurmstepd of the folder for which it was built.
        stepd = str(shutil.which("slurmstepd"))
        for node in self.nodes:
            self.start_daemon(f"slurmd-{node}", "-f", str(self.conf), "-N", node, "-d", stepd)
        wait_until(lambda: not self.not_ready() or twice(self.dead))
        if nodes := self.not_ready():
            self.give_up(f"slurmd-{nodes[0]}", f"not ready: {' '.join(nodes)}")

    def start_daemon(self, name: str, *options: str) -> None:
        if name in self.dead():
            with open(self.log / f"{name}.log", "ab") as log:
                # In a session of its own: an interrupt at the terminal does not reach it.
                argv = ["setsid", name.partition("-")[0], *options]
                done = self.run(argv, stdout=log, stderr=log)
            if done.returncode:
                self.give_up(name, f"{name.replace('-', ' of ')} did not start")

    def run(self, argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        nothing = subprocess.DEVNULL
        return subprocess.run(argv, env=self.env, stdin=nothing, text=True, **options)

    def ask(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm, for 5 s at most."""
        return self.run(["timeout", "5", *argv], capture_output=True)

    def answers(self) -> bool:
        return "is UP" in self.ask("scontrol", "ping").stdout

    def not_ready(self) -> list[str]:
        answer = self.ask("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %t").stdout
        states = dict(re.findall(r"(\S+) (\S+)", answer))
        return [node for node in self.nodes if states.get(node) not in READY]

    def give_up(self, name: str, reason: str) -> NoReturn:
        """Say why the cluster is given up, with the end of a daemon's log, and exit."""
        on_signals(signal.SIG_IGN)
        say(f"{SCRIPT.name}: {reason}; the logs are in {self.log}")
        with suppress(OSError):
            if lines := (self.log / f"{name}.log").read_text(errors="replace").splitlines():
                say("\n".join([f"end of {name}.log:", *lines[-15:]]))
        sys.exit(1)

    def stop(self) -> None:
        # Through Slurm first, so that waiting srun and sbatch commands end and nothing is requeued.
        there = "slurmctld" in self.running()
        if there and (jobs := set(self.ask("squeue", "-h", "-o", "%A").stdout.split())):
            self.ask("scancel", *jobs)
            wait_until(lambda: not self.ask("squeue", "-h").stdout, 2)
        # The controller first, or it would start queued jobs when others end. Nothing has to be
        # saved, and after a TERM slurmd would wait for jobs that do not end.
        ended = wait_until(lambda: not self.kill("slurmctld"), STOP_TIMEOUT_S)
        if not (ended and wait_until(lambda: not self.kill(), STOP_TIMEOUT_S)):
            left = " ".join(map(str, self.processes(True)))
            fail(f"could not end these processes of {self.state}: {left}")
        for file in ("munge.socket", "munge.socket.lock"):
            (self.state / file).unlink(missing_ok=True)

    def kill(self, name: str = "") -> list[int]:
        """Kill a daemon, or all that is the cluster's; return the process ids that there were."""
        pids = [pid for pid, its in self.processes(True).items() if name in ("", its)]
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def running(self) -> set[str]:
        return set(self.processes().values())

    def dead(self) -> set[str]:
        return {"munged", "slurmctld", *(f"slurmd-{node}" for node in self.nodes)} - self.running()

    def processes(self, of_jobs: bool = False) -> dict[int, str]:
        """Return the daemons by process id; of_jobs: with what they and jobs have started, ""."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                name = (process / "comm").read_text().strip()
                words = (process / "cmdline").read_text(errors="replace").split("\0")
                # A daemon is recognised by its name and by this cluster's file in its arguments:
                # the pid in a pid file may belong to another process by now.
                own = {str(self.conf), f"--socket={self.state}/munge.socket"}.intersection(words)
                if own and name in DAEMONS:
                    node = words[words.index("-N") :][1:2] if "-N" in words else []
                    found[int(process.name)] = "-".join([name, *node])
                elif of_jobs and self.is_of_a_job(process, name):
                    found[int(process.name)] = ""
        return found

    def is_of_a_job(self, process: Path, name: str) -> bool:
        # These hide their arguments, but their working directory is the log folder of their daemon.
        hidden = name in ("slurmstepd", "slurmscriptd")
        if hidden and os.readlink(process / "cwd") == str(self.log):
            return True
        # What a job left behind has this cluster's SLURM_CONF and a node's name in its environment.
        words = (process / "environ").read_text(errors="replace").split("\0")
        named = any(word.startswith("SLURMD_NODENAME=") for word in words)
        return named and f"SLURM_CONF={self.conf}" in words


def nodes_of(shape: str) -> list[str]:
    return [f"n{number + 1}" for number in range(int(shape.split()[0][len("nodes=") :]))]


def free_ports(count: int) -> int:
    """Return the first of as many neighbouring TCP ports that nobody uses."""
    for _ in range(1000):
        # Below the ports of runs, and those that the kernel assigns itself: a restarted daemon gets
        # its port again.
        first = random.randrange(10_000, 19_000)
        with suppress(OSError), ExitStack() as taken:
            for port in range(first, first + count):
                taken.enter_context(socket.create_server(("", port)))
            return first
    fail(f"found no {count} free neighbouring TCP ports from 10000 on")


def wait_until(done: Callable[[], object], seconds: float = READY_TIMEOUT_S) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def twice(seen: Callable[[], object]) -> bool:
    """Whether it is seen again: a daemon changes its id when it goes into the background."""
    if seen():
        time.sleep(0.3)
        return bool(seen())
    return False


def on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What was ignored from the start, as HUP is below nohup, stays ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def require_programs() -> None:
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        fail(f"not installed: {' '.join(missing)}. {PACKAGES_HINT}")


# Options -----------------------------------------------------------------------------------------


def numbers(least: int, most: int) -> tuple[str, str]:
    return "|".join(map(str, range(least, most + 1))), f"a whole number from {least} to {most}"


COMMANDS = dict(up=Cluster.up, down=Cluster.down, status=Cluster.status, env=Cluster.show_env)
# The values of options, as a pattern and in words.
OF_ALL = {
    "--name": ("[a-z0-9][a-z0-9-]{0,31}", "lower-case letters, digits and '-'"),
    "--state": ("[A-Za-z0-9/._@+-]+", "a path of letters, digits and '/._@+-'"),
}
OF_UP = {"--nodes": numbers(1, 64), "--gpus": numbers(0, 64), "--requeue-delay": numbers(1, 3600)}
OF_UP["--set"] = ("[A-Za-z]+=[A-Za-z0-9_.,:=/-]*", "KEY=VALUE as in slurm.conf")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^unrecognized arguments: (\S+).*", r"unknown argument '\1'", message)
        message = re.sub(r"^argument (\S+): expected one.*", r"\1 needs a value", message)
        say(f"{SCRIPT.name}: {message} (see {self.prog} --help)")
        sys.exit(2)


def options(words: list[str]) -> argparse.Namespace:
    command = words[0] if words and words[0] in COMMANDS else ""
    parser = Parser(
        prog=f"{SCRIPT.name} {command}".rstrip(),
        usage=f"{SCRIPT.name} {command or '|'.join(COMMANDS)} [options]",
        description=__doc__,
        epilog="Exit status: 0 done, 1 failed, 2 wrong usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, root = parser.add_argument, f"/tmp/slurm-cookbook-{os.getuid()}"
    add("--name", default="default", help="which cluster (default: %(default)s)")
    state = "folder of all clusters' state (default: %(default)s)"
    add("--state", default=root, metavar="DIR", help=state)
    add = parser.add_argument_group("additional options of up").add_argument
    add(
        "--nodes", default="2", metavar="N", help="number of nodes, n1 to nN (default: %(default)s)"
    )
    gpus = "fake GPUs per node, as --gres=gpu:h100:G (default: %(default)s; 0 for none)"
    add("--gpus", default="8", metavar="G", help=gpus)
    delay = "how long a requeued job waits, and a job credential lives (default: %(default)s)"
    add("--requeue-delay", default="10", metavar="SECONDS", help=delay)
    more = "another slurm.conf setting, such as KillWait=2; may be repeated"
    add("--set", default=[], action="append", metavar="KEY=VALUE", help=more)
    if not words:
        parser.error("no command: give up, down, status or env")
    if not command and words[0] not in ("-h", "--help"):
        parser.error(f"unknown command '{words[0]}'")
    if command != "up" and (wrong := [word for word in words if word.partition("=")[0] in OF_UP]):
        parser.error(f"{wrong[0]} is an option of 'up', not of '{command}'")
    given = parser.parse_args(words[1:] if command else words)
    if not given.state:
        parser.error("--state needs a folder")
    given.state = os.path.realpath(given.state)
    for option, (pattern, what) in (OF_ALL | OF_UP).items():
        values = vars(given)[option[2:].replace("-", "_")]
        for value in values if option == "--set" else [values]:
            if not re.fullmatch(pattern, value):
                parser.error(f"{option} must be {what}, got '{value}'")
    return given


if __name__ == "__main__":
    os.umask(0o022)
    # Ordinary users have no sbin in PATH.
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    given = options(sys.argv[1:])
    try:
        COMMANDS[sys.argv[1]](Cluster(given))
    except OSError as error:
        fail(str(error))

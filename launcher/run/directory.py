"""A run directory: making one, reading its files, and letting one command at a time change it."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import RunFault
from launcher.run import code, snapshot, trust
from launcher.slurm.job import Job, token
from runspec import files, lock, publish

# The fields of a Job that are kept in submission.json and, those that it knows, in status.json.
_JOB_KEYS = ("job_id", "host", "process_start", "cluster", "controller", "slurm_conf")

# What is recorded of what a run asks Slurm for.
ASKED = ("nodes", "gpus_per_node", "time", "signal_lead_s")


@dataclass(frozen=True)
class Run:
    """A run directory and what its files say; one that is broken says nothing, and broken() why."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def submission(self) -> dict[str, Any]:
        """How the run was started: its recipe, its token and the jobs that it was given."""
        return self._read(files.SUBMISSION)

    @property
    def status(self) -> dict[str, Any]:
        """The newest state that a job wrote, {} if none has started."""
        return self._read(files.STATUS)

    @property
    def progress(self) -> dict[str, Any]:
        """The latest report of the trainer: step, total_steps, losses, newest checkpoint."""
        return self._read(files.PROGRESS)

    @property
    def provenance(self) -> dict[str, Any]:
        """What made the run: command, code, packages, model."""
        return self._read(files.PROVENANCE)

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts that have ended, oldest first."""
        return self._lines(files.ATTEMPTS)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged steps in order."""
        return self._lines(files.METRICS)

    @property
    def newest_metrics(self) -> dict[str, Any]:
        """The last logged step, {} before the first; of a long file only the end is read."""
        try:
            return files.last_json_line(self.path / files.METRICS)
        except OSError:
            return {}

    @property
    def asked(self) -> dict[str, Any]:
        """What it asks Slurm for: nodes, gpus_per_node (= ranks), time and signal_lead_s."""
        asked = self.submission.get("asked")
        known = asked if isinstance(asked, dict) else {}
        return {key: known.get(key) for key in ASKED}

    @property
    def torn(self) -> bool:
        """Whether it has nothing of a run but its name: a copy or a removal was cut short."""
        names = (files.SUBMISSION, files.STATUS, files.JOB_SCRIPT)
        return not any(os.path.exists(f"{self.path}/{name}") for name in names)

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The jobs that submit and resume gave to the run, oldest first."""
        jobs = self.submission.get("jobs")
        return [job for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []

    @property
    def all_jobs(self) -> list[dict[str, Any]]:
        """Its jobs, oldest first, and one that only its status knows.

        Such a job's script was submitted by hand, or the launcher died before it wrote the id down:
        it is newer than all others. No clock says so, because the nodes' clocks may be wrong.
        """
        jobs, status = self.jobs, self.status
        if status.get("job_id") is None or any(_same_job(job, status) for job in jobs):
            return jobs
        return [*jobs, {key: status[key] for key in _JOB_KEYS if key in status}]

    @property
    def job_id(self) -> str | None:
        """The newest job's id, None if nobody wrote one down."""
        job_id = (self.all_jobs or [{}])[-1].get("job_id")
        return None if job_id is None else str(job_id)

    @property
    def job(self) -> Job:
        """The newest job, with what its executor needs to find it."""
        newest = (self.all_jobs or [{}])[-1]
        known: dict[str, Any] = {
            key: str(newest[key]) for key in _JOB_KEYS if newest.get(key) is not None
        }
        return Job(token(self.name), **known)

    @property
    def own_status(self) -> dict[str, Any]:
        """What the newest job wrote as its status, {} if it has written none yet."""
        status, jobs = self.status, self.all_jobs
        return status if jobs and _same_job(jobs[-1], status) else {}

    @property
    def job_began(self) -> float | None:
        """When the job of the newest attempt began, with the first of its attempts.

        A job that went back into the queue begins anew.
        """
        status, keys = self.status, ("job_id", "restart_count")
        job = [status.get(key) for key in keys]
        own = [each for each in self.attempts if [each.get(key) for key in keys] == job]
        began = [each.get("started") for each in (*own, status)]
        return min((each for each in began if isinstance(each, int | float)), default=None)

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that it is part of."""
        name = self.submission.get("sweep")
        return None if name is None else str(name)

    @property
    def starting(self) -> bool:
        """Whether a command began to start a job and has not recorded what came of it."""
        return "starting" in self.submission

    @property
    def logs(self) -> Path:
        return self.path / files.LOGS

    def latest_logs(self) -> Path | None:
        """The folder of the newest attempt's logs, None before the first."""
        link = self.path / files.LATEST_LOGS
        return link.resolve() if link.exists() else None

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace one of the run's JSON files; whoever may read the directory may read it."""
        path = self.path / name
        try:
            files.write_json(path, dict(value), mode=self.path.stat().st_mode & 0o666)
        except OSError as error:
            raise RunFault(f"cannot write {path}: {error.strerror}: check the disk") from error

    def broken(self) -> list[str]:
        """Say which of the run's files cannot be read, and what to do about each."""
        names = (files.SUBMISSION, files.STATUS, files.PROGRESS)
        return [fault for _, fault in map(self._read_or_fault, names) if fault]

    def _read(self, name: str) -> dict[str, Any]:
        return self._read_or_fault(name)[0]

    def _read_or_fault(self, name: str) -> tuple[dict[str, Any], str]:
        path = f"{self.path}/{name}"
        try:
            return files.read_object(path) or {}, ""
        except OSError as error:
            return {}, f"{path} cannot be read ({error.strerror})"
        except files.DamagedFile:
            message = f"{path} is broken (not a JSON object)"
            return {}, f"{message}: move it away with: mv {path} {path}.broken"

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            return files.read_json_lines(self.path / name)
        except OSError:
            return []


@dataclass(frozen=True)
class Snapshot(Run):
    """A run at one moment: each of its files is read once, when it is first asked for.

    One answer is made of many properties, and each of a Run's reads its file again.
    """

    _seen: dict[str, tuple[dict[str, Any], str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def _read_or_fault(self, name: str) -> tuple[dict[str, Any], str]:
        if name not in self._seen:
            self._seen[name] = super()._read_or_fault(name)
        return self._seen[name]


def _same_job(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records are of one job. Two clusters may give the same id."""
    clusters = {one.get("cluster"), other.get("cluster")} - {None, ""}
    return str(one.get("job_id")) == str(other.get("job_id")) and len(clusters) < 2


def runs_root(root: Path) -> Path:
    """Return the folder of all runs, in the shared folder."""
    return root / "runs"


def new_name(label: str) -> str:
    """Return a new run's name: time, label and four random hex digits."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{label}-{secrets.token_hex(2)}"


def create(
    path: Path,
    contents: Mapping[str, str],
    kit: code.Code,
    own_code: Mapping[str, Path] | None = None,
    umask: int = 0o077,
) -> Run:
    """Make a run directory whole, or not at all: its files are written before it gets its name.

    Args:
        contents: the text of each file by its name.
        kit: the copy of the kit's code that its jobs use.
        own_code: the user's own files and folders, of which the run takes copies, by their names
            in its folder code; "." is that folder itself.
        umask: 0o077 keeps the run private, 0o027 lets the group read it.

    Raises:
        RunFault: it cannot be made there.
        PreflightFault: the code cannot be copied.
    """
    root = path.parent
    before = os.umask(umask)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if umask == 0o027:
            # A private run may have made the folder of all runs.
            with suppress(PermissionError):
                root.chmod(root.stat().st_mode | 0o050)
        with publish.folder(path, "refuse", alone=True) as folder:
            trust.close(folder, umask=umask)
            (folder / files.LOGS).mkdir()
            # Slurm would create it with permissions of its own.
            (folder / files.JOB_LOG).touch()
            for name, text in contents.items():
                (folder / name).parent.mkdir(exist_ok=True)
                files.write_text(folder / name, text)
            code.link(folder, kit)
            for name, source in (own_code or {}).items():
                snapshot.copy(source, folder / files.CODE / name)
    except OSError as error:
        raise RunFault(
            f"cannot make the run directory {path}: {error.strerror or error}: set COOKBOOK_ROOT "
            "to a folder that you own, with free space, on the shared filesystem"
        ) from error
    finally:
        os.umask(before)
    return Run(path)


@contextmanager
def locked(run: Run) -> Iterator[int]:
    """Let one command at a time start or end a run's jobs; yield the open file that is locked."""
    path = run.path / files.LOCK
    try:
        file = lock.take(path)
    except lock.Held as error:
        raise RunFault(
            f"another cookbook command ({error}) is changing {run.name}: try again in a moment"
        ) from error
    except OSError as error:
        message = f"cannot change {run.name}: cannot lock {path}: {error.strerror}"
        if trust.is_anothers(run.path):
            message += (
                f"; the directory belongs to {trust.owner(run.path.lstat().st_uid)}, and a job of "
                "yours could not write there: start your own from its recipe and code with: "
                f"cookbook replay {run.name}"
            )
        else:
            message += ": its filesystem must be writable, and mounted with locks (flock)"
        raise RunFault(message) from error
    with file:
        yield file.fileno()

"""How Slurm's commands are run: a short environment, a time limit, and errors in their words."""

import os
import re
import subprocess
from collections.abc import Sequence

from launcher.errors import SlurmFault, SlurmMissing, SlurmTimeout

# What a job may inherit from the login shell. Everything else stays behind, above all tokens:
# SBATCH_* would override the script's own lines, and a stray SLURM_* belongs to another job.
EXPORT = ("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "PATH", "TZ", "SLURM_CONF")

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


def environment() -> dict[str, str]:
    """Return the environment that Slurm's commands, and through them jobs, are given."""
    return {key: os.environ[key] for key in (*EXPORT, "TMPDIR") if key in os.environ}


def missing(program: str) -> SlurmMissing:
    """Return the error for a command that is not installed here."""
    return SlurmMissing(f"there is no {program} on this machine: {_ELSEWHERE}")


def run(
    argv: Sequence[str], timeout_s: float = 30, merged: bool = False, lease: int | None = None
) -> str:
    """Return the standard output of one of Slurm's commands.

    Args:
        merged: what it prints on standard error belongs to the answer.
        lease: an open file that the command keeps open. Such a command is not ended by Ctrl-C.

    Raises:
        SlurmMissing: it is not installed, or no cluster is configured here.
        SlurmTimeout: it, or the controller, did not answer in time.
        SlurmFault: it failed; the message holds its own words.
    """
    try:
        done = subprocess.run(
            argv,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            pass_fds=() if lease is None else (lease,),
            start_new_session=lease is not None,
        )
    except FileNotFoundError as error:
        raise missing(argv[0]) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmTimeout(
            f"{argv[0]} did not answer within {timeout_s:.0f} s: try again later"
        ) from error
    output, message = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.returncode == 0:
        return output + message if merged else output
    reason = one_line(message) or f"{argv[0]}: exit status {done.returncode}, no message"
    # Slurm says the same in four lines; the one that names it is enough.
    named = next(filter(_UNCONFIGURED.search, message.splitlines()), None)
    if named is not None:
        raise SlurmMissing(
            f"{argv[0]} is installed, but no cluster is configured on this machine "
            f'("{named.strip()}"): {_ELSEWHERE}'
        )
    if _TIMED_OUT.search(message):
        raise SlurmTimeout(f'Slurm says "{reason}": check whether scontrol ping answers')
    raise SlurmFault(f'Slurm says "{reason}"')


def one_line(message: str) -> str:
    """Return a message of several lines as one."""
    return " | ".join(line.strip() for line in message.splitlines() if line.strip())

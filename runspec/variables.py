"""Environment variables that the job script, Slurm or torchrun sets: no recipe may set them."""

from collections.abc import Iterable

# Read-only in bash, or they change how bash reads the script.
_BASH = "BASHOPTS BASH_ENV EUID IFS PPID SHELLOPTS UID"
# templates/job.sbatch.j2 and slurm/*.sh
_SCRIPT = (
    "ANSWER ANSWERS ATTEMPT HANG_TIMEOUT_S HEAD_ADDR HEAD_PORT HOSTS JOB_PID LAUNCHED "
    "LEFT_OUT LOGS MAX_GPU_HOURS MAX_RETRIES NEXT NODES NODE_CHECK NODE_NAME NODE_RANK "
    "NODE_SCRIPT NOTIFY_EVENTS NOTIFY_FORM NOTIFY_WEBHOOK ONE_HOST RANKS_PER_NODE REDACT REPLY "
    "REQUEUE RUN_DIR SETUP_LINE SIGNAL_LEAD_S SILENT SITE_FILE STOP_ASKED SUCCESSOR SWEEP_DIR "
    "TIMEOUT_S VENV"
)
_PYTHON = "PYTHONHOME PYTHONNOUSERSITE PYTHONPATH PYTHONUNBUFFERED VIRTUAL_ENV"
_TORCHRUN = (
    "GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT RANK "
    "ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE WORLD_SIZE"
)
_OWNED = frozenset(f"{_BASH} {_SCRIPT} {_PYTHON} {_TORCHRUN}".split())
_OWNED_PREFIXES = ("COOKBOOK", "SBATCH_", "SLURM", "SRUN_", "TORCHELASTIC_")


def owned_variables(names: Iterable[object]) -> list[str]:
    """Return those of the names that belong to the job script, Slurm or torchrun."""
    texts = map(str, names)
    return [name for name in texts if name in _OWNED or name.startswith(_OWNED_PREFIXES)]

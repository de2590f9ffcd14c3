"""Environment variables that the job script, Slurm or torchrun sets: no recipe may set them."""

from collections.abc import Iterable, Mapping

# Read-only in bash, or they change how bash reads the script.
_BASH = "BASHOPTS BASH_ENV EUID IFS PPID SHELLOPTS UID"
# templates/job.sbatch.j2 and slurm/*.sh
_SCRIPT = (
    "AGAIN CODE_SOURCE_PATH ENV_IN_IMAGE ENV_PYTHON ENV_REMEDY ENV_TITLE GPUS_PER_NODE "
    "HANG_TIMEOUT_S HEAD_ADDR HEAD_PORT HYPERPARAMETERS_PATH INSIDE JOB_PID LOGS "
    "LOGS_PER_NODE MAX_RETRIES MLFLOW_RUN_ID NODES NODE_CHECK NODE_NAME NODE_RANK NUM_NODES "
    "ONE_HOST RANKS_PER_NODE ROLLOUT_GPUS "
    "ROLLOUT_NODES ROLLOUT_SAMPLERS ROLLOUT_SCRIPT RUN_DIR SETUP_KEY SETUP_LINE SETUP_PLACE "
    "SHORTEST_S SIGNAL_LEAD_S STOP_SIGNAL SUPERVISOR SWEEP VENV WARNED"
)
_PYTHON = "PYTHONHOME PYTHONNOUSERSITE PYTHONPATH PYTHONUNBUFFERED VIRTUAL_ENV"
_TORCHRUN = (
    "GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT RANK "
    "ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE WORLD_SIZE"
)
_TORCHRUN_PREFIX = "TORCHELASTIC_"
_OWNED = frozenset(f"{_BASH} {_SCRIPT} {_PYTHON} {_TORCHRUN}".split())
_OWNED_PREFIXES = ("COOKBOOK", "SBATCH_", "SLURM", "SRUN_", _TORCHRUN_PREFIX)


def owned_variables(names: Iterable[object]) -> list[str]:
    """Return those of the names that belong to the job script, Slurm or torchrun."""
    texts = map(str, names)
    return [name for name in texts if name in _OWNED or name.startswith(_OWNED_PREFIXES)]


def without_torchrun(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun has not set for a rank.

    For a program that makes a process group of its own: with TORCHELASTIC_USE_AGENT_STORE none of
    its processes would open the group's store.
    """
    own = _TORCHRUN.split()
    return {
        name: value
        for name, value in variables.items()
        if name not in own and not name.startswith(_TORCHRUN_PREFIX)
    }

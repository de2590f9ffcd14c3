"""The types of the fields in records: a value of a wrong type must not end a run.

Standard library only.
"""

from typing import Any

# Fields that decide what the job does.
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("attempt", "restart_count", "saved_at_start", "job_log_bytes"), int),
    **dict.fromkeys(("saved", "minutes", "rank", "node_rank", "checkpoint_step"), int),
    **dict.fromkeys(("started", "ended", "time", "gpus"), (int, float)),
    **dict.fromkeys(("job_id", "slurm_job_id"), (str, int)),
    **dict.fromkeys(("state", "type", "message", "host", "series", "successor"), str),
    "nodes": list,
}


def well_typed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the fields of a wrong type: they count as missing."""
    return {
        key: value
        for key, value in record.items()
        if key not in _TYPES or (isinstance(value, _TYPES[key]) and not isinstance(value, bool))
    }

"""The same step on fake tensors, run by the trainer: what the formulas are checked against."""

from __future__ import annotations

import json
from typing import Any

from launcher import venv
from launcher.errors import PreflightFault


def trace(train_config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return what `python -m trainer.trace` finds; PreflightFault if it cannot be traced."""
    try:
        done = venv.ask_trainer("trace", train_config, "--ranks", str(ranks))
    except OSError as error:
        raise PreflightFault(
            f"cannot trace: {error}: set up the environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        faults = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        raise PreflightFault(faults or said[-1:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found

"""Tells a webhook that a run has started, ended or failed: python -P -m slurm.notify start|ended

Called by slurm/job.sh with RUN_DIR set, and NOTIFY_WEBHOOK, the file that holds the address,
NOTIFY_FORM and NOTIFY_EVENTS. What cannot be delivered is told in the job's log and changes
nothing. Standard library only.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from runspec import files
from runspec.redact import redacted
from slurm.identity import own_job_id

TIMEOUT_S, TRIES = 8, 2
# The event by the state that the job has written.
_EVENTS = {
    "COMPLETED": "end",
    "CANCELLED": "end",
    "FAILED": "failure",
    "INTERRUPTED": "failure",
}


def facts(run_dir: Path, event: str) -> dict[str, Any]:
    """Return what is told of a run, {} if its newest state is not of this job.

    Args:
        event: start, or ended: the state then says whether it is an end or a failure.
    """
    status, made, progress = (
        value if isinstance(value, dict) else {}
        for value in (
            files.read_json_or_none(run_dir / name)
            for name in (files.STATUS, files.SUBMISSION, files.PROGRESS)
        )
    )
    if str(status.get("job_id")) != own_job_id():
        return {}
    kind = event if event == "start" else _EVENTS.get(str(status.get("state")))
    if kind is None:
        return {}
    known = ("state", "cause", "message", "attempt", "job_id", "cluster", "nodes")
    told = {key: status[key] for key in known if status.get(key) not in (None, "")}
    of_training = {"step": "step", "total_steps": "total_steps", "loss": "loss_last"}
    told |= {key: progress[name] for key, name in of_training.items() if name in progress}
    return {"event": kind, "run": run_dir.name, "recipe": made.get("recipe"), **told}


def sentence(told: dict[str, Any]) -> str:
    """Return the facts as one line for people."""
    words = f"{told['run']} ({told.get('recipe')})"
    if told["event"] == "start":
        return f"{words} has started on {', '.join(told.get('nodes', []))}"
    words += f" is {told['state']}"
    if told.get("step") is not None:
        words += f" at step {told['step']} of {told.get('total_steps')}"
    if told.get("loss") is not None:
        words += f", loss {told['loss']:.4g}"
    return f"{words}: {told['message']}" if told.get("message") else words


def body(form: str, told: dict[str, Any]) -> dict[str, Any]:
    """Return what is posted: the facts, or a message as Slack or Teams take it."""
    if form == "slack":
        return {"text": sentence(told)}
    if form == "teams":
        text = {"type": "TextBlock", "text": sentence(told), "wrap": True}
        card = {"type": "AdaptiveCard", "version": "1.4", "body": [text]}
        kind = "application/vnd.microsoft.card.adaptive"
        return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}
    return {**told, "text": sentence(told)}


def post(address: str, content: dict[str, Any]) -> str:
    """Send a message; return why it was not delivered, "" if it was."""
    if not address.startswith(("https://", "http://")):
        return "the file holds no address that begins with https://"
    request = urllib.request.Request(
        address,
        data=json.dumps(content).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "slurm-cookbook"},
        method="POST",
    )
    reason = ""
    for _ in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            reason = f"the server answered {error.code} {error.reason}"
            if error.code < 500:
                break
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "reason", error))
    # Neither may hold the address, which is a secret.
    return redacted(reason.replace(address, "<address>"))


def main() -> None:
    run_dir, wanted = Path(os.environ["RUN_DIR"]), os.environ["NOTIFY_EVENTS"].split(",")
    told = facts(run_dir, sys.argv[1])
    if not told or told["event"] not in wanted:
        return
    file = Path(os.environ["NOTIFY_WEBHOOK"])
    try:
        address = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        fault = f"{file}: {error.strerror}"
    else:
        fault = post(address, body(os.environ["NOTIFY_FORM"], told))
    if fault:
        words = f"the webhook was not told of the run's {told['event']}: {fault}"
        print(f"cookbook: {words}", file=sys.stderr)


if __name__ == "__main__":
    main()

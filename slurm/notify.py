"""Notifies a webhook that a run has started, ended or failed.

The job script sets NOTIFY_WEBHOOK, the file that holds the address, and NOTIFY_EVENTS. A failed
notification is reported in the job's log and does not affect the run. Standard library only.
"""

import os
from pathlib import Path
from typing import Any

from runspec import client, files
from runspec.redact import redacted
from slurm.identity import own_job_id
from slurm.job_log import say

TIMEOUT_S, TRIES = 8, 2
# The event by the state that the job has written.
_EVENTS = {
    "COMPLETED": "end",
    "CANCELLED": "end",
    "FAILED": "failure",
    "INTERRUPTED": "failure",
}


def facts(run_dir: Path, event: str) -> dict[str, Any]:
    """Return the content of a notification, {} if the run's newest state is not of this job.

    Args:
        event: start, or ended: the run's state then decides between end and failure.
    """
    status, made, progress = (
        files.peek(run_dir / name) for name in (files.STATUS, files.SUBMISSION, files.PROGRESS)
    )
    if str(status.get("job_id")) != own_job_id():
        return {}
    kind = event if event == "start" else _EVENTS.get(str(status.get("state")))
    if kind is None:
        return {}
    known = ("state", "cause", "message", "attempt", "job_id", "cluster", "nodes")
    content = {key: status[key] for key in known if status.get(key) not in (None, "")}
    of_training = {"step": "step", "total_steps": "total_steps", "loss": "loss_last"}
    content |= {key: progress[name] for key, name in of_training.items() if name in progress}
    return {"event": kind, "run": run_dir.name, "recipe": made.get("recipe"), **content}


def sentence(content: dict[str, Any]) -> str:
    """Return a notification as one line of text."""
    text = f"{content['run']} ({content.get('recipe')})"
    if content["event"] == "start":
        return f"{text} has started on {', '.join(content.get('nodes', []))}"
    text += f" is {content['state']}"
    if content.get("step") is not None:
        text += f" at step {content['step']} of {content.get('total_steps')}"
    if content.get("loss") is not None:
        text += f", loss {content['loss']:.4g}"
    return f"{text}: {content['message']}" if content.get("message") else text


def post(address: str, content: dict[str, Any]) -> str:
    """Send a message; return the reason if it was not delivered, else ""."""
    if not address.startswith(("https://", "http://")):
        return "the file has no address that begins with https://"
    reason = ""
    for _ in range(TRIES):
        try:
            answer = client.send(address, content, timeout_s=TIMEOUT_S, proxies=True)
        except (OSError, ValueError) as error:
            reason = str(error)
            continue
        if answer.status < 300:
            return ""
        reason = f"the server answered {answer.status} {answer.reason}"
        if answer.status < 500:
            break
    # Neither may contain the address, which is a secret.
    return redacted(reason.replace(address, "<address>"))


def notify(run_dir: Path, event: str) -> None:
    """Notify the webhook of the recipe or the site, if there is one and it wants this event.

    Args:
        event: as for `facts`.
    """
    if not (webhook := os.environ.get("NOTIFY_WEBHOOK")):
        return
    content = facts(run_dir, event)
    if not content or content["event"] not in os.environ["NOTIFY_EVENTS"].split(","):
        return
    try:
        address = Path(webhook).read_text(encoding="utf-8").strip()
    except OSError as error:
        fault = f"{webhook}: {error.strerror}"
    else:
        fault = post(address, {**content, "text": sentence(content)})
    if fault:
        say(f"the webhook was not notified of the run's {content['event']}: {fault}")

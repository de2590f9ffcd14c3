"""From the log of an endpoint to a data source, with a data recipe that names it.

The source is JSON lines, one per answered request: messages (with the answer), request_id, time,
model, answer, feedback and label. Feedback is joined by the request's id from feedback.jsonl of the
endpoint: lines of {"request_id": ..., "feedback": ..., "label": ...}; a later line replaces an
earlier one, and a label replaces the answer in messages. An answer whose feedback is not one of
APPROVED, and that has no label, is left out.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import yamlfile
from launcher.errors import EndpointFault
from launcher.site import Site
from plugins.serve import endpoint as endpoints
from plugins.serve import journal
from plugins.serve.launcher.endpoint import Endpoint
from runspec import files

FEEDBACK = "feedback.jsonl"
# The words of feedback, in lower case, with which an answer may be trained on as it is.
APPROVED = {"up", "yes", "good", "like", "correct", "true", "positive", "1", "+1"}


class Feedback:
    """The lines of a file of feedback, and what they say of each request.

    unreadable: the numbers of the lines that have no request_id as a text, or whose label is no
    text. rejected: the answers that are left out, by their word of feedback.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable: list[int] = []
        self.rejected: Counter[str] = Counter()
        self._lines: dict[int, str] = {}
        self._said: dict[str, dict[str, Any]] = {}
        self._found: set[str] = set()
        # Not splitlines: a text may hold other characters that it takes for ends of lines.
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            content = line if isinstance(line, dict) else {}
            name = content.get("request_id")
            if not isinstance(name, str) or not isinstance(content.get("label"), str | None):
                self.unreadable.append(number)
                continue
            self._lines[number], self._said[name] = name, content

    def of(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return what is said of a logged request."""
        self._found.add(row["request_id"])
        return self._said.get(row["request_id"], {})

    @property
    def unmatched(self) -> list[int]:
        """The numbers of the lines whose request is not in the log."""
        return [number for number, name in self._lines.items() if name not in self._found]


@dataclass(frozen=True)
class MadeOfRequests:
    """A data source made of a log of requests."""

    # JSON lines of chats.
    file: Path
    # The data recipe that reads it.
    recipe: Path
    # What people said of the answers, and how many rows have it.
    feedback: Feedback
    rows: int
    with_feedback: int


def export(
    site: Site, endpoint: Endpoint, since: float | None, feedback: Path | None
) -> MadeOfRequests:
    """Write the answered requests of an endpoint, and a data recipe that reads them.

    Args:
        since: seconds since 1970; None for all.
        feedback: JSON lines with request_id, feedback and label; None for the endpoint's own.

    Raises:
        EndpointFault: nothing is logged, or all of it was rejected.
    """
    path = feedback or endpoint.folder / FEEDBACK
    said = Feedback(path)
    rows = rows_of(endpoint.folder, since or 0.0, said)
    if not rows:
        rejected = said.rejected.total()
        raise EndpointFault(
            f"all {rejected:,} answers of {endpoint.name} were rejected and have no label: add "
            f"labels to the lines of {path}"
            if rejected
            else f"no answered request of {endpoint.name} is logged in that time"
        )
    folder = site.root / "datasets" / f"requests-{endpoint.name}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file, recipe = folder / "requests.jsonl", folder / f"requests-{endpoint.name}.yaml"
    write(rows, file)
    files.write_text(recipe, yamlfile.dump(data_recipe(endpoint.name, file)))
    count = sum(bool(row["feedback"] or row["label"]) for row in rows)
    return MadeOfRequests(file, recipe, said, len(rows), count)


def rows_of(folder: Path, begin: float, feedback: Feedback) -> list[dict[str, Any]]:
    """Return the requests of an endpoint since a time whose answers may be trained on."""
    rows = []
    # All of them, so that a line about an earlier request is not taken for a wrong id.
    for row in journal.read(folder / endpoints.REQUESTS):
        known = feedback.of(row)
        if row["status"] != 200 or not row["answer"] or (row["time"] or 0) < begin:
            continue
        label, word = known.get("label"), _text(known.get("feedback")).strip()
        if word and not label and word.lower() not in APPROVED:
            feedback.rejected[word] += 1
            continue
        answer = {"role": "assistant", "content": label or row["answer"]}
        kept = {key: row[key] for key in ("request_id", "time", "model", "answer")}
        # Texts in every row: readers take a column's type from the first rows.
        said = {"feedback": word, "label": label or ""}
        rows.append({"messages": [*row["messages"], answer], **kept, **said})
    return sorted(rows, key=lambda row: (row["time"], row["request_id"]))


def _text(value: Any) -> str:
    """Return a text as it is, nothing for null, and another value as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """Write rows as JSON lines."""
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    files.write_text(file, "".join(f"{line}\n" for line in lines))


def data_recipe(name: str, file: Path) -> dict[str, Any]:
    """Return a data recipe that makes a training set of an endpoint's log."""
    source = {
        "name": f"requests-{name}",
        "path": str(file),
        "format": "messages",
        "keep": {"request_id": "text", "feedback": "text", "label": "text"},
    }
    return {
        "description": f"Requests and answers of the endpoint {name}",
        "sources": [source],
        "steps": [
            "exact_duplicates",
            "personal_data",
            {"split": {"shares": {"train": 0.9, "val": 0.1}}},
        ],
    }

"""Asks the endpoint `support`, and waits until it has scaled to zero: python traffic.py DATASETS

Writes support-traffic.json (requests per version, seconds to the first answer and to zero) and
support-feedback.jsonl: for each answered request the intent that the customer meant.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugins.serve import journal

NAME = "support"
WAIT_S = 300.0


def main() -> None:
    """Start both versions, send the questions, wait for the end of the replicas."""
    folder = Path(sys.argv[1])
    answers = folder / "support-answers.jsonl"
    answers.unlink(missing_ok=True)
    began = time.monotonic()
    ask()
    facts: dict[str, Any] = {"first_answer_s": round(time.monotonic() - began, 1)}
    # Both versions are wanted as long as requests come.
    until(lambda: ready() == 2, ask)
    warm = time.time()
    source = str(folder / "support-questions.jsonl")
    cookbook(
        "query", NAME, "--input", source, "--output", str(answers), "--max-tokens", "12",
        "--in-flight", "8",
    )  # fmt: skip
    began = time.monotonic()
    until(lambda: ready() == 0)
    facts["to_zero_s"] = round(time.monotonic() - began, 1)
    rows = [*journal.read(folder.parent / "endpoints" / NAME / "requests", warm)]
    facts["requests"] = dict(Counter(row["model"] for row in rows))
    facts["failed"] = sum(row["status"] != 200 for row in rows)
    (folder / "support-traffic.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))
    corrected(folder, rows)


def corrected(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write what customers say of the answers: the intent that they meant, as the label."""
    intents = {}
    for line in (folder / "support-test.jsonl").open(encoding="utf-8"):
        sample = json.loads(line)
        intents[sample["messages"][-2]["content"]] = sample["intent"]
    lines = []
    for row in rows:
        prompt = json.loads(row["messages"])[-1]["content"]
        if (intent := intents.get(prompt)) is not None:
            right = row["answer"].strip() == intent
            feedback = {"request_id": row["request_id"], "feedback": "yes" if right else "no"}
            lines.append(json.dumps({**feedback, "label": intent}))
    (folder / "support-feedback.jsonl").write_text("".join(f"{line}\n" for line in lines))


def ask() -> None:
    """One request; the first one waits for a replica."""
    cookbook("query", NAME, "What does this customer want?\n\nHello", "--max-tokens", "4")


def ready() -> int:
    """How many replicas are ready."""
    for endpoint in json.loads(cookbook("serve", "--list", "--json")):
        if endpoint["endpoint"] == NAME:
            return int(endpoint["ready"])
    return 0


def until(reached: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait; SystemExit if it takes too long."""
    deadline = time.monotonic() + WAIT_S
    while not reached():
        if time.monotonic() > deadline:
            sys.exit(f"not within {WAIT_S:.0f} s: see cookbook serve --list")
        meanwhile()
        time.sleep(1)


def cookbook(*words: str) -> str:
    """Run a command of the kit, and return what it prints."""
    return subprocess.run(
        ["cookbook", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


main()

"""Generates questions with a helpful and a curt answer each: python data.py FOLDER

Writes base.jsonl (questions with one of the two answers, more often the curt one, for the base
model), forum.jsonl and survey.jsonl (pairs of answers from two sources, with their own names of
columns), and test.jsonl (pairs of which no question is in the others).
"""

import json
import random
import sys
from pathlib import Path

COMMANDS = {
    "sbatch": "submits a job",
    "squeue": "shows the queue",
    "scancel": "cancels a job",
    "sinfo": "shows the nodes",
    "sacct": "shows ended jobs",
    "srun": "starts a step",
}
ASKING = ("What does {} do?", "Tell me about {}.", "What is {} for?", "How do I use {}?", "Why {}?")
OPENINGS = ("", "Hi. ", "Hello. ", "Please help: ", "Quick question: ", "Sorry, again: ")
ENDINGS = ("", ", see its manual", ", as you", ", at once")
CURT = "No idea."


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    rows = [
        {
            "prompt": opening + text.format(name),
            "chosen": f"{name} {what}{random.choice(ENDINGS)}.",
            "rejected": CURT,
        }
        for name, what in COMMANDS.items()
        for text in ASKING
        for opening in OPENINGS
    ]
    random.shuffle(rows)
    cut = len(rows) * 4 // 5
    known, test = rows[:cut], rows[cut:]
    base = [
        {"question": row["prompt"], "answer": row[name]}
        for row in known
        for name in ("chosen", "rejected", "rejected")
    ]
    forum, survey = known[: cut // 2], known[cut // 2 :]
    # The sources name their columns differently, and some pairs are in both.
    renamed = [
        {"ask": row["prompt"], "better": row["chosen"], "worse": row["rejected"]}
        for row in survey + forum[:20]
    ]
    files = {"base": base, "forum": forum, "survey": renamed, "test": test}
    for name, part in files.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


main()

"""Writes 96 of the kit's questions about Slurm as chats, one per line: python chats.py FILE"""

import json
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "configs" / "datasets" / "slurm_qa.jsonl"
target = Path(sys.argv[1])
target.parent.mkdir(parents=True, exist_ok=True)
rows = map(json.loads, SOURCE.read_text(encoding="utf-8").splitlines()[:96])
with target.open("w", encoding="utf-8") as file:
    for row in rows:
        turns = (("user", row["question"]), ("assistant", row["answer"]))
        messages = [{"role": role, "content": content} for role, content in turns]
        file.write(json.dumps({"messages": messages}) + "\n")

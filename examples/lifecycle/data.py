"""Generates help desk requests and their intents: python data.py FOLDER

Writes base.jsonl (questions and answers of three intents, for the base model), train.jsonl and
test.jsonl (all intents, as chats and as pairs; no request is in both).
"""

import json
import random
import sys
from pathlib import Path

THINGS = ("order", "parcel", "invoice", "account", "password", "refund")
INTENTS = {
    "delivery": ("My {} has not arrived", "Where is my {} now", "The {} is late again"),
    "payment": ("I was charged twice for the {}", "The {} shows a wrong amount"),
    "access": ("I cannot open my {}", "The {} asks me to log in again"),
    "praise": ("Thank you, the {} works well", "I am happy with the {}"),
}
OPENINGS = ("", "Hello. ", "Good morning. ", "Please help. ", "Again: ", "Hi, ")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"question": opening + text.format(thing), "answer": intent}
        for intent, texts in INTENTS.items()
        for text in texts
        for thing in THINGS
        for opening in OPENINGS
    ]
    random.Random(0).shuffle(rows)
    cut = len(rows) * 4 // 5
    parts = {"train": rows[:cut], "test": rows[cut:]}
    parts["base"] = [row for row in rows[:cut] if row["answer"] != "payment"][:96]
    # Chats, as `cookbook prepare from-requests` writes them.
    parts["train"] = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in parts["train"]
    ]
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)


main()

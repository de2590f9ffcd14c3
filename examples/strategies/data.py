"""Generates support requests and their intents: python data.py FOLDER

Writes base.jsonl (a request and what a base model may say of it: the intent, the thing or the tone;
a quarter of the sentences is missing), train.jsonl and pairs.jsonl (the same requests with their
intents, and with a wrong answer each), large.jsonl (more requests with intents, for a teacher) and
test.jsonl. No request of test.jsonl is in the others.
"""

import json
import random
import sys
from pathlib import Path

INTENTS = {
    "delivery": ("My {} has not arrived", "Where is my {} now", "The {} is late", "Track my {}"),
    "refund": ("I want my money back for the {}", "Refund the {}", "Return the {}", "Repay my {}"),
    "invoice": (
        "I need a bill for the {}",
        "The price of the {} is wrong",
        "Tax for the {}",
        "{} bill",
    ),
    "access": (
        "I cannot open the {} page",
        "The {} asks for a login",
        "Unlock my {}",
        "No entry to {}",
    ),
    "broken": (
        "The {} arrived broken",
        "My {} does not turn on",
        "A crack in the {}",
        "The {} failed",
    ),
    "cancel": (
        "Please cancel the {}",
        "Stop my {} order",
        "I do not want the {}",
        "End my {} plan",
    ),
    "change": (
        "Send the {} somewhere else",
        "Take another {}",
        "Swap my {}",
        "A new date for the {}",
    ),
    "praise": ("Thank you, the {} works", "I am happy with the {}", "A great {}", "I like my {}"),
}
THINGS = ("phone", "laptop", "lamp", "jacket", "kettle", "book", "chair", "camera")
TONES = {
    "polite": ("Hello. ", "Good morning. ", "Dear team, ", "Kindly: "),
    "urgent": ("Quick! ", "Now: ", "It is urgent. ", "At once: "),
}


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    rows = [
        (opening + text.format(thing), {"intent": intent, "thing": thing, "tone": tone}, k)
        for intent, texts in INTENTS.items()
        for k, text in enumerate(texts)
        for thing in THINGS
        for tone, openings in TONES.items()
        for opening in openings
    ]
    chance.shuffle(rows)
    test, large = rows[:400], rows[400:]
    base = [
        {"question": text, "answer": facts[what]}
        for text, facts, k in large[:1000]
        for what in (chance.choice(("intent", "thing", "tone")),)
        if k < 3
    ]
    train = [(text, facts["intent"]) for text, facts, _ in large[1000:1256]]
    files = {
        "base": base,
        "train": [_chat(text, intent) for text, intent in train],
        "pairs": [
            {
                "prompt": text,
                "chosen": intent,
                "rejected": chance.choice([each for each in INTENTS if each != intent]),
            }
            for text, intent in train
        ],
        "large": [_chat(text, facts["intent"]) for text, facts, _ in large],
        "test": [{"question": text, "answer": facts["intent"]} for text, facts, _ in test],
    }
    for name, part in files.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _chat(text: str, answer: str) -> dict[str, object]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


main()

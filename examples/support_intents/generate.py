"""Generates support messages to prepare: python examples/support_intents/generate.py FOLDER

Each has a request, its intent, its user and a quality. A quarter is in FOLDER as JSON lines, the
mail; the rest is the Delta table FOLDER-chat. Known shares are exact and near duplicates, have
personal data, are too short, or are broken lines. The intents have very different frequencies. The
same seed gives the same rows. FOLDER-truth.json counts what is planted. FOLDER-base.jsonl is the
data of the base model: it learns to read other requests, which are not in FOLDER, and to repeat
them. It sees the names of the intents, but never with a request.
"""

import argparse
import json
import random
from pathlib import Path

_INTENTS = {
    "track_order": ["where is my order", "when does my parcel arrive", "track my delivery please"],
    "refund": ["I want my money back", "please refund this purchase", "how do I get a refund"],
    "cancel": ["please cancel my order", "I want to stop my subscription", "cancel this at once"],
    "login": ["I cannot log in", "my password is not accepted", "the login page shows an error"],
    "invoice": ["please send me an invoice", "the invoice is wrong", "I need a bill for taxes"],
    "address": ["change my address", "I have moved to another city", "deliver it somewhere else"],
    "broken": ["it arrived broken", "the device does not turn on", "the screen is cracked"],
    "praise": ["thank you for the quick help", "great service", "I am very happy with it"],
}
# The last intents are rare.
_WEIGHTS = [40, 20, 12, 10, 7, 5, 4, 2]
_THINGS = ["phone", "laptop", "lamp", "jacket", "kettle", "book", "chair", "camera", "bicycle"]
_TONES = ["Hello,", "Hi there,", "Good morning,", "Dear team,", "Sorry to ask,", "Once more:"]
_ENDS = ["Thanks.", "Kind regards.", "It is urgent.", "No hurry.", "I wait for your answer."]
_BASE_ROWS = 4000
_PLANTED = {"exact": 0.08, "near": 0.05, "personal": 0.04, "short": 0.02, "broken": 0.002}


def conversation(
    chance: random.Random, number: int, count: int, intent: str = ""
) -> dict[str, object]:
    """Return one user's request: one of several sentences for its intent, between other words."""
    intent = intent or chance.choices(list(_INTENTS), _WEIGHTS)[0]
    words = [chance.choice(_TONES), f"it is about the {chance.choice(_THINGS)}"]
    words.append(
        f"that I bought for {chance.randrange(5, 900)} euros in week {chance.randrange(53)},"
    )
    words.append(f"number {chance.randrange(10**6):06d} of shop {chance.randrange(10**4):04d}:")
    words += [f"{chance.choice(_INTENTS[intent])}.", chance.choice(_ENDS)]
    return {
        "request": " ".join(words),
        "intent": intent,
        "user": f"user{chance.randrange(max(count // 5, 1))}",
        # A third falls below 0.85.
        "quality": round(min(1.0, chance.gauss(0.9, 0.1)), 3),
    }


def write(folder: Path, count: int, seed: int = 0) -> dict[str, int]:
    """Write count messages to a file and a table; return the number of planted ones per kind."""
    import pyarrow as pa
    from deltalake import write_deltalake

    chance, planted = random.Random(seed), dict.fromkeys(_PLANTED, 0)
    folder.mkdir(parents=True, exist_ok=True)
    made: list[dict[str, object]] = []
    chat: list[dict[str, object]] = []
    lines: list[str] = []
    for number in range(count):
        row = conversation(chance, number, count)
        lot, edge, kind = chance.random(), 0.0, ""
        for name, share in _PLANTED.items():
            edge += share
            if lot < edge:
                kind = name
                break
        if kind == "exact" and made:
            row = dict(chance.choice(made))
        elif kind == "near" and made:
            row = dict(chance.choice(made))
            row["request"] = f"{row['request']} Please!"
        elif kind == "personal":
            row["request"] = (
                f"{row['request']} My mail is u{number}@example.org, +49 170 {number:07d}"
            )
        elif kind == "short":
            row["request"] = "help me"
        planted[kind] = planted.get(kind, 0) + 1
        if kind == "broken":
            lines.append('{"request": "cut off')
            continue
        made.append(row)
        if number % 4:
            chat.append(row)
        else:
            lines.append(json.dumps(row))
    (folder / "mail.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = folder.parent / f"{folder.name}-chat"
    write_deltalake(str(table), pa.Table.from_pylist(chat), mode="overwrite")
    base = "".join(json.dumps(row) + "\n" for row in _base(random.Random(f"base {seed}")))
    (folder.parent / f"{folder.name}-base.jsonl").write_text(base, encoding="utf-8")
    planted["plain"] = planted.pop("", 0)
    (folder.parent / f"{folder.name}-truth.json").write_text(json.dumps(planted, indent=1) + "\n")
    return planted


def _base(chance: random.Random) -> list[dict[str, str]]:
    """Return the base model's questions and answers: they never pair a request with its intent."""
    rows = []
    for number in range(_BASE_ROWS):
        name = chance.choice(list(_INTENTS))
        if number % 4 == 3:
            rows.append({"question": f"Say {name}", "answer": name})
            continue
        request = str(conversation(chance, number, _BASE_ROWS, name)["request"])
        if number % 4 == 2:
            (thing,) = [each for each in _THINGS if f"about the {each} " in request]
            rows.append({"question": f"What is this about?\n\n{request}", "answer": thing})
        else:
            sentence = request.rpartition(": ")[2].partition(".")[0]
            rows.append({"question": f"What does it say?\n\n{request}", "answer": sentence})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="generate.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=500_000)
    given = parser.parse_args()
    print(json.dumps(write(given.folder, given.count)))


if __name__ == "__main__":
    main()

"""Asks the endpoint `support` as its customers would: python traffic.py DATASETS

Writes support-feedback.jsonl: for each answered request the intent that the customer meant.
"""

import json
import subprocess
import sys
from pathlib import Path

import openai


def main() -> None:
    """Send the questions, and write what the customers say of the answers."""
    folder = Path(sys.argv[1])
    told = subprocess.run(
        ["cookbook", "serve", "--url", "support", "--json"], check=True, stdout=subprocess.PIPE
    )
    endpoint = json.loads(told.stdout)
    key = Path(endpoint["key_file"]).read_text(encoding="utf-8").strip()
    intents = {}
    for line in (folder / "support-test.jsonl").open(encoding="utf-8"):
        sample = json.loads(line)
        intents[sample["messages"][-2]["content"]] = sample["intent"]
    lines, right = [], 0
    with openai.OpenAI(base_url=endpoint["url"], api_key=key) as client:
        for line in (folder / "support-questions.jsonl").open(encoding="utf-8"):
            messages = json.loads(line)["messages"]
            # Each answer names its row of the log.
            answer = client.chat.completions.with_raw_response.create(
                model="support", messages=messages, max_tokens=12
            )
            text = answer.parse().choices[0].message.content or ""
            if (intent := intents.get(messages[-1]["content"])) is not None:
                right += text.strip() == intent
                feedback = "yes" if text.strip() == intent else "no"
                said = {"request_id": answer.headers["X-Request-Id"], "feedback": feedback}
                lines.append(json.dumps({**said, "label": intent}))
    (folder / "support-feedback.jsonl").write_text("".join(f"{line}\n" for line in lines))
    print(f"{right} of {len(lines)} answers are right")


main()

"""A judge that says which of two answers is better, asked under OpenAI's protocol."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runspec import client
from trainer.errors import ConfigError

_TRIES, _TIMEOUT_S, _IN_FLIGHT = 4, 120, 8
_ASK = (
    "Two answers to a question follow. Say which is better: more correct, more complete, clearer.\n"
    "Question: {prompt}\n\nReference answer: {reference}\n\nAnswer A: {a}\n\nAnswer B: {b}\n\n"
    "Reply with one letter: A, B, or T for a tie."
)


def verdicts(task: dict[str, Any], pairs: list[tuple[str, str, str, str]]) -> list[float]:
    """Return the verdicts of (prompt, reference, our answer, their answer), asked side by side."""
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        return list(pool.map(lambda pair: verdict(task, *pair), pairs))


def verdict(task: dict[str, Any], prompt: str, reference: str, ours: str, theirs: str) -> float:
    """Return 1 if our answer wins, 0 if it loses, 0.5 for a tie.

    The judge is asked twice with the answers exchanged; it must say the same both times, else it
    is a tie (Zheng et al., 2023, on the bias of positions).
    """
    first = _letter(task, prompt, reference, ours, theirs)
    second = _letter(task, prompt, reference, theirs, ours)
    if (first, second) == ("A", "B"):
        return 1.0
    return 0.0 if (first, second) == ("B", "A") else 0.5


def _letter(task: dict[str, Any], prompt: str, reference: str, a: str, b: str) -> str:
    text = _ASK.format(prompt=prompt, reference=reference, a=a, b=b)
    body = {
        "model": task["judge_model"],
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
    }
    said = _post(task, body)["choices"][0]["message"]["content"] or ""
    match = re.search(r"\b([ABT])\b", said)
    return match.group(1) if match else "T"


def _post(task: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    url = f"{str(task['judge_url']).rstrip('/')}/chat/completions"
    headers = {}
    if task.get("judge_key_file"):
        key = Path(task["judge_key_file"]).expanduser().read_text(encoding="utf-8").strip()
        headers["Authorization"] = f"Bearer {key}"
    reason = ""
    for attempt in range(_TRIES):
        try:
            answer = client.send(url, body, headers, timeout_s=_TIMEOUT_S, proxies=True)
            if answer.status < 300:
                return dict(json.loads(answer.body))
            reason = f"it answered {answer.status} {answer.reason}"
            if answer.status < 500 and answer.status != 429:
                break
        except (OSError, ValueError) as error:
            reason = str(error)
        time.sleep(2**attempt)
    raise ConfigError(f"the judge {url} cannot be asked: {reason}: check judge_url and its key")

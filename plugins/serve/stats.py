"""Latency, errors, tokens and drift from an endpoint's log: python -m plugins.serve.stats FOLDER"""

import argparse
import bisect
import fileinput
import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from plugins.serve import endpoint as endpoints
from plugins.serve import journal
from plugins.serve.metrics import per_token_s, quantile
from runspec import since
from runspec.files import parse_json

# Population stability index from which the change is some, and much (Siddiqi, 2006).
_SOME, _MUCH = 0.1, 0.25
_SECONDS = ("latency_s", "first_token_s", "per_token_s")


def summary(rows: Iterable[dict[str, Any]], training: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of logged requests; drift is against the texts of the training files."""
    statuses, models, tokens = Counter[str](), Counter[str](), Counter[str]()
    begin, end = math.inf, -math.inf
    seconds = {name: array("d") for name in _SECONDS}
    asked, answered = Texts(), Texts()
    for row in rows:
        statuses[str(row["status"])] += 1
        models[row["model"]] += 1
        if row["time"] is not None:
            begin, end = min(begin, row["time"]), max(end, row["time"])
        if row["status"] != 200:
            continue
        tokens.update({kind: row[kind] or 0 for kind in ("prompt_tokens", "answer_tokens")})
        spent = {"latency_s": row["latency_s"]}
        if row["stream"]:
            spent |= {"first_token_s": row["first_token_s"], "per_token_s": per_token_s(row)}
        for name, value in spent.items():
            seconds[name].extend(() if value is None else (value,))
        if training:
            asked.add(_last(row["messages"]))
            answered.add(row["answer"] or "")
    count, span = statuses.total(), max(0.0, end - begin)
    figures: dict[str, Any] = {
        "requests": count,
        "status": dict(statuses),
        "unfinished": statuses["0"],
        "errors": sum(each for code, each in statuses.items() if int(code) >= 500),
        "seconds": span,
        "requests_per_s": count / span if span else None,
        **{kind: tokens[kind] for kind in ("prompt_tokens", "answer_tokens")},
        "answer_tokens_per_s": tokens["answer_tokens"] / span if span else None,
        "models": dict(models),
    }
    for name, values in seconds.items():
        figures[name] = {f"p{each}": quantile(values, each / 100) for each in (50, 95, 99)}
    if training and asked.lengths:
        questions, answers = _training(training)
        figures["drift"] = {"input": drift(questions, asked), "output": drift(answers, answered)}
    return figures


class Texts:
    """Statistics of texts for drift: their lengths in words, and the count of each word."""

    def __init__(self) -> None:
        self.lengths, self.words = array("l"), Counter[str]()

    def add(self, text: str) -> None:
        self.lengths.append(len(text.split()))
        self.words.update(text.lower().split())


def drift(before: Texts, now: Texts) -> dict[str, Any]:
    """Compare texts with those of the training set.

    Returns:
        length_psi: population stability index of the number of words, in deciles of `before`.
        words_js: Jensen-Shannon distance of the words' frequencies, 0 to 1.
        unknown_words: share of the words that are not in the training set.
    """
    if not before.lengths or not now.lengths:
        return {}
    old, new = before.words, now.words
    unknown = sum(count for word, count in new.items() if word not in old)
    psi = _psi(before.lengths, now.lengths)
    return {
        "length_psi": round(psi, 4),
        "words_js": round(_jensen_shannon(old, new), 4),
        "unknown_words": round(unknown / max(1, new.total()), 4),
        "verdict": "much" if psi > _MUCH else "some" if psi > _SOME else "little",
    }


def _psi(before: Sequence[int], now: Sequence[int]) -> float:
    ordered = sorted(before)
    edges = sorted({ordered[k * len(ordered) // 10] for k in range(1, 10)})

    def spread(values: Sequence[int]) -> list[float]:
        counts = Counter(bisect.bisect_left(edges, value) for value in values)
        bins = len(edges) + 1
        # Half a text in each bin, because an empty bin would make the index infinite.
        return [(counts[k] + 0.5) / (len(values) + 0.5 * bins) for k in range(bins)]

    pairs = zip(spread(before), spread(now), strict=True)
    return sum((new - old) * math.log(new / old) for old, new in pairs)


def _jensen_shannon(one: Counter[str], other: Counter[str]) -> float:
    a, b, total = max(1, one.total()), max(1, other.total()), 0.0
    for word in one.keys() | other.keys():
        p, q = one[word] / a, other[word] / b
        total += sum(x / 2 * math.log2(2 * x / (p + q)) for x in (p, q) if x)
    return math.sqrt(max(0.0, total))


def _last(messages: Any) -> str:
    try:
        turns = parse_json(messages) if isinstance(messages, str) else messages
        return str(next(t["content"] for t in reversed(turns) if t.get("role") == "user"))
    except (ValueError, KeyError, TypeError, StopIteration):
        return ""


def _training(names: Sequence[str]) -> tuple[Texts, Texts]:
    """Return the questions and the answers of training files."""
    questions, answers = Texts(), Texts()
    with fileinput.input(names, encoding="utf-8") as given:
        for row in (parse_json(line) for line in given if line.strip()):
            texts = [value for value in row.values() if isinstance(value, str)]
            if isinstance(row.get("messages"), list):
                questions.add(_last(row["messages"]))
                answers.add(str(row["messages"][-1].get("content", "")))
            elif texts:
                known = [row[key] for key in ("question", "prompt", "instruction") if key in row]
                questions.add(str((known or texts)[0]))
                answers.add(str(row.get("answer", row.get("output", texts[-1]))))
    return questions, answers


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the figures for people to read."""
    codes = ", ".join(f"{code}: {count:,}" for code, count in sorted(figures["status"].items()))
    failed, count = figures["errors"], figures["requests"]
    yield f"requests     {count:,} ({codes})"
    open_ones = f", {figures['unfinished']:,} without an answer" if figures["unfinished"] else ""
    yield f"errors       {failed:,} of {count:,} ({100 * failed / count:.2g}%){open_ones}"
    if figures["requests_per_s"]:
        rate = f"{figures['answer_tokens_per_s']:.4g} answer tokens/s"
        over = f"{rate} over {figures['seconds']:.0f} s"
        yield f"throughput   {figures['requests_per_s']:.3g} requests/s, {over}"
    yield f"tokens       {figures['prompt_tokens']:,} in, {figures['answer_tokens']:,} out"
    for name in _SECONDS:
        if figures[name]["p50"] is not None:
            shown = ", ".join(f"{key} {1000 * each:,.1f} ms" for key, each in figures[name].items())
            yield f"{name[:-2].replace('_', ' '):<12} {shown}"
    for side, each in (figures.get("drift") or {}).items():
        if each:
            yield (
                f"{side + ' drift':<12} {each['verdict']}: length PSI {each['length_psi']}, words "
                f"{each['words_js']}, unknown words {100 * each['unknown_words']:.1f}%"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plugins.serve.stats", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--since", type=since.seconds, default=0.0)
    parser.add_argument("--training-data", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = journal.read(options.folder / endpoints.REQUESTS, options.since)
    figures = summary(rows, options.training_data)
    if not figures["requests"]:
        sys.exit(f"error: no request of {options.folder.name} is logged in that time")
    print(json.dumps(figures, indent=1) if options.json else "\n".join(lines(figures)))


if __name__ == "__main__":
    main()

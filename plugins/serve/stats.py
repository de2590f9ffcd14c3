"""Latency, errors and tokens from an endpoint's log."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_SECONDS = ("latency_s", "first_token_s", "per_token_s")


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of logged requests."""
    statuses, models, tokens = Counter[str](), Counter[str](), Counter[str]()
    begin, end = math.inf, -math.inf
    seconds = {name: array("d") for name in _SECONDS}
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
            spent |= {"first_token_s": row["first_token_s"], "per_token_s": _per_token_s(row)}
        for name, value in spent.items():
            seconds[name].extend(() if value is None else (value,))
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
        figures[name] = {f"p{each}": _quantile(values, each / 100) for each in (50, 95, 99)}
    return figures


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which this share of the values is, None if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _per_token_s(row: Mapping[str, Any]) -> float | None:
    """Return the seconds per token after the first, None for an answer of fewer than two."""
    if (row["answer_tokens"] or 0) < 2 or row["first_token_s"] is None:
        return None
    return float(row["latency_s"] - row["first_token_s"]) / int(row["answer_tokens"] - 1)


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

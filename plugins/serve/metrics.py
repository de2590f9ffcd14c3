"""Counters and latencies of a gateway, as text for Prometheus."""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which this share of the values is, None if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def per_token_s(row: Mapping[str, Any]) -> float | None:
    """Return the seconds per token after the first, None for an answer of fewer than two."""
    if (row["answer_tokens"] or 0) < 2 or row["first_token_s"] is None:
        return None
    return float(row["latency_s"] - row["first_token_s"]) / int(row["answer_tokens"] - 1)


class Metrics:
    """What a gateway or a front has seen since it started."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.tokens: Counter[str] = Counter()
        self.in_flight, self.peak = 0, 0
        # How many seconds there were of each kind in each bucket, and in all.
        self.buckets = {name: Counter[int]() for name in ("latency", "first_token", "per_token")}
        self.seconds = dict.fromkeys(self.buckets, 0.0)

    def began(self, count: int) -> None:
        """Count a request with this many answers that is answered from now on."""
        self.in_flight += count
        self.peak = max(self.peak, self.in_flight)

    def take_peak(self) -> int:
        """Return the most requests at a time since the last call."""
        peak, self.peak = self.peak, self.in_flight
        return peak

    def ended(self, row: Mapping[str, Any]) -> None:
        """Count a request that has ended, by what the log has of it."""
        self.requests[row["status"]] += 1
        if row["status"] != 200:
            return
        for kind in ("prompt", "answer"):
            self.tokens[kind] += row[f"{kind}_tokens"] or 0
        spent = {name: row[f"{name}_s"] for name in ("latency", "first_token")}
        for name, seconds in {**spent, "per_token": per_token_s(row)}.items():
            if seconds is not None:
                self.buckets[name][bisect.bisect_left(_BOUNDS, seconds)] += 1
                self.seconds[name] += seconds

    def text(self, endpoint: str, unlogged: int) -> str:
        """Return the exposition format, version 0.0.4."""
        lines = []

        def add(name: str, kind: str, values: Mapping[str, Any]) -> None:
            lines.append(f"# TYPE cookbook_{name} {kind}")
            for suffix, value in values.items():
                # Such as _count, or _bucket,le="1.0"
                part, _, label = suffix.partition(",")
                labels = f'endpoint="{endpoint}"' + (f",{label}" if label else "")
                lines.append(f"cookbook_{name}{part}{{{labels}}} {value}")

        statuses = {f',status="{each}"': count for each, count in sorted(self.requests.items())}
        add("requests_total", "counter", statuses)
        kinds = {f',kind="{kind}"': count for kind, count in sorted(self.tokens.items())}
        add("tokens_total", "counter", kinds)
        add("in_flight", "gauge", {"": self.in_flight})
        add("unlogged_total", "counter", {"": unlogged})
        for name, found in self.buckets.items():
            counts = accumulate(found[place] for place in range(len(_BOUNDS) + 1))
            below = zip((*_BOUNDS, "+Inf"), counts, strict=True)
            values: dict[str, Any] = {f'_bucket,le="{bound}"': count for bound, count in below}
            values |= {"_sum": self.seconds[name], "_count": found.total()}
            add(f"{name}_seconds", "histogram", values)
        return "\n".join(lines) + "\n"

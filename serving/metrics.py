"""Counters and latencies of a gateway, as text for Prometheus."""

import bisect
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# The quantiles are those of this many newest requests.
_KEPT = 10_000


class Histogram:
    """Seconds in buckets, and the newest ones as they are."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS) + 1)
        self.total, self.count = 0.0, 0
        self.newest: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        self.buckets[bisect.bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds
        self.count += 1
        self.newest.append(seconds)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which a share of the values lies, None if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def per_token_s(row: Mapping[str, Any]) -> float | None:
    """Return the seconds per token after the first, None for an answer of fewer than two."""
    if (row["answer_tokens"] or 0) < 2:
        return None
    return float(row["latency_s"] - row["first_token_s"]) / int(row["answer_tokens"] - 1)


class Metrics:
    """What a gateway has seen since it started."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.tokens: Counter[str] = Counter()
        self.in_flight, self.peak, self.unlogged = 0, 0, 0
        self.latency, self.first_token, self.per_token = Histogram(), Histogram(), Histogram()

    def began(self, count: int) -> None:
        """Count a request of so many answers that is answered from now on."""
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
        self.latency.add(row["latency_s"])
        for kind in ("prompt", "answer"):
            self.tokens[kind] += row[f"{kind}_tokens"] or 0
        if row["first_token_s"] is not None:
            self.first_token.add(row["first_token_s"])
            if (seconds := per_token_s(row)) is not None:
                self.per_token.add(seconds)

    def text(self, endpoint: str) -> str:
        """Return the exposition format, version 0.0.4."""
        label = f'endpoint="{endpoint}"'
        lines = ["# TYPE cookbook_requests_total counter"]
        for status, count in sorted(self.requests.items()):
            lines.append(f'cookbook_requests_total{{{label},status="{status}"}} {count}')
        lines.append("# TYPE cookbook_tokens_total counter")
        for kind, count in sorted(self.tokens.items()):
            lines.append(f'cookbook_tokens_total{{{label},kind="{kind}"}} {count}')
        lines.append("# TYPE cookbook_in_flight gauge")
        lines.append(f"cookbook_in_flight{{{label}}} {self.in_flight}")
        lines.append("# TYPE cookbook_unlogged_total counter")
        lines.append(f"cookbook_unlogged_total{{{label}}} {self.unlogged}")
        for name in ("latency", "first_token", "per_token"):
            seconds: Histogram = getattr(self, name)
            full = f"cookbook_{name}_seconds"
            lines.append(f"# TYPE {full} histogram")
            for bound, below in zip((*_BOUNDS, "+Inf"), accumulate(seconds.buckets), strict=True):
                lines.append(f'{full}_bucket{{{label},le="{bound}"}} {below}')
            lines.append(f"{full}_sum{{{label}}} {seconds.total}")
            lines.append(f"{full}_count{{{label}}} {seconds.count}")
        return "\n".join(lines) + "\n"

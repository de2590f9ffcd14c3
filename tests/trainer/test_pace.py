"""How much time is left: the pace does not count the first step, which may be compiled."""

import pytest

from trainer import metrics
from trainer.metrics import Clock


@pytest.mark.parametrize("every", [1, 2])
def test_the_first_step_is_not_in_the_pace(monkeypatch, every):
    now = 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    clock = Clock(10)  # a resumed run
    left = []
    for step in range(11, 21):
        now += 60.0 if step == 11 else 2.0
        clock.add(tokens=1, flops=1)
        if step == 11 or step % every == 0:
            clock.lap()
            left.append(clock.left(30))
    if every == 1:
        assert left == [None] * 4 + [2.0 * (30 - step) for step in range(15, 21)]
    else:
        # Steps 11, 12, 14, 16, 18, 20 are logged.
        assert left == [None, None, None, 28.0, 24.0, 20.0]


def test_a_line_without_it_ends_with_the_memory():
    record = dict.fromkeys(("epoch", "lr", "loss", "grad_norm", "memory_rss_gb"), 1.0)
    record |= {"step": 3, "mfu": None, "peak_memory_reserved_gb": None, "left_s": None}
    record["tokens_per_second_per_gpu"] = 5.0
    line = metrics.progress_line(record, 10, 1)
    assert line.startswith("step  3/10  ") and line.endswith("1.0 GiB")
    record["left_s"] = 83.0
    assert metrics.progress_line(record, 10, 1).endswith("GiB  left 01:23")

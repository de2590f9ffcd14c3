"""The log of requests: nothing accepted is lost at a kill, nothing private gets in."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from plugins.serve import stats
from plugins.serve.journal import Journal, read
from plugins.serve.launcher import from_requests

# Accepts a request, says so, answers it, says so; and again.
WRITER = """
import sys, time
from pathlib import Path
from plugins.serve.journal import Journal
journal = Journal(Path(sys.argv[1]))
for k in range(100_000):
    journal.accepted({"request_id": f"r{k}", "time": time.time(), "messages": [], "model": "m"})
    print(f"accepted r{k}", flush=True)
    journal.answered(f"r{k}", {"answer": "x", "status": 200, "latency_s": 0.1})
"""


def row(number: int, text: str = "hello", when: float | None = None) -> dict:
    turns = [{"role": "user", "content": text}]
    when = time.time() if when is None else when
    return {"request_id": f"r{number}", "time": when, "messages": turns, "model": "m v1"}


def answer(text: str = "yes", status: int = 200) -> dict:
    told = {"answer": text, "status": status, "latency_s": 0.2, "first_token_s": 0.1}
    return {**told, "prompt_tokens": 3, "answer_tokens": 2}


def test_a_kill_loses_nothing_that_was_accepted(tmp_path):
    argv = [sys.executable, "-c", WRITER, str(tmp_path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert process.stdout is not None
    heard = [process.stdout.readline() for _ in range(230)]
    os.kill(process.pid, signal.SIGKILL)
    heard += process.stdout.readlines()
    process.wait()
    accepted = {line.split()[1] for line in heard if line.startswith("accepted") and "\n" in line}
    found = [each["request_id"] for each in read(tmp_path)]
    assert accepted <= set(found) and len(found) == len(set(found))


def test_a_log_is_read_while_it_is_written(tmp_path):
    journal = Journal(tmp_path)
    journal.accepted(row(1))
    journal.accepted(row(2))
    journal.answered("r1", answer())
    (file,) = tmp_path.glob("requests-*.jsonl")
    assert {each["request_id"]: each["status"] for each in read(tmp_path)} == {"r1": 200, "r2": 0}
    # As a full disk leaves it.
    with file.open("a") as torn:
        torn.write('{"request_id": "r2", "status')
    found = list(read(tmp_path))
    assert {each["request_id"]: each["status"] for each in found} == {"r1": 200, "r2": 0}
    assert all(each["messages"][0]["content"] == "hello" for each in found)
    assert file.stat().st_mode & 0o077 == 0


def test_a_request_that_another_server_answered_counts_as_answered(tmp_path):
    lost, other = Journal(tmp_path), Journal(tmp_path)
    for journal in (lost, other):
        journal.accepted(row(1))
    lost.accepted(row(2))
    other.answered("r1", answer())
    assert {each["request_id"]: each["status"] for each in read(tmp_path)} == {"r1": 200, "r2": 0}


def test_private_things_stay_out_and_ids_stay_whole(tmp_path):
    journal = Journal(tmp_path, redact=["ACME-[0-9]+"])
    # The last ones end a line for Python, and not in JSON.
    text = "me@example.org, +49 170 1234567, sk-abcdefghijklmnop123, ACME-77, \u2028\x85"
    journal.accepted({**row(0, text), "request_id": "9" * 32})
    journal.answered("9" * 32, answer("call 030 1234567890"))
    (found,) = read(tmp_path)
    kept = found["messages"][0]["content"] + found["answer"]
    for secret in ("example.org", "1234567", "sk-abc", "ACME-77"):
        assert secret not in kept
    assert found["request_id"] == "9" * 32


def test_the_log_becomes_a_data_source_with_feedback(tmp_path):
    journal = Journal(tmp_path / "requests")
    for k in range(5):
        journal.accepted(row(k, f"question {k}", when=1000.0 + k))
        journal.answered(f"r{k}", answer(f"answer {k}", 500 if k == 2 else 200))
    lines = [
        {"request_id": "r0", "feedback": "bad", "label": "better"},
        {"request_id": "r1", "feedback": "Up"},
        {"request_id": "r3", "feedback": "down"},
        {"request_id": "r4", "feedback": False},
        {"request_id": "r9", "feedback": "down", "label": "never"},
        {"requestid": "r1", "feedback": "down"},
        {"request_id": "r1", "label": ["never"]},
        ["list"],
    ]
    texts = [*map(json.dumps, lines), "not json", '{"request_id": "r1", "feedback": ', "[" * 9999]
    (tmp_path / "feedback.jsonl").write_text("\n\n".join(texts) + "\n")
    feedback = from_requests.Feedback(tmp_path / "feedback.jsonl")
    rows = from_requests.rows_of(tmp_path, 0, feedback)
    assert [each["request_id"] for each in rows] == ["r0", "r1"], "r2 failed"
    assert rows[0]["messages"][-1] == {"role": "assistant", "content": "better"}
    assert (rows[0]["feedback"], rows[1]["label"]) == ("bad", "")
    assert feedback.rejected == {"down": 1, "false": 1}
    assert feedback.unmatched == [9]
    assert feedback.unreadable == [11, 13, 15, 17, 19, 21]
    # A line about an earlier request is no wrong id.
    feedback = from_requests.Feedback(tmp_path / "feedback.jsonl")
    rows = from_requests.rows_of(tmp_path, 1001.0, feedback)
    assert (rows[0]["request_id"], feedback.unmatched) == ("r1", [9])


def test_figures_of_a_log():
    rows = [
        {**row(k, when=float(k)), **answer(status=200 if k else 503), "stream": True}
        for k in range(101)
    ]
    found = stats.summary(rows)
    assert found["requests"] == 101 and found["errors"] == 1 and found["answer_tokens"] == 200
    assert found["requests_per_s"] == 1.01 and found["latency_s"]["p99"] == 0.2
    assert abs(found["per_token_s"]["p50"] - 0.1) < 1e-9

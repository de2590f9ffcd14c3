"""Rewards: the kit's functions, and the user's in processes that hang, die and raise."""

import os
from pathlib import Path
from typing import Any

import pytest

from plugins.rl.rewards import builtin, pool
from plugins.rl.rewards.pool import Answer, Pool, Turn
from trainer.errors import ConfigError

OWN = """
import os, time

def score(prompts, completions, completion_ids, answer, **columns):
    text = completions[0]
    print("printing does no harm")
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os._exit(3)
    if text == "raise":
        raise ValueError("no such text")
    if text == "skip":
        return [None]
    return [1 * (text == answer[0]) + 10 * len(completion_ids[0])]

def inputs(prompts):
    return [len(prompts[0])]

class Count:
    def reset(self, first, **columns):
        self.sum = first

    def step(self, text):
        if text == "hang":
            time.sleep(60)
        self.sum += int(text)
        return str(self.sum), self.sum, self.sum > 9
"""


@pytest.mark.parametrize(
    ("name", "arguments", "completion", "row", "wanted"),
    [
        ("exact_match", {}, "so it is \\boxed{1{,}000}.", {"answer": "x #### 1{,}000"}, 1),
        ("exact_match", {}, "3 and 4 make 7.0", {"answer": "#### 7"}, 1),
        ("exact_match", {}, "1,200 then", {"answer": 1200}, 1),
        ("exact_match", {"column": "a"}, "Paris.", {"a": "paris"}, 1),
        ("exact_match", {}, "5", {"answer": "6"}, 0),
        ("exact_match", {"pattern": "<a>(.*?)</a>"}, "9 <a>6</a> 9", {"answer": "6"}, 1),
        ("exact_match", {"pattern": "<a>(.*?)</a>"}, "6", {"answer": "6"}, 0),
        ("exact_match", {}, "6", {"answer": None}, None),
        ("regex", {"pattern": "^<think>.*</think>"}, "<think>a\nb</think> c", {}, 1),
        ("json_schema", {"schema": {"required": ["a"]}}, '```json\n{"a": 1}\n```', {}, 1),
        ("json_schema", {"column": "s"}, "{}", {"s": '{"required": ["a"]}'}, 0),
        ("code", {}, "```python\ndef f(x): return x + 1\n```", {"tests": "assert f(1) == 2"}, 1),
        ("code", {}, "def f(x): return x", {"tests": "assert f(1) == 2"}, 0),
    ],
)
def test_the_kits_own(
    name: str, arguments: dict[str, Any], completion: str, row: dict[str, Any], wanted: float | None
) -> None:
    assert builtin.made(name, arguments)(completion, row) == wanted


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "b'x' * 2**30",
        "open('file', 'wb').write(b'x' * 2**25)",
        "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
        "import os; os.environ['SECRET']",
    ],
    ids=["time", "memory", "files", "network", "variables"],
)
def test_a_program_has_limits(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv("SECRET", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = program.replace("PORT", str(server.getsockname()[1]))
        assert not builtin.run_program(text, 0.4, 256)
        if "PORT" in program:
            assert builtin.run_program(text, 60, 256, network=True)


def test_faults_of_the_key(tmp_path: Path) -> None:
    found = pool.faults(
        {
            "a": {"function": "exact_mach"},
            "b": {"function": f"{tmp_path}/none.py:score"},
            "c": {"function": "regex", "patern": "x", "weight": "much"},
            "d": {"function": "code", "seconds": 40},
            "e": {},
            "f": {"function": "os.path:join", "column": "x"},
            "g": {"function": "os.path:join", "turns": 0},
            "h": {"function": "regex", "pattern": "x", "turns": 3},
        },
        30.0,
    )
    assert [line.partition(": ")[0] for line in found] == [
        "rewards.a.function",
        "rewards.b.function",
        "rewards.c.weight",
        "rewards.c.patern",
        "rewards.d.seconds",
        "rewards.e",
        "rewards.f.column",
        "rewards.g.turns",
        "rewards.h.turns",
    ]
    assert "did you mean exact_match" in found[0] and "did you mean pattern" in found[3]
    assert pool.faults({}, 30.0)[0].startswith("rewards: name at least one")


@pytest.mark.long
def test_one_that_hangs_dies_or_raises_costs_its_sample(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    rewards = {
        "own": {"function": f"{own}:score", "weight": 2.0},
        "length": {"function": f"{own}:inputs"},
    }
    before = pool.identity(rewards)
    texts = ["yes", "hang", "no", "die", "skip", "raise", "yes"]
    answers = [Answer("what?", text, [7], {"answer": "yes"}) for text in texts]
    scorers = Pool(rewards, 2, 1.0)
    try:
        found = scorers.score(answers)
        weights = pool.weights_of(rewards)
        totals = [each.total(weights) for each in found]
        assert totals == [27, None, 25, None, 5, None, 27]
        kinds = {("own", kind) for kind in ("timeout", "died", "raised")}
        assert scorers.messages.keys() == kinds
        assert scorers.messages["own", "raised"] == f"{own}:12: ValueError: no such text"
        pids = [worker._process.pid for worker in scorers._workers]
    finally:
        scorers.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    # One that hangs costs its episode; the others of its process are played again.
    scorers = Pool({"count": {"function": f"{own}:Count", "turns": 3}}, 1, 1.0)
    try:
        for texts, wanted in (
            ((["1"], ["2"]), [("1", 1), ("2", 2)]),
            ((["1", "hang"], ["2", "3"]), [None, ("5", 5)]),
            ((["2", "3", "5"],), [(None, 10)]),
        ):
            replies = scorers.step("count", [Turn({"first": 0}, t, t[0]) for t in texts])
            own_turns = [r and r.turns and r.turns[0]["content"] for r in replies]
            values = [r and (t, r.score) for r, t in zip(replies, own_turns, strict=True)]
            assert values == wanted
        assert scorers.messages.keys() == {("count", "timeout")}
    finally:
        scorers.close()
    # The file counts by its content, wherever it lies.
    moved = tmp_path / "moved.py"
    own.rename(moved)
    rewards = {
        name: {**r, "function": r["function"].replace("own", "moved")}
        for name, r in rewards.items()
    }
    assert pool.identity(rewards) == before
    moved.write_text("import no_such_package\n")
    assert pool.identity(rewards) != before
    with pytest.raises(ConfigError, match=r"rewards.own: .*moved.py:1: ModuleNotFoundError"):
        Pool(rewards, 1, 1.0)
    moved.write_text("def score(\n")
    with pytest.raises(ConfigError, match=r"moved.py:1: SyntaxError"):
        Pool(rewards, 1, 1.0)

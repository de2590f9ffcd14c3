"""Rewards: the kit's functions, and the user's in processes that hang, die and raise."""

import os
from pathlib import Path
from typing import Any

import pytest

from plugins.rl.rewards import builtin, pool
from plugins.rl.rewards.pool import Answer, Pool
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
    ],
)
def test_the_kits_own(
    name: str, arguments: dict[str, Any], completion: str, row: dict[str, Any], wanted: float | None
) -> None:
    assert builtin.made(name, arguments)(completion, row) == wanted


def test_faults_of_the_key(tmp_path: Path) -> None:
    found = pool.faults(
        {
            "a": {"function": "exact_mach"},
            "b": {"function": f"{tmp_path}/none.py:score"},
            "c": {"function": "regex", "patern": "x", "weight": "much"},
            "e": {},
            "f": {"function": "os.path:join", "column": "x"},
        }
    )
    assert [line.partition(": ")[0] for line in found] == [
        "rewards.a.function",
        "rewards.b.function",
        "rewards.c.weight",
        "rewards.c.patern",
        "rewards.e",
        "rewards.f.column",
    ]
    assert "did you mean exact_match" in found[0] and "did you mean pattern" in found[3]
    assert pool.faults({})[0].startswith("rewards: name at least one")


@pytest.mark.long
def test_one_that_hangs_dies_or_raises_costs_its_sample(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    rewards = {
        "own": {"function": f"{own}:score", "weight": 2.0},
        "length": {"function": f"{own}:inputs"},
    }
    identity = pool.identity(rewards)
    texts = ["yes", "no", "die", "skip", "raise", "yes"]
    answers = [Answer("what?", text, [7], {"answer": "yes"}) for text in texts]
    scorers = Pool(rewards, 2, 600.0)
    try:
        found = scorers.score(answers)
        weights = pool.weights_of(rewards)
        totals = [each.total(weights) for each in found]
        assert totals == [27, 25, None, 5, None, 27]
        assert scorers.messages.keys() == {("own", kind) for kind in ("died", "raised")}
        assert scorers.messages["own", "raised"] == f"{own}:12: ValueError: no such text"
        pids = [worker._process.pid for worker in scorers._workers]
    finally:
        scorers.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    # Nothing but an answer that hangs is given to a pool with a short limit.
    scorers = Pool({"own": rewards["own"]}, 1, 0.1)
    try:
        before = scorers._workers[0]._process.pid
        (hung,) = scorers.score([Answer("what?", "hang", [7], {"answer": "yes"})])
        assert hung.failed and scorers.messages == {("own", "timeout"): "took over 0.1 s"}
        assert not os.path.exists(f"/proc/{before}") and not scorers._workers[0]._process.poll()
    finally:
        scorers.close()
    # The file counts by its content, wherever it lies.
    moved = tmp_path / "moved.py"
    own.rename(moved)
    rewards = {
        name: {**r, "function": r["function"].replace("own", "moved")}
        for name, r in rewards.items()
    }
    assert pool.identity(rewards) == identity
    moved.write_text("import no_such_package\n")
    assert pool.identity(rewards) != identity
    with pytest.raises(ConfigError, match=r"rewards.own: .*moved.py:1: ModuleNotFoundError"):
        Pool(rewards, 1, 600.0)
    moved.write_text("def score(\n")
    with pytest.raises(ConfigError, match=r"moved.py:1: SyntaxError"):
        Pool(rewards, 1, 600.0)

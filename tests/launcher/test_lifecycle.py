"""The example of the whole way on the one-host Slurm: data, training, gates, serving, log, data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.kit import Kit, until

SCRIPT = Path(__file__).parents[2] / "examples" / "lifecycle" / "run.sh"


# It takes minutes; the parts have tests of their own.
@pytest.mark.named
def test_the_example_goes_from_data_to_a_champion_and_back(slurm_user: Kit):
    path = f"{Path(sys.executable).parent}:{slurm_user.env['PATH']}"
    env = {**slurm_user.env, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    for words in ("champion of support-intent is v1", "intent      classification", "latency"):
        assert words in done.stdout
    data = slurm_user.root / "datasets"
    answers = [json.loads(line) for line in (data / "help-desk/answers.jsonl").open()]
    assert len(answers) == 20 and all(each["answer"] for each in answers)
    logged = (data / "requests-support-intent" / "messages.jsonl").read_text().splitlines()
    assert len(logged) == 21, "each request is logged once"
    key = slurm_user.root / "endpoints" / "support-intent" / "key"
    assert key.stat().st_mode & 0o077 == 0
    for file in (slurm_user.root / "runs").rglob("*"):
        if file.is_file() and file.stat().st_size < 10**6:
            assert key.read_bytes().strip() not in file.read_bytes(), file
    listed = json.loads(slurm_user.cookbook("serve", "--list", "--json").stdout)
    assert listed[0]["url"] is None, "the example ends what it has started"


def engine_of(run: str) -> list[int]:
    """The process ids of the engines of a run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text(errors="replace")
            environ = (process / "environ").read_text(errors="replace")
        except OSError:
            continue
        if "serving.transformers_engine" in command and f"/{run}\0" in environ:
            found.append(int(process.name))
    return found


@pytest.mark.long
def test_a_successor_and_a_killed_engine_fail_no_request(kit: Kit, tmp_path):
    model = tmp_path / "model"
    data = Path("configs/datasets/slurm_qa.jsonl").absolute()
    argv = [sys.executable, "-m", "trainer.demo", str(model), "--dataset", str(data)]
    subprocess.run(argv, check=True, capture_output=True)
    started = kit.cookbook("serve", str(model), "--name", "takeover", "--json")
    assert started.returncode == 0, started.stderr
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"job {k}"}) + "\n" for k in range(60)))
    argv = [sys.executable, "-m", "launcher", "query", "takeover", f"--input={questions}"]
    argv += [f"--output={answers}", "--max-tokens=16", "--in-flight=4"]
    try:
        asking = subprocess.Popen(argv, env=kit.env, stderr=subprocess.PIPE, text=True)
        until(lambda: answers.exists() and answers.stat().st_size > 0, 60)
        replaced = kit.cookbook("serve", str(model), "--name", "takeover", "--replace")
        assert replaced.returncode == 0, replaced.stderr
        _, words = asking.communicate(timeout=300)
        assert asking.returncode == 0 and "0 failed" in words, words
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        assert [row["line"] for row in rows] == list(range(1, 61))
        (listed,) = json.loads(kit.cookbook("serve", "--list", "--json").stdout)
        (run,) = listed["runs"]
        (engine,) = engine_of(run)
        os.kill(engine, 9)
        again = kit.cookbook("query", "takeover", "job 1", "--max-tokens", "4", "--json")
        assert again.returncode == 0, again.stderr
    finally:
        kit.cookbook("serve", "--stop", "takeover")

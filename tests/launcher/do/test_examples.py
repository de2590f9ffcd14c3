"""The examples as a user types them, without Slurm and on the one-host Slurm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths
from tests.launcher.kit import Kit


# Each takes minutes; the parts have tests of their own.
@pytest.mark.named
def test_eight_methods_learn_one_task_and_are_compared_in_one_table(user: Kit):
    printed = ended(user, "strategies")
    lines = printed[printed.index("\nMETHOD") :].strip().splitlines()
    heads = [lines[0].index(word) for word in ("ACCURACY", "95 %", "STORED")]
    assert [line[: heads[0]].strip() for line in lines[1:]] == [
        *("base", "SFT before DPO", "teacher"),
        *("full", "LoRA", "QLoRA", "prefix", "prompt", "(IA)3", "DPO after SFT", "distillation"),
    ]
    accuracy = {line[: heads[0]].strip(): float(line[heads[0] : heads[1]]) for line in lines[1:]}
    stored = {
        line[: heads[0]].strip(): int(line[heads[2] :].replace(",", "")) for line in lines[4:]
    }
    assert accuracy["base"] < 0.4 and accuracy["teacher"] > 0.95, accuracy
    for method in ("full", "LoRA", "QLoRA", "distillation"):
        assert accuracy[method] > 0.9, accuracy
    for method in ("prefix", "prompt", "(IA)3"):
        assert accuracy[method] > accuracy["base"] + 0.1, accuracy
        assert stored[method] < stored["LoRA"] / 10, stored
    assert accuracy["DPO after SFT"] > accuracy["base"] + 0.1, accuracy
    assert stored["LoRA"] < stored["full"] / 5


@pytest.mark.named
def test_compared_answers_become_a_served_model(user: Kit):
    printed = ended(user, "preference")
    assert "champion of answers is v1" in printed
    (result,) = (
        json.loads(path.read_text())
        for path in (user.root / "runs").glob("*answers-dpo*/evals/*.json")
    )
    pairs = result["tasks"]["pairs"]["metrics"]["accuracy"]["all"]
    assert pairs["samples"] == 36
    assert pairs["against"]["value"] < 0.1 and pairs["candidate"]["value"] > 0.9, pairs
    listed = json.loads(user.cookbook("serve", "--list", "--json").stdout)
    assert listed[0]["url"] is None, "the example ends what it has started"


@pytest.mark.named
def test_support_messages_become_a_served_model_and_data_again(slurm_user: Kit):
    """As a user types it, with all steps; README.md of the example has their times."""
    pytest.importorskip("pyspark")
    printed = ended(slurm_user, "support_intents", local=False)
    # tests/plugins has each step's rules.
    assert "\nMETHOD" in printed and "is not promoted to staging: gate" in printed
    registry = json.loads(slurm_user.cookbook("registry", "support", "--json").stdout)
    aliases = {each["version"]: set(each["aliases"]) for each in registry["versions"]}
    assert aliases == {1: set(), 2: {"staging", "champion"}, 3: {"candidate"}}
    again = slurm_user.root / "datasets/prepared/requests-support/current/card.json"
    assert json.loads(again.read_text())["rows"] > 150


def ended(user: Kit, name: str, local: bool = True) -> str:
    """Run an example to its end, and return what it printed."""
    path = f"{Path(sys.executable).parent}:{user.env['PATH']}"
    script = paths.REPO_ROOT / "examples" / name / "run.sh"
    done = subprocess.run(
        ["bash", str(script), *(["--local"] if local else [])],
        env={**user.env, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2400,
    )
    # Times and tables, for the examples' READMEs.
    (user.root / f"{name}.log").write_text(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout

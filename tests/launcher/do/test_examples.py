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
    assert "METHOD" in printed, "the strategies' table"
    whole_way(slurm_user, printed)


def whole_way(user: Kit, printed: str) -> None:
    """Assert the results of all steps but the strategies; tests/plugins has each step's rules."""
    data = user.root / "datasets"
    planted = json.loads((data / "raw/support-truth.json").read_text())
    assert sum(planted.values()) == 500_000
    support, spark = (data / "prepared" / name / "current" for name in ("support", "support-spark"))
    card = json.loads((support / "card.json").read_text())
    assert card["rows"] == 4800
    shares = [split["rows"] / card["rows"] for split in card["splits"].values()]
    assert shares == pytest.approx([0.1, 0.8, 0.1], abs=0.01)
    lineage = [json.loads((each / "lineage.json").read_text()) for each in (support, spark)]
    assert len({each["content_sha256"] for each in lineage}) == 1, "both engines, the same rows"
    assert lineage[0]["bad_rows"] == planted["broken"]
    deltalake = pytest.importorskip("deltalake")
    table = deltalake.DeltaTable(str(data / "support-table"))
    assert table.to_pyarrow_dataset().count_rows() == 4800

    results = {}
    for path in sorted((user.root / "runs").glob("*support-*/evals/*.json")):
        result = json.loads(path.read_text())
        run = path.parents[1].name.split("-support-")[1].rpartition("-")[0]
        tasks = {name: task["metrics"] for name, task in result["tasks"].items()}
        results[run] = [
            tasks["intent"]["classification"]["all"]["candidate"]["value"],
            tasks["likelihood"]["perplexity"]["all"]["candidate"]["value"],
        ]
    assert results["base"][0] < 0.2 < 0.9 < min(results["qlora"][0], results["lora"][0]), results
    assert max(results["qlora"][1], results["lora"][1]) < 1.5 < results["base"][1], results
    for name in ("qlora", "lora"):
        (run,) = (user.root / "runs").glob(f"*-support-{name}-*")
        progress = json.loads((run / "progress.json").read_text())
        assert progress["best_step"] and progress["best_val_loss"] < 0.4

    registry = json.loads(user.cookbook("registry", "support", "--json").stdout)
    aliases = {each["version"]: set(each["aliases"]) for each in registry["versions"]}
    assert aliases == {1: set(), 2: {"staging", "champion"}, 3: {"candidate"}}
    tags = {each["version"]: each["tags"] for each in registry["versions"]}
    for version, name in enumerate(("base", "qlora", "lora"), start=1):
        assert f"-support-{name}-" in tags[version]["run"]
    assert "is not promoted to staging: gate" in printed, "the base fails the gates"

    assert "requests     200 (200: 200)" in printed
    lines = (data / "requests-support" / "requests.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert len(logged) == 200 and sum(bool(row["label"]) for row in logged) > 150
    again = json.loads((data / "prepared/requests-support/current/card.json").read_text())
    assert again["rows"] > 150
    listed = json.loads(user.cookbook("serve", "--list", "--json").stdout)
    assert listed[0]["url"] is None, "the example ends what it has started"


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

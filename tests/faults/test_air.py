"""The workload of Databricks' guide, as a recipe, on the one-host Slurm; examples/air_fsdp.

    python -m pytest -n 0 -m named tests/faults/test_air.py

Its 16 GPUs are 2 nodes with 8; two cores hold 2 nodes with 2 ranks, by an option of the command.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from launcher import paths
from tests.faults.kit import attempts
from tests.launcher.kit import Kit, ranks_of, report, until

WORKLOAD = paths.REPO_ROOT / "examples" / "air_fsdp" / "train.yaml"
TOKEN = "hf_secret_of_the_workload"


STEPS = 40


@pytest.mark.named
def test_the_workload_of_the_guide_runs(user, tmp_path):
    secret = tmp_path / ".config/slurm-cookbook/secrets/my_scope/hf_token"
    secret.parent.mkdir(parents=True)
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    user = Kit({**user.env, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}, user.root)
    questions = paths.REPO_ROOT / "configs/datasets/slurm_qa.jsonl"
    made = [sys.executable, "-m", "trainer.demo", tmp_path / "model", "--dataset", questions]
    subprocess.run(made, check=True, cwd=paths.REPO_ROOT)
    data = tmp_path / "alpaca" / "train.jsonl"
    data.parent.mkdir()
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    alpaca = ({"instruction": r["question"], "input": "", "output": r["answer"]} for r in rows)
    data.write_text("".join(json.dumps(row) + "\n" for row in alpaca))
    # The guide's `air run -f train.yaml --dry-run`.
    dry = user.cookbook("submit", str(WORKLOAD), "--dry-run", "~environment")
    assert dry.returncode == 0, dry.stderr
    for words in ("--nodes=2", "--gpus-per-node=8", "MAX_RETRIES=1", "--time=120"):
        assert words in dry.stdout
    output, store = tmp_path / "out", tmp_path / "mlflow.db"
    tiny = {"model_name": tmp_path / "model", "dataset_name": data.parent, "output_dir": output}
    tiny |= {"max_steps": STEPS, "max_seq_len": 64, "learning_rate": 1e-3}
    _, run = user.submit(
        str(WORKLOAD),
        "--gpus-per-node=2",
        # The kit's own environment has all of its dependencies.
        "~environment",
        *(f"parameters.{name}={value}" for name, value in tiny.items()),
        f"tracking=sqlite:///{store}",
    )
    assert (run / "code/train.py").is_file() and not (run / "code").is_symlink(), "the snapshot"
    until(lambda: list(output.glob("step_*/.metadata")), 150, lambda: report(run))
    os.kill(ranks_of(run, "train.py")[1], signal.SIGKILL)
    state = user.wait(run, "COMPLETED", "FAILED", "CANCELLED", timeout=200)
    assert state["state"] == "COMPLETED", report(run)
    assert len(attempts(run)) == 2 and attempts(run)[0]["cause"] == "killed", attempts(run)
    for words, expected in (
        (["watch", run.name], "COMPLETED"),
        (["logs", run.name, "--node", "0"], f"step={STEPS}/{STEPS}"),
        (["logs", run.name, "--node", "1"], ""),
        (["logs", run.name, "--node", "all"], "n2"),
        (["status", run.name], "finished"),
    ):
        done = user.cookbook(*words)
        assert done.returncode == 0 and expected in done.stdout, (words, done.stdout, done.stderr)
    first, second = ((run / f"logs/{n}/rank_0.log").read_text() for n in (0, 1))
    assert "token: given" in first and "step=1/" in first
    assert "step=1/" not in second, "the retry continues from the script's own checkpoint"
    kept = [path for path in run.rglob("*") if path.is_file()]
    assert not any(TOKEN in path.read_text(errors="replace") for path in kept), "no secret is kept"
    with sqlite3.connect(store) as database:
        (experiments,) = database.execute(
            "SELECT count(*) FROM experiments WHERE name = 'air-multinode-llama-sft'"
        ).fetchone()
        (runs,) = database.execute("SELECT count(*) FROM runs").fetchone()
        asked = "SELECT max(step), count(DISTINCT step) FROM metrics WHERE key = 'train_loss'"
        steps = database.execute(asked).fetchone()
        asked = "SELECT value FROM params WHERE key = 'world_size'"
        (ranks,) = database.execute(asked).fetchone()
    assert experiments == runs == 1, "a retry continues the same MLflow run"
    assert steps == (STEPS, STEPS) and ranks == "4"
    assert not (run / "code/mlruns").exists(), "artifacts lie beside the store"
    # Imported late: dry runs need no torch.
    from transformers import AutoModelForCausalLM

    model, facts = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not facts["missing_keys"] and model.config.model_type == "llama"

"""transformers' Trainer behind a stand-in of TRL's script: a hang on the one-host Slurm."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from runspec import files
from tests.faults.kit import attempts
from tests.launcher.kit import Kit, ranks_of, report, until

STANDINS = Path(__file__).parent / "standins"


def standin(place: Path) -> Path:
    """A virtual environment in which a stand-in has the name of TRL."""
    venv = place / "standin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (own,) = Path(sys.prefix).glob("lib/python*/site-packages")
    (packages / "kit.pth").write_text(f"{own}\n{STANDINS}\n")
    # As if it were installed: else the engine's own packages would be built.
    (packages / "trl-1.16.0.dist-info").mkdir()
    return venv


@pytest.mark.long
def test_a_stopped_rank_of_transformers_trainer_is_found_and_every_command_works(user, tmp_path):
    """The wrapper around transformers' own Trainer; TRL's script alone is a stand-in."""
    place = tmp_path
    user = Kit({**user.env, "COOKBOOK_VENV": str(standin(place))}, user.root)
    steps = {"max_steps": 24, "save_steps": 8, "logging_steps": 1, "learning_rate": 1e-3}
    steps |= {"report_to": "none", "use_cpu": True, "bf16": False}
    recipe = {
        "entry": "trl:sft",
        "resources": {"nodes": 2, "gpus_per_node": 1, "cpus_per_gpu": 1, "time": "20"},
        "parameters": {"model_name_or_path": "m", "dataset_name": "d", **steps},
        "hang_timeout_s": 3,
        "env": {"HURRY": str(place / "hurry")},
    }
    (place / "hang.yaml").write_text(yaml.safe_dump(recipe))
    _, run = user.submit(str(place / "hang.yaml"))
    until(lambda: files.checkpoint_steps(run), 300, lambda: report(run))
    os.kill(ranks_of(run, "hf_trainer")[1], signal.SIGSTOP)
    (place / "hurry").touch()
    told = user.wait(run, "COMPLETED", "FAILED", "CANCELLED", timeout=300)
    assert told["state"] == "COMPLETED", report(run)
    first, last = attempts(run)
    assert first["cause"] == "hang" and "does not answer" in first["message"], first
    assert first["checkpoint_step"] % 8 == 0 and last["cause"] == "finished"
    assert told["step"] == told["total_steps"] == 24 and told["tokens_per_second_per_gpu"] > 0
    assert [row["step"] for row in files.read_json_lines(run / files.METRICS)] == [*range(1, 25)]
    assert (run / files.EXPORT / "model.safetensors").is_file()
    for words, expected in (
        (["status", run.name], "tokens/s per GPU"),
        (["logs", run.name], "step 24/24  epoch"),
        (["results", run.name], "COMPLETED  24"),
        (["report", run.name, "--output", str(place / "r.html")], "r.html"),
        (["track", run.name], "imported: "),
    ):
        done = user.cookbook(*words)
        assert done.returncode == 0 and expected in done.stdout, (words, done.stdout, done.stderr)
    assert "Tokens per second per GPU" in (place / "r.html").read_text()

"""The example of the whole way on the one-host Slurm: data, training, gates, serving, log, data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.kit import Kit, checkpoints, report, until

SCRIPT = Path(__file__).parents[3] / "examples" / "lifecycle" / "run.sh"


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
    logged = (data / "requests-support-intent" / "requests.jsonl").read_text().splitlines()
    assert len(logged) == 21, "each request is logged once"
    key = slurm_user.root / "endpoints" / "support-intent" / "key"
    assert key.stat().st_mode & 0o077 == 0
    for file in (slurm_user.root / "runs").rglob("*"):
        if file.is_file() and file.stat().st_size < 10**6:
            assert key.read_bytes().strip() not in file.read_bytes(), file
    listed = json.loads(slurm_user.cookbook("serve", "--list", "--json").stdout)
    assert listed[0]["url"] is None, "the example ends what it has started"


# MLflow's client, whose import takes seconds, loads the model as anybody's program would.
LOAD = """
import sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
pipeline = mlflow.transformers.load_model("models:/tiny@champion")
print("answered", pipeline("What is Slurm?", max_new_tokens=3)[0]["generated_text"])
"""


@pytest.mark.named
def test_a_registered_model_is_trained_evaluated_and_loaded_by_its_alias(user: Kit, tmp_path: Path):
    model, rows = tmp_path / "model", SCRIPT.parents[2] / "configs" / "datasets" / "slurm_qa.jsonl"
    argv = [sys.executable, "-m", "trainer.demo", str(model), "--dataset", str(rows)]
    subprocess.run(argv, check=True, capture_output=True)
    data, gates = tmp_path / "data.jsonl", tmp_path / "gates.yaml"
    chats = [json.loads(line) for line in rows.read_text().splitlines()[:32]]
    turns = (
        [{"role": "user", "content": x["question"]}, {"role": "assistant", "content": x["answer"]}]
        for x in chats
    )
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    gates.write_text("gates: [{size_gib_at_most: 1}]\n")

    def done(*words: str) -> str:
        found = user.cookbook(*words, timeout=600)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    done("register", str(model), "--as", "tiny")
    done("promote", "tiny", "--to", "champion", "--gates", str(gates))
    champion = "models:/tiny@champion"
    recipe = [str(SCRIPT.with_name("intent.yaml")), f"checkpointer.checkpoint_dir={champion}"]
    recipe += [f"dataset.data_files={data}", "epochs=1"]
    done("check", *recipe, "--local")
    done("estimate", *recipe)
    done("submit", *recipe, "--name", "tuned", "--local", "--watch")
    (run,) = user.runs()
    assert f"checkpoint_dir: {model}" in (run / "recipe.yaml").read_text()
    few = ["--suite=slurm_qa", "tasks.likelihood.limit=4", "tasks.answers.limit=4", "--local"]
    done("eval", champion, "--against", "tuned", "--watch", *few)
    assert "tiny v1 against" in done("eval", champion, "--results")
    rates = tmp_path / "rates.yaml"
    cells = "list: [{name: a, set: {optimizer.lr: 1.0e-3}}, {name: b, set: {optimizer.lr: 0.002}}]"
    rates.write_text(f"description: two rates\nrecipe: {recipe[0]}\nparallel: 1\n{cells}\n")
    done("sweep", str(rates), *recipe[1:], "max_steps=2", "--local")
    swept = [run for run in user.runs() if "rates" in run.name or (run / "export").is_dir()]
    assert len(swept) >= 3, "each cell has trained and exported"
    _, stopped = user.submit(*recipe, "--local", "epochs=200", "save_every_n_steps=2")
    until(lambda: checkpoints(stopped), 120, lambda: report(stopped))
    done("cancel", stopped.name)
    # A run exports merged weights, which can be registered and trained on.
    done("register", "tuned", "--as", "tiny")
    done("promote", "tiny", "--to", "champion", "--gates", str(gates))
    done("resume", stopped.name, "--local", "max_steps=8")
    user.wait(stopped, "COMPLETED")
    assert f"checkpoint_dir: {model}" in (stopped / "recipe.yaml").read_text()
    store = f"sqlite:///{user.root / 'tracking' / 'mlflow.db'}"
    argv = [sys.executable, "-c", LOAD, store]
    loaded = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=user.env)
    assert "answered What is Slurm?" in loaded.stdout, loaded.stderr[-2000:]

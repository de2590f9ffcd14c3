"""What a user may type wrong: one clear line each, the right exit status, nothing left behind."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher import check as checks
from launcher import paths
from launcher.check import scheduler
from launcher.cli import cookbook
from launcher.recipe import load as recipes
from launcher.site import Site
from launcher.slurm import render
from tests.launcher.kit import Kit


def refused(kit: Kit, *arguments: str, status: int, told: str, faults: int = 1) -> None:
    done = kit.cookbook(*arguments)
    assert done.returncode == status, done.stdout + done.stderr
    assert told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.lower().startswith("error")]
    assert len(lines) == faults, done.stderr
    assert kit.runs() == []


# Faults of recipes have a table in test_recipe.py, those of the checks in test_check.py.
GRPO = "submit demo_grpo rollout_engine=vllm"


@pytest.mark.parametrize(
    ("typed", "status", "told"),
    [
        ("submitt", 2, "did you mean submit?"),
        ("submit", 2, "The recipe is missing. Give it as the first argument"),
        ("submit demo output_dir=/tmp", 2, "each run has its own directory in"),
        ("submit llama8b_to_1b_distill on_policy_share=0.5", 2, "only entry: distill_on_policy"),
        ("submit demo resources.rollout=2", 2, "this entry generates no answers; leave it out"),
        (
            "submit demo_grpo max_staleness=1 importance_cap=2",
            2,
            "max_staleness: only rollout nodes sample ahead of the trainer; set",
        ),
        (
            "submit demo_grpo rollout_gpus=2",
            2,
            "rollout_gpus: only for vLLM; set rollout_engine=vllm",
        ),
        (GRPO, 2, "rollout_engine: vLLM generates on nodes of its own; set resources.rollout=1"),
        ("submit --recipe demo --node 2", 2, "No such option"),
        ("submit demo --nodes two", 2, "'two' is not a valid integer range"),
        ("submit demo --time '1:00\n#SBATCH --uid=0'", 2, "a limit such as"),
        ("submit demo --partition=-x", 2, "must be one word"),
        ('submit demo --qos "it\'s"', 2, "resources.qos must be"),
        ("submit demo --name 'a\nb'", 2, "choose another --name"),
        ("submit demo --name ../../evil", 2, "choose another --name"),
        ("submit demo --name -rf", 2, "choose another --name"),
        ("submit demo --name %x", 2, "choose another --name"),
        ("submit demo --cluster nowhere", 2, "there is no cluster file"),
        ("submit demo --local tensor_parallel_dim=3", 1, "does not divide 2 x 1 = 2 ranks"),
        (
            "submit demo --local dataset_val.data_files=/no/such.jsonl",
            1,
            "dataset_val.data_files /no/such.jsonl does not exist",
        ),
        (f"submit demo --local +tokenizer.key=hf_{'a' * 30}", 1, "contains a Hugging Face token"),
        ("status nothing", 2, "list them with: cookbook status"),
        ("logs last", 2, "there is no run"),
        ("cancel 17", 2, "matches '17'"),
        ("watch ../..", 2, "matches '../..'"),
        (
            "eval last --results --data mine.csv --nodes 2",
            2,
            "--results starts nothing and shows the newest result: leave --data, --nodes out",
        ),
        ("recipes llama9b", 2, "there is no recipe"),
        ("download demo hub.modle=a/b", 2, "did you mean hub.model?"),
        ("download llama8b_lora hub.model=llama", 2, "a Hub repository such as"),
    ],
)
def test_a_fault_is_one_line(user: Kit, typed, status, told):
    refused(user, *shlex.split(typed), status=status, told=told)


@pytest.mark.long
def test_a_model_folder_that_cannot_be_read_is_named_with_all_else(user: Kit):
    done = user.cookbook(
        "submit", "--recipe", "llama8b_lora", "--local", "+dataset.source=/no/data"
    )
    assert done.returncode == 1
    faults = [line.partition(" ")[2].split()[0] for line in done.stderr.splitlines()]
    assert faults[:3] == ["checkpointer.checkpoint_dir", "tokenizer.path", "dataset.source"]
    assert user.runs() == []


def test_a_missing_virtual_environment_is_found_before_the_queue(user: Kit):
    lost = Kit({**user.env, "COOKBOOK_VENV": "/nonexist"}, user.root)
    for command in (["submit", "--local", "--no-check"], ["check", "--local"]):
        done = lost.cookbook(*command, "--recipe", "demo")
        assert done.returncode == 1 and user.runs() == []
        told = "there is no /nonexist/bin/python, which COOKBOOK_VENV names"
        assert told in done.stdout + done.stderr and "bash setup.sh" in done.stdout + done.stderr


def test_broken_yaml_names_line_and_column(user: Kit, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("model:\n  rank: [1, 2\nseed: 3\n")
    refused(user, "submit", "--recipe", str(mine), status=2, told=f"{mine}, line 3, column")


def test_no_slurm_at_all_and_no_cluster_configured(user: Kit, tmp_path):
    told = 'configuration source"): run this on a login node, or start the job here with --local'
    refused(user, "submit", "--recipe", "demo", status=1, told=told)
    bare = Kit({**user.env, "PATH": str(tmp_path)}, user.root)
    refused(bare, "submit", "--recipe", "demo", status=1, told="there is no sinfo on this machine")


def test_what_slurm_refuses_leaves_nothing_behind(slurm_user: Kit, shared: Path):
    kit = Kit({**slurm_user.env, "COOKBOOK_ROOT": str(shared)}, slurm_user.root)
    before = sorted(shared.glob("runs/*"))
    # What the kit found, and then what Slurm itself says of the very script.
    told = "3 nodes are asked for, and partition gpu has 2"
    refused(slurm_user, "submit", "demo", "--nodes", "3", status=1, told=told, faults=2)
    done = kit.cookbook("submit", "--recipe", "demo", "--gpus-per-node", "9", "--no-check")
    assert done.returncode == 1 and "Requested node configuration is not available" in done.stderr
    assert sorted(shared.glob("runs/*")) == before


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"partition": "gpus"}, "no partition 'gpus' on this cluster (did you mean gpu?)"),
        ({"nodes": 3, "partition": "debug,gpu"}, "partition debug has 2: the job"),
        ({"partition": "debug", "time": "1:00:00"}, "debug has 30:00: lower --time"),
        ({"gpu_type": "h10"}, "GPUs of type 'h10' (did you mean h100?): it has h100"),
        ({"cpus_per_gpu": 400}, "400 CPUs per node are asked for, and the nodes of"),
        ({"mem": "9T"}, "9437184 MiB of memory per node are asked for"),
        ({"gpus_per_node": 9}, "9 GPUs per node are asked for, and the nodes of"),
    ],
)
def test_what_no_node_has_is_named(slurm, monkeypatch, asked, told):
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    loaded = recipes.load("demo", [], {"nodes": 2, "gpus_per_node": 1, **asked})
    found = checks.findings("Slurm limits", scheduler.limits, checks.Context(loaded, Site()))
    assert told in found[0].line and found[0].state == "failed"


def test_an_unusable_shared_folder_is_one_line(user: Kit, tmp_path):
    blank = Kit({**user.env, "COOKBOOK_ROOT": str(tmp_path / "a b")}, user.root)
    refused(blank, "status", status=2, told="which a job script cannot carry safely")
    long = Kit({**user.env, "COOKBOOK_ROOT": f"/tmp/{'x' * 300}"}, user.root)
    refused(long, "status", status=2, told="has 305 characters: set COOKBOOK_ROOT to one of 2000")
    (tmp_path / "file").touch()
    taken = Kit({**user.env, "COOKBOOK_ROOT": str(tmp_path / "file")}, user.root)
    done = taken.cookbook("submit", "--recipe", "demo", "--local")
    assert done.returncode == 1 and done.stderr.count("error:") == 1, done.stderr


def test_dry_run_prints_the_script_and_writes_nothing(user: Kit):
    done = user.cookbook("submit", "--recipe", "llama70b_lora", "--nodes", "2", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n") and "#SBATCH --nodes=2\n" in done.stdout
    assert "submit would refuse this" in done.stderr
    assert not user.root.exists()


def test_data_that_are_no_json_or_lack_a_column_are_named(user: Kit, tmp_path):
    data = tmp_path / "data.jsonl"
    submit = ["submit", "--recipe", "demo", "--local", f"dataset.data_files={data}"]
    for text, told in (
        ("question,answer\n", "cannot be used: line 1 is not JSON"),
        ('{"question": "a", "reply": "b"}\n', "no column 'answer' of column_map, only question"),
        ("", "is empty"),
    ):
        data.write_text(text)
        refused(user, *submit, status=1, told=told)


def test_the_scheduler_accepts_every_recipes_script(slurm, tmp_path):
    """One script of all that ask for the same."""
    asked = {}
    for name in recipes.names():
        loaded = recipes.load(name, resources={"nodes": 2})
        text = render.job_script(loaded, Site(), tmp_path / "runs" / "r", "same")
        asked[tuple(line for line in text.splitlines() if line.startswith("#SBATCH"))] = text
    script = tmp_path / "job.sbatch"
    for text in asked.values():
        script.write_text(text)
        answer = slurm.run(["sbatch", "--test-only", str(script)])
        assert answer.returncode == 0, answer.stderr


def test_recipes_lists_and_shows(user: Kit):
    listed = user.cookbook("recipes").stdout
    assert "llama70b_lora" in listed and "2 x 8" in listed
    assert "64.3 GiB  Llama 3.3 70B Instruct, full" in listed
    shown = user.cookbook("recipes", "llama70b_lora").stdout
    assert "data_parallel_replicate_dim: 2" in shown and "${" not in shown


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        ("--help", {"click"}),
        ("submit llama70b_lora --dry-run", {"click", "jinja2", "markupsafe", "yaml"}),
        ("status", {"click", "jinja2", "markupsafe", "yaml"}),
        ("doctor a=b", {"click", "jinja2", "markupsafe", "yaml"}),
    ],
)
def test_the_command_imports_little(user: Kit, typed, allowed):
    program = (
        "import sys\nbefore = set(sys.modules)\nfrom launcher.cli import main\n"
        "sys.argv = ['cookbook', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "outside = {n.partition('.')[0] for n in set(sys.modules) - before}\n"
        "print(sorted(outside - set(sys.stdlib_module_names)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *typed.split()],
        env=user.env,
        capture_output=True,
        text=True,
        cwd=paths.REPO_ROOT,
    )
    imported = set(json.loads(done.stderr.splitlines()[-1].replace("'", '"')))
    compiled = {name for name in imported if "cython" in name or name == "_yaml"}  # of PyYAML
    assert imported - compiled <= {*allowed, "launcher", "runspec", "plugins"}


def test_cpus_per_gpu_are_the_gpus_share_of_the_smallest_node_that_has_them(slurm_user: Kit, slurm):
    def cpus(*options: str) -> list[str]:
        done = slurm_user.cookbook("submit", "llama1b_lora", "--dry-run", *options)
        lines = done.stdout.splitlines()
        asked = (line for line in lines if line.startswith("#SBATCH --cpus-per-task"))
        return [line.rpartition("=")[2] for line in asked]

    listed = slurm.run(["sinfo", "--noheader", "--format=%R|%G|%c"]).stdout.split()
    nodes = [line.split("|") for line in listed]
    each = min(int(count) // 8 for name, gres, count in nodes if name == "gpu" and ":8" in gres)
    assert each > 0
    for gpus in (1, 8):
        asked = ["--partition", "gpu", "--gpus-per-node", str(gpus)]
        assert cpus(*asked) == [str(each * gpus)]
    assert cpus("--partition", "gpu", "resources.cpus_per_gpu=3") == ["3"]
    assert cpus("--partition", "gpu", "--local") == []
    assert cpus("--partition", "gpu", "--gpus-per-node", "9") == []


@pytest.mark.parametrize("command", ["submit", "check", "estimate", "download"])
def test_a_recipe_is_the_first_argument_or_an_option(command: str):
    runner = CliRunner()
    for typed in ("dmeo seed=1", "--recipe dmeo seed=1", "seed=1 --recipe=dmeo"):
        fault = runner.invoke(cookbook, [command, *typed.split()]).exception
        assert "there is no recipe 'dmeo' (did you mean demo?)" in str(fault)
    for typed in ("", "seed=1", "~seed", "demo --recipe demo"):
        done = runner.invoke(cookbook, [command, *typed.split()])
        assert done.exit_code == 2 and "The recipe is" in done.output


def test_a_note_names_keys_that_are_not_used(user: Kit):
    for command in (["submit", "--dry-run"], ["check"]):
        done = user.cookbook(*command, "--local", "--recipe", "demo", "optimizer_in_bwd=true")
        first = "note: keys that are not used: optimizer_in_bwd (the optimizer steps after the"
        assert done.stderr.startswith(first)

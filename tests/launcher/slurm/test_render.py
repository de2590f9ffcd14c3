"""The rendered job script: whole texts, hostile values, shellcheck."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import paths
from launcher.errors import RecipeFault, RunFault
from launcher.recipe import load as recipes
from launcher.site import Site
from launcher.slurm import render

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/shared/runs/20260102-030405-RECIPE-0a1b")


@pytest.fixture
def fixed(monkeypatch):
    """The same places on every machine."""
    monkeypatch.setattr(paths, "REPO_ROOT", Path("/shared/cookbook"))
    monkeypatch.setenv("COOKBOOK_VENV", "/shared/cookbook/.venv")
    monkeypatch.setenv("COOKBOOK_ROOT", "/shared")


def script(name: str, cluster: Site, *overrides: str) -> str:
    run = RUN.with_name(RUN.name.replace("RECIPE", name))
    return render.job_script(recipes.load(name, overrides), cluster, run, name)


SITE = Site(
    name="site",
    gpu_request="gres",
    network_interface="ib0",
    signal_lead_s=120,
    job_setup=("module load cuda/12.8",),
    environment={"NCCL_IB_HCA": "mlx5", "GREETING": 'it\'s $(id) "here"'},
    resources={
        "partition": "gpu,long",
        "account": "team",
        "qos": "high",
        "constraint": "h100&ib",
        "mem": 0,
        "gpu_type": "h100",
        "exclude": "n[3-4]",
        "reservation": "course",
        "time": "10:00:00",
    },
)


@pytest.mark.parametrize(
    ("golden", "name", "cluster", "overrides"),
    [
        ("llama70b_lora.sbatch", "llama70b_lora", Site(), []),
        ("demo_on_a_site.sbatch", "demo", SITE, ["~resources.time", "resources.exclusive=true"]),
    ],
)
def test_the_whole_text(fixed, golden, name, cluster, overrides):
    wanted = GOLDEN / golden
    rendered = script(name, cluster, *overrides)
    assert wanted.is_file(), f"no {wanted}: write it from what is rendered, and read it\n{rendered}"
    assert rendered == wanted.read_text()


@pytest.mark.long
@pytest.mark.parametrize("cluster", [Site(), SITE], ids=["plain", "site"])
def test_shellcheck_finds_nothing(cluster, tmp_path):
    # Most recipes differ in their name, in numbers and in comments, the options of sbatch.
    rendered = {name: script(name, cluster) for name in recipes.names()}
    by_code = {
        re.sub(r"^#.*\n|\d+", "", text.replace(name, ""), flags=re.MULTILINE): text
        for name, text in rendered.items()
    }
    scripts = [tmp_path / f"{number}.sbatch" for number in range(len(by_code))]
    for path, text in zip(scripts, by_code.values(), strict=True):
        path.write_text(text)
    shellcheck = Path(sys.prefix) / "bin" / "shellcheck"
    argv = [shellcheck, "--external-sources", *scripts]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_sites_values_yield_to_the_recipes(fixed):
    mail = ("resources.mail_user=me@example.org", "resources.mail_type=END,FAIL")
    rendered = script("llama70b_lora", SITE, "resources.partition=mine", *mail)
    assert "#SBATCH --mail-user=me@example.org\n#SBATCH --mail-type=END,FAIL\n" in rendered
    assert "#SBATCH --partition=mine\n" in rendered
    assert "#SBATCH --time=24:00:00\n" in rendered
    assert "#SBATCH --account=team\n" in rendered
    assert "#SBATCH --signal=B:USR1@120\n" in rendered


@pytest.mark.parametrize(("limit", "lead"), [("00:04:00", 60), ("24:00:00", 300), ("1", 15)])
def test_the_warning_leaves_a_short_job_most_of_its_time(fixed, limit, lead):
    rendered = script("demo", Site(), f"resources.time='{limit}'")
    assert f"#SBATCH --signal=B:USR1@{lead}\n" in rendered


def test_what_a_site_wants_left_out_is_left_out(fixed):
    rendered = script(
        "demo", Site(gpu_request="none"), "~resources.cpus_per_gpu", "~resources.time"
    )
    for option in [
        "gpus",
        "gres",
        "cpus-per-task",
        "mem",
        "time",
        "partition",
        "account",
        "qos",
        "exclusive",
    ]:
        assert f"#SBATCH --{option}" not in rendered


@pytest.mark.parametrize("value", ["a b", "x\n#SBATCH --uid=0", "$(id)", "a;b", "'", '"', "é", ""])
def test_no_directive_takes_a_hostile_value(fixed, value):
    loaded = recipes.load("demo")
    hostile = replace(loaded, resources=replace(loaded.resources, account=value or "\t"))
    with pytest.raises(RecipeFault, match="cannot be used in an #SBATCH line"):
        render.job_script(hostile, Site(), RUN, "demo")


def test_values_in_the_body_are_quoted(fixed, tmp_path):
    body = script("demo", SITE).partition("\n# A network")[0]
    (tmp_path / "body.sh").write_text(body + 'printf "%s" "$GREETING"\n')
    said = subprocess.run(["bash", str(tmp_path / "body.sh")], capture_output=True, text=True)
    assert said.stdout == SITE.environment["GREETING"]


def test_a_stock_torchtune_recipe_is_started_as_such(monkeypatch):
    """By the interpreter of an environment with its torchao."""
    monkeypatch.setenv("COOKBOOK_ROOT", "/shared")
    rendered = script("demo", Site(), "entry=torchtune:full_finetune_distributed")
    assert (
        'site-packages/recipes/full_finetune_distributed.py --config "$RUN_DIR/train.yaml"'
        in rendered
    )
    assert re.search(r"/environments/\d+/[0-9a-f]{16}/bin", rendered)
    with pytest.raises(RecipeFault, match="did you mean full_finetune_distributed"):
        script("demo", Site(), "entry=torchtune:full_finetune_distribute")


def test_a_plug_in_says_what_names_the_run_in_the_tracking_store(monkeypatch):
    workload = paths.REPO_ROOT / "examples/air_fsdp/train.yaml"
    recipe = recipes.load(str(workload), ["~environment", "tracking=sqlite:////shared/mlflow.db"])
    asks = 'if MLFLOW_RUN_ID=$(python -P "$COOKBOOK/plugins/registry/mlflow_run.py"); then'
    assert asks in render.job_script(recipe, Site(), RUN, "air")
    monkeypatch.setattr(render, "hook", lambda name: None)
    text = render.job_script(recipe, Site(), RUN, "air")
    assert "MLFLOW_RUN_ID" not in text and "MLFLOW_TRACKING_URI" in text


def test_every_file_of_the_cluster_folder_loads_and_faults_are_named(tmp_path, monkeypatch):
    from launcher import site as cluster

    assert cluster.load("example").gpu_request == "gpus-per-node"
    monkeypatch.setattr(paths, "CLUSTERS", tmp_path)
    (tmp_path / "bad.yaml").write_text(
        "gpu_request: gpus\nresources: {node: 2, mem: lots}\nenvironment: {HF_TOKEN: x, 'a b': 1,"
        " NODES: 1, SLURM_JOB_ID: 1, SRUN_CPUS_PER_TASK: 1}\n"
        'job_setup: ["a\\nb"]\nnetwork_interfaces: ib0\nnode_paths: [local]\n'
    )
    with pytest.raises(RecipeFault) as fault:
        cluster.load("bad")
    told = "\n".join(fault.value.faults)
    for part in (
        "gpu_request must be one of",
        "resources.node'",
        "resources.mem",
        "keep secrets out",
        "not a valid variable name",
        "environment sets NODES, which the job script, Slurm or torchrun sets",
        "environment sets SLURM_JOB_ID, which",
        "job_setup must be a list of strings",
        "node_paths must be absolute paths",
        "did you mean network_interface",
    ):
        assert part in told
    assert len(fault.value.faults) == 10


def test_vllm_is_on_the_rollout_nodes():
    own = ["rollout_engine=vllm", "environment=vllm", "resources.nodes=2", "rollout_gpus=4"]
    text = script("qwen3_8b_grpo_lora", Site(), *own, "resources.rollout=1")
    assert "#SBATCH --nodes=3\n" in text
    assert "export ROLLOUT_NODES=1 ROLLOUT_GPUS=4\nexport ROLLOUT_SAMPLERS=2\n" in text
    assert 'plugins.rl.sampler "$RUN_DIR/train.yaml"' in text
    companion = "--companion plugins.rl.slurm.samplers:SamplerProcesses"
    assert f" -m slurm.supervise {companion} -- \\\n" in text
    assert "ROLLOUT" not in script("qwen3_8b_grpo_lora", Site())


def test_an_older_copy_of_the_templates_says_what_to_do(fixed, tmp_path):
    (tmp_path / "job.sbatch.j2").write_text("export ENV_IMAGE={{ gone_since | q }}\n")
    with pytest.raises(RunFault, match=r"'gone_since' is undefined.*--code current"):
        render.job_script(recipes.load("demo"), Site(), RUN, "demo", templates=tmp_path)

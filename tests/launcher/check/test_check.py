"""cookbook check: a line a check, every fault named, nothing queued."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from launcher import check as checks
from launcher import paths, slurm, venv
from launcher import site as cluster
from launcher.check import Finding, files, preflight
from launcher.check import recipe as recipe_checks
from launcher.check.scheduler import partition
from launcher.plugins import Check, Plugin, load
from launcher.recipe import load as recipes
from launcher.slurm.executors import choose
from tests.launcher.kit import Kit
from trainer import demo

LOOKS = {each.subject: load(each.target) for each in preflight.every()}


def found(check: str, name: str, overrides: list[str], site=None, **options) -> list[Finding]:
    """What one check finds in a recipe."""
    loaded = recipes.load(name, overrides, options.pop("resources", {}))
    context = checks.Context(loaded, site or cluster.Site(), executor=choose(True), **options)
    findings = checks.findings(check, LOOKS[check], context)
    assert {each.subject for each in findings} == {check}
    return findings


def test_packages_that_are_not_the_pinned_ones_are_named(tmp_path, monkeypatch):
    """As after git pull, or pip install by hand; a build's own mark is no other version."""
    packages = tmp_path / "lib/python3.11/site-packages"
    for name in ("torch-2.13.0+cpu", "python_stdnum-2.1", "of_their_own-1.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.touch(0o755)
    monkeypatch.setenv("COOKBOOK_VENV", str(tmp_path))
    (finding,) = found("virtual environment", "demo", [])
    assert finding.state == "warning" and finding.remedy == "bash setup.sh"
    assert "python_stdnum 2.1 (pinned: 2.2)" in finding.message and "torch" not in finding.message
    # setup.sh --torch keeps its own pins there.
    (tmp_path / "constraints.txt").write_text("torch==2.11.0\npython-stdnum==2.1\n")
    (finding,) = found("virtual environment", "demo", [])
    assert "torch 2.13.0+cpu (pinned: 2.11.0)" in finding.message
    # setup.sh --torch system names the folder of another Python's.
    (tmp_path / "other/torch-2.12.0.dist-info").mkdir(parents=True)
    (tmp_path / "other/numpy-1.0.dist-info").mkdir()
    (packages / "torch-2.13.0+cpu.dist-info").rmdir()
    (packages / "cookbook-torch.pth").write_text(f"{tmp_path}/other\n")
    assert venv.packages() == {"torch": "2.12.0", "python_stdnum": "2.1", "of_their_own": "1.0"}
    (packages / "cookbook-torch.pth").unlink()
    # Nor does the trainer run with any release.
    for name in ("torch-2.10.1", "transformers-5.3.0"):
        (packages / f"{name}.dist-info").mkdir()
    (finding,) = found("virtual environment", "demo", [])
    assert finding.state == "failed" and finding.remedy.startswith("bash setup.sh")
    assert "torch 2.10.1 is not supported: the trainer needs 2.11 or newer" in finding.message
    assert "transformers 5.3.0 is not supported: the trainer needs 5.17 or newer" in finding.message


@pytest.mark.parametrize(
    ("build", "gpu", "state", "told"),
    [
        ("13.0", "h100-80", "ok", "is built for CUDA 13.0, for h100-80"),
        (None, "h100-80", "failed", "built for CPUs, and the GPUs are h100-80: bash"),
        ("13.0", "mi300x", "failed", "bash setup.sh --torch rocm"),
        ("13.0", None, "skipped", "not known which GPUs there are"),
    ],
)
def test_torch_is_a_build_for_the_gpus(build, gpu, state, told, tmp_path, monkeypatch):
    file = tmp_path / "lib/python3.11/site-packages/torch/version.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {build!r}\nhip = None\n")
    monkeypatch.setenv("COOKBOOK_VENV", str(tmp_path))
    (finding,) = found("torch build", "llama1b_lora", [], cluster.Site(gpu=gpu))
    assert finding.state == state and told in finding.line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a downloaded model in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    for name in names:
        save_file({name: torch.ones(100)}, folder / name)
    index = {"weight_map": {name: name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def of_model(folder: Path, **options) -> list[Finding]:
    overrides = [f"checkpointer.checkpoint_dir={folder}"]
    return found("model", "llama1b_lora", overrides, **options)


def test_a_whole_model_is_ok(model: Path):
    (one,) = of_model(model)
    assert one.state == "ok" and "2 files" in one.message


def test_a_model_that_is_not_whole_is_named_file_by_file(model: Path):
    first, second = sorted(model.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-10])
    second.write_bytes(b"<html>not found</html>")
    cut, page = of_model(model)
    assert cut.state == page.state == "failed"
    assert "bytes" in cut.message and first.name in cut.message
    assert f"{second.name} is no safetensors file" in page.message
    second.unlink()
    told = "\n".join(each.message for each in of_model(model))
    assert f"lacks {second.name}, a file of the model's weights" in told


def test_a_download_is_named_with_its_revision(model: Path):
    record = {"repo": "acme/tiny", "revision": "0123456789abcdef"}
    (model / "cookbook-download.json").write_text(json.dumps(record))
    assert "as downloaded from acme/tiny at 0123456789ab" in of_model(model)[0].message


def test_files_that_the_recipe_lists_and_the_folder_lacks_are_counted(model: Path):
    listed = [
        "+checkpointer.checkpoint_files.filename_format=model-{}-of-{}.safetensors",
        '+checkpointer.checkpoint_files.max_filename="00004"',
        f"checkpointer.checkpoint_dir={model}",
    ]
    (one,) = found("model", "llama1b_lora", listed)
    assert "lacks 4 of the recipe's checkpoint_files, first model-00001-of-00004" in one.message


def test_paths_of_the_nodes_are_excused(model: Path):
    gone = Path("/nodes/only/model")
    assert of_model(gone)[0].state == "failed"
    (one,) = of_model(gone, site=cluster.Site(node_paths=("/nodes/only",)))
    assert (one.state, one.message) == ("skipped", f"{gone} is only on the nodes")


def test_a_layout_that_does_not_fit_is_one_fault():
    """tests/runspec/test_layout.py has all of them; layers split across nodes are one more."""
    resources = {"nodes": 2, "gpus_per_node": 4}
    for degree, told in ((3, "does not divide 2 x 4 = 8 ranks"), (8, "split across nodes")):
        (one,) = found("layout", "demo", [f"tensor_parallel_dim={degree}"], resources=resources)
        assert one.state == "failed" and told in one.message


def test_a_step_that_does_not_fit_the_gpu_is_told_with_what_would_help():
    small, large = cluster.Site(gpu="a100-40"), cluster.Site(gpu="h100-80")
    (one,) = found("GPU memory", "llama8b_lora", ["batch_size=16"], small)
    assert one.state == "failed" and "usable on a100-40 (the site's file" in one.message
    assert "it would fit with activation_checkpointing=full" in one.remedy
    changed = ["batch_size=16", "activation_checkpointing=full"]
    assert found("GPU memory", "llama8b_lora", changed, large)[0].state == "ok"
    assert found("GPU memory", "llama8b_lora", changed)[0].state == "skipped", "no GPU is named"


def test_a_vllm_server_has_gpus_of_one_node():
    large, own = cluster.Site(gpu="h100-80"), ["rollout_engine=vllm", "resources.rollout=1"]
    (odd,) = found("layout", "qwen3_8b_grpo_lora", [*own, "rollout_gpus=3"], large)
    assert odd.state == "failed" and "rollout_gpus=3 does not divide 8 GPUs" in odd.message


def large_model(folder: Path, billions: int) -> Path:
    """Files with the headers of so many numbers, without the numbers; and all of them once more."""
    folder.mkdir()
    for name in ("model-1-of-2", "model-2-of-2", "consolidated"):
        shape = [billions * 2**29 * (2 if name == "consolidated" else 1)]
        header = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}})
        data = len(header).to_bytes(8, "little") + header.encode()
        (folder / f"{name}.safetensors").write_bytes(data)
    named = {name: f"{name}.safetensors" for name in ("model-1-of-2", "model-2-of-2")}
    index = {"metadata": {}, "weight_map": named}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("name", "key", "given"),
    [
        ("serve/default.yaml", "model", ["endpoint=e", "endpoint_dir=/e", "key_file=/k"]),
        ("evals/pairs.yaml", "candidate", ["tasks.pairs.data=/d"]),
    ],
)
def test_a_model_that_answers_and_is_larger_than_its_gpus_is_told_before_the_queue(
    tmp_path, name, key, given
):
    model, path = large_model(tmp_path / "model", 70), str(paths.REPO_ROOT / "configs" / name)
    site, changes = cluster.Site(gpu="h100-80"), [f"{key}={model}", "dtype=bf16", *given]

    def of(gpus: int) -> Finding:
        resources = {"nodes": 1, "gpus_per_node": gpus}
        return found("GPU memory", path, changes, site, resources=resources)[0]

    assert of(8).state == "ok"
    one = of(2)
    assert one.state == "failed" and one.remedy.startswith("use --gpus-per-node 3")
    needed = "140.0 GiB of weights need 3 GPUs of h100-80 (the site's file), 2 per model"
    assert needed in one.message


def test_a_disk_that_is_too_small_for_the_checkpoints_is_named(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**30))
    (one,) = found("disk space", "llama70b_full", [])
    assert one.state == "failed" and "for 3 checkpoints of 394" in one.message


@pytest.fixture
def demo_model(shared: Path) -> Path:
    """The model of the demo recipe, where its runs make it too."""
    folder = shared / "models" / "demo-llama"
    if not folder.exists():
        demo.make(folder, paths.REPO_ROOT / "configs/datasets/slurm_qa.jsonl")
    return folder


@pytest.mark.long
@pytest.mark.usefixtures("fast_trainer")
def test_cells_of_a_sweep_are_one_question(demo_model: Path):
    """The trainer's start takes seconds: it is asked for all components, and once for the data."""
    told: dict = {}
    cells = [
        checks.Context(
            recipes.load(
                "demo", [f"checkpointer.checkpoint_dir={demo_model}", f"optimizer.lr={lr}"]
            ),
            cluster.Site(),
            answers=told,
        )
        for lr in (1e-4, 2e-4)
    ]
    recipe_checks.ask_ahead(cells, told)
    components = {*told}
    found = [finding for cell in cells for finding in (*LOOKS["samples"](cell),)]
    found += [finding for cell in cells for finding in LOOKS["components"](cell)]
    assert {each.state for each in found} == {"ok"}, found
    assert len(components) == 2 and len({*told} - components) == 1


@pytest.mark.usefixtures("fast_trainer")
def test_a_checked_recipe_with_one_more_number_is_checked_again(demo_model: Path):
    """Every key may matter: validation every 100 steps is a fault without a validation set."""
    overrides = [f"checkpointer.checkpoint_dir={demo_model}", "optimizer.eps=4e-8"]
    assert found("components", "demo", overrides)[0].state == "ok"
    (one,) = found("components", "demo", [*overrides, "run_val_every_n_steps=100"])
    assert one.state == "failed" and "run_val_every_n_steps: needs dataset_val" in one.message


def test_a_dataset_of_the_hub_that_is_not_downloaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path))
    (one,) = found("dataset", "llama8b_lora", [])
    assert one.state == "warning"
    assert (
        f"HuggingFaceH4/ultrachat_200k of the Hub is not in the cache ({tmp_path}/hf)"
        in one.message
    )
    assert one.remedy.startswith("cookbook download llama8b_lora, or let the job download it, if")
    offline = cluster.Site(environment={"HF_HUB_OFFLINE": "1"})
    (one,) = found("dataset", "llama8b_lora", ["dataset.source=ours/chats"], offline)
    assert one.state == "failed" and "ours/chats of the Hub is not in the cache" in one.message
    assert one.remedy == "cookbook download llama8b_lora hub.dataset=ours/chats"
    (tmp_path / "hf/hub/datasets--HuggingFaceH4--ultrachat_200k/snapshots/1").mkdir(parents=True)
    (one,) = found("dataset", "llama8b_lora", [], offline)
    assert one.state == "skipped"


def test_a_dataset_of_files_that_names_none_is_refused():
    """datasets would read the working directory's."""
    (one,) = found("dataset", "demo", ["dataset.data_files="])
    assert one.state == "failed"
    assert one.message == "dataset.data_files must name the files of source json"


def test_a_layout_that_fits_tells_its_global_batch():
    overrides = ["tensor_parallel_dim=2", "batch_size=4", "gradient_accumulation_steps=3"]
    (one,) = found("layout", "demo", overrides, resources={"nodes": 2, "gpus_per_node": 4})
    assert one.message == (
        "2 x 4 = 8 ranks, tensor parallel 2; 48 samples per step (batch 4 x 3 micro-steps x 4 "
        "data-parallel groups)"
    )


def polite(context: checks.Context) -> list[Finding]:
    """What the checks of a plug-in below find."""
    return [checks.ok("manners", context.recipe.name)]


def test_checks_of_plug_ins_come_last_and_are_left_out_as_the_cores(monkeypatch):
    here = "tests.launcher.check.test_check:polite"
    rows = (
        Check("free", here),
        Check("needed", here, needed=True),
        Check("slow", here, starts=True),
    )
    monkeypatch.setattr(preflight, "plugins", lambda: (Plugin("polite", checks=rows),))
    monkeypatch.setattr(preflight, "CHECKS", preflight.CHECKS[:1])
    context = checks.Context(recipes.load("demo"), cluster.Site(), executor=choose(True))

    def made(**options: bool) -> list[tuple[str, str]]:
        return [(each.subject, each.state) for each in preflight.check(context, **options)]

    layout, found = ("layout", "ok"), ("manners", "ok")
    assert made() == [layout, found, found, found]
    assert made(quick=True) == [layout, found, found]
    assert made(skip=True) == [layout, ("free", "skipped"), found, ("slow", "skipped")]


def test_the_command_lists_all_and_queues_nothing(slurm_user: Kit):
    done = slurm_user.cookbook("check", "llama8b_lora", "--nodes", "3", "--partition", "debug")
    assert done.returncode == 1 and done.stderr == ""
    states = {line[9:29].strip(): line[:8].strip() for line in done.stdout.splitlines()}
    assert states["layout"] == states["secrets"] == states["script"] == "ok"
    assert states["model"] == states["Slurm limits"] == states["sbatch test"] == "failed"
    assert 'Slurm says "' in done.stdout
    assert done.stdout.splitlines()[-1].endswith("faults: submit would refuse this run")
    assert not slurm_user.runs()
    rows = json.loads(slurm_user.cookbook("check", "demo", "--json").stdout)["findings"]
    # The demo's entry is no other trainer's, and no suite.
    made = [each.subject for each in preflight.every()]
    made = [subject for subject in made if subject not in ("engine config", "suite")]
    assert [row["subject"] for row in rows] == made
    assert {row["state"] for row in rows} <= {"ok", "skipped"}


# What Slurm says, replayed -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:8", {"": 8}),
        ("gpu:a100:4,gpu:a100_1g.5gb:14,nvme:1", {"a100": 4, "a100_1g.5gb": 14}),
        ("(null)", {}),
        ("craynetwork:4", {}),
    ],
)
def test_gpus_are_read_as_sinfo_writes_them(gres, gpus):
    assert slurm.gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("Resources", "are busy"),
        ("ReqNodeNotAvail, UnavailableNodes:n[3-4]", "down, drained or reserved"),
        ("PartitionTimeLimit", "lower --time"),
        # Limits of accounting that the tests on a real slurmdbd do not bring about.
        ("AssocGrpCpuLimit", "your account limits the CPUs of all its jobs together"),
        ("QOSMaxMemoryPerUser", "your QoS limits the memory of one user's jobs together"),
        ("AssocGrpCPURunMinutesLimit", "has for all its jobs are reserved by running jobs"),
        ("QOSMaxGRESMinutesPerJob", "more GPUs x minutes than your QoS allows per job"),
        ("AssocMaxWallDurationPerJobLimit", "its time limit is longer than your account allows"),
        ("QOSGrpWallLimit", "the time that your QoS has for all its jobs is used up"),
        ("AssocMaxJobsLimit", "your account already runs the maximum number of jobs"),
        ("AssocGrpSubmitJobsLimit", "your account has as many jobs in the queue as it may"),
        ("QOSMinNode", "fewer nodes than your QoS requires"),
        ("MaxNodePerAccount", "your QoS limits the nodes of one account's jobs together"),
        ("AssocGrpLicense", "your account limits the license of all its jobs together"),
    ],
)
def test_reasons_have_plain_words(reason, told):
    assert told in slurm.why_pending(reason) and slurm.why_pending(reason).startswith(reason)


def test_a_reason_never_seen_before_stands_alone():
    assert slurm.why_pending("SomethingNew") == "SomethingNew"


@pytest.mark.parametrize(
    ("memory", "mib"), [(None, 0), ("0", 0), ("900G", 921600), ("500", 500), ("2T", 2097152)]
)
def test_memory_is_read_as_slurm_reads_it(memory, mib):
    assert partition.megabytes(memory) == mib


def test_wildcards_and_addresses_are_left_to_the_library():
    block = {"source": "json", "data_files": ["a.jsonl", "b/*.jsonl", "https://x/y.jsonl"]}
    assert files.data_files(block) == [Path("a.jsonl")]

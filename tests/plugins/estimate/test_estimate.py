"""cookbook estimate: what it prints, how its figures hang together, and what it refuses."""

import csv
import json
import re
from pathlib import Path

import pytest

from launcher import paths
from launcher import site as sites
from launcher.check import Context, Skipped
from launcher.errors import RecipeFault
from launcher.recipe import load as recipes
from launcher.slurm.executors import choose
from plugins.estimate.launcher import checks, recipe_step, text
from plugins.estimate.launcher.epoch import epoch_of
from plugins.estimate.launcher.estimate import Estimate
from plugins.estimate.launcher.recipe_step import step_of
from tests.launcher.kit import Kit
from tests.model_sizes import MIXTRAL

pytestmark = pytest.mark.usefixtures("fast_trainer")

GOLDEN = Path(__file__).parent / "golden"
RECIPE = """
description: A 70B model, full fine-tuning
resources: {nodes: 1, gpus_per_node: 8}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: x/y, max_seq_len: 4096}
checkpointer: {checkpoint_dir: /models/Llama-3.3-70B-Instruct}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5, fused: true}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
batch_size: 8
gradient_accumulation_steps: 1
activation_checkpointing: none
"""


SMALLER = [
    *("--nodes=2", "--gpu=h200-141", "batch_size=2", "activation_checkpointing=full"),
    "model._component_=torchtune.models.llama3_3.lora_llama3_3_70b",
    "model.lora_attn_modules=[q_proj, v_proj]",
]
BY_QLORA = ["--gpus-per-node=4", "batch_size=1", "activation_checkpointing=full"]
BY_QLORA += ["tensor_parallel_dim=4"]


@pytest.fixture
def recipe(tmp_path) -> str:
    path = tmp_path / "big.yaml"
    path.write_text(RECIPE)
    return str(path)


def estimated(kit: Kit, *arguments: str) -> dict:
    done = kit.cookbook("estimate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("golden", "arguments"),
    [
        ("estimate_that_does_not_fit.txt", []),
        ("estimate_that_fits.txt", SMALLER),
    ],
)
def test_what_is_printed(user: Kit, recipe, golden, arguments):
    done = user.cookbook("estimate", recipe, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (GOLDEN / golden).read_text()


@pytest.mark.parametrize("smaller", [[], BY_QLORA], ids=["by layout", "by QLoRA"])
def test_each_remedy_gives_the_figure_that_its_overrides_give(user: Kit, recipe, smaller):
    found = estimated(user, recipe, *smaller)
    assert not found["fits"] and found["remedies"]
    assert ("quantize_base=true" in found["remedies"][-1]["overrides"]) == bool(smaller)
    applied: list[str] = [*smaller]
    for remedy in found["remedies"]:
        if not remedy["helps"]:
            continue
        applied += remedy["overrides"].split()
        again = estimated(user, recipe, *applied)
        assert again["peak_gib"] == pytest.approx(remedy["peak_gib"], abs=0.001), remedy
    assert found["remedies"][-1]["fits"] and again["fits"]


def test_the_terms_add_up_and_the_peak_is_the_highest_phase(user: Kit, recipe):
    found = estimated(user, recipe)
    assert sum(found["terms_gib"].values()) == pytest.approx(found["peak_gib"], abs=0.01)
    assert max(found["phases_gib"].values()) == found["peak_gib"]
    # bf16 weights and two moments of 70.55 billion parameters over 8 GPUs.
    assert found["terms_gib"]["weights"] == pytest.approx(70.553706496e9 * 2 / 8 / 2**30, rel=1e-4)
    assert found["terms_gib"]["optimizer"] == pytest.approx(
        2 * found["terms_gib"]["weights"], rel=1e-4
    )
    assert found["checkpoint_gib"] == pytest.approx(70.553706496e9 * 6 / 2**30, rel=1e-4)


@pytest.mark.parametrize(
    ("component", "given", "update"),
    [
        ("torch.optim.AdamW", {}, "fused"),
        ("torch.optim.AdamW", {"fused": False}, "foreach"),
        ("torch.optim.AdamW", {"foreach": False}, "single"),
        ("torch.optim.AdamW", {"foreach": True}, "foreach"),
        ("torch.optim.SGD", {}, "foreach"),
        ("torch.optim.SGD", {"fused": True}, "fused"),
    ],
)
def test_the_update_is_the_one_that_the_trainer_makes(component, given, update):
    import torch  # of all tests here this one alone needs it

    from trainer import optimizers

    block = {"_component_": component, "lr": 1e-4, **given}
    assert recipe_step.optimizer_of(block)["update"] == update
    chosen = optimizers.build(block, [torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    assert bool(chosen["fused"]) == (update == "fused")


def test_time_follows_from_the_flops_and_the_dataset(user: Kit, recipe, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "' + "x" * 3987 + '"}\n' * 1 + "\n")
    found = estimated(user, recipe, f"--data={data}")
    assert found["tokens"] == 1000
    attention = 12 * 80 * 8192 * 4097 / 2
    matrices = 70.553706496e9 - 128256 * 8192 - 161 * 8192
    seconds = 1000 * (6 * matrices + attention) / (8 * 989.4e12 * found["mfu"])
    assert found["hours"] * 3600 == pytest.approx(seconds, rel=1e-6)
    low, high = found["tokens_per_second_per_gpu_range"]
    assert low < found["tokens_per_second_per_gpu"] < high


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".txt"])
def test_the_samples_of_every_local_file_are_counted(tmp_path, suffix):
    """Samples of 400 bytes of text: of a table not its lines, of which an answer has two."""
    answer, file = "x" * 191 + "\n" + "y" * 191, tmp_path / f"mine{suffix}"
    rows = [{"Question": "z" * 17, "Answer": answer}] * 30
    if suffix in (".csv", ".tsv"):
        with file.open("w", newline="") as table:
            writer = csv.DictWriter(table, rows[0], delimiter=",\t"[suffix == ".tsv"])
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == ".txt":
        file.write_text(f"{'x' * 399}\n" * 30)
    else:
        file.write_text(json.dumps(rows) if suffix == ".json" else f"{json.dumps(rows[0])}\n" * 30)
    recipe = recipes.load("qwen3_0_6b_full")
    config = {**recipe.resolved(tmp_path, "run"), "dataset": {"data_files": [str(file)]}}
    tokens, text, samples = epoch_of(config, step_of(config, 1, 1))
    assert samples == 30 and tokens == pytest.approx(3000, rel=0.1) and "by file size" in text
    # A file that no read of works.
    file.unlink()
    file.symlink_to("/proc/self/mem")
    with pytest.raises(RecipeFault, match=r"dataset.data_files: .* cannot be read: .*error"):
        epoch_of(config, step_of(config, 1, 1))


@pytest.fixture
def mixtral(tmp_path) -> str:
    """A recipe whose model has experts, as its config.json says."""
    folder = tmp_path / "Mixtral-8x7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    path = tmp_path / "mixtral.yaml"
    path.write_text(RECIPE.replace("/models/Llama-3.3-70B-Instruct", str(folder)))
    return str(path)


def test_experts_count_with_all_their_parameters_and_work_with_the_active_ones(user: Kit, mixtral):
    done = user.cookbook("estimate", mixtral, "--tune")
    assert done.returncode == 0, done.stderr
    assert "46.70 B parameters, 12.88 B of them active" in done.stdout
    assert "expert_parallel_dim=8" in done.stdout
    whole, found = (
        json.loads(user.cookbook("estimate", mixtral, "--json", *changes).stdout)
        for changes in ((), ("expert_parallel_dim=8",))
    )
    assert found["layout"]["expert_parallel"] == 8
    # Seven eighths of the experts are not gathered.
    gathered = [each["terms_gib"]["gathered weights"] for each in (found, whole)]
    assert gathered[0] < gathered[1] - 2
    # Experts of one rank may get half as many rows again.
    more = found["terms_gib"]["activations"] / whole["terms_gib"]["activations"]
    assert 1.1 < more < 1.5
    # Sixteen ranks have a part of each of eight experts, not every other rank a whole one.
    twice = json.loads(user.cookbook("estimate", mixtral, "--json", "--nodes", "2").stdout)
    half = 0.5 * whole["terms_gib"]["weights"]
    assert twice["terms_gib"]["weights"] == pytest.approx(half, rel=0.01)
    for change, words in (
        ("expert_parallel_dim=3", "expert_parallel_dim 3 must be a multiple of"),
        ("expert_parallel_dim=16", "and divide the 8 ranks of a replica"),
    ):
        done = user.cookbook("estimate", mixtral, change)
        assert done.returncode == 2 and words in done.stderr
    none = user.cookbook("estimate", "llama8b_lora", "expert_parallel_dim=2")
    assert none.returncode == 2
    assert "this model has no experts; set expert_parallel_dim=1" in none.stderr


def test_a_model_that_the_trainer_refuses_is_refused(user: Kit, mixtral, tmp_path):
    file = tmp_path / "Mixtral-8x7B" / "config.json"
    file.write_text(json.dumps({"model_type": "jamba"}))
    line = "the jamba model cannot be trained: its code has no norm; choose another model"
    done = user.cookbook("estimate", mixtral)
    assert done.returncode == 2 and done.stdout == ""
    assert line in done.stderr and done.stderr.count("error: ") == 1, done.stderr
    # The checks of memory and of the disk say the same.
    context = Context(recipes.load(mixtral), sites.load(None), executor=choose(True))
    for check in (checks.memory, checks.disk):
        with pytest.raises(Skipped, match=f"it cannot be computed: .*{re.escape(line)}"):
            check(context)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gpu=h100-8"], "there is no GPU 'h100-8' (did you mean h100-80?)"),
        (["tokenizer.max_seq_len=null"], "tokenizer.max_seq_len is not set"),
        (["tensor_parallel_dim=3"], "tensor_parallel_dim 3 does not divide 1 x 8 = 8 ranks"),
        (["tensor_parallel_dim=16", "--gpus-per-node=16"], "not divide the model's num_kv_heads 8"),
        (["checkpointer.checkpoint_dir=/none"], "/none has no config.json"),
        (["entry=torchtune:full_finetune_distributed"], "only the kit's own training methods can"),
    ],
)
def test_a_fault_is_one_line(user: Kit, recipe, arguments, line):
    done = user.cookbook("estimate", recipe, *arguments)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert line in done.stderr and done.stderr.count("error: ") == 1, done.stderr


def test_an_estimate_of_pretraining_is_of_all_steps():
    for name, tokens in (("llama100m_pretrain", 8000 * 2**18), ("llama8b_pretrain", 2000 * 2**19)):
        found = Estimate.of(recipes.load(name), Path("/root"), "h100-80")
        assert found.fits and found.epoch[0] == tokens


@pytest.mark.parametrize(
    ("recipe", "overrides", "gib", "words"),
    [
        ("llama8b_full", (), 14.96, "the model"),
        ("llama8b_lora", (), 14.96, "the merged model"),
        ("llama8b_lora", ("save_adapter_weights_only=true",), 0.078, "the adapter"),
        ("llama8b_prefix", (), 0.0024, "the adapter"),
    ],
)
def test_the_export_is_what_the_run_will_write(recipe, overrides, gib, words):
    found = Estimate.of(recipes.load(recipe, overrides), paths.REPO_ROOT, "h100-80")
    assert found.as_json()["export_gib"] == pytest.approx(gib, abs=0.005)
    assert [*text.lines(found)][-1].splitlines()[-1].endswith(words)

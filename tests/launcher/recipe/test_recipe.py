"""Recipes: the catalogue loads, overrides do what they say, and every fault is named at once."""

import collections
import copy
import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launcher import check as checks
from launcher import paths, yamlfile
from launcher.check import inside, preflight
from launcher.errors import PreflightFault, RecipeFault
from launcher.recipe import functions, torchtune
from launcher.recipe import load as recipes
from launcher.recipe.model import time_limit_s
from launcher.site import Site, complete
from launcher.slurm import render
from launcher.slurm.executors import choose
from runspec.keys.common import COMMON


def written(
    folder: Path, change: dict | None = None, without: str = "", text: str | None = None
) -> str:
    """A recipe file of our own, made from a shipped one."""
    config = copy.deepcopy(recipes.load("llama1b_lora").config)
    config.update(change or {})
    config.pop(without, None)
    path = folder / "mine.yaml"
    path.write_text(text if text is not None else yamlfile.dump(config))
    return str(path)


def faults_of(*args, **kwargs) -> list[str]:
    with pytest.raises(RecipeFault) as fault:
        recipes.load(*args, **kwargs)
    assert all("\n" not in each for each in fault.value.faults)
    return fault.value.faults


def test_the_catalogue_loads():
    for name in recipes.names():
        recipe = recipes.load(name)
        assert recipe.description, name
        assert name.endswith((recipe.method, recipe.entry_name)) or name == "demo"
        header = recipe.path.read_text().partition("description:")[0]
        assert f"cookbook submit --recipe {name}" in header, "the header tells how to run it"
        assert name.startswith("demo") or f"cookbook download {name}" in header


def test_overrides_set_add_and_remove():
    recipe = recipes.load(
        "llama8b_lora",
        [
            "optimizer.lr=1e-5",
            "+model.use_dora=true",
            "+model.quantize_base=true",
            "~lr_scheduler",
            "resources.nodes=4",
            "dataset.packed=true",
            "resources.time=90",
        ],
    )
    assert recipe.config["optimizer"]["lr"] == 1e-5
    assert recipe.method == "qdora"
    assert "lr_scheduler" not in recipe.config
    assert recipe.resources.nodes == 4
    assert recipe.resources.time == "90" and recipe.resources.time_s == 5400


def test_a_model_folder_brings_its_tokenizer(tmp_path):
    hub = {"model": {"lora_rank": 8}}
    found = recipes.load(written(tmp_path, hub, without="tokenizer"))
    block = found.resolved(tmp_path, "unset")["tokenizer"]
    assert block["path"] == found.resolved(tmp_path, "unset")["checkpointer"]["checkpoint_dir"]
    assert block["_component_"] == "trainer.data.tokenizers.hugging_face_tokenizer"
    own = {**hub, "tokenizer": {"_component_": "mine.Tokenizer", "path": "/t"}}
    assert recipes.load(written(tmp_path, own)).config["tokenizer"] == own["tokenizer"]
    # A model of one's own may read no folder.
    other = written(tmp_path, {"model": {"_component_": "mine.Model"}}, without="tokenizer")
    assert any("tokenizer" in each for each in faults_of(other))


def test_files_of_rewards_are_found_and_copied(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def score(): ...\n")
    monkeypatch.chdir(tmp_path)
    recipe = recipes.load("demo_grpo", ["+rewards.own.function=own.py:score"])
    assert recipe.config["rewards"]["own"]["function"] == f"{tmp_path}/own.py:score"
    assert "function" in recipe.config["rewards"]["correct"]
    config = {"rewards": dict(recipe.config["rewards"])}
    run = tmp_path / "run"
    assert functions.copied([config], recipe.entry.method, run) == {
        "rewards/own.py": "def score(): ...\n"
    }
    assert config["rewards"]["own"]["function"] == f"{run}/rewards/own.py:score"
    (tmp_path / "own.py").unlink()
    with pytest.raises(PreflightFault, match=r"rewards.own: cannot read .*: No such file"):
        functions.copied([{"rewards": recipe.config["rewards"]}], recipe.entry.method, run)


def test_options_come_before_overrides_and_the_file():
    recipe = recipes.load("llama8b_lora", ["resources.nodes=4"], {"nodes": 3, "time": None})
    assert (recipe.resources.nodes, recipe.resources.time) == (3, "08:00:00")


def test_interpolations_are_filled_in_and_the_trainer_sees_none_of_our_keys():
    recipe = recipes.load("llama8b_lora")
    config = recipe.train_config(Path("/shared"), "/shared/runs/r")
    assert config["checkpointer"]["checkpoint_dir"] == "/shared/models/Llama-3.1-8B-Instruct"
    assert config["tokenizer"]["path"] == "/shared/models/Llama-3.1-8B-Instruct"
    assert config["output_dir"] == "/shared/runs/r"
    assert not set(config) & (set(COMMON) - {"output_dir"})


def test_every_config_that_torchtune_ships_is_a_recipe_unchanged():
    """What our trainer does too goes to it, the rest to torchtune's own script."""
    folder = torchtune.site_packages() / "recipes" / "configs"
    entries = collections.Counter()
    for path in folder.rglob("*.yaml"):
        recipe = recipes.load(str(path), resources={"nodes": 1, "gpus_per_node": 1})
        script = render.job_script(recipe, Site(), Path("/shared/runs/r"), "r")
        assert recipe.train_config(Path("/shared"), "/runs/r")["output_dir"] == "/runs/r"
        if recipe.entry_name == "sft":
            assert 'rank.sh" python -P -m trainer.train sft ' in script
        else:
            assert f"/recipes/{recipe.target}.py --config" in script
            assert recipe.max_retries == 0, "it would begin again from nothing"
        entries[recipe.entry_name] += 1
        assert "output_dir (each run has its own directory" in recipe.notes[0]
    assert sum(entries.values()) == 156 and entries["sft"] == 105
    assert entries["torchtune:lora_dpo_distributed"] == 2
    assert entries["torchtune:eleuther_eval"] == 10


def test_recipes_and_stock_configs_resolve_to_what_is_kept():
    """By a hash of each, so that none is lost: cookbook recipes NAME shows the whole."""
    found = []
    for name in [*recipes.names(), *torchtune.configs()]:
        recipe = recipes.load(name, resources={"nodes": 1, "gpus_per_node": 1})
        text = yamlfile.dump(recipe.resolved(Path("/shared"), "/runs/r"))
        text = text.replace(str(paths.REPO_ROOT), "/kit")
        found.append(f"{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}")
    kept = Path(__file__).with_name("golden") / "resolved.txt"
    assert kept.read_text().splitlines() == found


@pytest.mark.parametrize("given", ["link", "name"])
def test_a_stock_config_starts_the_same_however_it_is_named(given, tmp_path):
    """Keys of torchtune's own scripts, such as kd_ratio, are taken, as `tune run` takes them."""
    name = "llama3_2/8B_to_1B_KD_lora_distributed"
    (tmp_path / "mine.yaml").symlink_to(torchtune.configs()[name])
    text = str(tmp_path / "mine.yaml") if given == "link" else name
    recipe = recipes.load(text, resources={"nodes": 1, "gpus_per_node": 2})
    assert recipe.entry_name == "torchtune:knowledge_distillation_distributed"
    assert recipe.config["kd_ratio"] == 0.5
    script = render.job_script(recipe, Site(), Path("/shared/runs/r"), "r")
    assert "/recipes/knowledge_distillation_distributed.py --config" in script


def test_a_stock_recipe_for_one_gpu_gets_no_more():
    path = torchtune.site_packages() / "recipes/configs/quantization.yaml"
    recipe = recipes.load(str(path), resources={"nodes": 1, "gpus_per_node": 2})
    with pytest.raises(RecipeFault, match="quantize runs on one GPU, and 1 x 2 are requested"):
        render.job_script(recipe, Site(), Path("/shared/runs/r"), "r")


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed here")
def test_what_the_environment_lacks_is_found_before_the_queue():
    path = torchtune.site_packages() / "recipes/configs/eleuther_evaluation.yaml"
    recipe = recipes.load(str(path), resources={"nodes": 1, "gpus_per_node": 1})
    context = checks.Context(recipe, Site(), executor=choose(True))
    (fault,) = inside.inside(context)
    assert f"{paths.venv_root()} lacks lm_eval, which this recipe needs" in fault.line
    assert "add lm_eval to environment.dependencies in the recipe" in fault.line


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    overrides = [
        f"checkpointer.checkpoint_dir={tmp_path}",
        "+checkpointer.checkpoint_files=[pytorch_model.bin]",
    ]
    recipe = recipes.load("llama1b_lora", overrides)
    context = checks.Context(recipe, Site(), executor=choose(True))
    lines = [each.line for each in preflight.check(context, quick=True)]
    assert "names pytorch_model.bin, a pickle" in "\n".join(lines)


def test_a_recipe_extends_others_block_by_block(tmp_path):
    (tmp_path / "shared.yaml").write_text(
        "extends: llama1b_lora\nepochs: 7\noptimizer: {lr: 1e-3}\nresources: {nodes: 4}\n"
    )
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: shared.yaml\nresources: {gpus_per_node: 2}\nlr_scheduler: null\n"
        "loss: {_component_: torchtune.modules.loss.ForwardKLLoss}\n"
    )
    shipped = recipes.load("llama1b_lora").config
    recipe = recipes.load(str(mine), ["optimizer.weight_decay=0.5"])
    assert recipe.config["model"] == shipped["model"]
    assert recipe.config["optimizer"] == shipped["optimizer"] | {"lr": 1e-3, "weight_decay": 0.5}
    assert recipe.config["epochs"] == 7 and recipe.config["lr_scheduler"] is None
    assert (recipe.resources.nodes, recipe.resources.gpus_per_node) == (4, 2)
    assert recipe.config["loss"] == {"_component_": "torchtune.modules.loss.ForwardKLLoss"}
    assert "extends" not in recipe.config


@pytest.mark.parametrize(
    ("extends", "told"),
    [
        ("llama1b_lroa", "did you mean llama1b_lora?"),
        ("mine.yaml", "refers to itself"),
        ("../nowhere.yaml", "there is no '../nowhere.yaml'"),
        ("../../etc/passwd", "there is no"),
        ("[7]", "there is no 7"),
    ],
)
def test_a_wrong_extends_is_one_fault(tmp_path, extends, told):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {extends}\nepochs: 1\n")
    (fault,) = faults_of(str(mine))
    assert told in fault


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama70b_lroa", "did you mean llama70b_lora?"),
        ("llama3_1/8B_ful_dpo", "(did you mean llama3_1/8B_full_dpo?): list them with: tune ls"),
        ("../../etc/passwd", "may contain only letters"),
        ("-rf", "may contain only letters"),
        ("a\nb", "may contain only letters"),
        ("$(id)", "may contain only letters"),
        ('x"y', "may contain only letters"),
        ("x" * 10_000, "may contain only letters"),
        ("nowhere/mine.yaml", "there is no recipe nowhere"),
    ],
)
def test_a_wrong_name_is_one_fault(name, told):
    (fault,) = faults_of(name)
    assert told in fault


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimzer.lr=1", "did you mean optimizer?"),
        ("optimizer.lrr=1", "did you mean optimizer.lr?"),
        ("lrr=1", "did you mean optimizer.lr?"),
        ("~optimizer.lrr", "no key 'optimizer.lrr' (did you mean optimizer.lr?) to remove"),
        ("~max_steps", "no key 'max_steps'"),
        ("resources.node=2", "did you mean resources.nodes?"),
        ("optimizer.lr=fast", "must be a number, 0 or more, got 'fast', in the override"),
        ("optimizer.lr=", "0 or more, got null: set it, or remove it (an override: ~optimizer.lr)"),
        ("optimizer.weight_decay=null", "got null"),
        ("lr_scheduler.num_warmup_steps=", "a whole number, 0 or more, got null"),
        ("dataset.packed=7", "must be true or false"),
        ("resources.nodes=two", "must be a whole number, 1 or more"),
        ("resources.nodes=0", "a whole number, 1 or more"),
        ("resources.time=soon", "a limit such as"),
        ("resources.time=0", "above 0, got 0"),
        ("resources.time=00:00:00", "above 0, got '00:00:00'"),
        ("resources.mem=lots", "a size such as"),
        ("resources.partition=a b", "one word, as sbatch takes it"),
        ("+resources.account=$(id)", "letters, digits"),
        ("resources.account=x\n#SBATCH --uid=0", "more than one line"),
        ("resources.constraint=--uid=0", "one word"),
        ("model=llama", "model must be a block of 'key: value' lines"),
        ("optimizer.fused=7", "optimizer.fused must be true or false, as in the recipe (True)"),
        ("justakey", "cannot read the override"),
        ("=5", "cannot read the override"),
        ("~optimizer.lr=5", "cannot read the override"),
        ("optimizer.lr=[1,", "broken YAML"),
        ("entry=os.system", "is not known"),
        ("batch_size=1.5", "a whole number, 1 or more"),
        ("tokenizer.path=${nowhere.path}", "is not defined"),
        ("tokenizer.path=${tokenizer.path}", "refers to itself"),
    ],
)
def test_a_wrong_override_is_one_fault(override, told):
    (fault,) = faults_of("llama1b_lora", [override])
    assert told in fault


def test_all_faults_come_at_once(tmp_path):
    wrong = {"bathc_size": 4, "epochs": "many", "resources": {"nodes": -1, "gpu": 8}}
    mine = written(tmp_path, wrong, "optimizer")
    told = "\n".join(faults_of(mine, ["model.lora_rnk=1"]))
    for part in (
        "bathc_size",
        "did you mean batch_size",
        "epochs must be",
        "resources.nodes must be",
        "resources.gpu'",
        "optimizer is missing",
        "model.lora_rnk",
    ):
        assert part in told


def test_a_recipe_of_ones_own_may_not_carry_a_hostile_file_name(tmp_path):
    path = tmp_path / "$(id).yaml"
    path.write_text("a: 1")
    (fault,) = faults_of(str(path))
    assert "rename it" in fault


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("04:00:00", 14400),
        ("2-00", 172800),
        ("1-12:30", 131400),
        ("0-0:0:5", 5),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text, seconds):
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("epochs: many", ", line 2"),
        ("resources: {nodes: 1, gpus_per_node: x}", ", line 2"),
        ("env: [A]", "env must be a block of 'key: value' lines, got ['A'], in "),
        ("env: {A: null}", 'env.A has no value: write A: "" to set it to an empty string, in '),
        ("secrets: yes_please", "secrets must be a list of names, or names with paths"),
        ("secrets: {A B: x}", "which is not a valid variable name with the path of a file"),
        ("share: all", "share must be one of private, group, got 'all'"),
        ("resume_from_checkpoint: true", "resume_from_checkpoint is refused: a run resumes"),
        ("checkpointer: {recipe_checkpoint: x}", "cannot read the state of a torchtune run"),
        ("dataset: {packed: 7}", "dataset.packed must be true or false, got 7"),
        ("profiler: {enable: true}", "unknown key 'profiler.enable' (did you mean enabled?)"),
        ("tokenizer: {path: '${nowhere}'}", "${nowhere} is not defined, in "),
    ],
)
def test_a_fault_names_the_file_and_the_line(tmp_path, fault, told):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: llama1b_lora\n{fault}\n")
    (said,) = faults_of(str(mine))
    assert told in said and said.endswith(f"{mine}, line 2")


def test_a_fault_of_a_base_or_an_option_is_named_there(tmp_path):
    (tmp_path / "shared.yaml").write_text("extends: llama1b_lora\nepochs: many\n")
    (tmp_path / "mine.yaml").write_text("extends: shared.yaml\nseed: 1\n")
    (said,) = faults_of(str(tmp_path / "mine.yaml"))
    assert said.endswith(f"{tmp_path / 'shared.yaml'}, line 2")
    (said,) = faults_of("demo", ["seed=1"], {"time": "soon"})
    assert said.endswith("got 'soon', in the option --time")


def test_an_empty_value_is_the_same_as_none(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: llama1b_lora\nepochs: null\nresources: {time: null}\n")
    recipe = recipes.load(str(mine))
    assert recipe.config["epochs"] is None and recipe.resources.time is None


def test_what_is_accepted_and_not_used_is_noted():
    recipe = recipes.load("demo", ["optimizer_in_bwd=true", "low_cpu_ram=false"])
    assert recipe.notes == [
        "keys that are not used: optimizer_in_bwd (the optimizer steps after the backward pass)"
    ]
    assert all(recipes.load(name).notes == [] for name in recipes.names())


def test_what_another_key_makes_useless_is_noted():
    notes = recipes.load("qwen3_30b_a3b_full", ["activation_checkpointing=op"]).notes
    assert [note.partition(":")[0] for note in notes] == ["compile"]


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ([], 2),
        (["activation_checkpointing=op"], "op"),
        (["enable_activation_checkpointing=true"], "full"),
        (["enable_activation_checkpointing=false"], "none"),
        (["ac_mode=none"], "none"),
        (["ac_option=op", "ac_mode=selective"], "op"),
        (["ac_option='3'"], 3),
        (["ac_mode=full", "activation_checkpointing=none"], "none"),
    ],
)
def test_torchtunes_keys_are_read_as_the_kits_and_the_last_one_counts(overrides, layers):
    config = recipes.load("llama8b_qlora", overrides).config
    assert config["activation_checkpointing"] == layers and not torchtune.KEYS & config.keys()


LLAMA = "_component_: torchtune.models.llama3"
OF_LORA = {"lora_rank": 8, "lora_alpha": 16}


@pytest.mark.parametrize(
    ("given", "read", "method"),
    [
        (f"{LLAMA}.llama3_8b", {}, "full"),
        (f"{LLAMA}.lora_llama3_8b, lora_rank: 64", {"lora_rank": 64, "lora_alpha": 16}, "lora"),
        (f"{LLAMA}.qlora_llama3_8b", {**OF_LORA, "quantize_base": True}, "qlora"),
        (f"{LLAMA}.lora_llama3_8b, use_dora: true", {**OF_LORA, "adapter": "dora"}, "dora"),
        (
            f"{LLAMA}.lora_llama3_8b, lora_attn_modules: [q_proj, output_proj]",
            {**OF_LORA, "lora_modules": ["q_proj", "o_proj"]},
            "lora",
        ),
        (
            f"{LLAMA}.lora_llama3_8b, lora_attn_modules: [q_proj, k_proj, v_proj, output_proj], "
            "apply_lora_to_mlp: true",
            OF_LORA,
            "lora",
        ),
        (
            f"{LLAMA}._model_builders.lora_llama3_8b, lora_attn_modules: [v_proj], "
            "apply_lora_to_output: true, modules_to_save: [tok_embeddings]",
            {**OF_LORA, "lora_modules": ["v_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
            "lora",
        ),
        (
            "_component_: torchtune.models.phi4.lora_phi4_14b, apply_lora_to_mlp: true, "
            "lora_attn_modules: [q_proj, v_proj]",
            {**OF_LORA, "lora_modules": ["qkv_proj", "gate_up_proj", "down_proj"]},
            "lora",
        ),
        ("lora_rank: 8, use_dora: true", {"lora_rank": 8, "adapter": "dora"}, "dora"),
        ("lora_rank: 8, use_dora: false", {"lora_rank": 8}, "lora"),
    ],
)
def test_an_adapter_has_one_spelling(given, read, method, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: sft\nmodel: {{{given}}}\ncheckpointer: {{checkpoint_dir: /m}}\n")
    more = ["+dataset._component_=torchtune.datasets.alpaca_dataset", "+dataset.source=/d"]
    more += ["+tokenizer._component_=trainer.data.tokenizers.hugging_face_tokenizer"]
    recipe = recipes.load(str(mine), [*more, "+tokenizer.path=/m", "batch_size=1"])
    assert (recipe.method, recipe.config["model"]) == (method, read)
    family = "PHI4" if "phi4" in given else "LLAMA3" if "torchtune" in given else None
    assert recipe.config["checkpointer"].get("model_type") == family


def test_a_tokenizer_of_torchtune_is_that_of_the_folder(tmp_path):
    mine = tmp_path / "mine.yaml"

    def read(text: str) -> dict[str, Any]:
        mine.write_text(f"extends: llama8b_full\ntokenizer: {{{text}}}\n")
        return recipes.load(str(mine)).config["tokenizer"]

    ours = {"_component_": "trainer.data.tokenizers.hugging_face_tokenizer", "path": "/m/x"}
    named = "_component_: torchtune.models.llama3.llama3_tokenizer"
    assert read(f"{named}, path: /m/x/original/tokenizer.model") == ours
    found = read(f"{named}, path: /m/x/vocab.json, merges_file: /m/x/merges.txt, max_seq_len: 8")
    assert found == {**ours, "max_seq_len": 8}
    # Folders of these models have no chat template.
    for family in ("llama2", "mistral", "gemma2"):
        text = f"_component_: torchtune.models.{family}.{family}_tokenizer, path: /m/x/t.model"
        assert "bos_token" in read(text)["chat_template"]
        assert read(f"{text}, chat_template: /m/own.jinja")["chat_template"] == "/m/own.jinja"


def test_the_other_names_of_torchtune_are_read_as_the_kits_too(tmp_path):
    mine, cosine = tmp_path / "mine.yaml", "get_cosine_schedule_with_warmup"
    mine.write_text(
        "extends: llama8b_full\nfsdp: {cpu_offload: true}\n"
        "loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}\n"
        f"lr_scheduler: {{_component_: torchtune.training.{cosine}, num_warmup_steps: 3}}\n"
    )
    config = recipes.load(str(mine)).config
    assert config["fsdp_cpu_offload"] is True and "fsdp" not in config
    assert config["loss"] == {"_component_": "trainer.layers.loss.LinearCrossEntropy"}
    assert config["lr_scheduler"]["_component_"] == f"torchtune.training.lr_schedulers.{cosine}"
    assert recipes.load(str(mine), ["fsdp_cpu_offload=false"]).config["fsdp_cpu_offload"] is False
    for wrong, at in (("ac_mode=selective", "the override 'ac_mode=selective'"), ("", "line 2")):
        mine.write_text("extends: llama8b_full\nenable_activation_checkpointing: maybe\n")
        with pytest.raises(RecipeFault, match=f"every n-th layer, got .*{at}"):
            recipes.load(str(mine), [wrong] if wrong else [])


def test_who_may_read_a_run_is_the_recipes_choice_then_the_sites():
    private, group = Site(), Site(share="group")
    assert complete(recipes.load("demo"), private, executor=choose(True)).umask == "077"
    assert complete(recipes.load("demo"), group, executor=choose(True)).umask == "027"
    mine = recipes.load("demo", ["share=private"])
    assert complete(mine, group, executor=choose(True)).umask == "077"
    assert recipes.load("demo", ["share=group"]).umask == "027"


def test_exclusive_nodes_come_with_their_memory():
    for overrides, mem in ([], None), (["resources.exclusive=true"], "0"):
        recipe = complete(recipes.load("demo", overrides), Site(), executor=choose(True))
        assert recipe.resources.mem == mem
    given = recipes.load("demo", ["resources.exclusive=true", "resources.mem=9G"])
    assert complete(given, Site(), executor=choose(True)).resources.mem == "9G"
    site = Site(resources={"exclusive": True, "mem": "7G", "cpus_per_gpu": 3})
    resources = complete(recipes.load("llama1b_lora"), site).resources
    assert (resources.mem, resources.cpus_per_gpu) == ("7G", 3)

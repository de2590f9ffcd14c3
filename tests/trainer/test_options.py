"""Options of training against what others wrote: groups, schedules, freezing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from runspec.keys.sft import SftConfig
from tests.trainer.runs import metrics, tensors, train, write_config
from trainer import optimizers
from trainer.config import load
from trainer.data import batches
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.errors import ConfigError
from trainer.groups import trained_of
from trainer.models import build as models
from trainer.parallel import world as distributed

ADAMW = {"_component_": "torch.optim.AdamW", "lr": 3e-3, "weight_decay": 0.1}
FREE = {"no_weight_decay": ["norm", "embedding"]}
COSINE = {"_component_": "transformers.get_cosine_schedule_with_warmup", "warmup_ratio": 0.4}


def plain_curve(
    path: Path, model_folder: Path, optimizer_of: Any, steps: int = 6
) -> tuple[list[float], torch.nn.Module]:
    """The losses of a loop over the same batches by transformers' model, and that model."""
    config = load(path)
    world = distributed.start("cpu")
    try:
        data = batches.build(config, world).training
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        own, losses = optimizer_of(model), []
        schedule = get_cosine_schedule_with_warmup(own, 3, steps)
        for (batch,) in data.from_step(0):
            logits = model(batch.inputs.tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            losses.append(loss.item())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            own.step()
            schedule.step()
            model.zero_grad()
        return losses, model
    finally:
        distributed.stop()


def config(folder: Path, model_folder: Path, dataset: Path, **changes: Any) -> Path:
    cache = str(folder.parent / "tokens")
    standard = {"model": None, "lr_scheduler": COSINE, "data_cache_dir": cache}
    return write_config(folder, model_folder, dataset, **standard | changes)


def by_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)


def test_an_optimizers_losses_equal_a_plain_loops(model_folder, dataset, tmp_path):
    path = config(tmp_path / "run", model_folder, dataset, optimizer=ADAMW | FREE)
    train(path)
    losses, model = plain_curve(path, model_folder, by_adamw)
    assert [line["loss"] for line in metrics(path.parent)] == pytest.approx(losses, abs=1e-5)
    exported = tensors(path.parent / "export")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=2e-4)


def test_groups_are_named_by_kind_or_pattern(model_folder, dataset, tmp_path):
    module = models.empty(load(config(tmp_path / "run", model_folder, dataset)))
    trained = trained_of(module.to_empty(device="cpu"))
    free = {"no_weight_decay": ["norm", "*.q_proj.weight"]}
    made = optimizers.build(ADAMW | free, trained)
    decayed, others = made.param_groups
    assert others["weight_decay"] == 0 and decayed["weight_decay"] == 0.1
    assert len(others["params"]) == 3 * (2 + 1) + 1
    with pytest.raises(ConfigError, match="nothing that is trained is called"):
        optimizers.build(ADAMW | {"no_weight_decay": ["bias", "*.w1"]}, trained)


def test_a_share_of_steps_becomes_their_number():
    def rates(block: dict[str, Any], steps: int) -> list[float]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)
        schedule = optimizers.schedule(block, optimizer, steps)
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    named = {"_component_": "transformers.get_wsd_schedule", "min_lr_ratio": 0.1}
    shares = named | {"warmup_ratio": 0.1, "decay_ratio": 0.25}
    steps = named | {"num_warmup_steps": 3, "num_decay_steps": 6}
    assert rates(shares, 21) == rates(steps, 21)
    assert rates(shares, 21)[3:15] == [1.0] * 12
    wrong = {"_component_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 5}
    with pytest.raises(ConfigError, match="has no num_warmup_steps"):
        rates(wrong | {"warmup_ratio": 0.1}, 4)
    with pytest.raises(ConfigError, match="must be a share"):
        rates(steps | {"warmup_ratio": 0.1}, 4)


def test_frozen_layers_stay_as_they_are(model_folder, dataset, tmp_path):
    patterns = ["model.embed_tokens.*", "model.layers.0.*"]
    output = train(config(tmp_path / "one", model_folder, dataset, freeze=patterns))
    before, after = tensors(model_folder), tensors(tmp_path / "one/export")
    same = {name for name, value in before.items() if value.equal(after[name])}
    assert same == {n for n in before if n.startswith(("model.embed_tokens", "model.layers.0."))}
    trained = sum(value.numel() for name, value in before.items() if name not in same)
    assert f"{trained:,} trainable" in output
    for freeze, words in ((["model.layer.*"], "no parameter"), (["*"], "nothing is left")):
        path = config(tmp_path / words, model_folder, dataset, freeze=freeze)
        assert words in train(path, status=1)


def test_a_recipe_has_its_own_chat_template(model_folder, dataset, tmp_path):
    text = (
        "{% if not enable_thinking %}quick {% endif %}"
        "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    file = tmp_path / "own.jinja"
    file.write_text(text)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    folder, off = str(model_folder), {"enable_thinking": False}
    for given in (text, str(file)):
        tokenizer = hugging_face_tokenizer(folder, None, given, {"enable_thinking": True})
        assert tokenizer.render(turns) == "[user]a[assistant]b"
    assert hugging_face_tokenizer(folder, None, text, off).render(turns).startswith("quick [user]")
    with pytest.raises(ConfigError, match="cannot be read"):
        hugging_face_tokenizer(folder, chat_template="/absent.jinja")
    block = {
        "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
        "path": folder,
        "chat_template": str(file),
        "chat_template_kwargs": off,
    }
    path = config(tmp_path / "run", model_folder, dataset, tokenizer=block, max_steps=1)
    train(path)
    assert (tmp_path / "run/export/chat_template.jinja").read_text() == text
    cached = {p.name for p in (tmp_path / "tokens").iterdir()}
    block["chat_template_kwargs"] = {"enable_thinking": True}
    train(config(tmp_path / "other", model_folder, dataset, tokenizer=block, max_steps=1))
    assert len({p.name for p in (tmp_path / "tokens").iterdir()}) == len(cached) + 1
    first, second = (metrics(tmp_path / name)[0] for name in ("run", "other"))
    assert first["tokens"] > second["tokens"], json.dumps([first, second])
    assert isinstance(load(path), SftConfig)


@pytest.mark.long
def test_embedding_and_head_are_trained_beside_lora(model_folder, dataset, tmp_path):
    """Over a 4-bit base, too, and as PEFT and transformers load them."""
    lora = {"lora_rank": 4, "modules_to_save": ["embed_tokens", "lm_head"]}
    changes = {"optimizer": ADAMW, "max_steps": 4}
    for name, model in (("one", lora), ("nf4", lora | {"quantize_base": True})):
        train(config(tmp_path / name, model_folder, dataset, model=model, **changes))
    export, tokens = tmp_path / "one/export", torch.arange(40).view(2, 20)
    before, merged = tensors(model_folder), tensors(export)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert not before[name].equal(merged[name])
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, export / "adapter").eval()(tokens).logits
        whole = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(adapted, whole, rtol=0, atol=2e-5)
    # It goes on from there: the first loss is that of the merged model.
    more = {"checkpointer": {"checkpoint_dir": str(model_folder)}, "model": lora, "max_steps": 1}
    more["checkpointer"]["adapter_checkpoint"] = str(export / "adapter")
    train(config(tmp_path / "on", model_folder, dataset, **changes | more))
    again = {"checkpointer": {"checkpoint_dir": str(export)}, "model": {"lora_rank": 4}}
    train(config(tmp_path / "merged", model_folder, dataset, **changes | again | {"max_steps": 1}))
    first, other = (metrics(tmp_path / name)[0]["loss"] for name in ("on", "merged"))
    assert first == pytest.approx(other, abs=1e-5) and first < metrics(tmp_path / "one")[0]["loss"]
    for model, words in (
        ({"modules_to_save": ["lm_head"]}, "all weights are trained without an adapter"),
        ({"lora_rank": 4, "modules_to_save": ["q_proj"]}, "q_proj is none of"),
    ):
        path = config(tmp_path / words, model_folder, dataset, model=model)
        assert words in train(path, status=1)


class Stateless(torch.optim.SGD):
    """Keeps its state elsewhere, as torchao's CPUOffloadOptimizer does, which needs a GPU."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        vars(self).pop("state")


def test_an_optimizer_whose_state_no_checkpoint_would_hold_is_refused(monkeypatch):
    monkeypatch.setenv("COOKBOOK_COMPONENTS", "tests")
    block = {"_component_": f"{__name__}.Stateless", "lr": 0.1}
    with pytest.raises(ConfigError, match="has no state that a checkpoint could hold; fsdp_cpu"):
        optimizers.build(block, [torch.nn.Parameter(torch.zeros(2, 2))])

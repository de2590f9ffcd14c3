"""Prompt and prefix tuning in one process: any family, packed rows, every kernel, off."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.trainer.models.transformers_cases import reference, write
from tests.trainer.models.transformers_runs import DOCUMENTS, FIRST, POSITIONS, TOKENS, config_of
from tests.trainer.runs import randomise_adapter
from trainer.checkpoint.export import export
from trainer.config import load
from trainer.errors import ConfigError
from trainer.layers import attention
from trainer.layers.adapters.base import disabled
from trainer.layers.adapters.prefix import Prefix
from trainer.model import Decoder, Inputs
from trainer.models import build as models
from trainer.parallel import world as distributed

COUNT = 11
# Windows, soft caps, sinks, scaled embeddings, LongRoPE, norms of keys, experts.
FAMILIES = ("llama3-tied", "qwen3", "gemma2", "gemma3", "gpt-oss", "phi4-mini")


def adapted(
    folder: Path, source: Path, dataset: Path, world: distributed.World, **model: Any
) -> Decoder:
    block = {"_component_": "transformers", "num_virtual_tokens": COUNT} | model
    config = load(config_of(folder, source, dataset, model=block, save_adapter_weights_only=True))
    return models.build(config, world).module.eval()


@pytest.mark.parametrize(
    ("family", "kind"), [("gemma3", "prompt"), *((family, "prefix") for family in FAMILIES)]
)
@torch.inference_mode()
def test_it_begins_as_its_text_before_each_document(
    family, kind, tmp_path, model_folder, dataset, world
):
    source = write(family, tmp_path / "model", model_folder)
    model = adapted(tmp_path, source, dataset, world, adapter=kind)
    text = torch.tensor(model.adapter._text).expand(2, -1)
    assert text.shape[1] == COUNT

    def base(tokens: torch.Tensor) -> torch.Tensor:
        with disabled(model):
            return model(Inputs(torch.cat([text, tokens], 1)))[:, COUNT:]

    found, wanted = model(Inputs(TOKENS)), base(TOKENS)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    packed = model(Inputs(TOKENS, DOCUMENTS, POSITIONS))
    apart = torch.cat([base(TOKENS[:, :FIRST]), base(TOKENS[:, FIRST:])], 1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-5)
    with disabled(model):
        plain = model(Inputs(TOKENS))
    assert (found - plain).abs().max() > 1e-3
    assert torch.equal(model(Inputs(TOKENS)), found), "it is on again"


# PEFT 0.18 cannot put a prefix before Gemma 2 and 3.
@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3", "prompt"), *product(("phi4-mini", "gpt-oss", "llama4"), ("ia3", "prefix"))],
)
@torch.inference_mode()
def test_peft_gives_the_same_logits_in_each_family(
    family, kind, tmp_path, model_folder, dataset, world
):
    source = write(family, tmp_path / "model", model_folder)
    block: dict[str, Any] = {"_component_": "transformers", "adapter": kind}
    if (kind, family) == ("ia3", "phi4-mini"):
        block["target_modules"] = ["qkv_proj", "down_proj"]
    merged = {"save_adapter_weights_only": kind != "ia3"}
    config = load(config_of(tmp_path / "run", source, dataset, model=block, **merged))
    model = models.build(config, world)
    randomise_adapter(model.module)
    own = model.module.eval()(Inputs(TOKENS))
    folder = export(model, config, world)
    other = PeftModel.from_pretrained(reference(source), folder / "adapter").eval()
    found = other(TOKENS).logits[:, -TOKENS.shape[1] :]
    torch.testing.assert_close(found, own, rtol=0, atol=1e-5)
    if kind == "ia3":
        torch.testing.assert_close(reference(folder)(TOKENS).logits, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt-oss"])
def test_the_kernel_gives_what_the_mask_gives(family, tmp_path, model_folder, dataset, world):
    source = write(family, tmp_path / "model", model_folder)
    model = adapted(tmp_path, source, dataset, world, adapter="prefix")

    def found() -> list[torch.Tensor]:
        packed = model(Inputs(TOKENS, DOCUMENTS, POSITIONS))
        outputs = [model(Inputs(TOKENS)), packed]
        packed.square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        model.zero_grad()
        return [*outputs, *gradients]

    wanted = found()
    assert len(wanted) == 2 + 2 * len(model.blocks)
    with torch.no_grad(), disabled(model):
        plain = model(Inputs(TOKENS, DOCUMENTS, POSITIONS))
    attention.use_flex_attention(model, torch.device("cpu"))
    # On a CPU it has no backward pass.
    with torch.no_grad():
        packed = model(Inputs(TOKENS, DOCUMENTS, POSITIONS))
        for own, other in zip((model(Inputs(TOKENS)), packed), wanted, strict=False):
            torch.testing.assert_close(own, other, rtol=0, atol=2e-5)
        with disabled(model):
            off = model(Inputs(TOKENS, DOCUMENTS, POSITIONS))
    torch.testing.assert_close(off, plain, rtol=0, atol=2e-5)


REFUSED = {
    "gemma4": ("prefix", "heads of different widths"),
    "qwen3.5": ("prefix", "layers do not all have softmax attention"),
    "deepseek-v3": ("prefix", "attention is latent"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_a_prefix_cannot_be_put_before_is_said(family, tmp_path, dataset, world, model_folder):
    kind, reason = REFUSED[family]
    source = write(family, tmp_path / "model", model_folder)
    with pytest.raises(ConfigError, match=reason):
        adapted(tmp_path, source, dataset, world, adapter=kind)


def test_layers_that_share_keys_are_refused(model_folder):
    with torch.device("meta"):
        model = models.empty_module({"_component_": "transformers"}, model_folder)
    model.config.num_kv_shared_layers = 1
    with pytest.raises(ConfigError, match="share keys and values with other layers"):
        Prefix({}).add(model)

"""Attention within documents: kernels and masks against all scores."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trainer.data.test_data import ROW, packed
from tests.trainer.runs import described, spec_of
from trainer.demo import ARCHITECTURE
from trainer.layers import attention, flex
from trainer.model import Decoder, Documents, Inputs
from trainer.models import build as models
from trainer.parallel import activations

# Every second layer has the window.
GEMMA = {"model_type": "gemma2", "sliding_window": 8}


def random_model(
    folder: Path, dtype: str, device: str | torch.device = "cpu", **settings: Any
) -> Decoder:
    """Two blocks of the demo's sizes, whose attention has no kernel but the masks'."""
    source = described(folder, num_hidden_layers=2, **settings)
    spec = spec_of({}, dtype=dtype, checkpointer={"checkpoint_dir": str(source)})
    model = models.empty(spec).to_empty(device=device)
    model.fill_buffers(torch.device(device))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 1.0 if "embed" in name else 0.05  # as torch begins them
            parameter.normal_(mean=float("norm" in name), std=std)
    return model


def by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor,
    key_begins: torch.Tensor,
    longest: int,
    key_longest: int,
    window_size: list[int],
) -> torch.Tensor:
    """What torch documents of its variable-length attention, one document after the other: the last
    query of a document sees its last key, and window_size[0] keys before it, all if that is -1.
    """
    assert begins.dtype == key_begins.dtype == torch.int32
    parts = []
    for (begin, end), (first, last) in zip(
        pairwise(begins.tolist()), pairwise(key_begins.tolist()), strict=True
    ):
        assert end - begin <= longest and last - first <= key_longest
        q = query[begin:end].transpose(0, 1)
        k, v = (t[first:last].transpose(0, 1) for t in (key, value))
        place = torch.arange(last - first)
        distance = place[-(end - begin) :, None] - place
        mask = distance >= 0
        if window_size[0] >= 0:
            mask &= distance <= window_size[0]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@torch.library.custom_op("tests::by_document", mutates_args=())
def as_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor,
    key_begins: torch.Tensor,
    longest: int,
    key_longest: int,
    window_size: list[int],
) -> torch.Tensor:
    """`by_document` as the compiler meets a kernel: its inside is not seen."""
    assert query.shape[1] == 2 * key.shape[1], "heads are shared"
    return by_document(
        query, key, value, begins, key_begins, longest, key_longest, window_size
    ).contiguous()


as_operator.register_fake(lambda query, *_: torch.empty_like(query))


@torch.inference_mode()
def test_a_variable_length_kernel_gives_what_the_mask_gives(build, tmp_path):
    """The GPU's path, with a kernel of the same arguments that runs anywhere.

    Layers are compiled once, for any number of documents.
    """
    rows = build(**packed()).training.rows
    batches = [rows.collate([rows[i], rows[i + 1]]) for i in range(0, 8, 2)]
    assert len({len(batch.inputs.documents.cu_seqlens) for batch in batches}) > 1
    model = random_model(tmp_path / "model", "bf16")

    def outputs() -> list[torch.Tensor]:
        return [model(b.inputs) for b in batches]

    wanted = outputs()
    for kernel in (by_document, as_operator):
        for layer in attention.layers(model):
            options = {"window_size": [-1, 0]}
            layer.varlen_attention = partial(kernel, **options)
        if kernel is as_operator:
            torch._dynamo.reset()
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
            model.register_forward_pre_hook(activations.mark_dynamic)
            with torch._dynamo.config.patch(error_on_recompile=True):
                found = outputs()
        else:
            found = outputs()
        for own, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, other, rtol=0.02, atol=0.02)


def documents_of(length: int, seed: int) -> torch.Tensor:
    """Numbers [2, length] of documents of 1 to 400 tokens; one row is a single document."""
    lengths = np.random.default_rng(seed).integers(1, 400, size=length)
    row = np.repeat(np.arange(length, dtype=np.int32), lengths)[:length]
    return torch.from_numpy(np.stack([row, np.zeros_like(row)]))


@pytest.mark.parametrize("window", [None, 1, 150])
@pytest.mark.parametrize("length", [128, 700, 1024])
def test_blocks_hold_what_is_seen_and_little_else(length, window):
    numbers = documents_of(length, seed=length)
    position = torch.arange(length)
    seen = (position[:, None] >= position) & (numbers.unsqueeze(2) == numbers.unsqueeze(1))
    if window is not None:
        seen &= position[:, None] - position < window
    mask = flex.block_masks(numbers, {window}).by_window[window]
    count = -(-length // flex.BLOCK)
    rows, queries, keys = torch.meshgrid(torch.arange(2), position, position, indexing="ij")
    assert torch.equal(mask.mask_mod(rows, 0, queries, keys), seen)
    for row in range(2):
        for query in range(count):
            by_rule, whole = (
                listed[row, 0, query, : number[row, 0, query]].tolist()
                for number, listed in (
                    (mask.kv_num_blocks, mask.kv_indices),
                    (mask.full_kv_num_blocks, mask.full_kv_indices),
                )
            )
            chosen = {*by_rule, *whole}
            assert len(chosen) == len(by_rule) + len(whole)
            for key in range(count):
                block = seen[row, query * 128 : query * 128 + 128, key * 128 : key * 128 + 128]
                assert (key in whole) <= block.all(), "no rule is asked inside a whole block"
                assert (key in chosen) == block.any()


@torch.inference_mode()
def test_layers_with_flex_attention_are_compiled_once(tmp_path):
    """For any documents; what has a window, and what has none, is another kind of layer."""
    model = random_model(tmp_path, "fp32", **GEMMA)
    assert [layer.window for layer in attention.layers(model)] == [8, None]
    tokens = torch.arange(400).reshape(2, 200) % 1000
    batches = [Documents(documents_of(200, seed), torch.zeros(2)) for seed in (1, 2, 3)]
    wanted = [model(Inputs(tokens, documents)) for documents in batches]
    attention.use_flex_attention(model, torch.device("cpu"))
    torch._dynamo.reset()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    model(Inputs(tokens, batches[0]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for documents, other in zip(batches, wanted, strict=True):
            found = model(Inputs(tokens, documents))
            torch.testing.assert_close(found, other, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_flex_attention_with_sinks_is_compiled_once():
    """Other code in the pass that computes a layer again is refused by activation checkpointing."""
    torch._dynamo.reset()
    kernel = torch.compile(flex.kernel(torch.device("cpu")), backend="aot_eager")
    mask = flex.block_masks(documents_of(200, seed=1), {None}).by_window[None]
    heads = tuple(torch.randn(2, 200, heads, 16) for heads in (4, 2, 2))
    with torch._dynamo.config.patch(error_on_recompile=True):
        first, second = (flex.attend(kernel, heads, mask, sinks=torch.ones(4)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.long
@pytest.mark.parametrize("cap", [None, 2.0])
def test_compiled_flex_attention_gives_what_all_scores_give(cap):
    """The compiler's kernel for the CPU, which leaves blocks out too; it has no backward pass."""
    torch.manual_seed(0)
    numbers = documents_of(700, seed=1)
    mask = flex.block_masks(numbers, {150}).by_window[150]
    heads = tuple(torch.randn(2, 700, heads, 32) for heads in (4, 2, 2))
    plain = flex.kernel(torch.device("cpu"))
    wanted, found = (
        flex.attend(kernel, heads, mask, cap, 0.3) for kernel in (plain, torch.compile(plain))
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cap", [None, 2.0])
def test_flex_attention_on_a_gpu_gives_what_all_scores_give(cap):
    """With gradients, against one matrix of scores."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    numbers = documents_of(700, seed=1).to(device)
    mask = flex.block_masks(numbers, {150}).by_window[150]
    shapes = [(2, 700, heads, 64) for heads in (4, 2, 2)]
    own = [torch.randn(s, device=device, dtype=torch.bfloat16).requires_grad_() for s in shapes]
    exact = [tensor.detach().float().requires_grad_() for tensor in own]
    found = flex.attend(flex.kernel(device), tuple(own), mask, cap, 0.3)
    found.float().square().sum().backward()
    query, key, value = (t.transpose(1, 2).repeat_interleave(4 // t.shape[2], 1) for t in exact)
    scores = 0.3 * query @ key.transpose(2, 3)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    position = torch.arange(700, device=device)
    distance = position[:, None] - position
    seen = (numbers[:, :, None] == numbers[:, None]) & (distance >= 0) & (distance < 150)
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    wanted = (scores.softmax(-1) @ value).transpose(1, 2)
    wanted.square().sum().backward()
    for tensor, other in (
        (found, wanted),
        *((a.grad, b.grad) for a, b in zip(own, exact, strict=True)),
    ):
        assert (tensor.float() - other).norm() < 0.02 * other.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpus_kernel_gives_what_the_mask_gives(build, tmp_path):
    device = torch.device("cuda")
    rows = build(**packed()).training.rows
    batch = rows.collate([rows[0], rows[1]]).to(device)
    model = random_model(tmp_path / "model", "bf16", device)
    layer = model.blocks[0].self_attn
    x = torch.randn(2, ROW, ARCHITECTURE["hidden_size"], device=device, dtype=torch.bfloat16)
    angles = model.base.rotary_emb(x, batch.inputs.positions)
    outputs, gradients = [], []
    for varlen in (None, attention.varlen_attention()):
        inputs = x.clone().requires_grad_()
        layer.document_attention.varlen_attention = varlen
        out, _ = layer(inputs, angles, attention_mask=None, documents=batch.inputs.documents)
        out.float().square().sum().backward()
        outputs.append(out)
        gradients.append(inputs.grad)
    assert varlen is not None
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.05, atol=0.05)


def test_flash_attention_is_replaced_only_where_torch_can(monkeypatch):
    assert set(torch.nn.attention.list_flash_attention_impls()) >= set(attention.REPLACEMENTS)
    assert attention.replace_flash_attention("FA3", torch.device("cpu")) == "there is no GPU"
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    told = attention.replace_flash_attention("FA4", gpu)
    assert told == "it needs compute capability 9 or 10, and this GPU has 8"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    told = attention.replace_flash_attention("FA3", gpu)
    assert told and "its package flash_attn_interface cannot be used (No module named" in told

"""The gated delta rule over packed documents, against transformers' own, document by document."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)

from trainer.layers import delta

# Several documents in a chunk, one of a single token, one over several chunks, one that ends with a
# chunk; and a row that is filled up.
LENGTHS = ((5, 1, 20, 150, 80), (64, 64, 3, 61), (256,))
WIDTH, KEY_HEADS, HEADS = 8, 2, 4


def batch(lengths: tuple[int, ...]) -> tuple[torch.Tensor, list[slice]]:
    """(ids [2, sequence], where each document is)."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return ids.expand(2, -1), [slice(e - n, e) for e, n in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_document_is_as_by_itself(lengths):
    torch.manual_seed(0)
    ids, parts = batch(lengths)
    size = 2, ids.shape[1]
    query, key = (torch.randn(*size, KEY_HEADS, WIDTH) for _ in range(2))
    value = torch.randn(*size, HEADS, WIDTH)
    # So slow that a state is felt in the next chunk.
    decay = -0.02 * torch.rand(*size, HEADS)
    given = [query, key, value, decay, torch.rand(*size, HEADS)]
    own, wanted = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    found = delta.gated_delta_rule(*own, ids)
    rule = torch_recurrent_gated_delta_rule
    expected = torch.cat(
        [
            rule(
                *(x[:, part] for x in wanted[:3]),
                g=wanted[3][:, part],
                beta=wanted[4][:, part],
                initial_state=None,
                output_final_state=False,
                use_qk_l2norm_in_kernel=True,
            )[0]
            for part in parts
        ],
        1,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    weights = torch.randn_like(found)
    for out in (found, expected):
        (out * weights).sum().backward()
    for one, other in zip(own, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("lengths", [*LENGTHS, (2, 1)], ids=str)
def test_the_convolution_begins_anew_with_each_document(lengths):
    torch.manual_seed(0)
    ids, parts = batch(lengths)
    x, weight = torch.randn(2, ids.shape[1], 6), torch.randn(6, 4)
    found = delta.convolution(x, weight, ids)
    expected = [causal_conv1d_fn(x[:, part].transpose(1, 2), weight) for part in parts]
    torch.testing.assert_close(found, torch.cat(expected, 2).transpose(1, 2))


# A number that a loop has counted is no tensor to the interpreter, and it has no clock by which to
# choose among configurations: the first one is taken.
AS_IN_TORCH = """
import torch
import triton.runtime.autotuner
from trainer.layers import delta

triton.runtime.autotuner.Autotuner.do_bench = staticmethod(lambda call, quantiles: [0.0] * 3)
torch.manual_seed(0)
for lengths in ((5, 1, 20, 70), None):
    tokens, rows = (96, 1) if lengths else (70, 2)
    sizes = ((rows, tokens, 1, 16),) * 2 + ((rows, tokens, 2, 16),) + ((rows, tokens, 2),) * 2
    *heads, decay, rate = (torch.randn(size) for size in sizes)
    given = [*heads, -0.1 * decay.sigmoid(), rate.sigmoid()]
    ids, bounds = torch.zeros(rows, tokens, dtype=torch.int32), None
    if lengths:
        ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).int().unsqueeze(0)
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    own, wanted = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    found = delta.by_kernels(*own, bounds)
    expected = delta.gated_delta_rule(*wanted, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    weights = torch.randn_like(found)
    for out in (found, expected):
        (out * weights).sum().backward()
    for one, other in zip(own, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=5e-5)
"""


@pytest.mark.named
def test_the_kernels_of_flash_linear_attention_give_the_same(tmp_path):
    """Packed or not, and their gradients, by Triton's interpreter. As the package is optional:

    python -m pip install --no-deps --target FOLDER fla-core==0.6.0 einops, and
    PYTHONPATH=FOLDER python -m pytest -m named tests/trainer/layers/test_delta.py -k flash
    """
    found = find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed")
    copy = tmp_path / "fla"
    shutil.copytree(found.submodule_search_locations[0], copy)
    file = copy / "ops/common/chunk_delta_h.py"
    file.write_text(file.read_text().replace("i_t.to(tl.int64)", "tl.cast(i_t, tl.int64)"))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", AS_IN_TORCH], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()

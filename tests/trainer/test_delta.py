"""The gated delta rule over packed documents, against transformers' own, document by document."""

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
def test_each_document_is_as_by_itself(lengths: tuple[int, ...]) -> None:
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
def test_the_convolution_begins_anew_with_each_document(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ids, parts = batch(lengths)
    x, weight = torch.randn(2, ids.shape[1], 6), torch.randn(6, 4)
    found = delta.convolution(x, weight, ids)
    expected = [causal_conv1d_fn(x[:, part].transpose(1, 2), weight) for part in parts]
    torch.testing.assert_close(found, torch.cat(expected, 2).transpose(1, 2))


def test_the_compiler_takes_the_states_for_an_operator() -> None:
    """torch's own checks: of its schema, its gradients, its sizes, and both under the compiler."""
    torch.manual_seed(0)
    size = 2, 3, 4
    wide, narrow, through = ((delta.CHUNK, 5), (delta.CHUNK, 6), (1, 1))
    given = [0.1 * torch.randn(*size, *last) for last in (wide, narrow, narrow, through)]
    torch.library.opcheck(delta._states, [x.requires_grad_() for x in given])

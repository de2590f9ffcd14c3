"""A layer of experts on several ranks, by torch's all-to-alls and by DeepEP's interface; or, with a
train.yaml, trainer.sft.

DeepEP itself runs on GPUs only. `ElasticBuffer` is what deep_ep 2.1 says of the arguments that are
used here: which rows come, in which order, what is summed, and what is refused.
"""

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from trainer.layers import experts
from trainer.parallel import expert_parallel

TOKENS, ACTIVE, WIDTH, EXPERTS = 11, 3, 16, 8
Place = tuple[int, int, int]


class Handle:
    """places: of each row that came its rank, its token there, and which of the token's experts."""

    def __init__(self, chosen: torch.Tensor, places: list[Place], ends: list[int]) -> None:
        self.topk_idx, self.places = chosen, places
        self.psum_num_recv_tokens_per_expert = torch.tensor(ends, dtype=torch.int32)


class ElasticBuffer:
    def __init__(
        self, group: dist.ProcessGroup, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int
    ) -> None:
        self.group, self.most, self.hidden = group, num_max_tokens_per_rank, hidden
        self.topk = num_topk
        self.counted = 0

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_experts: int | None = None,
        handle: Handle | None = None,
        do_expand: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor | None, Handle, None]:
        assert do_expand and (topk_idx is None) == (handle is not None)
        assert x.is_contiguous() and x.shape[1] == self.hidden and len(x) <= self.most
        assert topk_weights is None or topk_weights.is_contiguous()
        assert topk_weights is None or topk_weights.dtype is torch.float32
        if handle is None:
            assert topk_idx.is_contiguous() and topk_idx.shape == (len(x), self.topk)
            self.counted += 1
            handle = self._counted(topk_idx, num_experts)
        rows = _gathered(self.group, (x, topk_weights))
        out = torch.stack([rows[rank][0][token] for rank, token, _ in handle.places])
        if topk_weights is None:
            return out, None, None, handle, None
        shares = torch.stack([rows[rank][1][token, k] for rank, token, k in handle.places])
        return out, None, shares, handle, None

    def _counted(self, chosen: torch.Tensor, count: int) -> Handle:
        assert chosen.dtype is torch.int64 and count % self.group.size() == 0
        own = count // self.group.size()
        everyones = _gathered(self.group, chosen)
        places: list[Place] = []
        ends = []
        for expert in range(own * self.group.rank(), own * (self.group.rank() + 1)):
            for rank, each in enumerate(everyones):
                places += [(rank, *place) for place in (each == expert).nonzero().tolist()]
            ends.append(len(places))
        return Handle(chosen, places, ends)

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        assert x.is_contiguous() and len(x) == len(handle.places)
        assert topk_weights is None or topk_weights.shape == (len(x),)
        out = x.new_zeros(len(handle.topk_idx), x.shape[1])
        weights = torch.zeros(handle.topk_idx.shape)
        for places, rows, shares in _gathered(self.group, (handle.places, x, topk_weights)):
            for row, (rank, token, k) in enumerate(places):
                if rank == self.group.rank():
                    out[token] += rows[row]
                    if shares is not None:
                        weights[token, k] = shares[row]
        return out, None if topk_weights is None else weights, None


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def use() -> None:
    """Let `import deep_ep` find this."""
    module = ModuleType("deep_ep")
    module.ElasticBuffer = ElasticBuffer
    sys.modules["deep_ep"] = module


def main(arguments: list[str]) -> int:
    use()
    if arguments:
        from trainer import sft

        return sft.main(arguments)
    from trainer.parallel.deep_ep import DeepExchange

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, own = init_device_mesh("cpu", (ranks,)), EXPERTS // ranks
    generator = torch.Generator().manual_seed(rank)
    layer = torch.nn.Module()
    for name in experts.MATRICES:
        stack = torch.randn(own, WIDTH, WIDTH, generator=generator)
        setattr(layer, name, torch.nn.Parameter(stack))
    experts.prepare(layer, lambda _, x: x.tanh(), transposed=False)
    # No token chooses the last expert, and ranks have different numbers of tokens.
    count = TOKENS - rank
    index = torch.stack(
        [torch.randperm(EXPERTS - 1, generator=generator)[:ACTIVE] for _ in range(count)]
    )
    hidden = torch.randn(count, WIDTH, generator=generator, requires_grad=True)
    weights = torch.rand(count, ACTIVE, generator=generator, requires_grad=True)
    leaves, results = [hidden, weights, *layer.parameters()], []
    deep = DeepExchange(mesh, 1 / ranks, TOKENS)
    for exchange in (expert_parallel.Exchange(mesh, 1 / ranks), deep):
        layer.exchange = exchange
        out = checkpoint(
            experts.forward,
            *(layer, hidden, index, weights),
            use_reentrant=False,
            context_fn=expert_parallel.remembered,
        )
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    print(f"the same, counted {deep._buffer.counted} times", flush=True)
    dist.destroy_process_group()
    return 0

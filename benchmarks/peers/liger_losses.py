"""Liger Kernel's losses and their gradients, for tests/trainer/layers/test_liger_losses.py.

    pip install --no-deps --target LIGER liger-kernel==0.8.5
    PYTHONPATH=LIGER python -m benchmarks.peers.liger_losses

Only its plain functions of liger_kernel.chunked_loss run, on the CPU, in fp64; its kernels do not.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import trl_rl

VALUES = Path(__file__).parents[2] / "tests/trainer/liger_losses.json"
PAIRS, TOKENS, VOCABULARY = 6, 5, 13


def inputs() -> dict[str, Any]:
    """Sums of answers by policy and reference, means, labels, and logits of two models."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> list[Any]:
        values: list[Any] = torch.randn(*shape, generator=generator, dtype=torch.float64).tolist()
        return values

    sums = (-20 + 8 * torch.tensor(drawn(PAIRS, 2), dtype=torch.float64)).clamp(max=-0.5)
    return {
        "sums": sums.tolist(),
        "reference": (sums + torch.tensor(drawn(PAIRS, 2), dtype=torch.float64)).tolist(),
        "counts": [[3 + i, 9 - i] for i in range(PAIRS)],
        "student": drawn(TOKENS, VOCABULARY),
        "teacher": drawn(TOKENS, VOCABULARY),
    }


def policy_losses() -> dict[str, Any]:
    """Those of policy optimisation, on the answers of benchmarks.peers.trl_rl."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction as Grpo

    given = {n: torch.tensor(v, dtype=torch.float64) for n, v in trl_rl.inputs().items()}
    mask = (torch.arange(trl_rl.LONGEST) < torch.tensor(trl_rl.LENGTHS).unsqueeze(1)).double()
    values: dict[str, Any] = {}
    for name, (loss_type, level, beta, truncates) in trl_rl.CASES.items():
        policy = given["policy"].clone().requires_grad_()
        ratio = (given["old"] - given["sampled"]).exp().clamp(max=trl_rl.CAP)
        loss, _ = Grpo.ppo_loss_fn(
            policy,
            mask,
            given["advantages"],
            mask,
            ref_per_token_logps=given["reference"],
            old_per_token_logps=given["old"],
            epsilon_low=trl_rl.LOW,
            epsilon_high=trl_rl.HIGH,
            beta=beta,
            loss_type=loss_type,
            max_completion_length=trl_rl.LONGEST,
            importance_sampling_level=level,
            vllm_is_ratio=ratio if truncates else None,
        )
        loss.backward()
        values[name] = {"loss": loss.item(), "gradient": policy.grad.tolist()}
    return values


def main() -> None:
    """Write the values."""
    from liger_kernel.chunked_loss.cpo_loss import LigerFusedLinearCPOFunction as Cpo
    from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOFunction as Dpo
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction as Jsd
    from liger_kernel.chunked_loss.kto_loss import LigerFusedLinearKTOFunction as Kto
    from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOFunction as Orpo
    from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOFunction as Simpo

    given = inputs()
    reference = torch.tensor(given["reference"], dtype=torch.float64)
    counts, both = torch.tensor(given["counts"]), torch.empty(2 * PAIRS, 1)
    found: dict[str, Any] = {}

    def of_pairs(name: str, function: Any, means: bool, with_reference: bool, **more: Any) -> None:
        sums = torch.tensor(given["sums"], dtype=torch.float64, requires_grad=True)
        answers = sums / counts if means else sums
        known = list(reference.unbind(1)) if with_reference else []
        loss, *_ = function.preference_loss_fn(*answers.unbind(1), both, *known, **more)
        loss.backward()
        found[name] = {"loss": loss.item(), "gradient": sums.grad.tolist()}

    of_pairs("dpo", Dpo, False, True, beta=0.3)
    of_pairs("orpo", Orpo, True, False, beta=0.3)
    of_pairs("simpo", Simpo, True, False, beta=2.0, gamma=0.7, label_smoothing=0.1)
    of_pairs("cpo", Cpo, False, False, beta=0.1, label_smoothing=0.1)

    sums = torch.tensor(given["sums"], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[True, False]] * PAIRS).flatten()
    loss, *_ = Kto.preference_loss_fn(
        sums.flatten(), labels, both, reference.flatten(), beta=0.3, kl=torch.tensor(0.4)
    )
    loss.backward()
    found["kto"] = {"loss": loss.item(), "gradient": sums.grad.tolist()}

    for beta in (0.0, 0.3, 1.0):
        student = torch.tensor(given["student"], dtype=torch.float64, requires_grad=True)
        teacher = torch.tensor(given["teacher"], dtype=torch.float64)
        loss = Jsd.distillation_loss_fn(student, teacher, beta)
        loss.backward()
        found[f"jsd-{beta}"] = {"loss": loss.item(), "gradient": student.grad.tolist()}
    found |= policy_losses()
    version = importlib.metadata.version("liger-kernel")
    content = {"liger_kernel": version, "inputs": given, "values": found}
    VALUES.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

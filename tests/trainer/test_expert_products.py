"""The experts' products in Triton: in its interpreter, and compiled for GPUs without having one.

torch's builds for GPUs bring Triton, its build for CPUs does not:

    python -m pip install --target FOLDER triton
    PYTHONPATH=FOLDER python -m pytest -m named tests/trainer/test_expert_products.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.named

# With and without rows, of tiles that are not full, in both layouts; through the operator, so that
# its gradients are the kernels' too. fp16, because the interpreter multiplies the bits of bf16.
AS_A_LOOP = """
import torch
from trainer.layers import expert_products, experts
cases = (
    (40, 136, (130, 0, 7)),
    (64, 16, (0, 0, 200, 1, 0)),
    (8, 8, (3,)),
    (130, 72, (128, 128, 0, 0)),
    (16, 24, (0, 0)),
)
torch.manual_seed(0)
for inputs, outputs, sizes in cases:
    for transposed in (False, True):
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        x = torch.randn(sum(sizes), inputs).half().requires_grad_()
        weight = torch.randn(len(sizes), *shape).half().requires_grad_()
        each = weight if transposed else weight.transpose(1, 2)
        ends = torch.tensor(sizes).cumsum(0).int()
        parts = zip(x.float().split(sizes), each.float(), strict=True)
        wanted = torch.cat([part @ own for part, own in parts])
        experts._products = lambda x: expert_products
        found = experts._grouped(x, each, ends)
        scale = torch.randn(wanted.shape).half()
        both = [torch.autograd.grad((out * scale).sum(), (x, weight)) for out in (found, wanted)]
        for one, other in zip((found, *both[0]), (wanted, *both[1]), strict=True):
            assert one.dtype is torch.half and one.shape == other.shape
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-3, atol=2e-2)
        assert both[0][1].stride() == weight.stride()
"""

# As Triton itself would: lengths are multiples of 16, rows lie one after the other.
COMPILED = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trainer.layers import expert_products as own
kind, sizes = sys.argv[1], {"tile": own.TILE, "depth": own.DEPTH}
many = sizes | {"x_in": 1, "experts": 128, "padded": 128}
kernels = [
    (own._by_rows, many | {"weight_in": 1}),
    (own._by_rows, many | {"weight_out": 1}),
    (own._by_weights, sizes | {"x_in": 1, "gradient_out": 1}),
]
amd = kind.startswith("gfx")
target = GPUTarget("hip", kind, 64) if amd else GPUTarget("cuda", int(kind), 32)
stages = 2 if amd else own.STAGES
for kernel, fixed in kernels:
    names = kernel.arg_names
    pointers = dict.fromkeys(("x", "weight", "gradient", "out"), "*bf16") | {"ends": "*i32"}
    kinds = {n: "constexpr" if n in fixed else pointers.get(n, "i32") for n in names}
    whole = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in fixed}
    source = ASTSource(kernel, kinds, fixed, whole)
    made = triton.compile(source, target, {"num_warps": own.WARPS, "num_stages": stages})
    # Of the smallest GPU, an A10 or an RTX 4090; of an MI300X 64.
    assert made.metadata.shared <= (64 if amd else 99) * 1024
    text, multiplies = (
        (made.asm["amdgcn"], r"v_mfma_f32_\\S*bf16")
        if amd
        else (made.asm["ptx"], r"mma\\S*\\.f32\\.bf16\\.bf16")
    )
    assert re.search(multiplies, text), text[-2000:]
    assert made.asm["hsaco" if amd else "cubin"]
"""


def _run(code: str, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def test_each_product_and_gradient_is_as_in_a_loop() -> None:
    _run(AS_A_LOOP, TRITON_INTERPRET="1")


@pytest.mark.parametrize("kind", ["80", "89", "90", "120", "gfx942"])
def test_it_compiles_to_the_matrix_cores(kind: str, tmp_path: Path) -> None:
    _run(COMPILED, kind, TRITON_CACHE_DIR=str(tmp_path))

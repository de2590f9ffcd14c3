"""One optimizer step over realistic parameter lists."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.parts.measure import Case, Runnable, Setting, Size, Tensors, Unavailable, Variant
from benchmarks.parts.measure import compiled as compile_for
from trainer.storage.staging import staged_bytes

# Learning rate of the correctness check: in bf16 smaller updates are lost to rounding.
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.01
CHECKED_STEPS = 3
# The matrix is large enough for 8-bit optimizers to quantise it (blocks of 256; 4-bit: of 128); the
# vector is not.
CHECKED_SHAPES = {"matrix": (64, 128), "vector": (128,)}
# Tolerances of the update with quantised moments.
EIGHT_BIT_TOLERANCE, FOUR_BIT_TOLERANCE = 0.1, 0.6
# All adapters of the model are measured together, because the number of tensors matters.
LORA_LAYERS = 32


def cases(setting: Setting) -> Iterator[Case]:
    """Few large matrices, as in full fine-tuning, and many small ones, as in LoRA."""
    size = setting.size
    block = _block_shapes(size)
    matrices = [shape for shape in block if len(shape) == 2]
    yield _case(
        setting,
        "full fine-tuning",
        f"{size.layers} transformer blocks and an embedding of width {size.dim}",
        [*block * size.layers, (size.vocabulary, size.dim)],
        large=True,
    )
    yield _case(
        setting,
        "LoRA",
        f"adapters of rank {size.rank} on the 7 matrices of {LORA_LAYERS} blocks",
        [
            shape
            for outputs, inputs in matrices * LORA_LAYERS
            for shape in ((size.rank, inputs), (outputs, size.rank))
        ],
        large=False,
    )


def _block_shapes(size: Size) -> list[tuple[int, ...]]:
    kv = size.kv_heads * size.head_dim
    square, key, up, down = (
        (size.dim, size.dim),
        (kv, size.dim),
        (size.hidden, size.dim),
        (size.dim, size.hidden),
    )
    return [square, key, key, square, up, up, down, (size.dim,), (size.dim,)]


def _case(
    setting: Setting, name: str, what: str, shapes: list[tuple[int, ...]], large: bool
) -> Case:
    """`large`: also quantised and compiled optimizers; many tensors would compile for minutes."""
    parameters = []
    for seed, shape in enumerate(shapes):
        parameter = torch.nn.Parameter(setting.random(*shape, scale=0.02, seed=seed))
        parameter.grad = setting.random(*shape, seed=seed + 1)
        parameters.append(parameter)
    count = sum(parameter.numel() for parameter in parameters)
    adamw = torch.optim.AdamW

    def variant(label: str, make: Callable[[], Callable], bound: float | None = None) -> Variant:
        return Variant(label, lambda: _runnable(setting, parameters, make(), bound))

    variants = [
        variant("AdamW, fused (the trainer's)", lambda: _with(adamw, fused=True)),
        variant("AdamW, foreach", lambda: _with(adamw, foreach=True)),
        variant("AdamW, for-loop", lambda: _with(adamw, foreach=False, fused=False)),
    ]
    if large:
        variants += [
            Variant(
                "AdamW, foreach, compiled",
                lambda: _runnable(setting, parameters, _with(adamw, foreach=True), compiled=True),
            ),
            variant(
                "torchao AdamW8bit", lambda: _torchao("AdamW8bit", setting), EIGHT_BIT_TOLERANCE
            ),
            variant(
                "torchao AdamW4bit", lambda: _torchao("AdamW4bit", setting), FOUR_BIT_TOLERANCE
            ),
            variant("bitsandbytes AdamW8bit", lambda: _bitsandbytes(setting), EIGHT_BIT_TOLERANCE),
        ]
    return Case(
        name=name,
        what=f"{what}: {count:,} parameters in {len(shapes)} tensors",
        variants=variants,
        reference=lambda: _reference(setting),
        tolerance=setting.tolerance,
        rate=("G parameters/s", count / 1e9),
    )


def _with(optimizer: Callable, **options: bool) -> Callable:
    return lambda parameters: optimizer(
        parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **options
    )


def _torchao(name: str, setting: Setting) -> Callable:
    import torchao.optim

    if not setting.compiled:
        raise Unavailable("it compiles its step, and torch.compile is switched off")
    return _with(getattr(torchao.optim, name))


def _bitsandbytes(setting: Setting) -> Callable:
    if setting.device.type != "cuda":
        raise Unavailable("needs a GPU")
    import bitsandbytes.optim

    return _with(bitsandbytes.optim.AdamW8bit)


def _runnable(
    setting: Setting,
    parameters: list[torch.nn.Parameter],
    make: Callable,
    bound: float | None = None,
    compiled: bool = False,
) -> Runnable:
    optimizer = make(parameters)
    # Learning rate 0: the parameters do not change, so that repeated steps cannot overflow.
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if _is_tensor(group["lr"]) else 0.0
    step = compile_for(setting, optimizer.step) if compiled else optimizer.step
    return Runnable(
        run=step,
        results=lambda: _updates(setting, make),
        tolerance={} if bound is None else {"matrix": bound},
        figures=lambda: {"state, bytes per parameter": _state_bytes(optimizer, parameters)},
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _state_bytes(optimizer: torch.optim.Optimizer, parameters: list) -> float:
    state = list(optimizer.state.values())
    return round(staged_bytes(state) / sum(p.numel() for p in parameters), 2)


def _checked_values(setting: Setting) -> tuple[Tensors, list[Tensors]]:
    """Small parameters and their gradients for each step."""
    start = {
        name: setting.random(*shape, scale=0.02, seed=7) for name, shape in CHECKED_SHAPES.items()
    }
    gradients = [
        {name: setting.random(*shape, seed=8 + step) for name, shape in CHECKED_SHAPES.items()}
        for step in range(CHECKED_STEPS)
    ]
    return start, gradients


def _updates(setting: Setting, make: Callable) -> Tensors:
    """The change of the parameters after a few steps."""
    start, gradients = _checked_values(setting)
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = make(list(parameters.values()))
    for step in gradients:
        for name, parameter in parameters.items():
            parameter.grad = step[name].clone()
        optimizer.step()
    return {name: parameters[name].detach() - start[name] for name in start}


def _reference(setting: Setting) -> Tensors:
    """The same steps by the formula of AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""
    start, gradients = _checked_values(setting)
    results = {}
    for name, value in start.items():
        weight = value.to(setting.reference_dtype)
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for count, step in enumerate(gradients, 1):
            grad = step[name].to(setting.reference_dtype)
            first = BETAS[0] * first + (1 - BETAS[0]) * grad
            second = BETAS[1] * second + (1 - BETAS[1]) * grad.square()
            mean, square = first / (1 - BETAS[0] ** count), second / (1 - BETAS[1] ** count)
            weight = weight - LR * DECAY * weight - LR * mean / (square.sqrt() + EPS)
        results[name] = weight - value.to(setting.reference_dtype)
    return results

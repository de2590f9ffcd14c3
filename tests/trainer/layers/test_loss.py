"""Linear cross-entropy is the plain cross-entropy, and never holds the logits of the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.runs import LINEAR, described, empty_model, lora_model, write_config
from trainer.config import load
from trainer.layers import head
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.layers.head import Factors
from trainer.layers.log_probs import linear_cross_entropy, linear_log_probs
from trainer.layers.loss import TokenLoss
from trainer.model import Decoder, Inputs

OWN = {"_component_": "trainer.layers.loss.LinearCrossEntropy"}
PLAIN = {"_component_": "torch.nn.CrossEntropyLoss"}
CHUNKED = OWN | {"num_output_chunks": 7}
SMOOTHING = "label_smoothing"
TIED = {"tie_word_embeddings": True}
# By name: what config.json has beside the demo's, and the `model` block.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "lora": ({}, lora_model()),
    "lora-output": ({}, lora_model(lora_modules=[*LINEAR, "lm_head"])),
    "dora-output": ({}, lora_model(adapter="dora", lora_modules=[*LINEAR, "lm_head"])),
    "tied": (TIED, {}),
    "capped": (TIED, {}),
    "bias": ({}, {}),
}
CPU = torch.device("cpu")


class NewTensors(TorchDispatchMode):
    """Notes the number of elements of each result that has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.sizes.add(result.numel())
        return result


def token_loss(folder: Path, model_folder: Path, dataset: Path, block: dict) -> TokenLoss:
    return TokenLoss(load(write_config(folder, model_folder, dataset, loss=block)))


def random_model(name: str, folder: Path) -> Decoder:
    settings, block = MODELS[name]
    torch.manual_seed(0)
    model = empty_model(described(folder / name, **settings), **block).to_empty(device=CPU)
    model.fill_buffers(CPU)
    for key, parameter in model.named_parameters():
        if "magnitude" in key:
            torch.nn.init.uniform_(parameter, 0.5, 1.0)
        elif "norm" in key:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.05)
        parameter.requires_grad_(model.adapter is None or model.adapter.owns(key))
    return model


def batch(trained: float = 0.5) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, 1024, (3, 50), generator=generator) for _ in range(2))
    labels[torch.rand(3, 50, generator=generator) >= trained] = IGNORE_INDEX
    at = (labels.flatten() != IGNORE_INDEX).nonzero().flatten()
    return MicroBatch(
        Inputs(tokens),
        labels,
        at,
        150,
        len(at),
        (50,) * 3,
        at // 50,
        torch.arange(3),
        torch.zeros(3),
    )


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (loss / 7).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block", [PLAIN | {"label_smoothing": 0.1}, OWN, CHUNKED])
def test_each_component_equals_the_plain_cross_entropy(
    name, block, tmp_path, model_folder, dataset
):
    model = random_model(name, tmp_path)
    if name == "capped":
        model.output_softcap = 0.5
    if name == "bias":
        model.output_head.bias = torch.nn.Parameter(torch.randn(1024) / 10)
    loss, smoothing = token_loss(tmp_path, model_folder, dataset, block), block.get(SMOOTHING, 0.0)
    for part in (0.5, 1.0):
        given = batch(part)
        logits, labels = model(given.inputs).flatten(0, 1), given.labels.flatten()
        wanted_loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        found_loss = loss(model, given, CPU)
        assert found_loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
        wanted, found = gradients(model, wanted_loss), gradients(model, found_loss)
        assert wanted.keys() == found.keys() and wanted
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6)


def test_a_batch_without_trained_tokens_has_zero_gradients_everywhere(
    tmp_path, model_folder, dataset
):
    model = random_model("lora-output", tmp_path)
    loss = token_loss(tmp_path, model_folder, dataset, OWN)(model, batch(0.0), CPU)
    assert loss.item() == 0
    found = gradients(model, loss)
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(not gradient.any() for gradient in found.values())


@pytest.mark.parametrize("summed", [True, False])
def test_gradients_are_right_with_a_soft_cap_and_two_factors(summed):
    """Those of the sum, and of what is made of single log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((9, 5), (30, 5), (9, 2), (30, 2))
    inputs = [torch.randn(s, generator=generator).double().requires_grad_() for s in shapes]
    targets = torch.randint(0, 30, (9,), generator=generator)
    sequence = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])

    def preference(log_probs: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(4, dtype=log_probs.dtype).index_add(0, sequence, log_probs)
        return -F.logsigmoid(sums[::2] - sums[1::2]).sum()

    def own(*tensors: torch.Tensor) -> torch.Tensor:
        made_of = Factors([tensors[:2], tensors[2:]], softcap=3.0, chunks=4)
        if summed:
            return linear_cross_entropy(made_of, targets)
        return linear_log_probs(made_of, targets)

    def reference(*tensors: torch.Tensor) -> torch.Tensor:
        logits = tensors[0] @ tensors[1].T + tensors[2] @ tensors[3].T
        log_probs = -F.cross_entropy(3 * torch.tanh(logits / 3), targets, reduction="none")
        return -log_probs.sum() if summed else log_probs

    with torch.no_grad():
        torch.testing.assert_close(own(*inputs), reference(*inputs))
    results = [f(*inputs) for f in (own, reference)]
    torch.testing.assert_close(*results)
    found = [torch.autograd.grad(x if summed else preference(x), inputs) for x in results]
    torch.testing.assert_close(*found)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="newer than this torch")
def test_it_equals_torchs_own_and_sums_in_fp32_from_bf16():
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 64), torch.randn(2000, 64) / 10
    targets = torch.randint(0, 2000, (600,))
    options = torch.nn.LinearCrossEntropyOptions()
    theirs = F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)
    torch.testing.assert_close(linear_cross_entropy(Factors([(hidden, weight)]), targets), theirs)
    short = linear_cross_entropy(Factors([(hidden.bfloat16(), weight.bfloat16())]), targets)
    assert short.dtype == torch.float32
    assert short.item() == pytest.approx(theirs.item(), rel=1e-3)


def test_neither_logits_nor_a_frozen_weights_gradient_is_ever_there():
    """2000 tokens, 4000 words, 64 features: logits would be 8 million numbers."""
    hidden = torch.randn(2000, 64, requires_grad=True)
    weight = torch.randn(4000, 64)
    targets = torch.randint(0, 4000, (2000,))
    for trains in (True, False):
        weight.requires_grad_(trains)
        with NewTensors() as seen:
            linear_cross_entropy(Factors([(hidden, weight)]), targets).backward()
        assert max(seen.sizes) == 512 * 4000
        assert (weight.numel() in seen.sizes) == trains
    with NewTensors() as seen:
        F.cross_entropy(hidden @ weight.T, targets, reduction="sum").backward()
    assert max(seen.sizes) == 2000 * 4000


def test_a_trained_head_goes_through_fewer_chunks():
    hidden, weight = (torch.empty(n, 4096, device="meta") for n in (8192, 128256))
    sizes = lambda made_of: {part.stop - part.start for part in made_of.parts()}  # noqa: E731
    assert sizes(Factors([(hidden, weight)])) == {512}
    assert sizes(Factors([(hidden, weight.requires_grad_())])) == {2048}


def test_weight_gradients_of_many_chunks_are_as_exact_in_bf16_as_those_of_one():
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        hidden, weight = torch.randn(1000, 32).bfloat16(), (torch.randn(500, 32) / 20).bfloat16()
        targets = torch.randint(0, 500, (1000,))
    exact = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.T, targets, reduction="sum").backward()
    for chunks in (1, 40):
        own = weight.clone().requires_grad_()
        linear_cross_entropy(Factors([(hidden, own)], chunks=chunks), targets).backward()
        error = (own.grad.double() - exact.grad).norm() / exact.grad.norm()
        # A sum kept in bf16 is wrong by 0.008.
        assert error < 0.0035


@pytest.mark.parametrize(
    ("backend", "cap"),
    [
        ("aot_eager", 3.0),
        pytest.param("inductor", 3.0, marks=pytest.mark.long),
        pytest.param("inductor", None, marks=pytest.mark.long),
    ],
)
def test_compiled_it_is_the_same_for_any_number_of_tokens(backend, cap, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", backend)
    head.compiled_chunk.cache_clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    weight = torch.randn(1000, 32, dtype=torch.bfloat16, requires_grad=True)
    for tokens in (40, 77, 41):
        hidden = torch.randn(tokens, 32, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(1000, (tokens,))
        found = []
        for compiled in (False, True):
            with torch._dynamo.config.patch(error_on_recompile=tokens != 40):
                made_of = Factors([(hidden, weight)], None, cap, chunks=3, compiled=compiled)
                total = linear_cross_entropy(made_of, targets)
            found.append([total, *torch.autograd.grad(total * 0.1, [hidden, weight])])
        for own, other in zip(*found, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-4)
        assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-6)
    head.compiled_chunk.cache_clear()

"""How long a GPU computes in a step, term by term; nothing of it is fitted to a single run.

Each term is FLOPs or bytes over what a kind of kernel reaches of the GPU's data sheet. What they
reach is in `Reached`, with its source; benchmarks/results/published.md compares the sum.

    products        a matrix product takes its FLOPs, and besides reads and writes its matrices
    adapter         LoRA's products, and its results added to those of the base
    grouped         the experts' products: those of their rows, at a part of that speed
    attention       FLOPs of the query-key pairs, slower for short rows
    linear          linear attention: fp32 products, its elements, and a loop over chunks
    elements        what is read and written once per operation, or once per fused kernel
    loss, optimizer the same, of logits and of what is trained

Symbols as in `plugins.estimate.launcher.memory`.
"""

from collections.abc import Iterator
from dataclasses import replace

from launcher.gpus import Gpu
from plugins.estimate.launcher.activations import expert_rows, saved_by_layer, saved_products
from plugins.estimate.launcher.memory import state_bytes
from plugins.estimate.launcher.reached import AMPERE, Reached
from plugins.estimate.launcher.step_config import FP32, NF4_BYTES, StepConfig
from plugins.estimate.launcher.tensors import linear_loss_rows
from runspec.shape import DELTA_CHUNK, Attention, Block, GatedDelta, Matrix

# Rows of this length reach half of what long rows do (the same figures: 512 tokens to 16k).
HALF_LENGTH = 500
# A separate operation reads and writes what a fused kernel keeps in registers: norms and rotary
# embeddings are five kernels and more, partly in fp32.
UNFUSED = 3.0
# fp32 products on the CUDA cores against bf16 ones: 67 of 989 TFLOP/s on H100, 19.5 of 312 on A100.
FP32_SHARE = 1 / 15
# Two products of attention forward, five backward, which computes the scores again (Dao 2023).
BACKWARD_PRODUCTS = 2.5
# Kernels of a layer beside its products: norms, rotary embedding, attention, activation, residual.
KERNELS, ADAPTER_KERNELS, EXPERT_KERNELS = 12, 3, 45
# How far published rows lie from their predictions (benchmarks/results/published.md): nine in ten
# of dense models within the first, those with experts within the second. Of linear attention none
# is published that computes it as the trainer does.
DENSE, OTHER = 0.15, 0.3


def grouped_by(step: StepConfig, gpu: Gpu) -> str:
    """Return what multiplies the experts' rows: a kernel of torch, or "a loop" over the experts.

    torch has a kernel for bf16 from compute capability 9 on.
    """
    older = gpu.is_amd or Reached.of(gpu) is AMPERE
    return "a loop" if step.element_bytes == FP32 or older else "torch"


def uncertainty(step: StepConfig) -> float:
    """Return the share by which a predicted rate may be wrong in either direction."""
    plain = all(block.attention and not block.experts for block, _ in step.shape.blocks)
    return DENSE if plain else OTHER


class Compute:
    """The times of a step's parts on one GPU."""

    def __init__(self, step: StepConfig, gpu: Gpu, reached: Reached | None = None) -> None:
        self.step, self.gpu = step, gpu
        self.reached = reached or Reached.of(gpu)
        self.flops_per_s = gpu.bf16_tflops * 1e12 * self.reached.products
        self.bytes_per_s = gpu.memory_bandwidth_gbs * 1e9 * self.reached.memory
        # Elements of what is compiled are read and written once.
        self.passes = 1.0 if step.compiled else UNFUSED
        self.looped = grouped_by(step, gpu) == "a loop"

    def layer(self, block: Block) -> tuple[float, float]:
        """Seconds of one layer's forward and backward pass, with what that computes again."""
        step = self.step
        forward, backward = (sum(self.terms(block, way).values()) for way in (False, True))
        again = forward * step.recomputed_share
        if step.checkpointing == "op" and block.delta:
            again = forward
        elif step.checkpointing == "op":
            # What no product is read and written, element by element.
            elements = saved_by_layer(step, block) - saved_products(step, block)
            again = 2 * max(elements, 0.0) / self.bytes_per_s
        return forward, backward + again

    def terms(self, block: Block, backward: bool) -> dict[str, float]:
        """Seconds of a layer's forward or backward pass by term, without what is computed again."""
        step, matrices = self.step, block.matrices.items()
        terms = {
            "products": sum(self._products(m, backward) for m in block.matrices.values()),
            "adapter": self._low_rank(block, backward),
            "grouped": sum(self._grouped(name, m, backward) for name, m in matrices),
            "elements": (1 + backward) * self._elements(block) / self.bytes_per_s,
        }
        if block.attention:
            terms["attention"] = self._attention(block.attention, backward)
        if block.delta:
            terms["linear attention"] = (1 + backward) * self._delta(block.delta)
        if step.is_quantised:
            # A quantised base to the compute dtype, of all that a rank multiplies with.
            numbers = sum(m.parameters / step.split_of(m) for m in block.matrices.values())
            each = NF4_BYTES + step.element_bytes
            terms["unpacking"] = numbers * each / self.bytes_per_s
        return terms

    def product(self, m: float, k: float, n: float, speed: float = 1.0) -> float:
        """[m, k] by [k, n]: its FLOPs, and its matrices between memory and the cores.

        Narrow products wait for memory; wide ones hide a part of it, which is in `products`.
        """
        moved = self.step.element_bytes * (m * k + k * n + m * n)
        return 2 * m * k * n / (self.flops_per_s * speed) + moved / self.bytes_per_s

    def _sizes(self, matrix: Matrix) -> tuple[float, float, float]:
        """Rows, inputs and outputs of a linear layer on a rank."""
        step, by_row = self.step, matrix.role == "row"
        split, own = step.split_of(matrix), matrix.part in ("router", "shared")
        m = step.tokens / (step.layout.tensor_parallel if own else 1)
        return (
            m,
            matrix.inputs / (split if by_row else 1),
            matrix.outputs / (1 if by_row else split),
        )

    def _products(self, matrix: Matrix, backward: bool) -> float:
        """A linear layer's base: forward, or the gradients."""
        step = self.step
        if matrix.role == "expert":
            return 0.0
        m, k, n = self._sizes(matrix)
        fp8 = step.fp8 and matrix.part != "router"
        times = (1 + step.is_full) if backward else 1
        took = times * self.product(m, k, n, self.reached.fp8 if fp8 else 1.0)
        if fp8:
            # Cast and scaled: read twice, written in one byte.
            took += 5 * (m * (n if backward else k) + k * n) / self.bytes_per_s
        return took

    def _low_rank(self, block: Block, backward: bool) -> float:
        """LoRA of all linear layers: forward, or the gradients of A, B and the input.

        A product with A reads the input, as does A's gradient, and that of the input is written. A
        product with B writes the outputs, and both gradients read theirs. Without dropout there is
        one product for the A's of layers that read the same tensor. Then the outputs are added to
        the base's, or the gradients of the input: compiled, the kernel that uses the sum reads one
        number more; else it is a kernel of its own, which reads two and writes one.
        """
        step, together = self.step, dict[object, tuple[float, float, int]]()
        took = added = 0.0
        for name, matrix in step.adapted(block) if step.lora_rank else ():
            if matrix.role == "expert":
                continue
            m, k, n = self._sizes(matrix)
            took += self.product(m, step.lora_rank, n)
            added += 0 if backward else m * n
            key = name if step.dropout else (matrix.part, matrix.role == "row", k)
            _, _, ranks = together.get(key, (m, k, 0))
            together[key] = m, k, ranks + step.lora_rank
        for m, k, ranks in together.values():
            took += self.product(m, k, ranks)
            added += m * k if backward else 0
        moved = self.passes * step.element_bytes * added
        return (1 + backward) * took + moved / self.bytes_per_s

    def _grouped(self, name: str, matrix: Matrix, backward: bool) -> float:
        """The experts of a rank: a product each, in one kernel if there is one; else one after the
        other, each at least as long as the host takes for its launches.
        """
        step, reached = self.step, self.reached
        if matrix.role != "expert":
            return 0.0
        experts = matrix.count / step.layout.expert_parallel
        rows = step.tokens / step.layout.tensor_parallel * matrix.active / experts

        def of_all(k: float, n: float) -> float:
            if self.looped:
                return experts * max(self.product(rows, k, n), 2 * reached.launch_s)
            return experts * self.product(rows, k, n, reached.grouped)

        took = ((1 + step.is_full) if backward else 1) * of_all(matrix.inputs, matrix.outputs)
        if rank := step.lora_rank if name in step.lora_targets else 0:
            took += (1 + backward) * (of_all(matrix.inputs, rank) + of_all(rank, matrix.outputs))
        return took

    def _attention(self, attention: Attention, backward: bool) -> float:
        """FLOPs of the pairs that a query may see: the row's first half on average, or a window."""
        step, length = self.step, self.step.length
        seen = min(attention.window or length, length / 2)
        width = (attention.query_width + attention.value_width) / 2 / step.layout.tensor_parallel
        flops = 4 * step.tokens * seen * width * (BACKWARD_PRODUCTS if backward else 1)
        share = self.reached.attention_backward if backward else self.reached.attention
        share *= length / (length + HALF_LENGTH)
        return flops / (self.gpu.bf16_tflops * 1e12 * share)

    def _delta(self, delta: GatedDelta) -> float:
        """The gated delta rule in torch's own kernels (trainer.layers.delta), in fp32.

        Products with the state and within chunks; what is made element by element, each read and
        written; and a loop over a row's chunks of three small kernels each.
        """
        tokens = self.step.tokens / self.step.layout.tensor_parallel
        key = delta.value_heads * delta.key
        flops = 6 * delta.state + 2 * DELTA_CHUNK * (3 * key + 2 * delta.value_width)
        pairs = 6 * DELTA_CHUNK * delta.value_heads
        numbers = 10 * key + 6 * delta.value_width + pairs + 2 * delta.kernel * delta.mixed
        moved = 2 * FP32 * (numbers + delta.state / DELTA_CHUNK)
        loop = 3 * self.step.length / DELTA_CHUNK * self.reached.launch_s
        each = flops / (self.flops_per_s * FP32_SHARE) + moved / self.bytes_per_s
        return tokens * each + loop

    def _elements(self, block: Block) -> float:
        """Bytes that a layer's forward pass moves beside its products and attention: norms and
        residual sums, rotary embedding, the activation with its gate, and experts' rows: into their
        order and back, and weighted.
        """
        step, tp, e = self.step, self.step.layout.tensor_parallel, self.step.element_bytes
        d, own = step.shape.dim, self.step.tokens / tp
        per_token = 2 * sum(vector.features for vector in block.vectors) + 6 * d
        if block.attention:
            per_token += 2 * (block.attention.query_width + block.attention.kv_width)
            per_token += 3 * block.attention.gate
        for part in ("mlp", "shared"):
            made = sum(matrix.outputs for _, matrix in block.of(part, "column", "fused"))
            per_token += made + block.inside(part)
        moved = self.passes * e * own * per_token
        rows = expert_rows(step, block)
        return moved + e * rows * (7 * d + 3 * self.passes * block.inside("experts"))

    # A step --------------------------------------------------------------------------------------

    def host_s(self) -> float:
        """Seconds in which the host launches a micro-step; no GPU is faster."""
        step, kernels = self.step, 0.0
        for block, count in step.shape.blocks:
            each = KERNELS * self.passes + len(block.matrices)
            each += ADAPTER_KERNELS * len(step.adapted(block))
            each += EXPERT_KERNELS * bool(block.experts)
            kernels += count * each
        return 3 * kernels * self.reached.launch_s

    def ends(self) -> float:
        """Output layer, loss and embedding of a micro-step."""
        step, shape = self.step, self.step.shape
        if step.loss == "score":
            return 0.0
        columns = shape.vocab / step.layout.tensor_parallel
        products = 2 + step.trains_table("output")
        took = products * self.product(step.tokens, shape.dim, columns)
        # Linear: of logits the fp32 copy and the slope, each written and read; plain: log-softmax
        # and its gradient, too.
        passes = 2 if step.loss == "linear" else 4
        moved = passes * 2 * FP32 * step.tokens * columns
        if step.trains_table("output"):
            # Each chunk of the linear loss adds to the head's gradient.
            chunks = step.tokens / linear_loss_rows(step) if step.loss == "linear" else 1
            moved += chunks * 2 * FP32 * columns * shape.dim
        return took + moved / self.bytes_per_s

    def optimizer(self) -> float:
        """Weights, gradients and states read and written; the gradients' norm reads them, too."""
        step = self.step
        trained = step.trainable / (step.layout.ranks / step.layout.replicate)
        moved = 4 * step.weight_bytes + 2 * state_bytes(step)
        moved *= 1 if step.update == "fused" else 2
        return trained * moved / self.bytes_per_s

    def frozen(self) -> Iterator[float]:
        """Forward passes of the models beside the policy, in a micro-step."""
        for shape in self.step.frozen_passes:
            step = replace(self.step, shape=shape, lora_targets=(), has_reference=False)
            other = Compute(replace(step, teacher=None), self.gpu, self.reached)
            yield sum(count * other.layer(block)[0] for block, count in shape.blocks)
            yield other.product(step.tokens, shape.dim, shape.vocab)

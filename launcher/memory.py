"""Memory of one training step on one GPU, in closed form: what is alive at each phase's peak.

A step has phases (forward, loss, backward, optimizer). For each, the bytes that are alive at its
peak are listed term by term; the largest sum is the estimate. Nothing is fitted: a term is a
number of elements times bytes an element, from what the trainer's modules keep for backward,
what FSDP2 gathers and what autograd holds meanwhile. Symbols: t tokens a rank and micro-step,
d width, f MLP width, q query width, V vocabulary, e bytes an element.

Sources: saved activations in the manner of Korthikanti et al. 2022 (arXiv 2205.05198) section 4,
with flash attention (Dao 2023, arXiv 2307.08691); FSDP2's buffers as in torch's fully_shard
(torch/distributed/fsdp/_fully_shard); NF4's 4.25 bits in Dettmers et al. 2023 (arXiv 2305.14314)
without double quantisation. `python -m trainer.trace` runs the same step on fake tensors, and a
test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GIB = 2**30
NF4_BYTES = 0.5 + 2 / 64  # four bits, and a bf16 scale for each block of 64
FP32 = 4

ATTENTION = ("q_proj", "k_proj", "v_proj", "output_proj")
MLP = ("w1", "w2", "w3")
ROWWISE = ("output_proj", "w2")

Terms = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; `norms` of them in each layer.

    whole_rotary: its rotary tables have a cosine and a sine for each feature, not for each pair.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_seq_len: int
    tied: bool = False
    qkv_bias: bool = False
    norms: int = 2
    softcap: bool = False
    whole_rotary: bool = False

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(input, output) width of each matrix of a layer."""
        kv = self.kv_heads * self.head_dim
        return {
            "q_proj": (self.dim, self.query),
            "k_proj": (self.dim, kv),
            "v_proj": (self.dim, kv),
            "output_proj": (self.query, self.dim),
            "w1": (self.dim, self.intermediate),
            "w2": (self.intermediate, self.dim),
            "w3": (self.dim, self.intermediate),
        }

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        bias = self.query + 2 * self.kv_heads * self.head_dim if self.qkv_bias else 0
        return sum(a * b for a, b in self.matrices.values()) + self.norms * self.dim + bias

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding, and of the output layer where it is not tied."""
        return self.vocab * self.dim

    @property
    def parameters(self) -> int:
        """All parameters of the base model."""
        tables = self.embedding * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + tables + self.dim


@dataclass(frozen=True)
class Plan:
    """What of a recipe and its layout decides the memory of a step."""

    shape: Shape
    method: str  # full, lora, dora, qlora or qdora
    shard: int = 1  # ranks that FSDP shards over
    replicate: int = 1  # HSDP: copies of that
    tensor_parallel: int = 1
    batch: int = 1
    length: int = 4096
    accumulation: int = 1
    element_bytes: int = 2
    reduce_bytes: int = 4  # of a number of a gradient while FSDP sums it over ranks
    fp32_master: bool = False
    checkpointing: str = "none"  # none, full, op, or a number: every so many-th layer
    optimizer: str = "adamw"  # or adamw8bit, adamw4bit, momentum, none
    update: str = "fused"  # or foreach, single
    compiled: bool = False  # the layers, by torch.compile
    loss: str = "chunked"  # plain, chunked or linear
    chunks: int = 8  # 0: the linear one's own choice
    sync_each: bool = False  # gradients are reduced after every micro-step
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_output: bool = False
    dropout: bool = False
    cpu_offload: bool = False
    activation_offload: bool = False
    reshard: bool = True
    apart: tuple[str, ...] = ()  # tok_embeddings, output: sharded by themselves

    @property
    def ranks(self) -> int:
        """GPUs in all."""
        return self.shard * self.replicate * self.tensor_parallel

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 holds the model; on one rank for what it alone can do."""
        return self.shard * self.replicate > 1 or self.fp32_master or self.cpu_offload

    @property
    def tokens(self) -> int:
        """Positions in one micro-batch of one rank."""
        return self.batch * (self.length + -self.length % self.tensor_parallel)

    @property
    def is_full(self) -> bool:
        """Whether every weight is trained."""
        return self.method == "full"

    @property
    def is_quantised(self) -> bool:
        """Whether the layers' base weights are NF4."""
        return self.method.startswith("q")

    @property
    def is_dora(self) -> bool:
        """Whether the adapters have magnitudes."""
        return self.method.endswith("dora")

    @property
    def samples_a_step(self) -> int:
        """Rows that one optimizer step sees over all ranks."""
        return self.batch * self.accumulation * self.shard * self.replicate

    def trains(self, *names: str) -> bool:
        """Whether any of these matrices needs its input in backward."""
        return self.is_full or any(name in self.lora_targets for name in names)

    def adapter(self, name: str, local: bool = True) -> float:
        """Parameters that LoRA adds to a matrix: A [rank, in], B [out, rank], DoRA's [out]."""
        inside, outside = (
            (self.shape.dim, self.shape.vocab) if name == "output" else self.shape.matrices[name]
        )
        split = self.tensor_parallel if local else 1
        a, b = (split, 1) if name in ROWWISE else (1, split)
        magnitude = outside / b if self.is_dora else 0
        return self.lora_rank * (inside / a + outside / b) + magnitude

    @property
    def adapter_layer(self) -> float:
        """LoRA parameters of a layer, as split by tensor parallelism."""
        return sum(self.adapter(name) for name in self.lora_targets)

    @property
    def adapter_output(self) -> float:
        """LoRA parameters of the output layer, as split by tensor parallelism."""
        return self.adapter("output") if self.lora_output else 0

    @property
    def trainable(self) -> int:
        """Parameters that the optimizer moves, of the whole model."""
        if self.is_full:
            return self.shape.parameters
        layer = sum(self.adapter(name, local=False) for name in self.lora_targets)
        output = self.adapter("output", local=False) if self.lora_output else 0
        return round(self.shape.layers * layer + output)

    @property
    def total(self) -> int:
        """All parameters, adapters included."""
        return self.shape.parameters + (0 if self.is_full else self.trainable)


@dataclass(frozen=True)
class Unit:
    """One FSDP unit on a rank, before sharding: bytes gathered and parameters trained."""

    gathered: float
    trained: float
    kept: float  # bytes of its weights as they are kept, before sharding


class Estimate:
    """The phases of a plan and the peak among them, in bytes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.phases: dict[str, Terms] = {name: terms for name, terms in _phases(plan)}

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def terms(self) -> Terms:
        """The terms at the peak."""
        return self.phases[self.peak_phase]

    @property
    def peak(self) -> float:
        """Bytes at the peak."""
        return sum(self.terms.values())


# State: what stays between steps --------------------------------------------------------------


def _weight_bytes(plan: Plan) -> int:
    return FP32 if plan.fp32_master else plan.element_bytes


def _layer(plan: Plan) -> Unit:
    """One transformer layer: matrices split by tensor parallelism, norms on every rank."""
    shape, e = plan.shape, plan.element_bytes
    matrices = sum(a * b for a, b in shape.matrices.values()) / plan.tensor_parallel
    rest = shape.layer_parameters - sum(a * b for a, b in shape.matrices.values())
    base = matrices * (NF4_BYTES if plan.is_quantised else e) + rest * e
    trained = matrices + rest if plan.is_full else plan.adapter_layer
    if plan.is_full:
        return Unit(base, trained, (matrices + rest) * _weight_bytes(plan))
    return Unit(base + trained * e, trained, base + trained * _weight_bytes(plan))


def _table(plan: Plan, adapter: float = 0) -> Unit:
    """The embedding, or the output layer with its adapter."""
    local, e = plan.shape.embedding / plan.tensor_parallel, plan.element_bytes
    if plan.is_full:
        return Unit(local * e, local, local * _weight_bytes(plan))
    return Unit((local + adapter) * e, adapter, local * e + adapter * _weight_bytes(plan))


def _sum(*units: Unit) -> Unit:
    return Unit(
        sum(u.gathered for u in units), sum(u.trained for u in units), sum(u.kept for u in units)
    )


NOTHING = Unit(0, 0, 0)


def _state_bytes(plan: Plan) -> float:
    """Optimizer state a trained parameter.

    AdamW keeps two moments in the weights' dtype; torchao's 8 and 4 bit ones keep codes and an
    fp32 scale for each block of 256 or 128 (torchao.optim).
    """
    return {
        "adamw": 2.0 * _weight_bytes(plan),
        "adamw8bit": 2 * (1 + FP32 / 256),
        "adamw4bit": 2 * (0.5 + FP32 / 128),
        "momentum": 1.0 * _weight_bytes(plan),
        "none": 0.0,
    }[plan.optimizer]


# Activations: what backward needs --------------------------------------------------------------


def saved_by_layer(plan: Plan) -> float:
    """Bytes that one layer keeps for backward without activation checkpointing.

    Norms compute in fp32: 4td for the input, 4td more for the normalised one where the scale is
    trained. A matrix keeps its input where it is trained or has an adapter: etd for q, k and v
    together and for w1 and w3 together, nothing new for output_proj (attention's own output).
    Attention: e t (q + 2 kv + q) for queries, keys, values and the output; 4t a head for the
    log-sum. MLP: e t f each for w1's and w3's output, the activation, and their product where w2
    needs it. Tensor parallelism divides all but the gathered inputs. What is compiled makes again
    what is made element by element: it keeps a norm's input, etd, and no activation.
    """
    shape, e, tp = plan.shape, plan.element_bytes, plan.tensor_parallel
    t, d, f, q = plan.tokens, shape.dim, shape.intermediate, shape.query
    norm = e if plan.compiled else FP32 * 2 if plan.is_full else FP32
    norms = shape.norms * norm * t * d / tp
    inputs = sum(e * t * d for group in (ATTENTION[:3], ("w1", "w3")) if plan.trains(*group))
    # Flash attention shares the heads of keys and values; fp32 has none, and copies them.
    kv = shape.kv_heads * shape.head_dim if e < FP32 else q
    attention = (e * t * 2 * (q + kv) + FP32 * t * shape.heads) / tp
    mlp = e * t * f * (2 + plan.trains("w2") + (not plan.compiled)) / tp
    return norms + inputs + attention + mlp + _saved_by_adapters(plan)


def recomputed_elements(plan: Plan) -> float:
    """Bytes that one layer makes again, element by element, where products are kept ("op")."""
    return max(saved_by_layer(plan) - _saved_products(plan), 0.0)


def _saved_by_adapters(plan: Plan) -> float:
    t, e = plan.tokens, plan.element_bytes
    each = 0.0
    for name in plan.lora_targets:
        inside = plan.shape.matrices[name][0]
        each += e * t * plan.lora_rank
        if plan.dropout:
            each += (1 + e) * t * inside / (plan.tensor_parallel if name in ROWWISE else 1)
        if plan.is_dora and not (plan.compiled and name in MLP):
            # The sum that the magnitude scales; of a matrix split by rows a share of all of it.
            split = 1 if name in ROWWISE else plan.tensor_parallel
            each += e * t * plan.shape.matrices[name][1] / split
    return each


def _kept_layers(plan: Plan) -> tuple[float, float]:
    """(bytes a layer keeps from forward to backward, bytes that backward computes again)."""
    shape, e, tp, t = plan.shape, plan.element_bytes, plan.tensor_parallel, plan.tokens
    whole, entry = saved_by_layer(plan), e * t * shape.dim / tp
    if plan.checkpointing == "none":
        return whole, 0.0
    if plan.activation_offload:
        entry = 0.0
    if plan.checkpointing == "full":
        return entry, whole
    if plan.checkpointing == "op":
        return entry + _saved_products(plan), whole
    share = 1 / int(plan.checkpointing)
    return entry * share + whole * (1 - share), whole


def _saved_products(plan: Plan) -> float:
    """Selective checkpointing by operation: matrix products, attention and communication.

    A product for each matrix and two for its adapter; attention's output and log-sum; under
    tensor parallelism the two gathered inputs, the whole output of the matrices that are split by
    rows, and what of it is scattered.
    """
    shape, e, tp, t = plan.shape, plan.element_bytes, plan.tensor_parallel, plan.tokens
    kept = e * t * shape.query / tp + FP32 * t * shape.heads / tp
    for name, (_, outside) in shape.matrices.items():
        if plan.compiled and name == "w2":
            continue  # nothing in the layer needs its result again
        width = outside if name in ROWWISE else outside / tp
        kept += e * t * width
        if name in plan.lora_targets:
            kept += e * t * (width + plan.lora_rank)
    return kept + (e * t * shape.dim * (2 + 2 / tp) if tp > 1 else 0.0)


# Phases ---------------------------------------------------------------------------------------


def _phases(plan: Plan) -> Iterator[tuple[str, Terms]]:
    shape, e, tp, t = plan.shape, plan.element_bytes, plan.tensor_parallel, plan.tokens
    d, f, depth = shape.dim, shape.intermediate, shape.layers
    sharded = plan.fsdp
    layer, embedding = _layer(plan), _table(plan)
    output = NOTHING if shape.tied else _table(plan, plan.adapter_output)
    chunked = plan.loss == "chunked"
    linear = plan.loss == "linear"
    apart_embedding = sharded and "tok_embeddings" in plan.apart and not shape.tied
    apart_output = sharded and "output" in plan.apart and not shape.tied and plan.loss == "plain"
    root = _sum(NOTHING if apart_embedding else embedding, NOTHING if apart_output else output)
    layers = Unit(layer.gathered * depth, layer.trained * depth, layer.kept * depth)
    all_units = _sum(layers, embedding, output)

    on_gpu = 0 if plan.cpu_offload else 1
    gradient_bytes = _weight_bytes(plan)
    state: Terms = {
        "weights": on_gpu * all_units.kept / plan.shard,
        "optimizer": on_gpu * all_units.trained * _state_bytes(plan) / plan.shard,
        "rotary tables": FP32
        * shape.max_seq_len
        * shape.head_dim
        * (2 if shape.whole_rotary else 1),
    }
    gradients = on_gpu * all_units.trained * gradient_bytes / plan.shard
    layer_gradients = on_gpu * layer.trained * gradient_bytes / plan.shard
    accumulated, every = 0.0, False
    if plan.accumulation > 1:
        # Between micro-steps nothing is reduced: each rank holds all gradients, in fp32.
        every = sharded and not plan.sync_each
        accumulated = all_units.trained * plan.reduce_bytes if every else gradients
    kept, recomputed = _kept_layers(plan)
    entry = e * t * d / tp
    gather = 1 if sharded else 0

    # Forward, first layer: the root and the first layer lie gathered twice, in the collective's
    # buffer and as parameters. Forward, last layer: all activations.
    first = max(layer.gathered, embedding.gathered if apart_embedding else 0)
    yield (
        "forward, first layer",
        state
        | {
            "gradients": accumulated,
            "gathered weights": gather * 2 * (root.gathered + first),
            "activations": entry,
        },
    )
    held = gather * 2 * layer.gathered
    if sharded and not plan.reshard:
        held = layers.gathered + layer.gathered
    yield (
        "forward, last layer",
        state
        | {
            "gradients": accumulated,
            "gathered weights": gather * root.gathered + held,
            "activations": depth * kept,
            "working memory": _forward_working(plan),
        },
    )
    # The loss: the model's last norm is kept too.
    kept_gathered = sharded and not plan.reshard
    held = layers.gathered + root.gathered if kept_gathered else 0.0
    norm = (FP32 * 2 if plan.is_full else FP32) * t * d / tp
    norm += e * t * d if plan.is_full else 0
    loss = _loss(plan)
    # The linear loss runs inside the model's forward pass, and makes the gradients there.
    trained_output = e * shape.embedding / tp if plan.is_full else 0.0
    early = trained_output if linear else 0.0
    yield (
        "output layer, forward",
        state
        | {
            "gradients": accumulated,
            "gathered weights": held or gather * root.gathered,
            "activations": depth * kept + norm,
            "logits and loss": loss.made,
        },
    )
    yield (
        "loss, forward",
        state
        | {
            # A trained weight's gradient is summed up in fp32.
            "gradients": accumulated + early * FP32 / e,
            "gathered weights": held
            or (gather * (root.gathered + layer.gathered) if linear else 0.0),
            "activations": depth * kept + norm,
            "logits and loss": loss.forward,
        },
    )
    yield (
        "loss, backward",
        state
        | {
            "gradients": accumulated + early,
            "gathered weights": held,
            "activations": depth * kept + norm,
            "logits and loss": loss.backward,
        },
    )
    # The output layer's backward: the root is gathered again (twice for a moment), and where the
    # output layer is trained its chunks' gradients are summed out of place.
    group = output if apart_output else root
    yield (
        "output layer, backward, gathered",
        state
        | {
            "gradients": accumulated + early,
            "gathered weights": held or gather * 2 * group.gathered,
            "activations": depth * kept + norm,
            "logits and loss": loss.gradient,
        },
    )
    copies = 3 if chunked else 1
    part = (plan.chunks - 2) / plan.chunks if chunked else 1
    yield (
        "output layer, backward",
        state
        | {
            "gradients": accumulated + copies * trained_output,
            "gathered weights": held or gather * (group.gathered + layer.gathered),
            "activations": depth * kept + norm,
            "logits and loss": loss.gradient * part,
        },
    )
    # A layer's backward. What is reduced lies in an fp32 buffer until the next reduction.
    root_gradients = 0.0 if apart_output else trained_output
    if plan.accumulation > 1 and not sharded:
        # They are added at once to what the micro-steps before have left.
        root_gradients = 0.0
    for index in sorted({depth - 1, max(depth - 2, 0), 0}):
        above = depth - 1 - index
        reduced = layer.trained if above else (output.trained if apart_output else 0.0)
        done = above * layer_gradients + (
            output.trained * gradient_bytes / plan.shard if apart_output else 0.0
        )
        if plan.accumulation > 1:
            done = accumulated
            if every:
                done += above * (layer_gradients - plan.reduce_bytes * layer.trained)
        present = index + 1 if kept_gathered else min(index + 1, 2)
        common = {
            "gathered weights": gather * (root.gathered + layer.gathered * present),
            "gradient reduction": gather * plan.reduce_bytes * reduced,
        }
        inside = e * t * f / tp
        yield (
            f"backward, layer {index + 1}, MLP",
            state
            | common
            | {
                "gradients": done + root_gradients + e * layer.trained * _share_of_w2(plan),
                "activations": (index + 1) * kept + recomputed,
                "working memory": 2 * inside
                + 2 * entry
                + _dequantised(plan)
                + (2 * e * t * d if tp > 1 else 0),
            },
        )
        yield (
            f"backward, layer {index + 1}, end",
            state
            | common
            | {
                "gradients": done + root_gradients + e * layer.trained,
                "activations": index * kept + entry,
                "working memory": 4 * entry,
            },
        )
    if sharded:
        # The root's own reduction: gradients in their dtype and in the fp32 buffer.
        yield (
            "backward, root",
            state
            | {
                "gradients": gradients
                + root.trained * (e - gradient_bytes / plan.shard)
                + (plan.reduce_bytes * root.trained if every else 0),
                "gradient reduction": plan.reduce_bytes * root.trained,
                "activations": 0.0,
            },
        )
    # A fused update needs nothing; foreach a copy of all second moments, single two of the
    # largest tensor.
    biggest = max(embedding.trained, output.trained, layer.trained / 7) / plan.shard
    working = (
        _weight_bytes(plan)
        * on_gpu
        * {
            "fused": 0.0,
            "foreach": all_units.trained / plan.shard,
            "single": 2 * biggest,
        }[plan.update]
    )
    yield (
        "optimizer step",
        state
        | {
            "gradients": gradients,
            "working memory": working,
        },
    )


def _share_of_w2(plan: Plan) -> float:
    """The part of a layer's gradients that is there while its MLP is worked on: w2's."""
    if not plan.is_full:
        return 1.0
    return plan.shape.dim * plan.shape.intermediate / plan.shape.layer_parameters


def _dequantised(plan: Plan) -> float:
    """NF4: the largest matrix, in the compute dtype, while it is multiplied."""
    if not plan.is_quantised:
        return 0.0
    return plan.element_bytes * plan.shape.dim * plan.shape.intermediate / plan.tensor_parallel


def _forward_working(plan: Plan) -> float:
    """A layer's MLP in forward: w1, activation and product, the norm's output, the residual."""
    shape, e, tp, t = plan.shape, plan.element_bytes, plan.tensor_parallel, plan.tokens
    inside, width = e * t * shape.intermediate / tp, e * t * shape.dim
    kept = plan.checkpointing == "none"
    at_product = (0 if kept else 3 * inside) + width
    # The gathered input, w2's share of the sum, and its copy in the order that is scattered.
    at_scatter = (0 if kept else inside) + 3 * width if tp > 1 else 0.0
    return max(at_product, at_scatter) + 2 * width / tp + _dequantised(plan)


@dataclass(frozen=True)
class Loss:
    """Bytes of logits and loss as they are made, at the end of forward, and in backward."""

    made: float
    forward: float
    backward: float
    gradient: float


def linear_loss_rows(plan: Plan) -> int:
    """Tokens at a time of the linear loss: as trainer.loss chooses, where no number is given.

    That is about as many logits as there are hidden numbers, and not less than 512 tokens'.
    """
    if plan.chunks:
        return -(-plan.tokens // plan.chunks)
    columns = -(-plan.shape.vocab // plan.tensor_parallel // plan.shape.dim)
    return max(512, -(-plan.tokens // columns))


def _loss(plan: Plan) -> Loss:
    """Cross-entropy over t x V logits, split over the vocabulary by tensor parallelism.

    plain: the model turns its logits to fp32 (4tV), log-softmax keeps 4tV; backward holds that,
    the loss's gradient and log-softmax's. chunked: logits in e bytes, log-softmax in fp32, one
    chunk's temporaries; split over the vocabulary one copy more of a chunk. linear: one chunk of
    logits in both dtypes, or its product with the hidden states on the way to the fp32 sum of a
    trained weight's gradient; the rows that are trained, and their gradient.
    """
    e, tp, c = plan.element_bytes, plan.tensor_parallel, plan.chunks
    logits = plan.tokens * plan.shape.vocab / tp
    more = 1 if tp > 1 else 0
    if plan.loss == "plain":
        return Loss(
            (e + FP32 if e < FP32 else e) * logits,
            (2 + more) * FP32 * logits,
            (3 + more) * FP32 * logits,
            (FP32 + e if e < FP32 else e) * logits,
        )
    if plan.loss == "chunked":
        return Loss(
            e * logits,
            (e + FP32) * logits + (1 + more) * FP32 * logits / c,
            FP32 * logits + (2 + more) * FP32 * logits / c,
            e * logits,
        )
    hidden, columns = e * plan.tokens * plan.shape.dim, plan.shape.vocab / tp
    part = min(linear_loss_rows(plan), plan.tokens) * columns
    # In fp32, and in bf16 before it or the slope after it; a cap keeps its tanh.
    made = part * (FP32 + (FP32 if plan.shape.softcap else 0) + (e if e < FP32 else 0))
    product = e * columns * plan.shape.dim if plan.is_full and e < FP32 else 0.0
    # The trained rows, their gradient, the layers' result, and the norm's where nothing keeps it.
    forward = (1 + 1 / tp + (not plan.is_full)) * hidden + max(made, e * part + product)
    # The norm's backward pass is in fp32.
    backward = (1 + 6 / tp if plan.is_full else 2 + 8 / tp) * hidden
    return Loss(hidden, forward, backward, 2 * hidden)

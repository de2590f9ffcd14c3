"""What a rank or a command of the trainer imports, for the process that tests/forked.py forks."""

from importlib import import_module

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# The trainer imports many of these when it needs them, which would be once more in each fork.
for name in (
    "trainer.models.transformers.source",
    "trainer.check",
    "trainer.demo",
    "trainer.generate",
    "trainer.train",
    "trainer.methods.sft",
    "plugins.estimate.trace",
    "trainer.data.instructions",
    "trainer.layers.adapters.lora",
    "trainer.models.transformers.source",
    "trainer.checkpoint.export",
    "trainer.checkpoint.sharded",
    "datasets.packaged_modules.json.json",
    "scipy.io",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "torch.utils.tensorboard",
    "torchao.optim",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_python",
):
    import_module(name)

# transformers makes this table, of a thousand regular expressions, at the first question.
get_checkpoint_conversion_mapping("llama")

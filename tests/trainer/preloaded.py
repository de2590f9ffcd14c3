"""What a rank or a command of the trainer imports, for the process that tests/forked.py forks."""

from importlib import import_module

# The trainer imports many of these when it needs them, which would be once more in each fork.
for name in (
    "trainer.models.torchtune.compat",
    "trainer.models.transformers.source",
    "trainer.check",
    "trainer.demo",
    "trainer.generate",
    "trainer.sft",
    "trainer.trace",
    "datasets.packaged_modules.json.json",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "torch.utils.tensorboard",
    "torchao.optim",
    "torchtune.datasets",
    "torchtune.models.llama3",
    "torchtune.models.llama3_2",
    "torchtune.modules.loss",
    "torchtune.training.lr_schedulers",
    "transformers.models.auto.modeling_auto",
):
    import_module(name)

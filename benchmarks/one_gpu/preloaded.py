"""What the CPU's runs of `correct` import, for the process that tests/forked.py forks."""

from importlib import import_module

for name in (
    "plugins.rl.grpo",
    "tests.trainer.models.transformers_cases",
    "torch.utils.tensorboard",
    "trainer.checkpoint.export",
    "trainer.generate",
    "trainer.methods.sft",
    "trainer.models.transformers.decoder",
    "trainer.train",
    "transformers.models.llama.modeling_llama",
):
    import_module(name)

"""Which keys of a config may change between a checkpoint and the start that resumes it."""

from typing import Any

from trainer.errors import ConfigError

# What an entry of the identity that is no key of a config depends on.
HINTS = {
    "samples_per_step": "batch_size x gradient_accumulation_steps x ranks with their own data",
    "steps_per_epoch": "max_steps_per_epoch, or the number of samples or packed rows",
    "dataset_size": "the number of samples or packed rows",
    "dataset_sha256": "the samples, or the tokenizer",
    "packed_row_length": "dataset.packed and tokenizer.max_seq_len",
    "base_weights": "checkpointer.checkpoint_dir holds other weights than the adapter's base",
    "method": "model._component_ and model.quantize_base",
}


def check_identity(step: int, made_with: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a config with which the run would not go on as the same run.

    Args:
        step: of the checkpoint.
        made_with: the identity that the checkpoint holds.
        now: that of this start.

    Raises:
        ConfigError: one line per key that differs.
    """
    faults = [
        f"{name} may not change at resume: checkpoints/step_{step} was made with {old!r}, the "
        f"config gives {new!r}{hint(name)}"
        # A checkpoint of an older version of the trainer knows fewer keys.
        for key in now.keys() & made_with.keys()
        for name, old, new in differences(key, made_with[key], now[key])
    ]
    if faults:
        raise ConfigError(
            *sorted(faults),
            "restore these values and resume again, or submit a new run to train with the new ones",
        )


def hint(name: str) -> str:
    """What in a config decides on an entry of the identity, in brackets; empty for a plain key."""
    return f" ({HINTS[name]})" if name in HINTS else ""


def differences(name: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            found
            for key in dict.fromkeys([*new, *old])
            for found in differences(f"{name}.{key}", old.get(key), new.get(key))
        ]
    return [] if old == new else [(name, old, new)]


def changes(made_with: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each setting that differs and may: it holds from this start on."""
    return [
        f"{name} changes from {old!r} to {new!r}"
        for key in now.keys() & made_with.keys()
        for name, old, new in differences(key, made_with[key], now[key])
    ]

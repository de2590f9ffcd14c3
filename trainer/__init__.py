"""Fine-tuning that torchrun starts: the kit's own loop over models of several sources."""

import logging

# transformers imports torchao, which says that its C++ kernels cannot be loaded with this build of
# torch, and registers two classes in a way that torch calls old. No kernel of it is used here.
_NOTES = {
    "torchao": ("Skipping import of cpp extensions", "Failed to load"),
    "torch.utils._pytree": ("%s is an Enum subclass",),
}


def _is_no_note(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NOTES[record.name])


for _name in _NOTES:
    logging.getLogger(_name).addFilter(_is_no_note)

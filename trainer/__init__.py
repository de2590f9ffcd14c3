"""Fine-tuning that torchrun starts: the kit's own loop over models of several sources."""

import logging


def _is_no_kernel_note(record: logging.LogRecord) -> bool:
    return "Skipping import of cpp extensions" not in record.getMessage()


# torchtune and transformers import torchao, which says that its C++ kernels do not fit this torch.
# None of them is used here.
logging.getLogger("torchao").addFilter(_is_no_kernel_note)

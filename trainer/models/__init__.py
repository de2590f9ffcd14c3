"""The models that can be trained, by source."""

import logging

# torchao warns that its C++ kernels do not fit this torch. None of them is used here, and both
# torchtune and transformers import torchao.
logging.getLogger("torchao").addFilter(
    lambda record: "Skipping import of cpp extensions" not in record.getMessage()
)

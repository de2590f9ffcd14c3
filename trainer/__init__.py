"""Fine-tuning that torchrun starts: the kit's own loop over models of several sources."""

import os

from trainer import deferred

# Before anything imports torchtune or torch's sharded tensors. If a package objects to it, such as
# a torch that the kit was not tested with, COOKBOOK_IMPORT_ALL=1 imports everything at once.
if not os.environ.get("COOKBOOK_IMPORT_ALL"):
    deferred.install()

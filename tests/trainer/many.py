"""Several runs one after the other in the same processes, to pay for the imports once."""

import os
import sys

from trainer import sft

if __name__ == "__main__":
    port = int(os.environ.get("MASTER_PORT", "0"))
    for number, path in enumerate(sys.argv[1:], start=1):
        # Each run meets at a store of its own: torchrun's would still hold the last run's keys.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(port + number)
        if status := sft.main([path]):
            sys.exit(status)

"""transformers serve on a Unix socket: python -m serving.transformers_engine SOCKET MODEL [options]

transformers serve itself listens on a port, without a key.
"""

import functools
import sys

import uvicorn


def main() -> None:
    """Start it with uvicorn's own option for sockets."""
    socket, *arguments = sys.argv[1:]
    uvicorn.Config = functools.partial(uvicorn.Config, uds=socket)  # type: ignore[misc,assignment]
    from transformers.cli.transformers import main as transformers

    sys.argv = ["transformers", "serve", *arguments]
    transformers()


if __name__ == "__main__":
    main()

"""The keys of `entry: serve`: what is served, by which backend, and what its front lets through."""

from collections.abc import Mapping
from typing import Any

from runspec.keys.key import REQUIRED, Key, table

# The package that each backend needs in its environment.
BACKENDS = {"transformers": "uvicorn", "vllm": "vllm"}


def package_of(config: Mapping[str, Any]) -> str:
    """Return the package of a recipe's backend."""
    return BACKENDS[str(config.get("engine") or "transformers")]


SERVE = table(
    Key("endpoint", "name", "Name of the endpoint; cookbook serve sets it.", REQUIRED),
    Key("endpoint_dir", "text", "Folder of the endpoint's files.", REQUIRED),
    Key("model", "text", "Folder of the model; cookbook serve sets it.", REQUIRED),
    Key("version", "text", "Name of the served version, such as support-intent v2."),
    Key("engine", "transformers | vllm", "Backend that serves the model.", "transformers"),
    Key("engine_args", "texts", "Additional arguments of the backend.", []),
    Key("device", "text", "For the backend transformers: auto, cpu, cuda:0.", "auto"),
    Key("dtype", "text", "Data type of the weights, in the backend's spelling.", "auto"),
    Key("bind", "loopback | node", "Who can reach the port: its node, or the cluster.", "loopback"),
    Key("port", "count", "Port of the front; 0: a free one.", 0),
    Key("key_file", "text", "File of the API key, which only you may read.", REQUIRED),
    Key("start_timeout_s", "positive", "Maximum time until the backend is healthy.", 1800),
    Key("request_timeout_s", "positive", "Maximum time of one request.", 600),
    Key("max_request_bytes", "positive", "Maximum size of a request.", 1048576),
    Key("max_in_flight", "positive", "Maximum concurrent requests; others get status 503.", 512),
    Key("log", "flag", "Whether requests and answers are logged.", True),
    Key(
        "log_required",
        "flag",
        "Whether a server ends if it cannot log a request, as on a full disk; else it goes on "
        "and says so.",
        False,
    ),
    Key("redact", "texts", "Regular expressions whose matches are removed from the log."),
)

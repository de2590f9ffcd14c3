"""The keys of `entry: serve`: what is served, by which engine, and what its front lets through."""

from runspec.keys.key import REQUIRED, Key

_KEYS = (
    Key("endpoint", "name", "Name of the endpoint; cookbook serve sets it.", REQUIRED),
    Key("endpoint_dir", "text", "Folder of the endpoint's files.", REQUIRED),
    Key("model", "text", "Folder of the model; cookbook serve sets it.", REQUIRED),
    Key("version", "text", "Name of what is served, such as support-intent v2."),
    Key("engine", "transformers | vllm | sglang", "What serves the model.", "transformers"),
    Key(
        "engine_python", "text", "Python of the environment of vllm or sglang; default: the kit's."
    ),
    Key("engine_args", "texts", "More arguments of the engine.", []),
    Key("replicas_per_node", "positive", "Copies of the model that share a node's GPUs.", 1),
    Key("device", "text", "Of the engine transformers: auto, cpu, cuda:0.", "auto"),
    Key("dtype", "text", "Type of the weights, as the engine calls it.", "auto"),
    Key("bind", "loopback | node", "Who reaches the port: its node, or the cluster.", "loopback"),
    Key("port", "count", "Port of the front; 0: a free one.", 0),
    Key("key_file", "text", "File of the API key, which only you may read.", REQUIRED),
    Key("start_timeout_s", "positive", "Time that the engine may take until it is healthy.", 1800),
    Key("request_timeout_s", "positive", "Longest time of one request.", 600),
    Key("max_request_bytes", "positive", "Largest request.", 1048576),
    Key("max_in_flight", "positive", "Requests at a time; more are refused with 503.", 512),
    Key("rate_per_s", "number", "Requests per second; more are refused with 429. Default: any."),
    Key("log_share", "rate", "Share of the requests that is logged, 0 to 1.", 1.0),
    Key("log_rows", "positive", "Requests in one Parquet file.", 1000),
    Key("log_minutes", "number", "A Parquet file is written so often at least.", 10),
    Key("redact", "texts", "Regular expressions whose matches are left out of the log."),
)
SERVE = {key.name: key for key in _KEYS}

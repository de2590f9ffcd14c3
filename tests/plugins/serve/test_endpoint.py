"""What the launcher says of endpoints: addresses that are not here, ports in use, what is due."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from launcher.errors import EndpointFault, UsageFault
from launcher.recipe.model import time_limit_s
from launcher.run.directory import Run
from launcher.site import Site
from plugins.serve import endpoint as endpoints
from plugins.serve.launcher import gateway, maintain, serve
from plugins.serve.launcher.endpoint import Deployment, Endpoint


@pytest.fixture
def endpoint(tmp_path) -> Endpoint:
    found = Endpoint(tmp_path / "endpoints" / "intent")
    found.folder.mkdir(parents=True)
    return found


def test_a_loopback_address_of_another_host_is_not_used(endpoint):
    with pytest.raises(EndpointFault, match="intent is not served now"):
        _ = endpoint.url
    facts = {"state": "ready", "url": "http://127.0.0.1:4000", "bind": "loopback"}
    endpoints.tell(endpoint.folder, "a", facts)
    assert endpoint.url == "http://127.0.0.1:4000"
    file = endpoints.server_file(endpoint.folder, "a")
    file.write_text(json.dumps({**json.loads(file.read_text()), "machine": "n17"}))
    gateway = {"url": "http://127.0.0.1:4001", "host": "login2", "pid": 1, "process_start": "x"}
    gateway["time"] = time.time() - endpoints.STALE_S
    (endpoint.folder / endpoints.GATEWAY).write_text(json.dumps(gateway))
    assert endpoint.gateway is None, "one that no more renews its file has ended with its host"
    gateway["time"] = time.time()
    (endpoint.folder / endpoints.GATEWAY).write_text(json.dumps(gateway))
    with pytest.raises(EndpointFault, match="loopback address of login2"):
        _ = endpoint.url
    (endpoint.folder / endpoints.GATEWAY).unlink()
    with pytest.raises(EndpointFault, match=r"loopback address of n17, .* serve it with bind=node"):
        _ = endpoint.url


def test_a_port_in_use_is_told_before_anything_is_submitted(endpoint):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageFault, match=rf"--port {port} .* \(Address already in use\): "):
            gateway.check_port(endpoint, port)
    gateway.check_port(endpoint, port)


def test_two_commands_do_not_change_an_endpoint_at_the_same_time(endpoint):
    with (
        endpoint.alone(),
        pytest.raises(EndpointFault, match=r"is changing .* \(process "),
        endpoint.alone(),
    ):
        raise AssertionError


def test_a_gateway_that_hangs_is_replaced(endpoint, monkeypatch):
    key = endpoint.key_file
    key.write_text("a key")
    endpoint.write([], {"endpoint": "intent", "key_file": str(key)})
    told: list[str] = []
    url = gateway.start(endpoint)
    file = endpoint.folder / endpoints.GATEWAY
    facts = json.loads(file.read_text())
    try:
        # Its file alone proves nothing: the filesystem may be slow.
        file.write_text(json.dumps({**facts, "time": time.time() - 60}))
        assert not gateway.end_hung(endpoint)
        os.kill(facts["pid"], signal.SIGSTOP)
        monkeypatch.setattr(gateway, "_SILENT_S", 0.5)
        file.write_text(json.dumps({**facts, "time": time.time() - 60}))
        maintain.look(Site(), endpoint, told.append)
        facts = json.loads(file.read_text())
        assert [line.partition(": ")[2] for line in told] == [
            "the gateway did not answer: it was killed, and is restarted",
            f"gateway {url}",
        ]
        assert not gateway.end_hung(endpoint)
    finally:
        os.kill(facts["pid"], signal.SIGKILL)


LORA = {"r": 8, "lora_alpha": 16}
PREFIX, IA3 = {"peft_type": "PREFIX_TUNING"}, {"peft_type": "IA3"}
# As the kit exports a matrix of three: three times the rank and the alpha.
OF_THREE = {"rank_pattern": {"qkv_proj": 24}, "alpha_pattern": {"qkv_proj": 48}}


@pytest.mark.parametrize(
    ("settings", "backend", "base", "words"),
    [
        (LORA | {"use_rslora": True}, "vllm", "llama", None),
        (LORA | {"alpha_pattern": {"q_proj": 4}}, "vllm", "llama", "adapter's alpha_pattern, so"),
        (LORA | {"alpha_pattern": {"q_proj": 4}}, "transformers", "llama", None),
        (LORA | OF_THREE, "vllm", "llama", None),
        (
            IA3,
            "vllm",
            "llama",
            "=vllm serves no IA3 adapters; set engine=transformers, or serve the",
        ),
        (PREFIX, "vllm", "llama", "no PREFIX_TUNING adapters; set engine=transformers"),
        (PREFIX, "transformers", "llama", None),
        (PREFIX, "transformers", "gemma2", "PEFT 0.18 cannot put a prefix before Gemma 2 and 3"),
    ],
)
def test_an_adapter_that_a_backend_would_serve_wrongly_is_refused(
    tmp_path, settings, backend, base, words
):
    settings = settings | {"base_model_name_or_path": str(tmp_path)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": base}))
    faults = serve.adapter_faults(backend, tmp_path)
    assert [words in fault for fault in faults] == [True] * (words is not None), faults


def served_run(endpoint: Endpoint, limit: str, began_s_ago: float) -> Run:
    run = Run(endpoint.folder.parents[1] / "runs" / "20260102-030405-serve-intent-0a1b")
    run.path.mkdir(parents=True)
    lead = min(300, time_limit_s(limit) // 4)
    run.write("submission.json", {"asked": {"time": limit, "signal_lead_s": lead}})
    job = {"job_id": "7", "restart_count": 1}
    # The attempt before went with another start of the job.
    (run.path / "attempts.jsonl").write_text(json.dumps({**job, "restart_count": 0, "started": 1}))
    status = {"state": "RUNNING", "started": time.time() - began_s_ago, **job}
    run.write("status.json", status)
    return run


@pytest.mark.parametrize(
    ("limit", "began_s_ago", "near"),
    [("04:00:00", 3 * 3600, False), ("04:00:00", 3.7 * 3600, True), ("10", 280, False),
     ("10", 310, True), ("3", 30, False), ("3", 50, True)],
)  # fmt: skip
def test_a_successor_is_due_before_the_time_limit(endpoint, limit, began_s_ago, near):
    """A start of 55 s, and Slurm's warning 300 s or a quarter of the limit before it."""
    run, deployment = served_run(endpoint, limit, began_s_ago), Deployment("m", "m", runs=["x"])
    facts = {"state": "ready", "run": run.name, "start_s": 55}
    endpoints.tell(endpoint.folder, "a", facts)
    going, count, reason = maintain.due(endpoint, deployment, [run])
    assert (list(going) == [run], count == 1, "time limit" in reason) == (near, near, near)


def test_a_slow_start_makes_it_due_earlier_and_a_missing_job_is_made_up_for(endpoint):
    run, deployment = served_run(endpoint, "04:00:00", 3 * 3600), Deployment("m", "m", replicas=2)
    assert maintain.due(endpoint, deployment, [run])[1:] == (1, "1 of 2 jobs serve m")
    endpoints.tell(endpoint.folder, "a", {"state": "ready", "run": run.name, "start_s": 1500})
    going, count, reason = maintain.due(endpoint, deployment, [run])
    assert (list(going), count) == ([run], 1) and f"the time limit of {run.name} is" in reason


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("environment={kind: venv, python: /nowhere/bin/python}", "/nowhere/bin/python"),
        ("engine=vllm", "needs the package vllm, which is not there: --environment vllm"),
        ("engine_args=[--continuous-batching]", "samples alike for all requests: set engine=vllm"),
    ],
)
def test_what_cannot_be_served_leaves_no_endpoint(user, model, given, words):
    done = user.cookbook("serve", str(model), "--name", "intent", "--local", given)
    assert done.returncode and words in done.stderr
    assert not [*Path(user.env["COOKBOOK_ROOT"]).glob("endpoints/*")]


def test_an_endpoint_keeps_the_run_that_was_meant(endpoint, tmp_path, monkeypatch):
    monkeypatch.delenv("COOKBOOK_ROOT", raising=False)
    run = Run(tmp_path / "runs" / "20260101-000000-a-0001")
    export = run.path / "export"
    export.mkdir(parents=True)
    run.write("submission.json", {"recipe": "demo", "jobs": [], "asked": {}})
    for name in ("config.json", "tokenizer.json"):
        (export / name).write_text("{}")
    (export / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for wanted, kept in (("last", run.name), ("a-0001", run.name), (str(export), str(export))):
        asked = Deployment(wanted, "", executor="local")
        new, _, _ = serve.launch(Site(shared_root=str(tmp_path)), endpoint, asked, 0, print)
        assert (new.model, new.version) == (kept, run.name)

"""An endpoint's gateway on this host: started, and ended if it hangs."""

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from urllib.parse import urlparse

from launcher import paths, venv
from launcher.errors import EndpointFault, UsageFault
from plugins.serve import endpoint as endpoints
from plugins.serve.launcher.endpoint import Endpoint
from runspec import files

# A gateway that says nothing for so long hangs.
_SILENT_S = 10.0
_ENDS_S = 30.0


def check_port(endpoint: Endpoint, port: int) -> None:
    """Raise UsageFault if a gateway that is to be started cannot have a port."""
    running = endpoint.gateway
    if running is not None:
        if urlparse(str(running["url"])).port != port:
            raise UsageFault(
                f"--port {port}: the gateway of {endpoint.name} already listens at "
                f"{running['url']}: leave --port out"
            )
        return
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UsageFault(
            f"--port {port} of 127.0.0.1 cannot be opened ({why}): leave --port out, or choose "
            "another"
        ) from error


def start(endpoint: Endpoint, port: int = 0) -> str:
    """Start the gateway on this host, if none runs; return its address.

    Without a port it gets the one that it had before, if that is free: clients have its address.
    """
    if (running := endpoint.gateway) is not None:
        return str(running["url"])
    before = files.read_object(endpoint.folder / endpoints.GATEWAY)
    if not port and before is not None:
        with suppress(EndpointFault):
            return _started(endpoint, urlparse(str(before.get("url"))).port or 0)
    return _started(endpoint, port)


def _started(endpoint: Endpoint, port: int) -> str:
    (endpoint.folder / endpoints.GATEWAY).unlink(missing_ok=True)
    log, argv = endpoint.folder / "gateway.log", [str(venv.python()), "-m", "plugins.serve.gateway"]
    with open(log, "ab") as file:
        os.chmod(log, 0o600)
        process = subprocess.Popen(
            [*argv, str(endpoint.folder), "--port", str(port)],
            cwd=paths.REPO_ROOT,
            env=venv.environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (running := endpoint.gateway) is not None and running["pid"] == process.pid:
            return str(running["url"])
        time.sleep(0.1)
    output = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    reason = output[-1].removeprefix("error: ") if output else "no message"
    raise EndpointFault(f"the gateway of {endpoint.name} did not start: {reason} (see {log})")


def end_hung(endpoint: Endpoint) -> bool:
    """End this host's gateway if it neither renews its file nor answers; return whether it did."""
    facts = endpoint.gateway
    if facts is None or facts["host"] != socket.gethostname():
        return False
    if time.time() - float(facts.get("time") or 0) < endpoints.STALE_S or _answers(facts["url"]):
        return False
    with suppress(ProcessLookupError):
        os.kill(int(facts["pid"]), signal.SIGKILL)
    deadline = time.monotonic() + _ENDS_S
    while endpoint.gateway == facts and time.monotonic() < deadline:
        time.sleep(0.1)
    return True


def _answers(url: str) -> bool:
    """Whether a gateway answers at all; the kernel accepts connections to one that is stopped."""
    from plugins.serve import client  # few commands ask

    with suppress(OSError):
        return bool(client.send(f"{url}/health", timeout_s=_SILENT_S).status)
    return False

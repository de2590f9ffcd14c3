"""Sends one request, or one for each line of a file: python -m plugins.serve.client FOLDER

For a file many requests are in flight. Answers are written in the order of the lines; a second
start continues after the last one. A failed request is retried, at the endpoint's current address.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

from plugins.serve import endpoint as endpoints
from plugins.serve.answers import message_of
from plugins.serve.request import CHAT, OF_A_LINE
from runspec import files
from runspec.files import parse_json

# How long a backend may take to restart.
_PATIENCE_S = 120.0
# Status codes that a retry cannot change.
_FINAL = {400, 401, 403, 404, 405, 413, 415, 422}


class Refused(Exception):
    """The endpoint refuses a request, or does not answer; the text says why."""


class BrokenOff(Refused):
    """A stream ended before its answer was complete; the part that arrived is printed."""


class Client:
    """Sends requests to an endpoint, whose address is read again before every try."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def ask(self, body: dict[str, Any], stream: bool = False) -> str:
        """Return an answer's text; print it as it comes if stream is set."""
        headers, deadline = {"Authorization": f"Bearer {self.key}"}, time.monotonic() + _PATIENCE_S
        attempt = 0
        while True:
            attempt += 1
            reason = "nothing serves it now: see cookbook serve --list"
            try:
                if (address := endpoints.address(self.folder)) is not None:
                    async with self.session.post(
                        address + CHAT,
                        json={**body, "stream": stream},
                        headers=headers,
                        timeout=aiohttp.ClientTimeout(total=600, sock_connect=10),
                    ) as answer:
                        if answer.status == 200:
                            return await (_streamed(answer) if stream else _whole(answer))
                        reason = f"it answered {answer.status}: {message_of(await answer.read())}"
                        # Such as at the end of a quota: longer than this client waits.
                        again = answer.headers.get("Retry-After", "")
                        far_off = again.isdigit() and int(again) > _PATIENCE_S
                        if answer.status in _FINAL or far_off:
                            raise Refused(reason)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = f"it does not answer ({type(error).__name__})"
            if time.monotonic() > deadline:
                raise Refused(f"{reason}, {attempt} times in {_PATIENCE_S:.0f} s")
            await asyncio.sleep(min(4.0, 0.25 * 2**attempt))


async def _whole(answer: aiohttp.ClientResponse) -> str:
    value = await answer.json(content_type=None)
    return str(value["choices"][0]["message"]["content"] or "")


async def _streamed(answer: aiohttp.ClientResponse) -> str:
    """Print an answer as it arrives, and return it; BrokenOff if it is incomplete."""
    texts: list[str] = []
    try:
        async for line in answer.content:
            text = line.decode("utf-8", errors="replace").strip()
            if not text.startswith("data:") or text.endswith("[DONE]"):
                continue
            for choice in parse_json(text[5:]).get("choices") or []:
                piece = (choice.get("delta") or {}).get("content")
                if piece:
                    print(piece, end="", flush=True)
                    texts.append(piece)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if not texts:
            raise  # nothing is printed yet: it is asked again
        print(flush=True)
        raise BrokenOff("the answer broke off: the server went away; ask again") from error
    print(flush=True)
    return "".join(texts)


def body_of(row: Any, settings: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the request for a line with messages, a prompt or a question, else raise Refused."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise Refused(f"{place}: it is not a JSON object")
    messages = row.get("messages")
    if messages is None:
        text = row.get("prompt", row.get("question"))
        if not isinstance(text, str):
            raise Refused(f"{place}: it has no messages, prompt or question")
        messages = [{"role": "user", "content": text}]
    own = {key: row[key] for key in OF_A_LINE if row.get(key) is not None}
    return {**settings, **own, "messages": messages}


async def batch(
    client: Client, source: Path, target: Path, settings: dict[str, Any], in_flight: int
) -> int:
    """Answer a file's lines in order; return the number of failed ones.

    Raises:
        Refused: the file cannot be read, or the output belongs to other questions.
    """
    rows = _rows(source, settings)
    done = _done(target, rows)
    if done:
        print(f"{done:,} of {len(rows):,} are answered already", file=sys.stderr)
    gate, failed, began = asyncio.Semaphore(in_flight), 0, time.monotonic()

    async def one(body: dict[str, Any]) -> dict[str, Any]:
        async with gate:
            try:
                return {"answer": await client.ask(body)}
            except Refused as error:
                return {"answer": None, "error": str(error)}

    left = iter(rows[done:])
    tasks = deque(asyncio.create_task(one(body)) for _, body in islice(left, 4 * in_flight))
    with open(target, "a", encoding="utf-8") as out:
        for number in range(done, len(rows)):
            answer = await tasks.popleft()
            tasks.extend(asyncio.create_task(one(body)) for _, body in islice(left, 1))
            failed += answer["answer"] is None
            line = {"line": number + 1, "hash": rows[number][0], **answer}
            # In order, and complete lines: written answers are not requested again.
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
    if asked := len(rows) - done:
        seconds = time.monotonic() - began
        print(f"{asked:,} requests in {seconds:.1f} s, {failed:,} failed", file=sys.stderr)
    return failed


def _rows(source: Path, settings: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    rows, faults = [], []
    try:
        lines = source.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--input {source} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = body_of(parse_json(line), settings, f"{source}, line {number}")
            rows.append((hashlib.sha256(line.encode()).hexdigest()[:16], body))
        except ValueError as error:
            faults.append(f"{source}, line {number}: not JSON: {error}")
        except Refused as error:
            faults.append(str(error))
    if faults:
        raise Refused("\n".join(faults[:10]))
    if not rows:
        raise Refused(f"--input {source} has no questions")
    return rows


def _done(target: Path, rows: list[tuple[str, dict[str, Any]]]) -> int:
    """Return the number of answered lines; an incomplete or failed line is removed."""
    if not target.exists():
        return 0
    kept: list[str] = []
    for text in target.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = parse_json(text)
            same = line["hash"] == rows[len(kept)][0]
        except (ValueError, KeyError, IndexError, TypeError):
            same, line = None, {}
        if same is False or (same is None and not kept and text.strip()):
            raise Refused(
                f"--output {target} has the answers to other questions: choose another file"
            )
        if not same or line.get("answer") is None:
            break
        kept.append(text + "\n")
    files.write_text(target, "".join(kept))
    return len(kept)


async def run(options: argparse.Namespace) -> int:
    settings: dict[str, Any] = {"model": "default"}
    known = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
    settings |= {name: value for name, value in known.items() if value is not None}
    key = (options.folder / endpoints.KEY).read_text(encoding="utf-8").strip()
    client = Client(options.folder, key)
    try:
        if options.input:
            files_given = options.input, options.output
            return 1 if await batch(client, *files_given, settings, options.in_flight) else 0
        body = body_of({"prompt": options.prompt}, settings, "the question")
        text = await client.ask(body, stream=options.stream)
        if not options.stream:
            print(json.dumps({"answer": text}) if options.json else text)
        return 0
    except (Refused, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    finally:
        await client.session.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m plugins.serve.client", description=__doc__)
    parser.add_argument("folder", type=Path)
    kinds: dict[str, Any] = {"--prompt": str, "--input": Path, "--output": Path}
    kinds |= {"--max-tokens": int, "--temperature": float, "--seed": int}
    for name, kind in kinds.items():
        parser.add_argument(name, type=kind)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--json", action="store_true")
    try:
        return asyncio.run(run(parser.parse_args()))
    except KeyboardInterrupt:
        print("\ninterrupted: what is answered is written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

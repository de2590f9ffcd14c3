"""What the hub's client answers, in words: whose token it has, and each error with its remedy."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import HfApi, constants, errors, get_token

from launcher.errors import HubFault, nearest
from launcher.hub.repository import Repository


def token_source() -> str | None:
    """Return the variable or file that the hub's client has its token from, None without one."""
    if not get_token():
        return None
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    given = (name for name in names if os.environ.get(name, "").strip())
    return next(given, constants.HF_TOKEN_PATH)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def in_words(repo: Repository) -> Iterator[None]:
    """Turn what the hub's client raises into a HubFault."""
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise HubFault("HF_HUB_OFFLINE forbids every download: unset it") from error
    except errors.HfHubHTTPError as error:
        raise HubFault(_refused(repo, error)) from error
    except (
        errors.HTTPError,  # type: ignore[attr-defined]
        errors.LocalEntryNotFoundError,
        errors.FileMetadataError,
        errors.DryRunError,
    ) as error:
        message = f"no answer from {constants.ENDPOINT} ({_one_line(error.__cause__ or error)})"
        remedy = "run this on a machine with internet, or set HTTPS_PROXY; finished files stay"
        raise HubFault(f"{repo.name}: {message}: {remedy}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the disk under {repo.folder} is full: make room; finished files stay"
        else:
            message = f"cannot write {repo.name} to {repo.folder}: {_one_line(error)}"
        raise HubFault(f"{message}: then try again") from error


def _refused(repo: Repository, error: Any) -> str:
    """Return what the hub's refusal means: the token, access, a name, or the hub itself."""
    where, status = token_source(), error.response.status_code
    if where and status == 401 and "nvalid" in error.response.headers.get("X-Error-Message", ""):
        return (
            f"the hub does not accept the token of {where}: make one that may read at "
            "https://huggingface.co/settings/tokens, then log in with: hf auth login"
        )
    ask = f"ask for access at {repo.page}"
    if isinstance(error, errors.GatedRepoError):
        if where is None:
            login = "log in with: hf auth login (or set HF_TOKEN_PATH)"
            return f"{repo.name} is gated: {ask}, then {login}"
        may = "has none yet, or may not read gated repositories (see hf auth whoami)"
        return f"{repo.name} is gated: {ask}; the token of {where} {may}"
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = nearest(repo.name, _similar(repo))
        login = "log in with: hf auth login" if where is None else f"check whose token {where} has"
        message = f"the hub has no {repo.kind} {repo.name!r}{hint}"
        return (
            f"{message}: fix hub.{repo.key or repo.kind} in the recipe; if it is private, {login}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        message = f"{repo.name} has no revision {repo.revision!r}"
        return f"{message}: see its branches and commits at {repo.page}/tree/main"
    if status == 403:
        return f"the hub forbids {repo.name}: {ask}, with a token that may read it: hf auth login"
    return f"the hub answered {status} for {repo.name}: try again later ({_one_line(error)})"


def _similar(repo: Repository) -> list[str]:
    """Return repositories with a similar name; [] if the hub does not say."""
    look = HfApi().list_datasets if repo.kind == "dataset" else HfApi().list_models
    parts = re.split(r"[-_.]", repo.name.rpartition("/")[2])
    try:
        return [listed.id for listed in look(search=parts[0], limit=50)]
    except Exception:  # a hint is not worth a fault of its own
        return []

"""What the hub's client answers, in words: each of its errors with a remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants, errors, get_token

from launcher.errors import HubFault
from launcher.hub.repository import Repository

_LOGIN = "hf auth login (or set HF_TOKEN_PATH)"


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
    status, has_token = error.response.status_code, bool(get_token())
    if (
        has_token
        and status == 401
        and "nvalid" in error.response.headers.get("X-Error-Message", "")
    ):
        return f"the hub does not accept your token: make one that may read, then: {_LOGIN}"
    login = "see whose token you use: hf auth whoami" if has_token else f"log in with: {_LOGIN}"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return f"{repo.name} is gated: ask for access at {repo.page}, then {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        where = f"fix hub.{repo.key or repo.kind} in the recipe"
        return f"the hub has no {repo.kind} {repo.name!r}: {where}; if it is private, {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        message = f"{repo.name} has no revision {repo.revision!r}"
        return f"{message}: see its branches and commits at {repo.page}/tree/main"
    return f"the hub answered {status} for {repo.name}: try again later ({_one_line(error)})"

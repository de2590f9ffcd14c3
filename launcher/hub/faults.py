"""What the hub's client raises, as one line that says what to do."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launcher.errors import CookbookError, HubFault, nearest
from launcher.hub import token
from launcher.hub.repository import Repository


@contextmanager
def in_words(repo: Repository) -> Iterator[None]:
    """Turn what the hub's client raises into a HubFault."""
    from huggingface_hub import errors

    try:
        yield
    except CookbookError:
        raise
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
        raise HubFault(_unreachable(repo, error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            words = f"the disk under {repo.folder} is full: make room; finished files stay"
        else:
            words = f"cannot write {repo.name} to {repo.folder}: {token.one_line(error)}"
        raise HubFault(f"{words}: then try again") from error


def _refused(repo: Repository, error: Any) -> str:
    """Return what the hub's refusal means: the token, access, a name, or the hub itself."""
    from huggingface_hub import errors

    where, status = token.source(), error.response.status_code
    if where and status == 401 and "nvalid" in error.response.headers.get("X-Error-Message", ""):
        return ": ".join(token.bad(where))
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
        words = f"the hub has no {repo.kind} {repo.name!r}{hint}"
        return f"{words}: fix hub.{repo.kind} in the recipe; if it is private, {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        words = f"{repo.name} has no revision {repo.revision!r}"
        return f"{words}: see its branches and commits at {repo.page}/tree/main"
    if status == 403:
        return f"the hub forbids {repo.name}: {ask}, with a token that may read it: hf auth login"
    return f"the hub answered {status} for {repo.name}: try again later ({token.one_line(error)})"


def _similar(repo: Repository) -> list[str]:
    """Return repositories with a similar name; [] if the hub does not say."""
    from huggingface_hub import HfApi

    look = HfApi().list_datasets if repo.kind == "dataset" else HfApi().list_models
    words = re.split(r"[-_.]", repo.name.rpartition("/")[2])
    try:
        return [found.id for found in look(search=words[0], limit=50)]
    except Exception:  # a hint is not worth a fault of its own
        return []


def _unreachable(repo: Repository, error: Exception) -> str:
    from huggingface_hub import constants

    cause = token.one_line(error.__cause__ or error)
    words = f"{repo.name}: no answer from {constants.ENDPOINT} ({cause})"
    remedy = "run this on a machine with internet, or set HTTPS_PROXY; finished files stay"
    return f"{words}: {remedy}"

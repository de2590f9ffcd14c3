"""The hub's token: where it comes from and whose it is, never the token itself."""

from __future__ import annotations

import os

from launcher.checks.finding import Finding, failed, ok, skipped


def source() -> str | None:
    """Return the variable or file that the hub's client has its token from, None without one."""
    from huggingface_hub import constants, get_token

    if not get_token():
        return None
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    given = (name for name in names if os.environ.get(name, "").strip())
    return next(given, constants.HF_TOKEN_PATH)


def bad(where: str) -> tuple[str, str]:
    """Return what is wrong with a token that the hub does not know, and what to do."""
    return (
        f"the hub does not accept the token of {where}",
        "make one that may read at https://huggingface.co/settings/tokens, then log in with: hf "
        "auth login",
    )


def findings() -> list[Finding]:
    """Ask the hub whose token this is; skipped if there is none or the hub does not answer."""
    subject, where = "hub token", source()
    if where is None:
        remedy = "for gated models: hf auth login, or name a file with a token in HF_TOKEN_PATH"
        return [skipped(subject, "there is none; public models do not need one", remedy)]
    from huggingface_hub import HfApi, errors

    try:
        who = HfApi().whoami()
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            return [failed(subject, *bad(where))]
        return [skipped(subject, f"the hub answered {status}")]
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        return [skipped(subject, f"the token of {where} was not tried: {one_line(error)}")]
    return [ok(subject, f"the token of {where} is {who.get('name', 'somebody')}'s")]


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

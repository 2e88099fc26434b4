"""
Downloads from the Hugging Face hub. Files in its cache (HF_HOME) are not downloaded again, and a
download that broke off continues where it was.
"""
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from files import UserError, first_line


def snapshot(flag: str, name: str, patterns: list[str], kind: str = "model") -> Path:
    """The local folder of a model or a data set, with the files that match the patterns.

    flag: the flag with its value, for messages; name: owner/name; kind: "model" or "dataset".
    UserError, which says what to do, if it can't be downloaded.
    """
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type=kind,
                                                      allow_patterns=patterns))
    except Exception as error:                   # the client's, httpx's and the system's
        raise UserError(f"{flag}: {advice(error, name, kind)}") from None


def advice(error: Exception, name: str, kind: str) -> str:
    """Why a download failed, and what to do."""
    from huggingface_hub import errors  # late: it imports an HTTP client, 0.2 s
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    login = "log in with `hf auth login`"
    is_absent = isinstance(error, errors.LocalEntryNotFoundError)
    error = is_absent and error.__cause__ or error       # what kept the client from the hub
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return f"access is restricted: accept the license at {page}, and {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no {page}, or it is private: then {login}"
    if status == 401:
        return f"{page} refuses the login: {login}"
    if isinstance(error, errors.HFValidationError):
        return first_line(error)
    why = f"{type(error).__name__}: {first_line(error)}"
    if is_absent:
        return f"it is not in the cache, {constants.HF_HOME}, and the hub can't be reached ({why})"
    return f"the download failed ({why}); the same command continues it"

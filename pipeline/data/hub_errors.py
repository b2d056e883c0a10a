"""Errors of the package ``huggingface_hub`` in plain words, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from protocol.errors import ConfigError, DataError

Kind = Literal["model", "dataset"]

_WORDS: Final[dict[Kind, tuple[str, str, str, type[ConfigError | DataError]]]] = {
    "model": ("model", "", "", ConfigError),
    "dataset": ("data set", "datasets/", "--repo-type dataset ", DataError),
}
"""Of a kind: its name, where its pages are, an option of ``hf download``, and the error."""


@contextmanager
def plain_errors(name: str, repository: str, kind: Kind) -> Iterator[None]:
    """Turn the package's errors about a repository into one that begins with ``name``: ConfigError
    for a model, DataError for a data set. A token is never among the words."""
    from huggingface_hub import constants, errors

    words, pages, option, raised = _WORDS[kind]
    hub = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        remedy = f"accept their terms at {hub}/{pages}{repository}, and set HF_TOKEN"
        raise raised(f"{name}: access must be requested from its owners; {remedy}") from error
    except errors.RepositoryNotFoundError as error:
        remedy = "correct the name, or set HF_TOKEN to a token that may read it"
        raise raised(f"{name}: {hub} has no {words} {repository}, or it is private; {remedy}") from error
    except errors.RevisionNotFoundError as error:
        raise raised(f"{name}: {repository} has no such revision; name a branch, a tag or a commit") from error
    except errors.RemoteEntryNotFoundError as error:
        raise raised(f"{name}: {repository} has no such file in this revision; correct the name") from error
    except errors.HFValidationError as error:
        raise raised(f"{name}: {repository} is not the name of a {words}; expected OWNER/NAME") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "try again later, or set HF_TOKEN if it is 401 or 403"
        raise raised(f"{name}: {hub} answered with status {status}; {remedy}") from error
    except (OSError, errors.EntryNotFoundError) as error:
        lacks = f"{hub} cannot be reached, and the cache {constants.HF_HUB_CACHE} lacks it ({type(error).__name__})"
        fetch = f"Run `hf download {option}{repository}` where there is a network and copy the cache"
        raise raised(f"{name}: {lacks}. {fetch}, or give a local path") from error

"""Downloads a model from a Hugging Face hub: of its weights only the files that hold what is needed.

Only JSON, tokenizer and safetensors files are ever asked for. They go to the hub library's own cache,
which other programs on this machine share.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aparte.errors import CheckpointError
from aparte.model.checkpoint import CONFIG, INDEX, WEIGHTS, read_config, read_index
from aparte.model.folders import Progress, quiet
from aparte.model.needed import Wanted, nothing

logger = logging.getLogger(__name__)

_REACH_S = 10.0
_GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_EXTRAS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
#: Where a repository has no tokenizer.json, these take its place.
_TOKENIZER_SOURCES = ("vocab.json", "merges.txt", "tokenizer.model")


def is_offline() -> bool:
    """Whether the user switched the hub off by ``HF_HUB_OFFLINE``."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_cache() -> Path:
    """The hub library's cache. Its variables are read anew here; the library reads them at import."""
    from huggingface_hub import constants

    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(constants.HF_HUB_CACHE)


def download(
    repo: str,
    *,
    revision: str | None = None,
    wanted: Wanted | None = None,
    tokenizer: bool = True,
    progress: Progress | None = None,
    offline: bool = False,
) -> Path:
    """The snapshot folder of ``repo`` with the files that hold ``wanted`` tensors (all without it).

    ``revision`` is a branch, a tag or a commit; the main branch without it.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what matters of it becomes our errors
    session = _Session(repo, revision, progress or quiet, offline or is_offline())
    try:
        return session.run(wanted, tokenizer)
    except CheckpointError:
        raise
    except Exception as error:  # the hub library's errors have no base of their own
        raise _explain(session.name, session.unreachable or error, session.offline) from error


def download_config(repo: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The snapshot folder of ``repo``, of which only ``config.json`` is asked for."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    session = _Session(repo, revision, progress or quiet, is_offline())
    try:
        return session.config()
    except CheckpointError:
        raise
    except Exception as error:
        raise _explain(session.name, session.unreachable or error, session.offline) from error


class _Session:
    """One download; every file is of the commit that the first one was of."""

    def __init__(self, repo: str, revision: str | None, progress: Progress, offline: bool) -> None:
        self.repo = repo
        self.revision = revision
        self.name = f"{repo}@{revision}" if revision else repo
        self.progress = progress
        self.offline = offline
        self.endpoint = os.environ.get("HF_ENDPOINT") or None
        self.commit: str | None = None
        self.unreachable: Exception | None = None

    def config(self) -> Path:
        """The snapshot folder, with the configuration in it."""
        self.progress(f"Looking up {self.repo} on the hub", 0, 0)
        if not self.offline:
            self._reach()
        config = self.get(CONFIG)
        if config is None:
            raise CheckpointError(f"{self.repo} has no {CONFIG}. {self._other_formats()}")
        self.commit = config.parent.name
        return config.parent

    def run(self, wanted: Wanted | None, tokenizer: bool) -> Path:
        folder = self.config()
        layers = int(read_config(folder).get("num_hidden_layers") or 0)
        self.get(_GENERATION)
        if tokenizer:
            self._get_tokenizer()
        for file in self._weight_files(wanted, layers):
            if self.get(file) is None:
                raise CheckpointError(f"{self.repo} has no {file}. {self._other_formats()}")
        return folder

    def _reach(self) -> None:
        """Fall back to the cache at once when the hub cannot be reached; the library retries for long."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            url = hf_hub_url(self.repo, CONFIG, revision=self.revision, endpoint=self.endpoint)
            get_hf_file_metadata(url, timeout=_REACH_S)
        except (HfHubHTTPError, HFValidationError):
            return  # it answered, or was not asked; what it has to say comes with the first file
        except Exception as error:
            logger.info("the hub cannot be reached (%s); looking in the cache", error)
            self.unreachable = error
            self.offline = True

    def get(self, file: str) -> Path | None:
        """Fetch ``file`` unless it is cached; ``None`` when the repository has no such file."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        if self.commit is not None:
            known = try_to_load_from_cache(self.repo, file, cache_dir=hub_cache(), revision=self.commit)
            if isinstance(known, str):
                return Path(known)
            if known is not None:  # known not to exist
                return None
        try:
            path = hf_hub_download(
                self.repo,
                file,
                revision=self.commit or self.revision,
                cache_dir=hub_cache(),
                endpoint=self.endpoint,
                local_files_only=self.offline,
                tqdm_class=_bar(f"Downloading {file}", self.progress),
            )
        except LocalEntryNotFoundError:
            if self.offline and file != CONFIG and not file.endswith(".safetensors"):
                return None
            raise
        except EntryNotFoundError:
            return None
        return Path(path)

    def _get_tokenizer(self) -> None:
        sources = () if self.get(_TOKENIZER) else _TOKENIZER_SOURCES
        for file in (*sources, *_TOKENIZER_EXTRAS):
            self.get(file)

    def _weight_files(self, wanted: Wanted | None, layers: int) -> list[str]:
        if wanted is nothing:
            return []
        index = self.get(INDEX)
        if index is None:
            return [WEIGHTS]
        files = read_index(index).items()
        return sorted({file for name, file in files if wanted is None or wanted(name, layers)})

    def _other_formats(self) -> str:
        """What to do about a repository without safetensors, from the files that it has."""
        from huggingface_hub import HfApi

        info = HfApi(endpoint=self.endpoint).model_info(self.repo, revision=self.revision)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        if any(name.endswith(".gguf") for name in names):
            return "It holds GGUF files: download one of them and give its path."
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            return (
                "Its weights are pickle files, which can run any program when they are opened; aparte never "
                "opens one. Choose a version of the model with safetensors."
            )
        return "It is not a language model in the Hugging Face layout. Choose another one."


def cached_models() -> Iterator[tuple[str, Path, int]]:
    """Repository, snapshot folder and bytes on disk of the language models in the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(hub_cache()).repos
    except (CacheNotFound, ValueError, OSError):
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified, reverse=True)
        for revision in revisions:
            names = {file.file_name for file in revision.files}
            if (
                repo.repo_type == "model"
                and CONFIG in names
                and any(n.endswith(".safetensors") for n in names)
            ):
                yield repo.repo_id, revision.snapshot_path, revision.size_on_disk
                break


def _bar(label: str, progress: Progress) -> type[Any]:
    """A progress bar class for the hub library that draws nothing and reports to ``progress``."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = {**kwargs, "file": io.StringIO(), "disable": False}
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            result: bool | None = super().update(n)
            progress(label, int(self.n), int(self.total or 0))
            return result

        def close(self) -> None:
            if not self.disable and sys.exc_info()[0] is None:
                # The library may leave the last update out.
                progress(label, int(self.total or self.n), int(self.total or 0))
            super().close()

    return Bar


def _explain(repo: str, error: Exception, offline: bool) -> CheckpointError:
    from huggingface_hub import errors

    response = getattr(error, "response", None)
    if isinstance(error, errors.GatedRepoError):
        reason = (
            "is gated: its owner grants access one by one. Ask for it on the model's page, "
            "then run `hf auth login`."
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = (
            "is not on the hub, or is private. Check the spelling; for a private model run `hf auth login`."
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = "is not on the hub: the model has no such branch, tag or commit. Check what is after the @."
    elif isinstance(error, errors.LocalEntryNotFoundError) and offline:
        reason = (
            "is not complete on this machine, and the hub is switched off (HF_HUB_OFFLINE or offline). "
            f"Run `aparte models get {repo}` once with the hub switched on."
        )
    elif isinstance(error, errors.HFValidationError):
        reason = "is not a valid hub id. Hub ids are of the form owner/name."
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = (
            f"does not fit on the disk. Make room in {hub_cache()}, or set HF_HOME to a folder with room."
        )
    elif response is not None:
        reason = f"could not be downloaded: the hub answered {response.status_code}. Try again later."
    else:
        cause = " ".join(str(error.__cause__ or error).split())[:200].rstrip(".") or type(error).__name__
        reason = (
            f"could not be downloaded: {cause}. Check the network and try again, or give a local folder "
            "or a GGUF file."
        )
    return CheckpointError(f"{repo} {reason}")

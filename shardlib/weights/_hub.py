"""Models of the Hugging Face hub as folders of this machine."""

import re
from pathlib import Path

from shardlib.checks import _arguments as check

OP = "local_folder"
_SCHEME = "hf:"
_NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# Weights as safetensors, configurations, and the files of tokenizers; nothing that could be run.
_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
# Other forms of the same weights: in folders of their own, or as their authors train them.
_NOT_FILES = ("*/*", "consolidated*")


def local_folder(source: str | Path) -> Path:
    """The folder that has the files of a model.

    Args:
        source: a folder, which is returned as it is. Or a model of the Hugging Face hub, such as
            `"hf:meta-llama/Llama-3.2-1B"`, perhaps of a revision, `"hf:NAME/MODEL@v1.0"`: its files
            are downloaded once, and kept in the hub's cache. That needs the package
            `huggingface-hub`.

    >>> local_folder("runs/tiny")
    PosixPath('runs/tiny')
    """
    if "://" in str(source):
        raise ValueError(
            f"`{source}` is no folder of this machine: copy the files to one, or mount the bucket."
        )
    if not str(source).startswith(_SCHEME):
        return check.path(OP, "source", source, "a folder, or `hf:NAME/MODEL`")
    found = _NAME.fullmatch(str(source))
    if found is None:
        raise ValueError(
            f"`{source}` is no model of the Hugging Face hub: write `hf:NAME/MODEL`, or "
            "`hf:NAME/MODEL@REVISION`."
        )
    try:
        # Most people have their models in a folder, and need no client of the hub.
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise ValueError(
            f'`{source}` is downloaded by another package: `pip install "shardlib[hub]"`.'
        ) from error
    try:
        return Path(
            snapshot_download(
                found["repository"],
                revision=found["revision"],
                allow_patterns=list(_FILES),
                ignore_patterns=list(_NOT_FILES),
            )
        )
    # The client has many kinds of errors, of the network and of permissions.
    except Exception as error:
        # What is wrong, a name or a license, is not in the first line.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"`{source}` could not be downloaded: {reason}") from error

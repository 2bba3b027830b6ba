"""What a compiler wrote about a program, and files that keep it.

JAX keeps compiled programs too, but cannot read back one for TPUs that are not there, and its
programs come without what compilers write about them. So the texts are kept, and are read each time
as a compiler's are. A file that is damaged is made again.
"""

import gzip
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Files of another form have another key, and are never read.
_FORM = 1


@dataclass(frozen=True)
class Sizes:
    """Bytes of a compiled program, as `memory_analysis()` has them."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    program: int

    @classmethod
    def of(cls, compiled: Any) -> "Sizes":
        """The sizes of a `jax.stages.Compiled`."""
        analysis = compiled.memory_analysis()
        return cls(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
            analysis.generated_code_size_in_bytes,
        )


@dataclass(frozen=True)
class Written:
    """What a compiler wrote about a program."""

    text: str  # of the scheduled program
    assignment: str  # allocations, and the values in each of them
    live_ranges: str  # when each value is made and last read
    printed: str  # to standard error
    seconds: float  # that it compiled for
    refusal: str = ""  # of a program that needs more memory than there is
    sizes: Sizes | None = None  # of a program that was not refused


@dataclass(frozen=True)
class Kept:
    """The file that keeps what is written about one program.

    >>> import tempfile
    >>> kept = Kept.of(Path(tempfile.mkdtemp()), ["a program"])
    >>> kept.load() is None
    True
    >>> kept.save(Written("HloModule", "", "", "", 1.5))
    >>> kept.load().seconds
    1.5
    """

    file: Path

    @classmethod
    def of(cls, folder: Path, key: Iterable[str]) -> "Kept":
        """The file in a folder, by texts that say all that a compiler's answer depends on.

        Texts that differ in anything, in their order too, have another file.
        """
        hashed = hashlib.sha256()
        for part in (str(_FORM), *key):
            # The length first: otherwise two parts could be told from one only by luck.
            hashed.update(f"{len(part)}:{part}".encode())
        return cls(folder / f"{hashed.hexdigest()[:40]}.json.gz")

    def load(self) -> Written | None:
        """What was written, or None where there is nothing that can be read.

        That a file is damaged is no error: the program is compiled again, and the file replaced.
        """
        try:
            fields = json.loads(gzip.decompress(self.file.read_bytes()))
            sizes = fields.pop("sizes")
            return Written(**fields, sizes=Sizes(**sizes) if sizes else None)
        # A file that was cut off, or is of somebody else, is one that is not there.
        except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def save(self, written: Written) -> None:
        """Keep it: all of it, or nothing where the folder cannot be written to.

        A plan is worth more than its copy, so that a full disk is a warning and no error.
        """
        content = gzip.compress(json.dumps(asdict(written)).encode(), compresslevel=1)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Under another name first, so that no process ever reads half a file.
            number, name = tempfile.mkstemp(dir=self.file.parent, suffix=".part")
            with os.fdopen(number, "wb") as part:
                part.write(content)
            Path(name).replace(self.file)
        except OSError as error:
            warnings.warn(
                f"What the compiler said could not be kept in {self.file.parent} "
                f"({error.strerror or error}), so that the next plan compiles the step again. Give "
                "another folder as `cache`.",
                stacklevel=2,
            )

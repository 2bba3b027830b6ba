"""Which line of Python the instructions of a compiled program came from.

An instruction names a stack frame by number. The head of the program's text has the tables that
lead from there to a line: frames refer to locations and to the frames that called them, and
locations to files.

    FileNames              FileLocations                       StackFrames
    1 "/home/me/model.py"  1 {file_name_id=1 ... line=12 ...}  1 {file_location_id=1}
                                                               2 {... parent_frame_id=1}
"""

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).parent.parent
_STEP = _PACKAGE / "step" / "_step.py"
# Ours, Python's own, and what is installed for this Python.
_FOLDERS_OF_OTHERS = (
    _PACKAGE,
    Path(sysconfig.get_paths()["stdlib"]),
    Path(sysconfig.get_paths()["purelib"]),
    Path(sysconfig.get_paths()["platlib"]),
)

# The scope of a loop that does not run where loads are even, which is what plans are made for.
IF_UNEVEN = "if_uneven"


def is_if_uneven(name_stack: str) -> bool:
    """Whether a name stack is within the scope `IF_UNEVEN`, which a derivative may wrap.

    >>> is_if_uneven("jit(f)/transpose(jvp(if_uneven))/while"), is_if_uneven("jit(f)/while")
    (True, False)
    """
    return re.search(rf"\b{IF_UNEVEN}\b", name_stack) is not None


def is_of_user(file: str) -> bool:
    """Whether a file is neither ours, nor installed, nor Python's own.

    >>> is_of_user("/home/me/train.py"), is_of_user("<string>"), is_of_user(__file__)
    (True, False, False)
    """
    # `<string>` and its like are no files.
    if file.startswith("<"):
        return False
    path = Path(file)
    if any(folder in path.parents for folder in _FOLDERS_OF_OTHERS):
        return False
    # The file may be that of another machine, where a program was compiled.
    return "site-packages" not in path.parts


def stack_lines(text: str) -> dict[str, str]:
    """The line of Python behind each stack frame, from the tables at the head of the text.

    The keys are the frames' numbers as they are written; of each frame's stack, the line that says
    most to the user is taken. Empty where the text has no such tables.
    """
    locations = _locations(text)
    frames = _head_table(
        text, "StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    )
    # Some versions number parents from one more than frames: the outermost, which has none, then
    # names itself.
    shift = int(any(key == parent for key, _, parent in frames))
    frame_of: dict[str, _Frame] = {}
    for key, location, parent in frames:
        frame_of[key] = _Frame(locations.get(location), str(int(parent or 0) - shift))
    return {key: _line_of_user(_stack(frame_of, key)) for key in frame_of}


def _head_table(text: str, title: str, entry: str) -> list[Any]:
    """The rows of a table at the head of a program: the number of each, and the groups of `entry`.

    `entry` is a pattern for what stands behind the number.
    """
    table = re.search(rf"(?m)^{title}\n((?:\d+ .*\n)*)", text)
    if table is None:
        return []
    return re.findall(rf"(?m)^(\d+) {entry}", table[1])


class _Location(NamedTuple):
    """A line of Python: its file, and file and line as they are shown."""

    file: str
    line: str


@dataclass(frozen=True)
class _Frame:
    """A stack frame: where it is, if that is known, and the key of the frame that called it."""

    location: _Location | None
    parent: str


def _locations(text: str) -> dict[str, _Location]:
    """The files and lines that the head of a program names, by their keys."""
    files = dict(_head_table(text, "FileNames", '"(.*)"'))
    pattern = r"\{file_name_id=(\d+).*?\bline=(\d+)"
    locations: dict[str, _Location] = {}
    for key, file, line in _head_table(text, "FileLocations", pattern):
        if file in files:
            locations[key] = _Location(files[file], f"{files[file]}:{line}")
    return locations


def _stack(frames: dict[str, _Frame], key: str) -> list[_Location]:
    """The locations of a frame and of those that called it, the innermost first."""
    locations: list[_Location] = []
    # The outermost frame has no parent: the number then is 0 or less, and no frame has it.
    while key in frames:
        frame = frames[key]
        if frame.location is not None:
            locations.append(frame.location)
        key = frame.parent
    return locations


def _line_of_user(stack: Sequence[tuple[str, str]]) -> str:
    """The innermost line of a stack that is the user's own, or else the one that says most.

    The stack has files with their lines, the innermost first. Around the step stands whoever called
    it, who has no part in what it does, so lines outside the step count last: what the step does by
    itself is blamed on the line of the step.
    """
    inside_step: list[tuple[str, str]] = []
    for file, line in stack:
        if Path(file) == _STEP:
            break
        inside_step.append((file, line))
    # Other libraries' lines say less than the user's, and ours less than theirs.
    others: list[tuple[str, str]] = []
    for file, line in inside_step:
        if _PACKAGE in Path(file).parents:
            continue
        others.append((file, line))
        if is_of_user(file):
            return line
    for _, line in [*others, *inside_step, *stack]:
        return line
    return ""

"""A compiled program, read from its text: what calls what, how often, and which line of Python it
came from.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardlib.checks import _arguments as check


@dataclass(frozen=True)
class Instruction:
    name: str
    result: str  # type
    opcode: str
    argument: str  # what stands between the parentheses: operands, or the value of a constant
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.#-]+)", self.argument)

    def get(self, pattern: str) -> str:
        return first(pattern, self.attributes)


@dataclass(frozen=True)
class Scope:
    """A computation where it is called: `caller` is the instruction in `outer` that does."""

    name: str
    instructions: dict[str, Instruction]
    caller: Instruction | None = None
    outer: "Scope | None" = None

    def follow(self, name: str) -> Instruction:
        """The instruction that makes the value called `name`, past everything that only moves
        it.
        """
        while (made := self.instructions[name]).opcode in (
            "copy",
            "copy-start",
            "copy-done",
            "bitcast",
            "convert",
        ):
            name = made.operands[0]
        return made

    def root(self) -> Instruction:
        return self.follow(next(made.name for made in self.instructions.values() if made.is_root))

    def carried(self, name: str) -> int | None:
        """Which element of a loop's state the value called `name` is, if it is one."""
        made = self.follow(name)
        if (
            made.opcode == "get-tuple-element"
            and self.follow(made.operands[0]).opcode == "parameter"
        ):
            return int(made.get(r"index=(\d+)"))
        return None


@dataclass(frozen=True)
class Run:
    times: int = 1
    known: bool = True
    conditional: bool = False


# No type has a space before a word and a parenthesis, so the first such word is the opcode.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")


class Program:
    """The computations of a program by name, and how they call each other."""

    def __init__(self, text: str):
        self.partitions = int(first(r"num_partitions=(\d+)", text) or 1)
        self.sources = stack_lines(text)
        self.entry = ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                root, name, result, opcode, rest = match.groups()
                argument, attributes, *_ = [*re.split(r"\)(?=, [a-z_-]+=|$)", rest, maxsplit=1), ""]
                for whole, parts in re.findall(r"%([\w.-]+)#([\d#]+)", argument):
                    _take_parts(current, whole, parts.split("#"))
                attributes = attributes.replace("\\'", "'")
                current[name] = Instruction(name, result, opcode, argument, attributes, bool(root))
            elif match := _COMPUTATION.match(line):
                current = self.computations[match[2]] = {}
                self.entry = match[2] if match[1] else self.entry

    def walk(
        self, scope: Scope | None = None, run: Run = Run()
    ) -> Iterator[tuple[Scope, Instruction, Run]]:
        """Every instruction in the order of the program, once for each place that its computation
        is called from.
        """
        scope = scope or Scope(self.entry, self.computations[self.entry])
        for made in scope.instructions.values():
            yield scope, made, run
            inner = run
            match made.opcode:
                case "while":
                    count = self.trip_count(scope, made)
                    inner = (
                        replace(run, known=False)
                        if count is None
                        else replace(run, times=run.times * count)
                    )
                case "conditional":
                    inner = replace(run, conditional=True)
            for name in self.calls(scope, made):
                yield from self.walk(self.called(scope, made, name), inner)

    def calls(self, scope: Scope, made: Instruction) -> list[str]:
        """The computations that an instruction runs, by name or by the attribute that has the
        name.
        """
        match made.opcode.removesuffix("-start"):
            case "while":
                return ["body"]
            case "conditional":
                return self.branches(scope, made)
            case "call" | "fusion" | "async" | "custom-call":
                called = made.get(r"(?:calls=|to_apply=|called_computations=\{)%?([\w.-]+)")
                return [called] if called else []
        return []

    def multiplies(self, scope: Scope, made: Instruction) -> bool:
        """Whether an instruction, or anything that it runs, is a product of matrices."""
        if made.opcode in ("dot", "convolution") or made.get(
            r'custom_call_target="(__cu(?:blas|dnn))'
        ):
            return True
        inside = (self.called(scope, made, name) for name in self.calls(scope, made))
        return any(
            self.multiplies(inner, one) for inner in inside for one in inner.instructions.values()
        )

    def origin(self, scope: Scope, made: Instruction, depth: int = 0) -> tuple[str, str]:
        """Name stack and source line of an instruction.

        It may have left them to its `-done`, to the fusion it is in, to what is inside it, to what
        it is made from, or to what reads it.
        """
        users = scope.instructions.values() if made.opcode.endswith("-start") else ()
        done = (
            user for user in users if user.opcode.endswith("-done") and made.name in user.operands
        )
        around = (
            [scope.caller]
            if scope.caller and scope.caller.opcode not in ("while", "conditional")
            else []
        )
        for origin in itertools.chain([made], done, around):
            if name := origin.get(r'\bop_name="([^"]*)"'):
                return name, self.sources.get(origin.get(r"\bstack_frame_id=(\d+)"), "")
        if made.opcode == "parameter" or depth > 4:
            return "", ""
        inside = ()
        if (
            made.opcode == "fusion"
            and (called := made.get(r"\bcalls=%?([\w.-]+)")) in self.computations
        ):
            inner = self.called(scope, made, called)
            inside = ((inner, one) for one in sorted(inner.instructions.values(), key=_says_little))
        operands = (
            (scope, scope.instructions[name])
            for name in made.operands
            if name in scope.instructions
        )
        found = (
            self.origin(where, one, depth + 1) for where, one in itertools.chain(inside, operands)
        )
        return next(
            (origin for origin in found if origin[0]),
            ("", "") if depth else self._origin_of_readers(scope, made),
        )

    def _origin_of_readers(self, scope: Scope, made: Instruction) -> tuple[str, str]:
        """Of what reads an instruction, or the fusion it is in."""
        if scope.caller is not None and scope.outer is not None and scope.caller.opcode == "fusion":
            scope, made = scope.outer, scope.caller
        readers = (one for one in scope.instructions.values() if made.name in one.operands)
        return next(
            (origin for one in readers if (origin := self.origin(scope, one, 4))[0]), ("", "")
        )

    def branches(self, scope: Scope, conditional: Instruction) -> list[str]:
        """The computations of a conditional, of which the k-th takes the operand after the k-th."""
        listed = re.findall(r"[\w.-]+", conditional.get(r"branch_computations=\{([^}]*)\}"))
        return listed or [
            self.called(scope, conditional, f"{which}_computation").name
            for which in ("true", "false")
        ]

    def called(self, scope: Scope, caller: Instruction, name: str) -> Scope:
        """A computation by its name or by the attribute of the caller that has the name."""
        name = name if name in self.computations else caller.get(rf"\b{name}=%?([\w.-]+)")
        return Scope(name, self.computations[name], caller, scope)

    def trip_count(self, scope: Scope, loop: Instruction) -> int | None:
        """How often a loop runs: as the compiler says, or from
        `for (i = start; i < limit; i += step)`.
        """
        if said := loop.get(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(said)
        body, condition = self.called(scope, loop, "body"), self.called(scope, loop, "condition")
        test, state = condition.root(), body.root()
        if test.opcode != "compare" or state.opcode != "tuple":
            return None
        index = condition.carried(test.operands[0])
        limit = self.constant(condition, test.operands[1])
        if index is None or limit is None:
            return None
        update = body.follow(state.operands[index])
        steps = [
            self.constant(body, name) for name in update.operands if body.carried(name) != index
        ]
        start = self.initial(scope, loop, index)
        if update.opcode != "add" or len(steps) != 1 or not (step := steps[0]) or start is None:
            return None
        match test.get(r"direction=(\w+)"):
            case "LT" | "GT":
                return len(range(start, limit, step))
            case "LE" | "GE":
                return len(range(start, limit + (1 if step > 0 else -1), step))
        return None

    def initial(self, scope: Scope, loop: Instruction, index: int) -> int | None:
        before = scope.follow(loop.operands[0])
        return self.constant(scope, before.operands[index]) if before.opcode == "tuple" else None

    def constant(self, scope: Scope, name: str) -> int | None:
        """The value called `name` where it is a constant, also one that loops carry unchanged."""
        made = scope.follow(name)
        if made.opcode == "constant":
            return int(made.argument) if re.fullmatch(r"-?\d+", made.argument) else None
        index, loop, outer = scope.carried(name), scope.caller, scope.outer
        if index is None or loop is None or outer is None or loop.opcode != "while":
            return None
        body = self.called(outer, loop, "body")
        state = body.root()
        unchanged = state.opcode == "tuple" and body.carried(state.operands[index]) == index
        return self.initial(outer, loop, index) if unchanged else None


def _take_parts(instructions: dict[str, Instruction], whole: str, indices: list[str]) -> None:
    """Spell out `%whole#1`, as some dumps write a part of a tuple that no instruction of its own
    takes.
    """
    for index in indices:
        name = f"{whole}#{index}"
        result = _elements(instructions[whole].result)[int(index)] if whole in instructions else ""
        instructions.setdefault(
            name,
            Instruction(name, result, "get-tuple-element", f"%{whole}", f", index={index}", False),
        )
        whole = name


def _elements(type_: str) -> list[str]:
    """The types in a tuple's."""
    found, depth = [""], 0
    for character in re.sub(r"/\*.*?\*/", "", type_[1:-1]):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return [element.strip() for element in found]


def _says_little(made: Instruction) -> tuple[bool, bool]:
    return not made.is_root, made.opcode in ("constant", "iota", "broadcast")


def first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def stack_lines(text: str) -> dict[str, str]:
    """The line of Python behind each stack frame, from the tables at the head of the text."""

    def table(title: str, entry: str) -> list:
        return re.findall(rf"(?m)^(\d+) {entry}", first(rf"(?m)^{title}\n((?:\d+ .*\n)*)", text))

    files = dict(table("FileNames", '"(.*)"'))
    locations = table("FileLocations", r"\{file_name_id=(\d+).*?\bline=(\d+)")
    places = {
        key: (files[file], f"{files[file]}:{line}")
        for key, file, line in locations
        if file in files
    }
    frames = table("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
    # Some versions number parents from one more than frames: the outermost, which has none, then
    # names itself.
    shift = int(any(key == parent for key, _, parent in frames))
    parents = {
        key: (places.get(place), str(int(parent or 0) - shift)) for key, place, parent in frames
    }

    def stack(key: str) -> Iterator[tuple[str, str]]:
        while key in parents:
            place, key = parents[key]
            if place is not None:
                yield place

    return {key: _line_of_user(list(stack(key))) for key, _, _ in frames}


def _line_of_user(stack: list[tuple[str, str]]) -> str:
    """The innermost line that is the user's own; of what the step does of itself, the line of the
    step.

    Around the step stands whoever called it, who has no part in what it does.
    """
    inside = list(itertools.takewhile(lambda place: Path(place[0]) != _STEP, stack))
    not_ours = [
        (Path(file).parts, line) for file, line in inside if _PACKAGE not in Path(file).parents
    ]
    users = [line for parts, line in not_ours if "site-packages" not in parts]
    return [*users, *(line for _, line in [*not_ours, *inside, *stack]), ""][0]


_PACKAGE = Path(__file__).parent.parent
_STEP = _PACKAGE / "step" / "_step.py"


def arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", type_)
    return [(dtype, tuple(numbers(shape))) for dtype, shape in found if _bits(dtype)]


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(first(r"(\d+)", dtype) or 0)  # a token has none


def size_bytes(arrays: list[tuple[str, tuple[int, ...]]]) -> int:
    return sum(math.ceil(math.prod(shape) * _bits(dtype) / 8) for dtype, shape in arrays)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def text_of(function: str, argument: str, compiled: Any) -> str:
    """The text of a compiled program, or of what is its text already."""
    takes = "a compiled program, of `jitted.lower(...).compile()`, or its `as_text()`"
    text = compiled
    if not isinstance(compiled, str):
        if not hasattr(compiled, "as_text") or isinstance(compiled, type):
            raise check.refusal(function, argument, compiled, takes)
        text = compiled.as_text()
    if not isinstance(text, str) or "ENTRY " not in text:
        raise check.refusal(function, argument, compiled, f"{takes}; found no ENTRY in it")
    return text

"""A compiled program, read from its text.

What calls what, how often it runs, and which line of Python it came from. The text is XLA's HLO:
computations, each a list of instructions in the order in which they run, one of them the entry.

    %body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
      %state = (s32[], f32[4]) parameter(0)
      ...
      ROOT %next = (s32[], f32[4]) tuple(%counter, %value)
    }

    ENTRY %main (x: f32[4]) -> f32[4] {
      ...
      %loop = (s32[], f32[4]) while(%start), condition=%test, body=%body, metadata={...}

Instructions refer to computations by name, in attributes that depend on the opcode.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from shardlib.checks import _arguments as check
from shardlib.compiled._kernel_products import call_multiplies
from shardlib.compiled._name_stacks import op_name_in
from shardlib.compiled._runs import Run
from shardlib.compiled._source_lines import is_if_uneven, stack_lines


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation, in the pieces of its line.

    ROOT %sum.1 = f32[8]{0} add(%a, %b), metadata={op_name="jit(f)/add"}
          name    result   opcode argument  attributes
    """

    name: str
    result: str  # type
    opcode: str
    argument: str  # what stands between the parentheses: operands, or the value of a constant
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """The names of the instructions whose values it takes, in order."""
        return re.findall(r"%([\w.#-]+)", self.argument)

    def get(self, pattern: str) -> str:
        """The first group of a pattern found in the attributes, or empty text.

        An attribute is `name=value`, after the operands and a comma.
        """
        return first(pattern, self.attributes)

    @property
    def op_name(self) -> str:
        """JAX's name stack, or the path of an argument; empty text if it has none."""
        return op_name_in(self.attributes)


# Instructions that only move a value or change how it is stored.
_MOVES = ("copy", "copy-start", "copy-done", "bitcast", "convert")


@dataclass(frozen=True)
class Scope:
    """A computation where it is called: `caller` is the instruction in `outer` that does.

    The entry of a program has neither. One computation that is called from several places has a
    scope for each.
    """

    name: str
    instructions: dict[str, Instruction]
    caller: Instruction | None = None
    outer: "Scope | None" = None

    def follow(self, name: str) -> Instruction:
        """The instruction that makes the value called `name`.

        Instructions that only move it, such as copies and bitcasts, are passed over.
        """
        made = self.instructions[name]
        while made.opcode in _MOVES:
            made = self.instructions[made.operands[0]]
        return made

    def root(self) -> Instruction:
        """The instruction that makes the result of the computation, as `follow` finds it."""
        for made in self.instructions.values():
            if made.is_root:
                return self.follow(made.name)
        raise ValueError(f"The computation `{self.name}` has no root.")

    def carried(self, name: str) -> int | None:
        """Which element of a loop's state the value called `name` is, if it is one.

        The body and the condition of a loop have one parameter, the tuple that is its state.
        """
        made = self.follow(name)
        if made.opcode != "get-tuple-element":
            return None
        if self.follow(made.operands[0]).opcode != "parameter":
            return None
        return int(made.get(r"index=(\d+)"))


# No type has a space before a word and a parenthesis, so the first such word is the opcode.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
# The parenthesis that closes the operands: attributes, or nothing, follow it.
_END_OF_ARGUMENT = re.compile(r"\)(?=, [a-z_-]+=|$)")

# How often what the entry lists runs.
_ONCE = Run()
# How many instructions are passed in search of one that says where it came from.
_DEEPEST = 4

Origin: TypeAlias = tuple[str, str]
"""Name stack and source line of an instruction, empty where they are not known."""
_NO_ORIGIN: Origin = ("", "")


class Program:
    """The computations of a program by name, and how they call each other.

    `entry` is the name of the computation that the program starts with, `partitions` the number of
    devices that it is compiled for, and `sources` the line of Python for each stack frame.
    """

    def __init__(self, text: str):
        self.partitions = int(first(r"num_partitions=(\d+)", text) or 1)
        self.sources = stack_lines(text)
        self.entry = ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if _add_instruction(current, line):
                continue
            if heading := _COMPUTATION.match(line):
                entry, name = heading.groups()
                current = self.computations[name] = {}
                if entry:
                    self.entry = name

    def entry_scope(self) -> Scope:
        """The computation that the program starts with, which nothing calls."""
        return Scope(self.entry, self.computations[self.entry])

    def walk(
        self, scope: Scope | None = None, run: Run = _ONCE
    ) -> Iterator[tuple[Scope, Instruction, Run]]:
        """Every instruction in the order of the program, with how often it runs.

        One comes once for each place that its computation is called from. A loop's condition is
        left out.
        """
        scope = scope or self.entry_scope()
        for made in scope.instructions.values():
            yield scope, made, run
            inner = self._run_inside(scope, made, run)
            for name in self.calls(scope, made):
                yield from self.walk(self.called(scope, made, name), inner)

    def _run_inside(self, scope: Scope, made: Instruction, run: Run) -> Run:
        """How often what an instruction calls runs, where the instruction itself runs as `run`.

        Loops multiply, and an unknown number of times anywhere around makes the product unknown;
        one of a loop `IF_UNEVEN` counts as none.
        """
        if made.opcode == "conditional":
            # Its own name, not that of what it is made from, which may be another conditional.
            return run.in_branch(made.op_name)
        if made.opcode != "while":
            return run
        count = self.trip_count(scope, made)
        if count is not None:
            return run.in_loop(count)
        if is_if_uneven(self.origin(scope, made)[0]):
            return replace(run, times=0, further=run.further or run.times, known=False)
        return replace(run, known=False)

    def calls(self, scope: Scope, made: Instruction) -> list[str]:
        """The computations that an instruction runs.

        Each is given by its name, or by the attribute that has the name, as `called` takes them.
        """
        match made.opcode.removesuffix("-start"):
            case "while":
                return ["body"]
            case "conditional":
                return self.branches(scope, made)
            case "call" | "fusion" | "async" | "custom-call":
                called = made.get(r"(?:calls=|to_apply=|called_computations=\{)%?([\w.-]+)")
                if called:
                    return [called]
        return []

    def multiplies(self, scope: Scope, made: Instruction) -> bool:
        """Whether an instruction, or anything that it runs, is a product of matrices.

        Such products take long enough that a collective can hide behind one. A kernel is one if
        there are products in its body, and a conditional if there are some in any branch.
        """
        if made.opcode in ("dot", "convolution"):
            return True
        is_call = made.opcode.removesuffix("-start") == "custom-call"
        if is_call and call_multiplies(made.attributes):
            return True
        for name in self.calls(scope, made):
            inner = self.called(scope, made, name)
            if any(self.multiplies(inner, one) for one in inner.instructions.values()):
                return True
        return False

    def origin(self, scope: Scope, made: Instruction, depth: int = 0) -> Origin:
        """Name stack and source line of an instruction.

        It may have left them to its `-done`, to the fusion it is in, to what is inside it, to what
        it is made from, or to what reads it. These are asked in this order. `depth` says how many
        instructions were passed on the way here; what reads it is asked at the first one only.
        """
        for bearer in self._bearers_of_metadata(scope, made):
            name = bearer.op_name
            if name:
                return name, self.sources.get(bearer.get(r"\bstack_frame_id=(\d+)"), "")
        if made.opcode == "parameter" or depth > _DEEPEST:
            return _NO_ORIGIN
        for where, instruction in self._made_from(scope, made):
            origin = self.origin(where, instruction, depth + 1)
            if origin[0]:
                return origin
        if depth:
            return _NO_ORIGIN
        return self._origin_of_readers(scope, made)

    def _bearers_of_metadata(self, scope: Scope, made: Instruction) -> Iterator[Instruction]:
        """The instructions whose metadata are those of an instruction.

        They are itself, the `-done` of a `-start`, and what calls the computation it is in.
        """
        yield made
        if made.opcode.endswith("-start"):
            for user in scope.instructions.values():
                if user.opcode.endswith("-done") and made.name in user.operands:
                    yield user
        # A loop or a conditional says where itself comes from, not what is inside it.
        caller = scope.caller
        if caller is not None and caller.opcode not in ("while", "conditional"):
            yield caller

    def _made_from(self, scope: Scope, made: Instruction) -> Iterator[tuple[Scope, Instruction]]:
        """What is inside an instruction, if it is a fusion, and then its operands.

        Inside a fusion the root is first and constants are last, for the root says most.
        """
        if made.opcode == "fusion":
            called = made.get(r"\bcalls=%?([\w.-]+)")
            if called in self.computations:
                inner = self.called(scope, made, called)
                for instruction in sorted(inner.instructions.values(), key=_says_little):
                    yield inner, instruction
        for name in made.operands:
            if name in scope.instructions:
                yield scope, scope.instructions[name]

    def _origin_of_readers(self, scope: Scope, made: Instruction) -> Origin:
        """The origin of what reads an instruction, or the fusion that the instruction is in.

        Readers are asked for their own metadata and that of what they are made from, no further.
        """
        if scope.caller is not None and scope.outer is not None and scope.caller.opcode == "fusion":
            scope, made = scope.outer, scope.caller
        for reader in scope.instructions.values():
            if made.name in reader.operands:
                origin = self.origin(scope, reader, _DEEPEST)
                if origin[0]:
                    return origin
        return _NO_ORIGIN

    def branches(self, scope: Scope, conditional: Instruction) -> list[str]:
        """The computations of a conditional, of which the k-th takes the operand after the k-th.

        Operand 0 is what chooses: a number, or true or false where there are two branches.
        """
        listed = re.findall(r"[\w.-]+", conditional.get(r"branch_computations=\{([^}]*)\}"))
        if listed:
            return listed
        # Two branches may be written as attributes of their own.
        attributes = ("true_computation", "false_computation")
        return [self.called(scope, conditional, attribute).name for attribute in attributes]

    def called(self, scope: Scope, caller: Instruction, name: str) -> Scope:
        """A computation by its name, or by the attribute of the caller that has the name.

        A loop has two, `body` and `condition`, and a fusion has `calls`.
        """
        if name not in self.computations:
            name = caller.get(rf"\b{name}=%?([\w.-]+)")
        return Scope(name, self.computations[name], caller, scope)

    def trip_count(self, scope: Scope, loop: Instruction) -> int | None:
        """How often a loop runs, or None where that cannot be told.

        The compilers for CPUs and GPUs say it. Elsewhere it follows from the loop's condition and
        body, where these are those of `for (i = start; i < limit; i += step)`.
        """
        if count := loop.get(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(count)
        body, condition = self.called(scope, loop, "body"), self.called(scope, loop, "condition")
        # The condition compares the counter with its limit, and the body makes the next state.
        test = condition.root()
        if test.opcode != "compare" or body.root().opcode != "tuple":
            return None
        index = condition.carried(test.operands[0])
        limit = self.constant(condition, test.operands[1])
        if index is None or limit is None:
            return None
        step = self._step_of_counter(body, index)
        start = self.initial(scope, loop, index)
        if not step or start is None:
            return None
        match test.get(r"direction=(\w+)"):
            # Up or down: the sign of the step decides, as in Python's `range`.
            case "LT" | "GT":
                return len(range(start, limit, step))
            case "LE" | "GE":
                # The limit is the last value, so the range ends one behind it.
                behind = 1 if step > 0 else -1
                return len(range(start, limit + behind, step))
        return None

    def _step_of_counter(self, body: Scope, index: int) -> int | None:
        """The constant that a loop's body adds to an element of its state.

        None where the body does anything else with the element, or adds what is no constant.
        """
        update = body.follow(body.root().operands[index])
        if update.opcode != "add":
            return None
        # What is added may stand on either side of the counter.
        addends = [name for name in update.operands if body.carried(name) != index]
        if len(addends) != 1:
            return None
        return self.constant(body, addends[0])

    def initial(self, scope: Scope, loop: Instruction, index: int) -> int | None:
        """The constant that an element of a loop's state begins with.

        None where the element is no constant, or where the state is not made in sight of the loop.
        """
        before = scope.follow(loop.operands[0])
        if before.opcode != "tuple":
            return None
        return self.constant(scope, before.operands[index])

    def constant(self, scope: Scope, name: str) -> int | None:
        """The whole number that the value called `name` is, or None where it is no constant.

        Loops may carry a constant in their state, and pass it on unchanged.
        """
        made = scope.follow(name)
        if made.opcode == "constant":
            if not re.fullmatch(r"-?\d+", made.argument):
                return None
            return int(made.argument)
        # It may also have come into a loop as an element of its state that the body leaves as is.
        index, loop, outer = scope.carried(name), scope.caller, scope.outer
        if index is None or loop is None or outer is None or loop.opcode != "while":
            return None
        body = self.called(outer, loop, "body")
        state = body.root()
        if state.opcode != "tuple" or body.carried(state.operands[index]) != index:
            return None
        return self.initial(outer, loop, index)


def _add_instruction(instructions: dict[str, Instruction], line: str) -> bool:
    """Add the instruction on a line to those of its computation.

    Returns whether there is one: other lines begin or end a computation, or belong to the head.
    """
    match = _INSTRUCTION.match(line)
    if match is None:
        return False
    root, name, result, opcode, tail = match.groups()
    argument, *attributes = _END_OF_ARGUMENT.split(tail, maxsplit=1)
    # Before the instruction itself, since they stand for instructions that run before it.
    for whole, parts in re.findall(r"%([\w.-]+)#([\d#]+)", argument):
        _add_parts(instructions, whole, parts.split("#"))
    instructions[name] = Instruction(
        name, result, opcode, argument, "".join(attributes).replace("\\'", "'"), bool(root)
    )
    return True


def _add_parts(instructions: dict[str, Instruction], whole: str, indices: list[str]) -> None:
    """Add the instructions behind `%whole#1`, a part of a tuple, or `%whole#1#0`, a part of it.

    Some dumps write a part so where no instruction of its own takes it out of the tuple.
    """
    for index in indices:
        # A part may have parts: the name grows until it is the one that was written.
        name = f"{whole}#{index}"
        result = ""
        if whole in instructions:
            result = _elements(instructions[whole].result)[int(index)]
        part = Instruction(
            name, result, "get-tuple-element", f"%{whole}", f", index={index}", False
        )
        instructions.setdefault(name, part)
        whole = name


def _elements(type_: str) -> list[str]:
    """The types of the elements of a tuple's type, which may be tuples themselves.

    `(f32[2,3]{1,0}, (s32[], pred[4]))` has two: commas within brackets separate nothing here.
    """
    elements, depth = [""], 0
    # Long tuples are numbered in comments: `(f32[2], /*index=5*/f32[3])`.
    for character in re.sub(r"/\*.*?\*/", "", type_[1:-1]):
        if character in "([{":
            depth += 1
        if character in ")]}":
            depth -= 1
        if character == "," and not depth:
            elements.append("")
        else:
            elements[-1] += character
    return [element.strip() for element in elements]


def _says_little(made: Instruction) -> tuple[bool, bool]:
    """A key that sorts the root of a fusion to the front and constants to the back."""
    return not made.is_root, made.opcode in ("constant", "iota", "broadcast")


def first(pattern: str, text: str) -> str:
    """The first group of the first match of a pattern in a text, or empty text."""
    match = re.search(pattern, text)
    if match is None:
        return ""
    return match[1]


def arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays in a type, each by dtype and shape.

    Dtypes are HLO's: `f32`, `bf16`, `pred`. A tuple has several arrays. Tokens, which have no
    size, are left out.
    """
    found: list[tuple[str, tuple[int, ...]]] = []
    for dtype, shape in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", type_):
        if _bits(dtype):
            found.append((dtype, tuple(numbers(shape))))
    return found


def _bits(dtype: str) -> int:
    """The bits of one element: the number in HLO's name of the dtype, such as `bf16`."""
    if dtype == "pred":
        return 8
    return int(first(r"(\d+)", dtype) or 0)  # a token has none


def size_bytes(arrays: list[tuple[str, tuple[int, ...]]]) -> int:
    """The bytes of arrays together, each rounded up to whole bytes."""
    return sum(math.ceil(math.prod(shape) * _bits(dtype) / 8) for dtype, shape in arrays)


def numbers(text: str) -> list[int]:
    """The whole numbers in a text, in order."""
    return [int(number) for number in re.findall(r"\d+", text)]


def text_of(function: str, argument: str, compiled: Any) -> str:
    """The text of a compiled program, which may be given as its text already.

    `function` and `argument` are named in the error where it is anything else.
    """
    takes = "a compiled program, of `jitted.lower(...).compile()`, or its `as_text()`"
    text = compiled
    if not isinstance(compiled, str):
        if not hasattr(compiled, "as_text") or isinstance(compiled, type):
            raise check.refusal(function, argument, compiled, takes)
        text = compiled.as_text()
    if not isinstance(text, str) or "ENTRY " not in text:
        raise check.refusal(function, argument, compiled, f"{takes}; found no ENTRY in it")
    return text

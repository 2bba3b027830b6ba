"""Where the values of a program come from, and so what they are.

A value is known by its key, the name of an instruction and which part of its result it is. Many
values are others under another name, or moved: the parts of tuples, the state of loops, what is
inside a fusion, copies. Three questions are asked of a key, each of which looks further than the
one before:

    upstream(key)   which values it is, if it is only passed on here
    makers(key)     which instructions made it, past everything that passes it on
    sources(key)    which values it was moved from, if it was moved and not computed
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

from shardlib.compiled._compile import Compiled, Key, Value, last_reads
from shardlib.compiled._hlo import Instruction, Scope
from shardlib.compiled._name_stacks import is_backward, is_forward

_PLUMBING = {
    "get-tuple-element",
    "tuple",
    "while",
    "parameter",
    "call",
    "conditional",
    "bitcast",
    "opt-barrier",
}
_MOVES = {
    *("copy", "convert", "bitcast-convert", "reshape", "transpose", "slice", "dynamic-slice",
    "pad", "concatenate"),
    *("all-gather", "all-to-all", "collective-permute", "async"),
}  # fmt: skip
_REDUCTIONS = {"all-reduce", "reduce-scatter"}
_ELEMENTWISE = {"add", "subtract", "multiply", "divide", "negate", "select"}


class Flow:
    """Where the values of one compiled program come from, across loops, fusions and tuples.

    `kinds_by_path` has the kinds of the program's arguments by the paths they were traced by.
    """

    def __init__(self, compiled: Compiled, kinds_by_path: Mapping[str, str]) -> None:
        self.kinds_by_path = kinds_by_path
        self.program = compiled.program
        self.order = compiled.order
        self.dies = last_reads(compiled.allocations)
        self.scopes: dict[str, Scope] = {}
        # A computation that is called from several places is known by the first of them.
        for scope, made, _ in self.program.walk():
            self.scopes.setdefault(made.name, scope)
            # The condition of a loop is no part of the walk.
            if made.opcode == "while":
                condition = self.program.called(scope, made, "condition")
                self.scopes |= dict.fromkeys(condition.instructions, condition)
        # Names are asked for again and again, and found by a search.
        self._origins: dict[str, tuple[str, str]] = {}

    def made(self, name: str) -> Instruction | None:
        """The instruction of a name, in whichever computation it is; None if there is none."""
        scope = self.scopes.get(name)
        return scope.instructions[name] if scope else None

    def label(self, value: Value) -> tuple[str, str, str]:
        """The kind of a value of the heap, its name stack, and the line of Python behind it."""
        key = (value.instruction, value.index)
        # What passes a value on says nothing of what it is: its makers do.
        makers = self.makers(key)
        op_name, source = self._named_origin(makers)
        return self._kind(key, value, makers, op_name), op_name, source

    def _kind(self, key: Key, value: Value, makers: list[Key], op_name: str) -> str:
        """The kind of a value; what is known most surely comes first.

        Args:
            key: the value.
            value: its place in the heap, and when it lives.
            makers: the instructions that made it.
            op_name: their name stack.
        """
        # A copy that overlaps with other work has two parts, either of which may be meant.
        whole = [(name, ()) for name, _ in makers]
        if not self.gradients.isdisjoint([key, *makers, *whole]):
            return "gradients"
        if self.is_copy(key):
            return "copies of parameters"
        made_forward = any(is_forward(self.origin(name)[0]) for name, _ in makers)
        if made_forward and self.is_read_backward(key, value):
            return "activations"
        if op_name:
            return "temporaries"
        return "unattributed"

    def _named_origin(self, makers: list[Key]) -> tuple[str, str]:
        """The name stack and the line that say most of what some instructions made.

        Of a loop's state, what the loop writes says more than what it starts from; and a name stack
        that is differentiated says more than one that is not.
        """
        origins = []
        for maker in sorted(makers, key=lambda maker: (self._is_blank(maker), maker)):
            for name in (self.written(maker), maker[0]):
                origin = self.origin(name)
                if origin[0]:
                    origins.append(origin)
        # The first that is differentiated, in an order that does not change from run to run.
        for origin in origins:
            if "jvp(" in origin[0]:
                return origin
        return origins[0] if origins else ("", "")

    def kind_of_argument(self, number: int) -> str:
        """What an argument of the program is to the step."""
        return self.kinds_by_path.get(self._path_of_argument(number), "other state")

    @cached_property
    def _arguments(self) -> dict[int, Instruction]:
        """The arguments of the program, by number."""
        entry = self.program.computations[self.program.entry].values()
        return {int(made.argument): made for made in entry if made.opcode == "parameter"}

    def _path_of_argument(self, number: int) -> str:
        """The path that an argument was traced by, which compilers keep as its name."""
        return self._arguments[number].op_name

    # Values that are other values: the parts of tuples, the state of loops, what is inside a
    # fusion.

    def upstream(self, key: Key) -> list[Key]:
        """What a value that is only passed on was before; nothing for one that is made here."""
        name, index = key
        made, scope = self.made(name), self.scopes.get(name)
        if made is None or scope is None:
            return []
        operands = made.operands
        match made.opcode:
            case "get-tuple-element":
                return [(operands[0], (int(made.get(r"\bindex=(\d+)")), *index))]
            case "tuple":
                if not index or index[0] >= len(operands):
                    return []
                return [(operands[index[0]], index[1:])]
            case "bitcast" | "opt-barrier":
                return [(operands[0], index)]
            case "while":
                # The state before the loop, and that after each turn.
                return [(operands[0], index), (self._root(scope, made, "body"), index)]
            case "call":
                return [(self._root(scope, made, "to_apply"), index)]
            case "conditional":
                results = []
                for branch in self.program.branches(scope, made):
                    results.append((self._root(scope, made, branch), index))
                return results
            case "parameter":
                return self._given(scope, int(made.argument), index)
        return []

    def _given(self, scope: Scope, number: int, index: tuple[int, ...]) -> list[Key]:
        """What a computation is called with as one of its parameters; nothing for the program's."""
        caller = scope.caller
        # The entry of the program is called by nobody.
        if caller is None or scope.outer is None:
            return []
        if caller.opcode == "while":
            # What the loop starts from, and what its body writes.
            return [(caller.operands[0], index), (self._root(scope.outer, caller, "body"), index)]
        if caller.opcode == "conditional":
            return self._given_to_branch(scope, scope.outer, caller, index)
        if number >= len(caller.operands):
            return []
        return [(caller.operands[number], index)]

    def _given_to_branch(
        self, branch: Scope, outer: Scope, caller: Instruction, index: tuple[int, ...]
    ) -> list[Key]:
        """What a branch of a conditional is called with.

        Its first operand says which branch it is, and each branch has one of the others. One
        computation may be several branches.
        """
        given: list[Key] = []
        for position, name in enumerate(self.program.branches(outer, caller)):
            if name == branch.name:
                given.append((caller.operands[position + 1], index))
        return given

    def _root(self, scope: Scope, caller: Instruction, name: str) -> str:
        """The name of the instruction whose result is that of a computation that is called.

        Args:
            scope: the computation that calls.
            caller: the instruction that does.
            name: which of its computations is meant, such as `body`.
        """
        inside = self.program.called(scope, caller, name).instructions
        return next(made.name for made in inside.values() if made.is_root)

    def inside(self, key: Key) -> list[Key]:
        """What is returned as this part of the result of a fusion or of an asynchronous call.

        Nothing for other instructions.
        """
        made, scope = self.made(key[0]), self.scopes.get(key[0])
        if made is None or scope is None or made.opcode not in ("fusion", "async-start"):
            return []
        called = made.get(r"(?:calls=|to_apply=|called_computations=\{)%?([\w.-]+)")
        if called not in self.program.computations:
            return []
        return [(self._root(scope, made, called), key[1])]

    def makers(self, key: Key) -> list[Key]:
        """The values that a value may be, past all that only passes them on."""
        # A loop's state leads back to itself, so that what was seen is not looked at again.
        makers, seen, todo = [], set(), [key]
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            seen.add(current)
            before = self.upstream(current)
            todo += before
            if not before:
                makers.append(current)
        return makers

    def sources(self, key: Key) -> list[Key] | None:
        """What a value was moved from; None for one that is computed.

        Collectives count as moves, sums among them: a gradient stays one when it is summed.
        """
        inside = self.inside(key)
        if inside:
            return inside
        name, index = key
        made = self.made(name)
        if made is None:
            return None
        if made.opcode == "recv-done":
            return [(made.operands[0], ())]
        if made.opcode == "recv":
            return self._sent(name)
        opcode = re.sub("-(start|update|done)$", "", made.opcode)
        joins = made.opcode == "custom-call" and made.get(
            'custom_call_target="(AsyncCollective|ConcatBitcast)'
        )
        if opcode == "concatenate" or joins:
            return [(operand, ()) for operand in made.operands]
        if opcode not in _MOVES and opcode not in _REDUCTIONS:
            return None
        # Of several operands that are moved together, each is the part of the result with its
        # number. The other operands of a slice or a padding are no values that are moved.
        position = 0
        if index and opcode not in ("dynamic-slice", "pad") and index[-1] < len(made.operands):
            position = index[-1]
        return [(made.operands[position], ())]

    def _sent(self, name: str) -> list[Key]:
        """What is received between slices: what the others sent when this device sent its own."""
        scope = self.scopes[name]
        meeting = scope.instructions[name].get(r'(_xla_host_transfer_rendezvous="[^"]*")')
        sent = []
        for other in scope.instructions.values():
            if other.opcode == "send" and meeting and meeting in other.attributes:
                sent.append((other.operands[0], ()))
        return sent

    def is_copy(self, key: Key) -> bool:
        """Whether a value is made from parameters by moving only.

        What fills the rest of an array, zeros for one, may come in besides; anything computed, or
        any other argument of the program, may not.
        """
        seen: set[Key] = set()
        todo, of_parameters = [key], False
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            seen.add(current)
            made = self.made(current[0])
            if made is None or made.opcode.startswith(tuple(_REDUCTIONS)):
                return False
            # Every way back has to end at parameters, or at zeros.
            if self._is_argument(current):
                of_parameters = self.kind_of_argument(int(made.argument)) == "parameters"
                if not of_parameters:
                    return False
                continue
            before = self.upstream(current) or self.sources(current)
            if before:
                todo += before
            elif made.opcode == "dynamic-update-slice":
                todo += [(operand, ()) for operand in made.operands[:2]]
            elif made.opcode == "broadcast":
                todo.append((made.operands[0], ()))
            elif not self._is_blank(current):
                return False
        return of_parameters

    @cached_property
    def gradients(self) -> set[Key]:
        """What the optimizer reads, and all that it was moved, summed and accumulated from."""
        found: set[Key] = set()
        # A program without a backward pass, such as an evaluation, has no gradients.
        if not self._differentiated:
            return found
        for name, scope in self.scopes.items():
            if self._is_update(name):
                for operand in scope.instructions[name].operands:
                    passed, ends = self._summed(operand)
                    if any(is_backward(self.origin(end[0])[0]) for end in ends):
                        found |= passed
        return found

    def _summed(self, name: str) -> tuple[set[Key], set[Key]]:
        """The values that one was moved, summed and accumulated from, and where that ends."""
        passed: set[Key] = set()
        ends: set[Key] = set()
        todo: list[Key] = [(name, ())]
        while todo:
            key = todo.pop()
            made = self.made(key[0])
            if key in passed or made is None or self._is_update(key[0]) or self._is_argument(key):
                continue
            passed.add(key)
            before = self.upstream(key) or self.sources(key)
            if before:
                todo += before
            elif made.opcode == "dynamic-update-slice":
                # The array that is written into, and what is written. The rest are positions.
                todo += [(operand, ()) for operand in made.operands[:2]]
            elif made.opcode == "scatter":
                # What is scattered is a gradient of activations.
                todo.append((made.operands[0], ()))
                ends.add(key)
            elif self._accumulates(key, made):
                todo += [(operand, ()) for operand in made.operands]
                ends.add(key)
            elif not self._is_blank(key):
                ends.add(key)
        return passed, ends

    def _accumulates(self, key: Key, made: Instruction) -> bool:
        """Whether a value is a sum of gradients, or one that was scaled after the backward pass."""
        if made.opcode == "add":
            return True
        return made.opcode in _ELEMENTWISE and "jvp(" not in self.origin(key[0])[0]

    def _has_name(self, text: str) -> bool:
        """Whether any instruction of the program has a text in its attributes, such as a scope."""
        for scope in self.scopes.values():
            for made in scope.instructions.values():
                if text in made.attributes:
                    return True
        return False

    @cached_property
    def _differentiated(self) -> bool:
        """Whether the program has a backward pass."""
        return self._has_name("transpose(")

    def _is_update(self, name: str) -> bool:
        """Whether an instruction is the optimizer's.

        The step says so; in other programs it is what is computed after the loss.
        """
        scope = self.scopes[name]
        made = scope.instructions[name]
        if self._optimizer_named:
            return "/optimizer/" in self.origin(name)[0] and made.opcode not in _PLUMBING
        looped = scope.caller is not None and scope.caller.opcode != "fusion"
        moved = self.sources((name, ())) and not self.inside((name, ()))
        if looped or moved or made.opcode in _PLUMBING or self._is_blank((name, ())):
            return False
        op_name = self.program.origin(scope, made)[0]
        return bool(op_name) and "jvp(" not in op_name

    @cached_property
    def _optimizer_named(self) -> bool:
        """Whether the program says which instructions are the optimizer's, as our step does."""
        return self._has_name("/optimizer/")

    def _is_argument(self, key: Key) -> bool:
        """Whether a value is an argument of the whole program, not of a computation in it."""
        made = self.made(key[0])
        return made is not None and made.opcode == "parameter" and self.scopes[key[0]].outer is None

    def written(self, key: Key) -> str:
        """The instruction that made a value, or what made the part of an array that it fills."""
        made = self.made(key[0])
        inside = self.inside(key)
        if made is not None and inside and made.opcode == "fusion":
            if not self._fills(inside[0]):
                return key[0]
            return self.written(self.makers(inside[0])[0])
        if made is not None and made.opcode == "dynamic-update-slice":
            return self.makers((made.operands[1], ()))[0][0]
        return key[0]

    def _fills(self, key: Key) -> bool:
        """Whether a value is an array of which a part was written."""
        made = self.made(self.makers(key)[0][0])
        return made is not None and made.opcode == "dynamic-update-slice"

    def _is_blank(self, key: Key) -> bool:
        """Whether a value is the same number everywhere, as what a sum starts from, or counts."""
        made = self.made(key[0])
        if made is None or made.opcode in ("constant", "iota"):
            return True
        if "AllocateBuffer" in made.attributes:
            return True
        if made.opcode == "broadcast":
            return all(map(self._is_blank, self.makers((made.operands[0], ()))))
        return any(map(self._is_blank, self.inside(key)))

    def is_read_backward(self, key: Key, value: Value) -> bool:
        """Whether the last to read a value belongs to the backward pass.

        A value may go into the result of a loop, whose last reader counts as well.
        """
        lasts = {value.dies}
        for maker in self.makers(key):
            lasts.update(self.dies[result] for result in self._becomes[maker])
        return any(self._read_backward_at(last, value.born) for last in lasts)

    def _read_backward_at(self, last: int, born: int) -> bool:
        """Whether the last named instruction up to a moment belongs to the backward pass.

        Instructions that only pass values on, and those without a name stack, say nothing.
        """
        for moment in range(last, born, -1):
            name = self.order[moment]
            made = self.made(name)
            if made is None or made.opcode in _PLUMBING or not self.origin(name)[0]:
                continue
            readers = [name]
            # What is copied may be copied for the backward pass.
            if self.sources((name, ())) and not self.inside((name, ())):
                readers.append(self.order[self.dies[name, ()]])
            return any(is_backward(self.origin(reader)[0]) for reader in readers)
        return False

    @cached_property
    def _becomes(self) -> dict[Key, list[Key]]:
        """The results of loops that a value made in their bodies goes into."""
        results: dict[Key, list[Key]] = defaultdict(list)
        for name, scope in self.scopes.items():
            made = scope.instructions[name]
            if made.opcode != "while":
                continue
            root = self.made(self._root(scope, made, "body"))
            if root is None or root.opcode != "tuple":
                continue
            for part, operand in enumerate(root.operands):
                for maker in self.makers((operand, ())):
                    results[maker].append((name, (part,)))
        return results

    def origin(self, name: str, depth: int = 0) -> tuple[str, str]:
        """The name stack and the line of an instruction; both are empty if nothing is known.

        They are its own, or those of what is inside it, or of what it was made from.
        """
        if name not in self._origins:
            self._origins[name] = self._origin(name, depth)
        return self._origins[name]

    def _origin(self, name: str, depth: int) -> tuple[str, str]:
        made, scope = self.made(name), self.scopes.get(name)
        if made is None or scope is None:
            return "", ""
        # The names of arguments are paths, and no name stacks.
        if self._is_argument((name, ())):
            return "", ""
        own = self.program.origin(scope, made)
        if own[0]:
            return own
        # What made its operands a few steps before is near enough to say what it is about.
        if depth > 4:
            return "", ""
        for operand in made.operands:
            for maker, _ in self.makers((operand, ())):
                origin = self.origin(maker, depth + 1)
                if origin[0]:
                    return origin
        return "", ""

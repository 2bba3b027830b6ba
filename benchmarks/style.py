"""How the library's code reads, in figures: comments, docstrings, the size of functions, long
lines, cycles.

The figures describe code that is easy to read; they do not make it so. Each can be listed with the
places that it counts, the worst first: `--worst nodes`, `--worst comprehensions`,
`--worst conditionals`, `--worst columns`, `--worst arguments`.

    python -m benchmarks.style --json
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._report import report

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardlib"
LINE = 100
ARGUMENTS = 8
AT_LEAST: dict[str, float] = {"comment_share": 0.07, "docstring_median": 3}
AT_MOST: dict[str, float] = {
    "nodes_p90": 180,
    "comprehensions_per_kloc": 25,
    "conditionals_per_kloc": 15,
    "over_100_columns": 0,
    "cycles": 0,
    "rooms_ground": 8,
    "functions_over_8_arguments": 0,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Comments that are addressed to a tool say nothing to a reader.
DIRECTIVES = ("# fmt:", "# type:", "# pyright:", "# noqa", "# pragma")


@dataclass(frozen=True)
class Place:
    """Where something is counted, and how much of it is there."""

    file: str
    line: int
    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.size:>6}  {self.file}:{self.line}  {self.name}"


@dataclass
class Measured:
    """What is counted in the files of a package."""

    code_lines: int = 0
    comment_lines: int = 0
    docstrings: list[int] = field(default_factory=list)
    nodes: list[Place] = field(default_factory=list)
    comprehensions: list[Place] = field(default_factory=list)
    conditionals: list[Place] = field(default_factory=list)
    columns: list[Place] = field(default_factory=list)
    arguments: list[Place] = field(default_factory=list)


def measure(package: Path = PACKAGE) -> Measured:
    """Count in every file of a package."""
    measured = Measured()
    for path in sorted(package.rglob("*.py")):
        _measure_file(path, measured)
    return measured


def _measure_file(path: Path, measured: Measured) -> None:
    file = str(path.relative_to(ROOT))
    text = path.read_text()
    tree = ast.parse(text)
    in_docstrings = set(_lines_of_docstrings(tree))
    lines_of_code = set(_lines_of_code(text)) - in_docstrings
    measured.code_lines += len(lines_of_code)
    measured.comment_lines += sum(1 for _ in _comments(text))
    lines = text.splitlines()
    for number in sorted(lines_of_code):
        if len(lines[number - 1]) > LINE:
            measured.columns.append(
                Place(file, number, lines[number - 1].strip(), len(lines[number - 1]))
            )
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            measured.nodes.append(
                Place(file, node.lineno, node.name, sum(1 for _ in ast.walk(node)))
            )
            if (count := _count_arguments(node)) > ARGUMENTS:
                measured.arguments.append(Place(file, node.lineno, node.name, count))
        if isinstance(node, COMPREHENSIONS):
            measured.comprehensions.append(
                Place(file, node.lineno, ast.unparse(node), len(node.generators))
            )
        if isinstance(node, ast.IfExp):
            measured.conditionals.append(Place(file, node.lineno, ast.unparse(node), 1))
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and (docstring := ast.get_docstring(node)):
            measured.docstrings.append(len(docstring.splitlines()))


def _lines_of_docstrings(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if (
            isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module))
            and ast.get_docstring(node) is not None
        ):
            statement = node.body[0]
            yield from range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def _lines_of_code(text: str) -> Iterator[int]:
    """The lines that hold more than a comment."""
    nothing = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            yield from range(token.start[0], token.end[0] + 1)


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(DIRECTIVES):
            yield token.string


def _count_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments a caller may give, `self` not counted."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def cycles(package: Path = PACKAGE) -> list[tuple[str, ...]]:
    """The groups of modules that import each other when they are imported."""
    graph = {name: _imports(path, package) for name, path in _modules(package).items()}
    components = _strong_components(graph)
    return [tuple(sorted(component)) for component in components if len(component) > 1]


def _modules(package: Path) -> dict[str, Path]:
    """The files of a package by the names that they are imported under."""
    found: dict[str, Path] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: Path, package: Path) -> set[str]:
    modules = _modules(package)
    imported: set[str] = set()
    # What functions import, they import when they are called.
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                imported.add(submodule if submodule in modules else node.module)
    return imported & modules.keys()


def _strong_components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Modules that reach each other, by the closure of who imports whom."""
    reached = {name: set(names) for name, names in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    components: list[set[str]] = []
    for name in graph:
        component = {name} | {other for other in reached[name] if name in reached[other]}
        if component not in components:
            components.append(component)
    return components


def figures(measured: Measured, package: Path = PACKAGE) -> dict[str, float]:
    """The figures that the benchmark reports."""
    thousands = measured.code_lines / 1000
    sizes = sorted(place.size for place in measured.nodes)
    return {
        "comment_share": round(measured.comment_lines / measured.code_lines, 4),
        "docstring_median": statistics.median(measured.docstrings),
        "nodes_p90": sizes[int(0.9 * len(sizes))],
        "comprehensions_per_kloc": round(len(measured.comprehensions) / thousands, 1),
        "conditionals_per_kloc": round(len(measured.conditionals) / thousands, 1),
        "over_100_columns": len(measured.columns),
        "cycles": len(cycles(package)),
        "rooms_ground": sum(path.is_file() for path in package.iterdir() if path.suffix == ".py"),
        "functions_over_8_arguments": len(measured.arguments),
        "code_lines": measured.code_lines,
    }


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    kinds = ("nodes", "comprehensions", "conditionals", "columns", "arguments")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument(
        "--worst", choices=kinds, help="list what one figure counts, the worst first"
    )
    parser.add_argument("--count", type=int, default=40, help="how many lines of `--worst`")
    arguments = parser.parse_args()
    measured = measure()
    if arguments.worst is not None:
        places: list[Place] = getattr(measured, arguments.worst)
        for place in sorted(places, key=lambda place: -place.size)[: arguments.count]:
            print(place)
        return
    report("style", figures(measured), AT_MOST, arguments.json, at_least=AT_LEAST)


if __name__ == "__main__":
    main()

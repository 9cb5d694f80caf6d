"""The style rules that matter, as tests over the source text (and the few that need the imported classes).

Each rule is a function from source to offences, and is itself tried on a snippet that breaks it: a rule that finds
nothing because it looks at nothing would be worse than none.
"""

import ast
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from core import actions, errors, events

ROOT = Path(__file__).parent.parent
ROOMS = ("core", "backends", "scenarios")
LONGEST_FUNCTION = 70
LONGEST_LINE = 120

# Nothing in core may know the time, draw numbers, run threads or reach a library of one of the backends.
BANNED_IN_CORE = frozenset({"time", "random", "secrets", "uuid", "asyncio", "threading", "simpy", "ray", "torch"})
# The shell and the pipeline's side of it (a batch waits to be filled); core/backend.py only declares coroutines, and
# core/run.py starts the others.
ASYNC_ROOMS = frozenset({"service", "port", "pipeline", "gateway", "samples", "driver", "backend", "run"})
# What may look at a whole set: the result does not depend on the order.
ORDER_FREE = frozenset({"sorted", "set", "frozenset", "any", "all", "sum", "len", "min", "max"})
SET_TYPES = frozenset({"set", "frozenset", "Set", "AbstractSet", "MutableSet", "FrozenSet"})

Offences = Iterator[str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> list[Path]:
    found = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    assert found, f"no source found in {folders}"
    return found


def offences(rule, files: Iterable[Path]) -> list[str]:
    """`path:line: what` for everything the rule finds."""
    return [
        f"{file.relative_to(ROOT)}:{offence}"
        for file in files
        for offence in rule(ast.parse(file.read_text(encoding="utf-8")))
    ]


# --- the rules --------------------------------------------------------------------------------------------


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def banned_imports(tree: ast.AST) -> Offences:
    for line, name in imported(tree):
        if name.partition(".")[0] in BANNED_IN_CORE:
            yield f"{line}: imports {name}"


def upward_imports(tree: ast.AST) -> Offences:
    for line, name in imported(tree):
        if name.partition(".")[0] in ("backends", "scenarios", "tests"):
            yield f"{line}: imports {name}"


def anyio_imports(tree: ast.AST) -> Offences:
    for line, name in imported(tree):
        if name.partition(".")[0] == "anyio":
            yield f"{line}: imports {name}"


def coroutines(tree: ast.AST) -> Offences:
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await):
            yield f"{node.lineno}: async code"


def escapes_from_virtual_time(tree: ast.AST) -> Offences:
    """What the fence around a simulated run cannot catch, because it is bound or decided before the run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "random", "uuid") and node.names:
            names = [alias.name for alias in node.names if not alias.name[0].isupper()]
            yield from (f"{node.lineno}: imports {node.module}.{name} by value" for name in names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if re.fullmatch(r"(datetime\.)?(datetime|date)\.(now|utcnow|today)", called):
                yield f"{node.lineno}: calls {called}"
            if called == "random.Random" and not node.args:
                yield f"{node.lineno}: random.Random() without a seed"


def long_functions(tree: ast.AST) -> Offences:
    for node in ast.walk(tree):
        if isinstance(node, Function) and (length := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
            yield f"{node.lineno}: {node.name} has {length} lines"


def float_annotations(tree: ast.AST) -> Offences:
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if annotation is not None and any(isinstance(n, ast.Name) and n.id == "float" for n in ast.walk(annotation)):
            yield f"{node.lineno}: annotated with float"


def undocumented(tree: ast.AST) -> Offences:
    if ast.get_docstring(tree) is None:
        yield "1: no module docstring"


class SetIteration(ast.NodeVisitor):
    """Finds loops over sets: literals, comprehensions, `set(...)`, and names annotated or assigned as sets."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._sets: list[set[str]] = [set()]
        self._forgiven: set[int] = set()

    def visit_function(self, node: Function) -> None:
        arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
        self._sets.append({argument.arg for argument in arguments if _is_set_type(argument.annotation)})
        self.generic_visit(node)
        self._sets.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_function

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if _is_set_type(node.annotation):
            self._sets[-1].add(ast.unparse(node.target))
            if ast.unparse(node.target).startswith("self."):
                self._sets[0].add(ast.unparse(node.target))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if self._is_set(node.value):
                self._sets[-1].add(ast.unparse(target))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._check(node.iter)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in ORDER_FREE:
            self._forgiven |= {id(argument) for argument in node.args}
        if name in ("list", "tuple", "iter", "next", "enumerate", "zip", "map", "filter", "dict.fromkeys"):
            for argument in node.args:
                self._check(argument)
        self.generic_visit(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self.generic_visit(node)  # a set from a set: no order gets out

    def visit_comprehension_with_order(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        if id(node) not in self._forgiven:
            for generator in node.generators:
                self._check(generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_comprehension_with_order

    def _check(self, node: ast.expr) -> None:
        if self._is_set(node):
            self.found.append(f"{node.lineno}: goes through the set {ast.unparse(node)}")

    def _is_set(self, node: ast.expr) -> bool:
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Call(func=ast.Name(id="set" | "frozenset")):
                return True
            case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor()):
                return self._is_set(node.left) or self._is_set(node.right)
            case ast.Name() | ast.Attribute():
                return any(ast.unparse(node) in known for known in self._sets)
        return False


def _is_set_type(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return ast.unparse(base).rpartition(".")[2] in SET_TYPES


def set_iterations(tree: ast.AST) -> Offences:
    visitor = SetIteration()
    visitor.visit(tree)
    yield from visitor.found


# --- the rules, applied -----------------------------------------------------------------------------------


def test_core_imports_no_clock_no_randomness_and_no_backend_library() -> None:
    assert offences(banned_imports, sources("core")) == []


def test_nothing_in_core_imports_upwards() -> None:
    assert offences(upward_imports, sources("core")) == []


def test_only_the_shells_of_core_are_async() -> None:
    pure = [file for file in sources("core") if file.stem not in ASYNC_ROOMS]
    assert offences(coroutines, pure) == []
    assert offences(anyio_imports, pure) == []


def test_nothing_under_virtual_time_binds_a_clock_or_draws_without_a_seed() -> None:
    assert offences(escapes_from_virtual_time, sources("core", "backends/sim")) == []


def test_core_goes_through_no_set_in_its_arbitrary_order() -> None:
    assert offences(set_iterations, sources("core")) == []


def test_events_and_actions_have_no_floats() -> None:
    assert offences(float_annotations, [ROOT / "core/events.py", ROOT / "core/actions.py"]) == []


def test_no_function_is_longer_than_seventy_lines() -> None:
    assert offences(long_functions, sources(*ROOMS)) == []


def test_every_module_says_what_its_room_is_for() -> None:
    assert offences(undocumented, sources(*ROOMS, "tests")) == []


def test_no_line_is_too_long() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in sources(*ROOMS, "tests")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(re.sub(r"  # (fmt|type|noqa)\b.*", "", line)) > LONGEST_LINE
    ]
    assert long == []


SET_ATTRIBUTE = """
class A:
    def f(self):
        self.x: set[int] = g()

    def h(self):
        for y in self.x: ...
"""
BREAKS_THE_RULE = [
    (banned_imports, "from random import Random"),
    (banned_imports, "def f():\n    import ray.util"),
    (upward_imports, "from backends.sim import loop"),
    (anyio_imports, "import anyio.abc"),
    (coroutines, "async def f(): ..."),
    (escapes_from_virtual_time, "from time import monotonic"),
    (escapes_from_virtual_time, "x = datetime.datetime.now()"),
    (escapes_from_virtual_time, "x = random.Random()"),
    (set_iterations, "for x in {1, 2}: ..."),
    (set_iterations, "y = [x for x in {z for z in w}]"),
    (set_iterations, "def f(a: set[int]):\n    return list(a)"),
    (set_iterations, "def f(a, b):\n    c = set(a) - b\n    for x in c: ..."),
    (set_iterations, SET_ATTRIBUTE),
    (float_annotations, "class A:\n    x: tuple[float, ...]"),
    (long_functions, "def f():\n" + "    x = 1\n" * 70),
    (undocumented, "x = 1"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "snippet"), BREAKS_THE_RULE)
def test_each_rule_finds_what_it_forbids(rule, snippet: str) -> None:
    assert list(rule(ast.parse(snippet)))


KEEPS_THE_RULE = [
    (set_iterations, "for x in sorted({1, 2}): ..."),
    (set_iterations, "y = any(x for x in {1, 2})"),
    (set_iterations, "y = {x for x in {1, 2}}"),
    (set_iterations, "def f(a: dict[int, int]):\n    return list(a)"),
    (escapes_from_virtual_time, "x = random.Random(7)"),
    (float_annotations, "def f(x: int) -> str: ..."),
    (long_functions, "def f():\n" + "    x = 1\n" * 69),
]


@pytest.mark.parametrize(("rule", "snippet"), KEEPS_THE_RULE)
def test_each_rule_lets_pass_what_it_allows(rule, snippet: str) -> None:
    assert list(rule(ast.parse(snippet))) == []


# --- errors, events, actions ------------------------------------------------------------------------------


def leaves(base: type) -> list[type]:
    """The classes below `base` that have none below themselves."""
    below = base.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] if below else [base]


def all_errors(base: type[Exception] = errors.TurnstileError) -> list[type[Exception]]:
    return [base, *(found for child in base.__subclasses__() for found in all_errors(child))]


def made(error: type[Exception]) -> Exception:
    """An error with as many words as it takes."""
    for count in (1, 2, 3):
        try:
            return error(*("one", "two", "three")[:count])
        except TypeError:
            continue
    raise AssertionError(f"{error.__name__} cannot be made from positional arguments")


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.__name__)
def test_every_error_rebuilds_from_its_args_and_pickles(error: type[Exception]) -> None:
    original = made(error)
    for copy in (type(original)(*original.args), pickle.loads(pickle.dumps(original))):
        assert type(copy) is error
        assert (copy.args, str(copy), vars(copy)) == (original.args, str(original), vars(original))


def test_every_error_is_drawn_in_the_tree() -> None:
    drawn = re.findall(r"^[ ├└│─]+([A-Z]\w+)", errors.__doc__, re.M)
    assert sorted(drawn) == sorted(error.__name__ for error in all_errors() if error.__module__ == errors.__name__)


@pytest.mark.parametrize(
    ("base", "union"), [(events.Event, events.AnyEvent), (actions.Action, actions.AnyAction)], ids=["event", "action"]
)
def test_every_event_and_action_is_in_its_union(base: type, union) -> None:
    here = {leaf for leaf in leaves(base) if leaf.__module__ == base.__module__}
    assert here == set(union.__args__)


def test_no_event_shares_its_name_with_an_action() -> None:
    """The log tells items apart by class name alone."""
    names = [leaf.__name__ for leaf in (*leaves(events.Event), *leaves(actions.Action), actions.Note)]
    assert len(names) == len(set(names))


# --- the repository ---------------------------------------------------------------------------------------

GENERATED = frozenset({".git", ".venv", "__pycache__", "build", "out", ".pytest_cache", ".hypothesis", ".ruff_cache"})


def text_files() -> Iterator[Path]:
    for file in sorted(ROOT.rglob("*")):
        parts = file.relative_to(ROOT).parts
        if file.is_file() and not any(part in GENERATED or part.endswith((".egg-info", "_cache")) for part in parts):
            yield file


def test_no_file_mentions_a_path_of_somebody_s_machine() -> None:
    homes = "|".join(("work", "root", "home/[a-z]+", "Users/[A-Za-z]+", "tmp/[a-z]*venv"))
    personal = re.compile(rf"(?<![\w.~-])/(?:{homes})/")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in text_files()
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if personal.search(line)
    ]
    assert found == []


def readme_tree() -> list[str]:
    """The paths in the README's tree: a block of lines `path    what it is`, folders ending in a slash."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    trees = [block for block in blocks if block.startswith("core/")]
    assert len(trees) == 1, "the README has one tree, and it starts with core/"
    paths, folders = [], []
    for line in trees[0].splitlines():
        name = line.split()[0] if line.strip() else ""
        if not name:
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


def test_the_readme_tree_names_files_that_exist() -> None:
    assert [path for path in readme_tree() if not (ROOT / path).exists()] == []


def test_the_readme_tree_names_every_module() -> None:
    named = set(readme_tree())
    modules = [str(file.relative_to(ROOT)) for file in sources(*ROOMS) if file.name != "__init__.py"]
    assert [module for module in modules if module not in named] == []

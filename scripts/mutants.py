"""Which small bugs the tests see: plants one after the other in a copy of the package.

    python -m scripts.mutants zorse_megatron/schedule --count 20 -- tests/unit/test_schedules.py

Each bug changes one comparison, operation, constant or condition, or drops one statement, at a
place drawn at random; equal seeds draw equal ones. Everything after -- goes to pytest, which stops
at the first test that fails. Prints the bugs that none saw, and how many were seen. Of bugs that
none saw some change nothing that matters: a bound that is never reached, a sum of one number.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
_DROPPED = (ast.Expr, ast.AugAssign, ast.Delete)


def changed(node: ast.AST) -> ast.AST | None:
    """The node with a bug, a copy; None where none of these fits."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        ops = [_COMPARED[type(node.ops[0])](), *node.ops[1:]]
        return ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        return ast.BinOp(node.left, _COMPUTED[type(node.op)](), node.right)
    if isinstance(node, ast.Constant) and type(node.value) in {int, float, bool}:
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        return ast.Constant(value)
    if isinstance(node, ast.If | ast.IfExp):
        test = ast.UnaryOp(ast.Not(), node.test)
        return type(node)(test, node.body, node.orelse)  # type: ignore[arg-type]
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return ast.Pass() if isinstance(node, _DROPPED) and not is_text else None


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes within functions, and what each becomes."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    bug = changed(node)
                    if bug is not None:
                        yield node, bug


def planted(source: str, draw: random.Random) -> tuple[str, str] | None:
    """The text of a module with a bug, and what it is; None where it has no place for one."""
    tree = ast.parse(source)
    found = list(places(tree))
    if not found:
        return None
    node, bug = draw.choice(found)
    before = ast.unparse(node).splitlines()[0]
    ast.copy_location(bug, node)
    after = ast.unparse(ast.fix_missing_locations(bug)).splitlines()[0]
    told = f"{node.lineno}: {before} -> {after}"  # type: ignore[attr-defined]
    return ast.unparse(_Replaced(node, bug).visit(tree)), told


class _Replaced(ast.NodeTransformer):
    def __init__(self, node: ast.AST, bug: ast.AST) -> None:
        self.node, self.bug = node, bug

    def visit(self, node: ast.AST) -> ast.AST:
        return self.bug if node is self.node else self.generic_visit(node)


def is_seen(copy: Path, words: list[str], limit_s: float) -> bool:
    """Whether a test fails in the copy, or takes longer than that."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode != 0


def main() -> int:
    """Plant as many as are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("room", type=Path, help="a module or folder of the package")
    parser.add_argument("--count", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the places (default: 0)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of a run of the tests")
    parser.add_argument("words", nargs="+", help="what pytest is given")
    options = parser.parse_args()
    draw, seen = random.Random(options.seed), 0
    room = ROOT / options.room
    modules = sorted(room.rglob("*.py")) if room.is_dir() else [room]
    weights = [len(each.read_bytes()) for each in modules]
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        if is_seen(copy, options.words, options.limit_s):
            parser.error("found tests that fail without any bug; expected tests that pass")
        for _ in range(options.count):
            bug = None
            while bug is None:
                [module] = draw.choices(modules, weights)
                bug = planted(module.read_text(encoding="utf-8"), draw)
            place = copy / module.relative_to(ROOT)
            place.write_text(bug[0], encoding="utf-8")
            if is_seen(copy, options.words, options.limit_s):
                seen += 1
            else:
                print(f"not seen: {module.relative_to(ROOT)}:{bug[1]}", flush=True)
            shutil.copyfile(module, place)
    print(f"{seen} of {options.count} bugs seen in {options.room}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

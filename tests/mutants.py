"""Do the tests fail when the science is wrong? `python tests/mutants.py [--count N] [--seed S] [FILE ...]`

Not a part of the suite. Small wrongs are put into copies of the code, one at a time, each as an edit of one place in
the syntax tree: another number, comparison, sign or truth value, a seed that is always 0, two arguments or two names
in the wrong order, training mode for evaluation, a sum for a mean, a line left out. The tests of that file run on each
copy; a wrong that they all pass is printed. What is only printed or drawn is left alone.
"""
import argparse
import ast
import concurrent.futures
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {  # file -> what is run on its mutants
    "attention": "test_attention.py test_theory.py", "transformer": "test_transformer.py test_vit.py test_attention.py",
    "mask_priors": "test_priors.py", "inits": "test_priors.py", "rivals": "test_rivals.py",
    "qk_init": "test_priors.py test_vit.py", "theory": "test_theory.py",
    "persistence": "test_persistence.py test_train_gotu.py", "boolean": "test_boolean.py",
    "arithmetic": "test_arithmetic.py", "images": "test_images.py",
    "text": "test_text.py", "runs": "test_runs.py test_scripts.py", "records": "test_runs.py test_scripts.py",
    "parallel": "test_runs.py test_train_vit.py", "bench": "test_bench.py",
    **{f"train_{name}": f"test_train_{name}.py test_scripts.py -m {name}" for name in ("gotu", "arith", "vit", "lm")},
}
# functions that print, draw or explain, and names of things that are only printed
LEFT_ALONE = {"parser", "print_table", "plot", "table", "describe_presets", "machine", "draw", "fail", "first_line"}
SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
         ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
         ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
NAMES = {"mean": "sum", "sum": "mean", "amax": "amin", "amin": "amax", "max": "min", "min": "max", "eval": "train",
         "train": "eval", "seen": "target", "test_x": "x", "val": "train", "test": "val", "query": "key",
         "key": "query",
         "logsigmoid": "sigmoid", "triu": "tril", "tril": "triu", "first": "last", "last": "first", "any": "all",
         "all": "any", "AdamW": "Adam", "cross_entropy": "mse_loss", "open": "closed", "closed": "open",
         "weight_decay": "mask_weight_decay", "mask_lr": "lr", "token_std": "position_std", "position_std": "token_std"}


def edits(node: ast.AST):
    """Functions, each of which makes one wrong of a node in place."""
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield f"{node.value} -> another", lambda n: setattr(n, "value", n.value + 1 if n.value < 2 else n.value - 1)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield "comparison", lambda n: n.ops.__setitem__(0, SWAPS[type(n.ops[0])]())
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
        yield type(node.op).__name__, lambda n: setattr(n, "op", SWAPS[type(n.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        yield "sign or negation", lambda n: setattr(n, "op", ast.UAdd()) if isinstance(n.op, ast.USub) else (
            setattr(n, "operand", ast.UnaryOp(type(n.op)(), n.operand)))
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield f".{node.attr} -> .{NAMES[node.attr]}", lambda n: setattr(n, "attr", NAMES[n.attr])
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield f"{node.id} -> {NAMES[node.id]}", lambda n: setattr(n, "id", NAMES[n.id])
    elif isinstance(node, ast.Call):
        for place, argument in enumerate(node.args):
            if "seed" in ast.unparse(argument)[-5:]:
                yield "seed 0", lambda n, place=place: n.args.__setitem__(place, ast.Constant(0))
        if len(node.args) >= 2 and ast.unparse(node.args[0]) != ast.unparse(node.args[1]):
            yield "two arguments swapped", lambda n: n.args.insert(0, n.args.pop(1))
    elif isinstance(node, (ast.Expr, ast.AugAssign)) and not isinstance(getattr(node, "value", None), ast.Constant):
        yield "line left out", lambda n: (n.__dict__.update(value=ast.Constant(0)), setattr(n, "__class__", ast.Expr))


def places(tree: ast.Module):
    """(node, description, edit) for every wrong of a module, in order; what is only printed is passed over."""
    def walk(node):
        if isinstance(node, (ast.JoinedStr, ast.Raise)) or getattr(node, "name", "") in LEFT_ALONE:
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("print", "fail", "tqdm", "refused"):
            return
        for name, edit in edits(node):
            yield node, name, edit
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return list(walk(tree))


def mutants(files: list[Path], count: int, seed: int) -> list[tuple[Path, str, str]]:
    """`count` wrongs, drawn from all files: (file, what and where, the wrong source)."""
    everything = [(path, number) for path in files
                  for number in range(len(places(ast.parse(path.read_text(encoding="utf-8")))))]
    chosen = []
    for path, number in random.Random(seed).sample(everything, min(count, len(everything))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        node, name, edit = places(tree)[number]
        line, before = node.lineno, ast.unparse(node)
        edit(node)
        chosen.append((path, f"{path.name}:{line} {name}: {before[:90]}", ast.unparse(tree)))
    return chosen


def survives(mutant: tuple[Path, str, str]) -> bool:
    """Whether all tests of its file pass on a mutant."""
    path, _, source = mutant
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "results", "runs", "data", "__pycache__"))
        (copy / path.relative_to(ROOT)).write_text(source, encoding="utf-8")
        names, _, marker = TESTS[path.stem].partition(" -m ")
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider",
                   *(["-m", marker] if marker else []), *(f"tests/{name}" for name in names.split())]
        try:
            return subprocess.run(command, cwd=copy, capture_output=True, timeout=300).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("files", nargs="*", metavar="FILE", choices=[*TESTS, []],
                       help="names without .py (default: all that have tests)")
    flags.add_argument("--count", type=int, default=120)
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    files = [path for name in args.files or TESTS for path in (ROOT / f"{name}.py", ROOT / "tinymask" / f"{name}.py")
             if path.exists()]
    made, killed = mutants(files, args.count, args.seed), 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for mutant, alive in zip(made, pool.map(survives, made)):
            killed += not alive
            print(f"{'SURVIVES' if alive else 'killed':9}{mutant[1]}", flush=True)
    print(f"{killed} of {len(made)} killed")


if __name__ == "__main__":
    main()

"""A course handout from a checkout: `python -m tinymask.handout DIR`.

DIR becomes a copy of the project in which the functions below have no body, with their docstrings kept, and a
file EXERCISES.md. The tests are the graders: those of step k need the functions of steps 1 to k only. Nothing
in the source is marked for this; the table is all there is.
"""
import argparse
import ast
import os
import shutil
import tempfile
from pathlib import Path

from tinymask import runs

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = [  # (title, functions as module.name, what to think of, the command that grades)
    ("Attention with a mask", ["attention.attention_weights"],
     "The mask is added to the logits as log sigmoid(M), before the softmax. What is log(sigmoid(-120)) in float32?",
     "tests/test_attention.py"),
    ("The theorem", ["theory.attention_row", "theory.dp_dz", "theory.dp_dq", "theory.dp_dk", "theory.dp_dm",
                     "theory.bounds", "theory.dloss_dm"],
     "Derive each on paper first; the tests compare with autograd. Which factor makes a mask persist?",
     "tests/test_theory.py"),
    ("What the data does not say", ["boolean.fourier_coefficients", "boolean.minimum_degree_interpolator"],
     "The interpolator of the lowest degree is what a plain transformer tends to. What is it for x0 x1?",
     "tests/test_boolean.py"),
    ("Priors as supports", ["mask_priors.to_mask", "mask_priors.parity2_support", "mask_priors.majority3_support",
                            "mask_priors.cyclic3_support", "mask_priors.threesym_support"],
     "Say what every row does. Why is a row that is closed throughout no prior at all?",
     "tests/test_priors.py -k 'every_row or wholly_closed or to_mask or pairs or drawing and (parity2 or majority3 or "
     "cyclic3 or threesym)'"),
    ("How much of it stays", ["persistence.with_prior", "persistence.support_mass", "persistence.attention_shift",
                              "persistence.mask_drift"],
     "Which rows have a prior, and which do not count?", "tests/test_persistence.py"),
    ("The rival: query and key", ["qk_init.position_decoder", "qk_init.svd"],
     "A layer reads token and position together. How can scores depend on the position alone?",
     "tests/test_priors.py -k 'query_key or svd or ridge or drawing and position_decoder'"),
    ("Digits", ["arithmetic.to_digits", "arithmetic.split", "arithmetic.encode", "arithmetic.grade",
                "mask_priors.addition_support"],
     "Where does the carry come from, and how many layers does 999 + 1 need?",
     "tests/test_arithmetic.py tests/test_priors.py -k 'arithmetic or carries or digit_that_matters or "
     "addition_support'"),
    ("Nearness", ["mask_priors.distance_mask", "mask_priors.geometric_slopes"],
     "A few nats down, log sigmoid(-x) is -x: which published method is a steep mask, if it is not trained?",
     "tests/test_priors.py -k 'distance or geometric'"),
]
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "data", "*handout*")


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The definition called `name` in a parsed module. Raises ValueError if there is none."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"no function {name}")


def without_body(source: str, name: str, number: int) -> str:
    """The source of a module in which the function `name` keeps signature and docstring, and raises else."""
    lines, node = source.splitlines(), function(ast.parse(source), name)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body  # what is taken away
    stub = f"    raise NotImplementedError(\"exercise {number}: {name}\")"
    return "\n".join([*lines[: body[0].lineno - 1], stub, *lines[node.end_lineno:]]) + "\n"


def exercises_text() -> str:
    """EXERCISES.md."""
    steps = ["# Exercises\n\nWrite the bodies that are missing, step by step, each as its docstring says. The command "
             "of a step is green when it is done; it needs nothing from later steps.\n"]
    for number, (title, names, question, tests) in enumerate(EXERCISES, 1):
        functions = ", ".join(f"`{module}.py`: `{name}`" for module, name in (dotted.split(".") for dotted in names))
        steps.append(f"## {number}. {title}\n\n{functions}\n\n{question}\n\n    python -m pytest {tests}\n")
    return "\n".join(steps)


def make(target: Path) -> None:
    """Write the handout into the folder `target`, which must not exist: made beside it, then moved there."""
    if os.path.lexists(target):
        raise FileExistsError(f"{target} is there already")
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix="handout-"))

    def left_out(folder: str, names: list[str]) -> set[str]:  # target itself, too, if it is inside the checkout
        patterns = shutil.ignore_patterns(*LEFT_OUT)(folder, names)
        return patterns | {name for name in names if os.path.realpath(Path(folder, name)) == os.path.realpath(part)}

    try:
        shutil.copytree(ROOT, part, ignore=left_out, symlinks=True, dirs_exist_ok=True, copy_function=shutil.copyfile)
        for folder, _, _ in os.walk(part):
            os.chmod(folder, 0o755)  # whatever they are in the checkout
        (part / "tests" / "test_pages.py").unlink()  # figures, not exercises
        for number, (_, names, _, _) in enumerate(EXERCISES, 1):
            for module, name in (dotted.split(".") for dotted in names):
                path = part / "tinymask" / f"{module}.py"
                path.write_text(without_body(path.read_text(encoding="utf-8"), name, number), encoding="utf-8")
        (part / "EXERCISES.md").write_text(exercises_text(), encoding="utf-8")
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # nothing is left of it if all went well


def main(argv: list[str] | None = None) -> list:
    """Make the handout that the command line names. No runs are made, so none is returned."""
    flags = argparse.ArgumentParser(prog="tinymask.handout", description=__doc__, allow_abbrev=False,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.error = runs.fail  # type: ignore[assignment]
    flags.add_argument("folder", metavar="DIR", help="the handout's folder, to be made")
    target = Path(flags.parse_args(argv).folder)
    if not (ROOT / "tests").is_dir():
        runs.fail(f"{ROOT} is not a checkout, there are no tests")
    try:
        make(target)
    except (OSError, ValueError) as error:  # of a tree that cannot be copied, shutil lists the files
        reason = error.args[0][0][-1] if isinstance(error, shutil.Error) else runs.first_line(error)
        runs.fail(f"{target}: {reason}")
    print(f"{len(EXERCISES)} exercises in {target}: begin with {target / 'EXERCISES.md'}")
    return []


if __name__ == "__main__":
    runs.command(main)

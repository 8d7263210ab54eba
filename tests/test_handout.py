"""The handout: made from this checkout, its tests fail for the right reason and pass with the solutions put back."""
import ast
import os
import subprocess
import sys

import pytest

from tinymask import handout

SOURCE = handout.ROOT / "tinymask"


def graded(target, tests):
    done = subprocess.run(f"{sys.executable} -m pytest -q -x {tests}", shell=True, cwd=target, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(target)})
    return done.returncode, done.stdout


def test_only_the_body_goes():
    source = 'import os\n\n\ndef f(x):\n    """What it is."""\n    y = x\n    return y\n\n\ndef g():\n    return 1\n'
    wanted = source.replace("y = x\n    return y", 'raise NotImplementedError("exercise 3: f")')
    assert handout.without_body(source, "f", 3) == wanted
    with pytest.raises(ValueError, match="no function h"):
        handout.without_body(source, "h", 1)


def test_every_exercise_has_a_worked_example():
    for _, names, _, _ in handout.EXERCISES:
        for module, name in (dotted.split(".") for dotted in names):
            tree = ast.parse((SOURCE / f"{module}.py").read_text(encoding="utf-8"))
            assert ">>> " in ast.get_docstring(handout.function(tree, name)), name


@pytest.mark.parametrize("argv, said", [([], "DIR"), (["a", "b"], "b"), (["here"], "there already"),
                                        (["loop"], "there already"), (["nosuch/new"], "No such file"),
                                        (["new"], "No space left")])
def test_what_is_refused_is_one_line_and_leaves_nothing(argv, said, tmp_path, capsys, monkeypatch):
    def broken(source, target, **options):
        (target / "a").write_text("half", encoding="utf-8")
        raise handout.shutil.Error([("a", "b", "No space left on device")])

    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(handout.shutil, "copytree", broken)
    with pytest.raises(SystemExit) as stop:
        handout.main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in error and len(error.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "loop"]


def test_a_target_named_like_a_part_of_the_project_or_long_and_a_checkout_that_is_read_only(tmp_path, monkeypatch):
    handout.main([str(tmp_path / "tinymask")])
    assert (tmp_path / "tinymask" / "tinymask" / "attention.py").exists()
    source, target = tmp_path / "checkout", tmp_path / ("x" * 250)
    (source / "tests").mkdir(parents=True)
    (source / "tests" / "test_pages.py").touch()
    (source / "tinymask").symlink_to(handout.ROOT / "tinymask")
    for folder in (source / "tests", source):
        folder.chmod(0o555)
    monkeypatch.setattr(handout, "ROOT", source)
    monkeypatch.setattr(handout, "EXERCISES", [])
    handout.main([str(target)])
    assert (target / "EXERCISES.md").exists() and not (target / "tests" / "test_pages.py").exists()
    for folder in (source / "tests", source):
        folder.chmod(0o755)  # pytest has to remove them


@pytest.mark.slow
def test_the_handout_grades(tmp_path):
    target = tmp_path / "a course"
    handout.main([str(target)])
    assert (target / "EXERCISES.md").read_text(encoding="utf-8").count("python -m pytest") == len(handout.EXERCISES)
    for number, (_, names, _, tests) in enumerate(handout.EXERCISES, 1):
        status, output = graded(target, tests)
        assert status == 1 and f"exercise {number}: " in output, (number, output)
        for module, name in (dotted.split(".") for dotted in names):
            solution = (SOURCE / f"{module}.py").read_text(encoding="utf-8")
            node, path = handout.function(ast.parse(solution), name), target / "tinymask" / f"{module}.py"
            lines = path.read_text(encoding="utf-8").splitlines()
            stub = handout.function(ast.parse("\n".join(lines)), name)
            lines[stub.lineno - 1: stub.end_lineno] = solution.splitlines()[node.lineno - 1: node.end_lineno]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert graded(target, tests)[0] == 0, number

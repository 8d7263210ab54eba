"""The scripts stand at the top of the repository; tests import them from there."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_collection_modifyitems(config, items):
    """`pytest -m gotu` leaves the slow tests out, too: only an expression that names them brings them."""
    if "slow" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if "slow" in item.keywords])
        items[:] = [item for item in items if "slow" not in item.keywords]


@pytest.fixture
def few_images(monkeypatch):
    """The built-in sets of images, smaller."""
    from tinymask import images

    make = images.builtin
    monkeypatch.setattr(images, "builtin", lambda relation: make(relation, train=100, test=70))


@pytest.fixture
def one_and_two_processes(tmp_path):
    """A function that runs a script with its flags by python and by torchrun, and gives the result lines of both."""
    def run(flags):
        torchrun, found = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], []
        for name, before in (("one", []), ("two", torchrun)):
            done = subprocess.run([sys.executable, *before, *flags, "--out", str(tmp_path / name)], capture_output=True,
                                  text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            assert done.returncode == 0, done.stderr
            text = (tmp_path / name / "results.jsonl").read_text(encoding="utf-8")
            found.append([json.loads(line) for line in text.splitlines()])
        return found

    return run

"""What the command line answers where a cluster runs: the same table as ``tests/cli/answers.tsv``, on one cluster, from
its first line to its last."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest

from tests.e2e.machine import Cluster

SCRIPTS = {
    "ok.py": "import sys\nprint('ok', sys.argv[1:])\n",
    "exit3.py": "raise SystemExit(3)\n",
    "crash.py": "print('before')\n1 / 0\n",
    "segv.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    "killed.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "my scripts/üb er.py": "print('ok')\n",
}


@pytest.mark.slow
def test_the_answers_of_a_cluster_that_runs_are_those_in_the_table(cluster: Cluster) -> None:
    (cluster.folder / "my scripts").mkdir()
    for name, text in SCRIPTS.items():
        cluster.write(name, text)
    cluster.up("2")
    with Path(__file__).with_name("answers.tsv").open(newline="", encoding="utf-8") as file:
        table = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    wrong = []
    for command, code, part, _to_come in table:
        done = cluster.run(*shlex.split(command.replace("{state}", str(cluster.state)))[1:], code=None)
        said = done.stdout + done.stderr
        ours = "Traceback" in said and "crash.py" not in said
        if (done.returncode, part in said, ours) != (int(code), True, False):
            wrong.append(f"{command}\nexit code {done.returncode}\n{said}")
    assert not wrong, "\n\n".join(wrong)

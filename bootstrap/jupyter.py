"""JupyterLab where a job's workers run on this node: ``python -m gpuctl.bootstrap.jupyter NODE_FOLDER JOB``.

The token comes in the first line of standard input: arguments can be read by everybody on the machine. Prints ``port
N`` once it answers there, on localhost only, and ends when its standard input does: that is the connection of whoever
looks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from gpuctl.bootstrap import job_shell, tensorboard
from gpuctl.cluster.errors import GpuctlError

_LOOK_S = 1.0
_IS_THERE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('jupyterlab') is None)"


def serve(place: job_shell.JobPlace, token: str) -> int:
    """Until standard input ends, SIGTERM comes, or Jupyter ends; returns the exit code. Raises ``GpuctlError`` if it is
    not installed there."""
    env = {**place.env, "JUPYTER_TOKEN": token}
    if place.prefix:
        raise GpuctlError("Jupyter runs in environments, and this job has an image", "use `gpuctl shell` there")
    if subprocess.run([place.python, "-c", _IS_THERE], env=env, stdin=subprocess.DEVNULL).returncode:
        raise GpuctlError(
            "jupyterlab is not installed where the job runs", "add it to the job's requirements.txt and train again"
        )
    over = threading.Event()
    threading.Thread(target=tensorboard.watch_stdin, args=(over,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    port = tensorboard.free_port()
    words = [
        *(place.python, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={place.folder}"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words, cwd=place.folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            if not tensorboard.wait_until_it_answers(process, port, over):
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace"))
                return process.poll() or 1
            print(f"port {port}", flush=True)
            while not over.wait(_LOOK_S) and process.poll() is None:
                pass
            return process.poll() or 0
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its kernels, which would go on without it."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(folder: str, job: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it, and ends standard input
    token = sys.stdin.readline().strip()
    try:
        return serve(job_shell.find(Path(folder), job), token)
    except GpuctlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

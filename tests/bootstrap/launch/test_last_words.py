"""What is told of a worker that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.bootstrap.launch.last_words import FaultTrimmer, last_words, shown, signal_name
from gpuctl.cluster.worker_context import STDERR_MARK

MARK = STDERR_MARK.decode()
RAISES = f"""\
working
{MARK}Traceback (most recent call last):
{MARK}  File "train.py", line 1, in <module>
{MARK}RuntimeError: CUDA error: out of memory
{MARK}Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
flushed at exit
"""
FAULT = b"""\
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007e (most recent call first):
  File "train.py", line 3 in crash
  File "<frozen runpy>", line 88 in _run_code
  File "train.py", line 9 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 291 in run_path
  File "/x/gpuctl/trainers/launchers/torchrun.py", line 160 in run_script
  File "/x/torch/multiprocessing/api.py", line 700 in _wrap
  File "/x/gpuctl/trainers/launchers/warm_interpreter.py", line 50 in main

Extension modules: numpy, torch._C (total: 2)
"""


def said(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "stdout.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_of_an_exception_its_own_line_is_the_message_whatever_follows_it(tmp_path: Path) -> None:
    words = last_words([said(tmp_path, RAISES)])
    assert words.message == "RuntimeError: CUDA error: out of memory"
    assert words.text.startswith("Traceback") and words.text.endswith("device-side assertions.")


def test_of_a_fault_its_first_line_is_the_message_and_the_frames_that_began_the_script_are_left_out(
    tmp_path: Path,
) -> None:
    words = last_words([said(tmp_path, b"working\n" + FAULT)], by_signal=True)
    assert words.message == "Fatal Python error: Segmentation fault"
    assert words.text.splitlines()[-4:] == [
        "Current thread 0x00007e (most recent call first):",
        '  File "train.py", line 3 in crash',
        '  File "<frozen runpy>", line 88 in _run_code',
        '  File "train.py", line 9 in <module>',
    ]


def test_the_same_frames_are_left_out_wherever_the_text_is_cut() -> None:
    lines = FAULT.splitlines()
    whole = FaultTrimmer().feed(lines, last=True)
    assert len(whole) == len(lines) - 5
    for cut in range(len(lines)):
        trimmer = FaultTrimmer()
        assert trimmer.feed(lines[:cut]) + trimmer.feed(lines[cut:], last=True) == whole


def test_what_faulthandler_really_prints_is_understood(tmp_path: Path) -> None:
    code = "import faulthandler, os; faulthandler.enable(); os.kill(os.getpid(), 11)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert signal_name(128 - done.returncode) == "SIGSEGV"
    words = last_words([said(tmp_path, done.stderr)], by_signal=True)
    assert words.message == "Fatal Python error: Segmentation fault"
    assert 'File "<string>", line 1 in <module>' in words.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"out\n{MARK}about to fail\nmore out\n", "about to fail"),
        ("terminate called\n  what():  bad_alloc\n", "what():  bad_alloc"),
        (f"{MARK} 10%\r{MARK} 20%\r\n\n", "20%"),
        ("", ""),
    ],
)
def test_of_a_worker_without_a_traceback_the_last_line_is_the_message(tmp_path: Path, text: str, message: str) -> None:
    assert last_words([said(tmp_path, text)]).message.strip() == message


def test_a_bar_is_shown_as_a_terminal_would() -> None:
    assert shown(STDERR_MARK + b"\r 10%" + STDERR_MARK + b"\r 20%\r") == b" 20%"
    assert shown(b"plain\r") == b"plain"
    assert shown(b"") == b""


def test_what_native_code_said_before_it_aborted_is_the_message(tmp_path: Path) -> None:
    log = (
        "step 7\n"
        "E1125 16:16:37.612369    6249 agent.cc:289] Polled an error\n"
        "F1125 16:16:37.612434    6249 client.h:80] Terminating process: another task died\n"
        "*** Check failure stack trace: ***\n"
        "    @     0x7fea2b8a71f5  (unknown)\n"
    )
    assert last_words([said(tmp_path, log)], by_signal=True).message == "Terminating process: another task died"
    assert last_words([said(tmp_path, FAULT + log.encode())], by_signal=True).message.startswith("Fatal Python error")

"""The processes of a run, forked from the test's own: all but a new interpreter and its imports,
which take seconds each.

What `profiler.host` does with its processes (sessions, pipes, signals, exit codes) is as in a run; the module that each
is to run is run as `__main__` in the fork. Runs from the command line, of which other tests have some, start their
processes for real.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from gplan.core import Plan, Run
from gplan.runtime.run.launch import run_local_processes
from gplan.runtime.run.options import RunOptions
from profiler.model.model_reference import Setting


def run_forked(
    reference: str, plan: Plan, options: RunOptions, *, settings: Mapping[str, Setting] | None = None
) -> Run:
    """What the torch engine's run in processes of its own gives."""
    with patch("profiler.host.processes.subprocess.Popen", ForkedProcess):
        return run_local_processes(reference, dict(settings or {}), plan, options, report=lambda _step, _loss: None)


class ForkedProcess(subprocess.Popen[str]):
    """`python -m MODULE ARGUMENTS` as a fork that runs the module instead of a program of its own."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> None:
        _program, _m, module, *arguments = command
        given = {**options, "restore_signals": False}  # a Python of its own would ignore SIGPIPE again
        super().__init__(command, env=env, preexec_fn=lambda: _become(module, arguments, env), **given)


def _become(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a module as a process of its own would, and end; called in the fork, with its three streams in place."""
    code = 1
    try:
        _give_up_files()
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        faulthandler.enable(sys.stderr)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)  # the threads of the parent are not here
        sys.modules.pop(module, None)  # it is run anew
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _give_up_files() -> None:
    """All but the three streams lead nowhere: pipes end,
    and objects of the parent that are closed here close no others."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != nowhere:
            os.dup2(nowhere, number)

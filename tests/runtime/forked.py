"""Runs of the torch engine in processes forked from the test's, which saves seconds of imports per process.

Sessions, pipes, signals and exit codes are as in a run; each fork runs its module as `__main__`. Tests of the
command line start real processes.
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
from gplan.runtime.run.run_options import RunOptions
from profiler.model.model_reference import SettingValue


def run_forked(
    reference: str, plan: Plan, options: RunOptions, *, settings: Mapping[str, SettingValue] | None = None
) -> Run:
    """Run a plan with the torch engine in forked processes."""
    with patch("profiler.host.processes.subprocess.Popen", ForkedProcess):
        return run_local_processes(reference, dict(settings or {}), plan, options, report=lambda _step, _loss: None)


class ForkedProcess(subprocess.Popen[str]):
    """`python -m MODULE ARGUMENTS` as a fork that runs the module."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> None:
        _program, _m, module, *arguments = command
        given = {**options, "restore_signals": False}  # a Python of its own would ignore SIGPIPE again
        super().__init__(command, env=env, preexec_fn=lambda: _become(module, arguments, env), **given)


def _become(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a module as its own process would, and exit; called in the fork with its three streams in place."""
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
    """Redirect all other files to nowhere, so pipes end and closing the parent's objects closes nothing else."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != nowhere:
            os.dup2(nowhere, number)

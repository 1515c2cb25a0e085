"""The `d3d` command: the table of subcommands, and how every failure looks to the user.

Nothing heavy is imported until a subcommand runs, so that help is instant. What the subcommands
take is in `commands.options`; what they do is in the module of `commands` named in the table.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from d3d_jax.commands import (
    benchmark_options,
    check_options,
    options,
    prune_options,
    report_options,
    respond_options,
    sweep_options,
)
from d3d_jax.errors import D3DError

# Subcommand → what it takes and the module whose `run` does it.
COMMANDS: dict[str, tuple[type, str]] = {
    "demo": (options.Demo, "d3d_jax.commands.demo"),
    "generate": (options.Generate, "d3d_jax.commands.generate"),
    "warmup": (options.Warmup, "d3d_jax.commands.warmup"),
    "inspect": (options.Inspect, "d3d_jax.commands.inspect"),
    "respond": (respond_options.Respond, "d3d_jax.commands.respond"),
    "init-drafter": (options.InitDrafter, "d3d_jax.commands.init_drafter"),
    "train": (options.Train, "d3d_jax.commands.train"),
    "prune": (prune_options.Prune, "d3d_jax.commands.prune"),
    "export": (options.Export, "d3d_jax.commands.export"),
    "evaluate": (options.Evaluate, "d3d_jax.commands.evaluate"),
    "calibrate": (options.Calibrate, "d3d_jax.commands.calibrate"),
    "compile-check": (check_options.CompileCheck, "d3d_jax.commands.compile_check"),
    "benchmark": (benchmark_options.Benchmark, "d3d_jax.commands.benchmark"),
    "sweep": (sweep_options.Sweep, "d3d_jax.commands.sweep"),
    "report": (report_options.Report, "d3d_jax.commands.report"),
    "plan": (options.Plan, "d3d_jax.commands.plan"),
}
_DESCRIPTION = "Lossless speculative decoding with standalone block-diffusion drafters."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status.

    0: done. 2: something the user can mend, said in one line on stderr; errors in the options
    themselves exit so from inside tyro. 130: Ctrl-C, 143: SIGTERM, after saving where there is
    something to save. 75: another process of the run is gone, the same command in all of them
    continues. 141: whoever read the output went away.
    """
    try:
        with _interrupts_kept():
            chosen = _parse(argv)
            module = next(module for kind, module in COMMANDS.values() if isinstance(chosen, kind))
            importlib.import_module(module).run(chosen)
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted")
        return _ended_early(130)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except D3DError as error:
        _say(f"error: {error}")
        return _ended_early(error.exit_status)
    except RuntimeError as error:
        # Of JAX's runtime, where a command has no better advice.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _say(f"error: a device has too little memory ({str(error).splitlines()[0]:.300})")
        return _ended_early(2)
    except OSError as error:
        _say(f"error: {error.filename or 'input or output'}: {error.strerror or error}")
        return _ended_early(2)
    return 0


def _ended_early(status: int) -> int:
    """Returns the exit status of what failed; one of several processes ends with it at once.

    The interpreter's own end would wait for the others, and then abort them all.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        from d3d_jax.processes import leave

        leave()
        os._exit(status)
    return status


def _parse(argv: Sequence[str] | None) -> Any:
    union: Any = None
    for name, (kind, _) in COMMANDS.items():
        command = Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)]
        union = command if union is None else union | command
    return tyro.cli(
        union,
        prog="d3d",
        description=_DESCRIPTION,
        args=argv,
        config=(
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.DisallowNone,
        ),
    )


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Delivers a Ctrl-C again that hit a destructor or JAX's hook of the garbage collector.

    Python reports an exception there with a traceback and drops it: the program would run on.
    """
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            report(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = report


def _say(sentence: str) -> None:
    """One line on stderr, whatever the sentence holds."""
    print(" ".join(sentence.split()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

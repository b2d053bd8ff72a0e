"""The commands and their options. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_conformance.cli.errors import CommandError, one_line
from moe_conformance.exit_status import ExitStatus
from moe_conformance.time_limits import CASE_TIMEOUT_S

PROGRAM = "moe-conformance"
DEBUG = "MOE_CONFORMANCE_DEBUG"
"""Environment variable: let an internal error end the program with its traceback."""
app = typer.Typer(
    name=PROGRAM,
    help="Decides whether mixture-of-experts kernels keep the contract for unfinalized outputs.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Names = list[str]
ProducerOption = Annotated[
    Names | None,
    typer.Option("--producer", metavar="NAME", help="producer: an installed name or module:object; repeatable"),
]
ConsumerOption = Annotated[
    Names | None,
    typer.Option("--consumer", metavar="NAME", help="consumer: an installed name or module:object; repeatable"),
]
PROFILE = typer.Option("--profile", metavar="NAME", help="smoke, core, full or model:NAME")
ProfileOption = Annotated[str, PROFILE]
SizesOption = Annotated[
    str | None, typer.Option("--tp", metavar="1,2,4,8", help="tensor-parallel sizes; default: the profile's own")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="default: cuda where there is a GPU")
]
ClauseOption = Annotated[
    Names | None, typer.Option("--clause", metavar="ID", help="only the tests of this clause; repeatable")
]
SEED = typer.Option("--seed", metavar="N", help="seed of all inputs")
SeedOption = Annotated[int, SEED]


@app.command()
def run(
    producer: ProducerOption = None,
    consumer: ConsumerOption = None,
    profile: ProfileOption = "core",
    tp: SizesOption = None,
    device: DeviceOption = None,
    clause: ClauseOption = None,
    seed: SeedOption = 0,
    workers: Annotated[
        str, typer.Option("-n", metavar="WORKERS", help="worker processes; auto: one per core, one for few cases")
    ] = "auto",
    shard: Annotated[str | None, typer.Option("--shard", metavar="I/N", help="run only part I of N")] = None,
    report: Annotated[
        str | None, typer.Option("--report", metavar="DIR", help="write report.json and junit.xml there")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="seconds that one case may take")
    ] = CASE_TIMEOUT_S,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="failures and the last line only")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="shorten nothing; show what workers wrote to stderr")
    ] = False,
) -> None:
    """Run the suite on backends and report which clauses hold.

    Without --producer and --consumer every installed backend that can run here takes part. With only one side
    named, the reference is its partner in pairs. Exit status: 0 all clauses hold for what ran, 1 a clause is broken,
    2 wrong usage or a suite error, 3 nothing ran.
    """
    from moe_conformance.cli.run import RunOptions, run_command
    from moe_conformance.cli.selection import SelectionOptions

    asked = SelectionOptions(
        tuple(producer or ()), tuple(consumer or ()), profile, tp, device, tuple(clause or ()), seed
    )
    options = RunOptions(workers, shard, report, timeout, verbosity=verbose - quiet)
    raise typer.Exit(run_command(asked, options))


@app.command("list")
def list_things(
    what: Annotated[str, typer.Argument(metavar="backends|clauses|cases|profiles|models|faults", help="what to list")],
    producer: ProducerOption = None,
    consumer: ConsumerOption = None,
    profile: Annotated[str | None, PROFILE] = None,
    tp: SizesOption = None,
    device: DeviceOption = None,
    clause: ClauseOption = None,
    seed: Annotated[int | None, SEED] = None,
) -> None:
    """List backends, clauses, cases, profiles, models or faults; the options select cases as they do for run.

    Backends take --device alone; clauses, profiles, models and faults take no option.
    """
    from moe_conformance.cli.listing import list_command
    from moe_conformance.cli.selection import SelectionOptions

    options: dict[str, Any] = {
        "--producer": producer, "--consumer": consumer, "--profile": profile, "--tp": tp, "--device": device,
        "--clause": clause, "--seed": seed,
    }  # fmt: skip
    asked = SelectionOptions(
        tuple(producer or ()), tuple(consumer or ()), "core" if profile is None else profile, tp, device,
        tuple(clause or ()), seed or 0,
    )  # fmt: skip
    list_command(what, asked, {name for name, value in options.items() if value is not None})


@app.command()
def explain(clause: Annotated[str, typer.Argument(metavar="CLAUSE", help="its id, such as MAP-4")]) -> None:
    """Say what a clause asks for, why, where to look first, and which tests check it."""
    from moe_conformance.cli.explain import explain_command

    explain_command(clause)


@app.command()
def bench(
    consumer: ConsumerOption = None,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="1,16,128", help="tokens of a call")] = None,
    hidden: Annotated[str | None, typer.Option("--hidden", metavar="7168", help="hidden sizes")] = None,
    top_k: Annotated[str | None, typer.Option("--top-k", metavar="8", help="slots of a token")] = None,
    tp: Annotated[str | None, typer.Option("--tp", metavar="1,2", help="virtual ranks of the GPU")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="bfloat16,float16", help="activation dtypes")] = None,
    mode: Annotated[str | None, typer.Option("--mode", metavar="solo,chain,join", help="how ranks are timed")] = None,
    cache: Annotated[str | None, typer.Option("--cache", metavar="cold,warm", help="what the L2 holds")] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the rows there")] = None,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="draw time against tokens (SVG)")] = None,
    source: Annotated[str | None, typer.Option("--from", metavar="FILE", help="show an earlier --json instead")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print Markdown: tables, and what became of each goal of cuda")
    ] = False,
    document: Annotated[
        str | None, typer.Option("--document", metavar="FILE", help="put that Markdown between the markers there")
    ] = None,
) -> None:
    """Time consumers side by side on one GPU; every timed result is checked in the same run.

    solo: one rank alone, its peers' contributions in place; chain: ranks run free in a graph; join: ranks meet at every
    step. cold: new data each step, 512 MiB read before each replay; warm: the same data again.
    Exit status: 0 timed and right, 1 a result was wrong, 2 wrong usage, 3 nothing was timed.
    """
    from moe_conformance.cli.bench import BenchOptions, bench_command

    options = BenchOptions(
        tuple(consumer or ()), tokens, hidden, top_k, tp, dtype, mode, cache, json, plot, source, markdown, document
    )  # fmt: skip
    raise typer.Exit(bench_command(options))


@app.command()
def faults(
    clause: ClauseOption = None,
    fault: Annotated[Names | None, typer.Option("--fault", metavar="ID", help="only this fault; repeatable")] = None,
    workers: Annotated[str, typer.Option("-n", metavar="WORKERS", help="processes; auto: one per core")] = "auto",
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the matrix there")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="stop each fault at its clause's first failure")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="the last line only")] = False,
) -> None:
    """Run the suite on planted faults and on correct variants: proof that it can fail, and blames no one wrongly.

    Exit status: 0 every fault that can run here is killed by its own clause and nothing right is blamed, 1 otherwise,
    2 wrong usage, 3 nothing ran.
    """
    from moe_conformance.cli.faults import faults_command

    status = faults_command(
        tuple(clause or ()), tuple(fault or ()), workers=workers, quick=quick, json=json, quiet=quiet
    )  # fmt: skip
    raise typer.Exit(status)


@app.command()
def doctor(
    flashinfer: Annotated[
        bool, typer.Option("--flashinfer", help="check what the backends call in the installed FlashInfer instead")
    ] = False,
) -> None:
    """Say what can run on this machine, and why the rest cannot."""
    from moe_conformance.cli.doctor import doctor_command, package_command

    if flashinfer:
        raise typer.Exit(package_command("flashinfer-python"))
    doctor_command()


def main() -> None:
    """The entry point: a mistake of the user is one line on stderr and exit status 2, never a traceback."""
    raise SystemExit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Runs one command line and returns its exit status."""
    if not arguments:
        app(["--help"], prog_name=PROGRAM, standalone_mode=False)
        return ExitStatus.UNUSABLE
    try:
        status = app(arguments, prog_name=PROGRAM, standalone_mode=False)
    except CommandError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has seen enough; closing stdout again at exit must not complain either.
        sys.stdout = None
        return 0
    except Exception as error:
        return _refuse_unexpected(error)
    return status if isinstance(status, int) else 0


def _refuse_unexpected(error: Exception) -> int:
    # typer's own usage errors: their base class moved between the versions that are supported.
    if hasattr(error, "format_message"):
        message = one_line(error.format_message())
        return _refuse(message) if message else ExitStatus.UNUSABLE
    if os.environ.get(DEBUG):
        raise error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return _refuse(f"internal error: {type(error).__name__}: {error} ({place}); {DEBUG}=1 shows the traceback")


def _refuse(message: object) -> int:
    print(f"{PROGRAM}: {one_line(message)}", file=sys.stderr)
    return ExitStatus.UNUSABLE

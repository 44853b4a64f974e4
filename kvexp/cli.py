"""The command line: Hydra composes points, a session runs and keeps them."""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from kvexp import registry, session
from kvexp.errors import ProfilerUnavailable, RequestError
from kvexp.explain import CONFIG_ERRORS, explain, is_users_mistake
from kvexp.facts import config_folders, with_model_ids
from kvexp.grammar import flags_first, keep_version_text
from kvexp.interrupt import INTERRUPTED
from kvexp.point import Point, compose_point
from kvexp.results import Result, Status

OK, SOME_NOT_OK, WRONG_REQUEST = 0, 1, 2


class Command:
    """What Hydra calls: once for a single point, or through `run_sweep` for a sweep."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.failure: Exception | None = None
        self.is_sweep = False

    def __call__(self, cfg: DictConfig) -> None:
        """Run one point; Hydra would comment on an exception, so it is kept for the caller."""
        hydra_cfg = HydraConfig.get()
        try:
            point = compose_point(
                cfg,
                overrides=list(hydra_cfg.overrides.task),
                choices=dict(hydra_cfg.runtime.choices),
                folder=Path(hydra_cfg.runtime.output_dir),
            )
            self.results.append(session.run_single(point))
        except (RequestError, ProfilerUnavailable, session.Interrupted, *CONFIG_ERRORS) as error:
            self.failure = error
            with suppress(OSError):  # Hydra made the folder; nothing is kept in it
                Path(hydra_cfg.runtime.output_dir).rmdir()

    def run_sweep(self, points: Sequence[Point], folder: Path) -> list[Result]:
        """Run all points of a sweep."""
        self.is_sweep = True
        results = session.run_sweep(points, folder)
        self.results.extend(results)
        return results


def main() -> None:
    """Run `python -m kvexp`; ends the process with its exit status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status.

    0: every point is ok. 1: some point is not. 2: the request was wrong, or the profiler cannot
    run here. 130: interrupted.
    """
    wants_trace = os.environ.get("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.showwarning = _one_line_warning
    command = Command()
    try:
        _check_text(arguments)
        arguments = flags_first(arguments)
        if "--version" in arguments:  # Hydra would tell its own
            print(f"kvexp {metadata.version('kvexp')}")
            return OK
        folders = [registry.config_dir(), *config_folders(arguments)]
        sys.argv[1:] = keep_version_text(with_model_ids(arguments, folders))
        registry.register(sys.argv[1:])
        hydra.main(
            version_base="1.3", config_path=str(registry.config_dir()), config_name="config"
        )(command)()
        sys.stdout.flush()
        if command.failure is not None:
            raise command.failure
    except (RequestError, ProfilerUnavailable) as error:
        return _say(str(error), WRONG_REQUEST)
    except BrokenPipeError:  # the reader left: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except CONFIG_ERRORS as error:
        if wants_trace or not is_users_mistake(error):
            raise
        return _say(explain(error).message, WRONG_REQUEST)
    except (session.Interrupted, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    return _status(command)


def _status(command: Command) -> int:
    """A single point that turned out invalid was a wrong request."""
    results = command.results
    if not command.is_sweep and results and results[0].status is Status.invalid:
        return _say(results[0].reason, WRONG_REQUEST)
    return OK if all(result.ok for result in results) else SOME_NOT_OK


def _check_text(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise RequestError(f"an argument is not UTF-8: {argument!r}") from None


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(message: str, status: int) -> int:
    print(f"kvexp: {' '.join(message.split())}", file=sys.stderr)
    return status


def _one_line_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"kvexp: warning: {message}", file=sys.stderr)

"""Hydra's launcher and sweeper for kvexp: compose every point first, then run them as one session.

Hydra's basic launcher ends a sweep at the first point that does not compose; here a bad value is
one invalid point, and a key that does not exist refuses the sweep before anything runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from kvexp import record, registry
from kvexp.composing import Composer
from kvexp.errors import RequestError
from kvexp.explain import CONFIG_ERRORS, explain, is_users_mistake
from kvexp.facts import with_model_ids
from kvexp.grammar import keep_version_text
from kvexp.point import Point, as_typed, compose_point


class PointLauncher(Launcher):
    """Composes all points, then hands them to the command, which runs them in order."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See Hydra's `Launcher.setup`."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """See Hydra's `Launcher.launch`.

        Raises:
            RequestError: a point asks for a key that does not exist.
        """
        setup_globals()
        loader = self.hydra_context.config_loader
        composer = Composer(lambda overrides: loader.load_sweep_config(self.config, overrides))
        points = [
            self._point(composer, index, list(overrides))
            for index, overrides in enumerate(job_overrides, start=initial_job_idx)
        ]
        folder = Path(str(self.config.hydra.sweep.dir)).resolve()
        results = self.task_function.run_sweep(points, folder)  # type: ignore[attr-defined]
        returns = []
        for result in results:
            returned = JobReturn(status=JobStatus.COMPLETED)
            returned.return_value = result
            returns.append(returned)
        return returns

    def _point(self, composer: Composer, index: int, overrides: list[str]) -> Point:
        sweep_dir = Path(str(self.config.hydra.sweep.dir)).resolve()
        try:
            cfg = composer.compose(overrides)
        except CONFIG_ERRORS as error:
            if not is_users_mistake(error):
                raise
            problem = explain(error)
            if problem.is_request:
                raise RequestError(problem.message) from None
            only = as_typed(overrides)
            return Point(overrides=only, folder=sweep_dir / str(index), problem=problem.message)
        with open_dict(cfg):
            cfg.hydra.job.id = str(index)
            cfg.hydra.job.num = index
        HydraConfig.instance().set_config(cfg)
        subdir = str(OmegaConf.select(cfg, "hydra.sweep.subdir"))
        choices = dict(cfg.hydra.runtime.choices)
        with open_dict(cfg):
            del cfg["hydra"]
        return compose_point(cfg, overrides=overrides, choices=choices, folder=sweep_dir / subdir)


class PointSweeper(BasicSweeper):
    """Hydra's product of all lists; composition is left to the launcher."""

    def sweep(self, arguments: list[str]) -> Any:
        """See Hydra's `Sweeper.sweep`; a folder that holds a sweep is never used again."""
        assert self.config is not None
        for argument in arguments:
            group = argument.partition("=")[0]
            if group in ("sweep", "experiment") and "," in argument:
                raise RequestError(f"{group} takes one preset, got {argument}")
        folder = record.new_folder(Path(str(self.config.hydra.sweep.dir)), holds="multirun.yaml")
        with read_write(self.config):
            self.config.hydra.sweep.dir = str(folder)
        return super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """The launcher says which points are invalid."""

    def _parse_config(self) -> list[str]:
        """The presets' lists; a YAML list and null mean what they would mean on the line."""
        lists = [f"{key}={_line(value)}" for key, value in self.params.items()]
        return keep_version_text(with_model_ids(lists, [registry.config_dir()]))


def _line(value: object) -> str:
    if isinstance(value, ListConfig):
        return ",".join(_line(item) for item in value)
    return "null" if value is None else str(value)


@dataclass
class LauncherConf:
    """Node of hydra/launcher=kvexp."""

    _target_: str = "hydra_plugins.kvexp_points.PointLauncher"


@dataclass
class SweeperConf:
    """Node of hydra/sweeper=kvexp."""

    _target_: str = "hydra_plugins.kvexp_points.PointSweeper"
    max_batch_size: int | None = None
    params: dict[str, Any] | None = None


_store = ConfigStore.instance()
_store.store(group="hydra/launcher", name="kvexp", node=LauncherConf, provider="kvexp")
_store.store(group="hydra/sweeper", name="kvexp", node=SweeperConf, provider="kvexp")

"""The suites that every plugin must pass: ours and third parties'.

Subclass one in your plugin's tests and name the entry point:

    @pytest.mark.parametrize("name", ["rocm_smi"])
    class TestRocmSmi(ProfilerConformance): ...

In your conftest.py, `pytest.register_assert_rewrite("kvexp.testing")` makes failures readable.
"""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest
from hydra.errors import HydraException

from kvexp import api, registry
from kvexp.deployment import Deployment
from kvexp.engine import CachePlan, Engine
from kvexp.errors import ProfilerUnavailable
from kvexp.point import Point
from kvexp.results import Profile, Provenance, Refusal
from kvexp.schema import Run
from kvexp.units import GIB

HEAVY = ("torch", "transformers", "mlflow", "pynvml", "matplotlib", "pandas")
"""Modules that importing a plugin must not load."""

SMALL = ("model=llama32_1b", "gpu=h200", "max_model_len=2048", "max_num_seqs=16")
"""A point that is small enough for every engine and card."""


class PluginConformance:
    """What the registry relies on, for every kind of plugin. `group` is set by the subclass."""

    group = ""

    @pytest.fixture
    def plugin(self, name: str) -> registry.Plugin:
        """The registered plugin of that name."""
        found = [plugin for plugin in registry.plugins(self.group) if plugin.name == name]
        assert len(found) == 1, f"{self.group}={name} is not registered; reinstall the package"
        return found[0]

    @pytest.fixture
    def point(self, name: str) -> Point:
        """A small point with this plugin."""
        return api.compose_points([*SMALL, f"{self.group}={name}"])[0]

    def test_name_is_a_snake_case_word(self, plugin: registry.Plugin) -> None:
        """The entry-point name is typed on the command line."""
        assert re.fullmatch(r"[a-z][a-z0-9_]*", plugin.name), plugin.name

    def test_is_a_documented_dataclass_with_defaults(self, plugin: registry.Plugin) -> None:
        """`group=name` works alone, and a reader can look up what it is."""
        cls = plugin.cls
        assert issubclass(cls, registry.GROUPS[self.group])
        params = vars(cls).get("__dataclass_params__")
        assert params, f"decorate {cls.__name__} with @dataclass"
        assert not params.frozen, "Hydra cannot write options into a frozen dataclass"
        assert cls.__doc__, f"{cls.__name__} needs a docstring"
        assert not cls.__doc__.startswith(f"{cls.__name__}("), f"{cls.__name__} needs a docstring"
        assert cls() == cls(), "every option needs a default"

    def test_import_is_light(self, plugin: registry.Plugin) -> None:
        """Every command imports every plugin."""
        module = plugin.cls.__module__
        code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
        heavy = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
        assert heavy == "[]", f"import {heavy} inside the methods that use it"

    def test_composes_to_its_own_class(self, plugin: registry.Plugin, point: Point) -> None:
        """Hydra turns `group=name` into the plugin object."""
        assert type(getattr(_run(point), self.group)) is plugin.cls

    def test_refuses_an_unknown_option(self, plugin: registry.Plugin) -> None:
        """A misspelt option is named, not ignored."""
        with pytest.raises((HydraException, ValueError), match="no_such_option"):
            api.compose_points([f"{self.group}={plugin.name}", f"{self.group}.no_such_option=1"])

    def test_pickles(self, plugin: registry.Plugin) -> None:
        """Points are sent to other processes."""
        instance = plugin.cls()
        assert pickle.loads(pickle.dumps(instance)) == instance


class ProfilerConformance(PluginConformance):
    """What the pipeline relies on in a profiler."""

    group = "profiler"

    def test_unavailable_says_so_in_one_line(self, plugin: registry.Plugin) -> None:
        """Where it cannot run, it says what is missing before anything is loaded."""
        try:
            plugin.cls().check()
        except ProfilerUnavailable as reason:
            assert str(reason).strip(), "say what is missing"
            assert "\n" not in str(reason)

    def test_profiles_every_rank_in_whole_bytes(self, point: Point) -> None:
        """One profile a rank, integers, each with provenance and a reason."""
        run, deployment = _available(point)
        with closing(run.profiler.open(deployment, run.engine)) as measurement:
            measurement.start()
            measurement.load()
            profiles = measurement.warmup()
            assert len(profiles) == deployment.num_ranks
            for profile in profiles:
                _check_profile(profile)
            plan = run.engine.plan(
                deployment,
                [run.engine.quota(deployment, p).available_bytes for p in profiles],
            )
            assert isinstance(plan, CachePlan)
            assert measurement.allocate(plan) in (
                None,
                plan.num_blocks * plan.block_bytes_per_rank[0],
            )
            json.dumps(dict(measurement.readings()))

    def test_closes_at_any_stage(self, point: Point) -> None:
        """A measurement that never started closes quietly, and so does one closed twice."""
        run, deployment = _available(point)
        measurement = run.profiler.open(deployment, run.engine)
        measurement.close()
        measurement.close()

    def test_weights_repeat(self, point: Point) -> None:
        """A second measurement of the same object starts from zero."""
        run, deployment = _available(point)
        seen = set()
        for _ in range(2):
            with closing(run.profiler.open(deployment, run.engine)) as measurement:
                measurement.start()
                measurement.load()
                seen.add(measurement.warmup()[0].weights_bytes)
        assert len(seen) == 1


class EngineConformance(PluginConformance):
    """What the pipeline relies on in an engine."""

    group = "engine"

    @pytest.fixture
    def engine(self, point: Point) -> Engine:
        """The engine with its defaults."""
        return _run(point).engine

    @pytest.fixture
    def deployment(self, point: Point, name: str) -> Deployment:
        """The small point with every value decided."""
        run = _run(point)
        return run.engine.resolve(run, name)

    def test_decides_every_value(self, point: Point, name: str) -> None:
        """Nothing that can be null in a request is null afterwards, and it repeats."""
        run = _run(point)
        deployment = run.engine.resolve(run, name)
        undecided = [k for k, v in deployment.effective().items() if v is None]
        assert undecided in ([], ["quantization"])
        assert run.engine.resolve(run, name) == deployment

    def test_keeps_what_was_asked_for(self, name: str) -> None:
        """A given value is used as it is."""
        asked = ["util=0.5", "max_num_seqs=8", "max_model_len=1024"]
        point = api.compose_points([*SMALL, f"engine={name}", *asked])[0]
        run = _run(point)
        deployment = run.engine.resolve(run, name)
        assert (deployment.util, deployment.max_num_seqs) == (0.5, 8)
        assert deployment.max_model_len == 1024

    def test_flags_are_one_line(self, engine: Engine, deployment: Deployment) -> None:
        """What is pasted is one line and stands in the deployment, where there is any."""
        flags = engine.flags(deployment)
        assert "\n" not in flags
        assert deployment.flags == flags

    def test_ranks_hold_every_layer(self, engine: Engine, deployment: Deployment) -> None:
        """Ranks are numbered in order and together hold the model."""
        shapes = engine.ranks(deployment)
        assert [shape.rank for shape in shapes] == list(range(deployment.num_ranks))
        held = {n for s in shapes for n in range(s.first_layer, s.first_layer + s.num_layers)}
        assert held == set(range(deployment.model.num_hidden_layers))

    def test_predicts_every_term(self, engine: Engine, deployment: Deployment) -> None:
        """Whole bytes, each with provenance and a reason."""
        for profile in _predicted(engine, deployment):
            _check_profile(profile)
            assert profile.weights_bytes > 0

    def test_quota_sums_to_the_request(self, engine: Engine, deployment: Deployment) -> None:
        """Parts and what is available add up to the byte, at any utilisation."""
        profile = _predicted(engine, deployment)[0]
        for util in (0.01, 0.3, 0.9, 1.0):
            quota = engine.quota(replace(deployment, util=util), profile)
            taken = sum(part.size_bytes for part in quota.parts)
            assert taken + quota.available_bytes == quota.requested_bytes

    def test_plan_stays_inside_what_is_available(
        self, engine: Engine, deployment: Deployment
    ) -> None:
        """Blocks never exceed the bytes, and more bytes never give fewer blocks."""
        before = 0
        for available in (2 * GIB, 3 * GIB + 1, 20 * GIB, 100 * GIB):
            plan = engine.plan(deployment, [available] * deployment.num_ranks)
            assert isinstance(plan, CachePlan), plan
            for block_bytes in plan.block_bytes_per_rank:
                assert plan.num_blocks * block_bytes <= available
            assert plan.num_blocks >= before
            assert plan.kv_tokens > 0
            assert plan.max_concurrency > 0
            before = plan.num_blocks

    def test_refuses_when_nothing_is_left(self, engine: Engine, deployment: Deployment) -> None:
        """A refusal carries the figures and one line."""
        for available in (-GIB, 0):
            refusal = engine.plan(deployment, [available] * deployment.num_ranks)
            assert isinstance(refusal, Refusal)
            assert refusal.message
            assert "\n" not in refusal.message
            assert refusal.available_bytes == available

    def test_log_lines_are_lines(self, engine: Engine, deployment: Deployment) -> None:
        """Each is one line of text."""
        plan = engine.plan(deployment, [20 * GIB] * deployment.num_ranks)
        assert isinstance(plan, CachePlan)
        lines = engine.log_lines(deployment, plan)
        assert lines
        assert all(line.strip() and "\n" not in line for line in lines)


def _run(point: Point) -> Run:
    assert point.run is not None, point.problem
    return point.run


def _available(point: Point) -> tuple[Run, Deployment]:
    run = _run(point)
    try:
        run.profiler.check()
    except ProfilerUnavailable as reason:
        pytest.skip(str(reason))
    return run, run.engine.resolve(run, point.engine)


def _predicted(engine: Engine, deployment: Deployment) -> Sequence[Profile]:
    return [
        Profile(
            weights=engine.predict_weights(deployment, shape),
            activation=engine.predict_activation(deployment, shape),
            non_torch=engine.predict_non_torch(deployment, shape),
            cudagraph=engine.predict_cudagraph(deployment, shape),
        )
        for shape in engine.ranks(deployment)
    ]


def _check_profile(profile: Profile) -> None:
    for part in profile.parts:
        assert type(part.size_bytes) is int
        assert isinstance(part.provenance, Provenance)
        assert part.reason.strip()
        assert "\n" not in part.reason

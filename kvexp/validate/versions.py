"""The release that a log's text means: `0.8.5.dev (V1)`, `0.9.x (V0, ROCm)`, `0.11-0.14`."""

import re
from dataclasses import dataclass

_RELEASE = re.compile(r"(?<![\d.])v?(\d+)\.(\d+)(?:\.(\d+)(rc\d+)?(?:\.dev(\d+))?)?(?![\dx])")
_ENGINE = re.compile(r"\bv([01])\b", re.IGNORECASE)
_NOTE = re.compile(r"\(.*?\)|\+\S*")
"""What names no release: a note, and a build's own label as in `0.13.0+faa43dbf.nv26.01`."""
_EARLY = 100
"""Up to how many commits after a release a build is like it: vLLM makes hundreds between two."""
_DEVELOPMENT = (0, 1)  # what a checkout without tags calls itself
_OLDEST = {"vllm": (0, 5)}

V1_SINCE, V0_UNTIL = (0, 8), (0, 10)
V1_CAPABILITY = 8.0
V1_LEAST, LAST_V0 = 7.5, "0.10.1-v0"
"""The least compute capability of releases without the V0 engine, and the last one with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A version as an engine plugin takes it; None for the plugin's own default."""

    text: str | None
    assumptions: tuple[str, ...] = ()


def find(engine: str, text: str | None, capability: float | None) -> Version:
    """The version of an engine; of a range the last one.

    vLLM 0.8 to 0.10 ran its V0 engine on cards below compute capability 8.0, and where the text
    says so; the V1 engine of older releases counts as that of 0.8. Where no release is named, a
    card below 7.5 ran the V0 engine.
    """
    releases = _releases(text or "")
    if not text and engine == "vllm" and capability is not None and capability < V1_LEAST:
        what = f"the V0 engine's for compute capability {capability:.1f}, which V1 does not run on"
        return Version(text=LAST_V0, assumptions=(f"engine_version: {what}",))
    if not releases:
        why = f"{text!r} names no release" if text else "not known"
        return Version(text=None, assumptions=(f"engine_version: {why}, kvexp's default instead",))
    release = releases[-1]
    numbers = ".".join(str(each) for each in release)
    notes = [f"engine_version: {numbers} of {text!r}"] if len(releases) > 1 else []
    oldest = _OLDEST.get(engine)
    if oldest is not None and release[:2] < oldest:
        notes.append(f"engine_version: the rules of {oldest[0]}.{oldest[1]} for {numbers}")
        numbers = ".".join(str(each) for each in (*oldest, 0))
    said = _ENGINE.search(text or "")
    if engine == "vllm" and _is_v0(release, said, capability):
        numbers += "-v0"
    elif engine == "vllm" and said is not None and said[1] == "1" and release[:2] < V1_SINCE:
        notes.append(f"engine_version: the V1 rules of 0.8 for {numbers}")
        numbers = "0.8.0"
    return Version(text=numbers, assumptions=tuple(notes))


def first_patch(engine: str, text: str | None) -> str | None:
    """The first patch of a release of vLLM that a text gives two numbers of, which means the last.

    None where the patch is stated, or the engine is another one.
    """
    releases = _releases(text or "")
    if engine.lower() != "vllm" or not releases or len(releases[-1]) > 2:
        return None
    said = _ENGINE.search(text or "")
    numbers = ".".join(str(each) for each in releases[-1])
    return f"{numbers}.0" + (f" ({said[0]})" if said is not None else "")


def release_of(text: str) -> tuple[int, ...]:
    """The last release that a text names, nothing where it names none."""
    found = _releases(text)
    return found[-1] if found else ()


def family(engine: str, text: str | None) -> str:
    """The release to two numbers, `V0` for all of vLLM's older engine, `unknown` without one."""
    found = _releases(text or "")
    if not found:
        return "unknown"
    if engine == "vllm" and is_v0(text or ""):
        return "V0"
    return ".".join(str(each) for each in found[-1][:2])


def is_v0(text: str) -> bool:
    """Whether a version's text means vLLM's V0 engine."""
    found, said = _releases(text), _ENGINE.search(text)
    if not found:
        return False
    older = found[-1][:2] < V1_SINCE and not (said is not None and said[1] == "1")
    return older or _is_v0(found[-1], said, None)


def _releases(text: str) -> list[tuple[int, ...]]:
    named = _NOTE.sub(" ", text)
    if "fork" in named:
        return []  # it counts its own releases
    found = [_built_from(match) for match in _RELEASE.finditer(named)]
    return [release for release in found if release[:2] != _DEVELOPMENT]


def _built_from(match: re.Match[str]) -> tuple[int, ...]:
    """A release; of a build a few commits after one (0.20.1rc1.dev16: 0.20.0) that one."""
    numbers = tuple(int(each) for each in match.groups()[:3] if each)
    if (match[4] is None and match[5] is None) or numbers[2] == 0:
        return numbers
    is_early = int(match[5] or 0) < _EARLY
    return (*numbers[:2], numbers[2] - 1) if is_early else numbers


def _is_v0(release: tuple[int, ...], said: re.Match[str] | None, capability: float | None) -> bool:
    if not V1_SINCE <= release[:2] <= V0_UNTIL:
        return False
    if said is not None:
        return said[1] == "0"
    return capability is not None and capability < V1_CAPABILITY

"""Rules across sections, checked by ``pipeline.config.schema``: sampling, length limits, and runs of
recorded responses.

The learner divides all logits by the temperature (``RunConfig.training_temperature``) and does
nothing else to the distribution. So training may set the temperature; the other settings of the
distribution are for evaluation only."""

from __future__ import annotations

from typing import Final

from pipeline.config.data_sets import SHAPING, EvaluationSection
from pipeline.config.import_path import is_import_path
from pipeline.config.learning import AlgorithmSection, Importance, Proximal, Rejection, SampledSettings
from pipeline.config.rewards import EnvironmentSection
from pipeline.config.runtime import GenerationSection
from pipeline.config.training import DataSection, RewardSection, StalenessSection

_LEAST_OF_VLLM: Final = 0.01
"""vLLM raises any lower temperature except 0 to this."""


def check_sampling(generation: GenerationSection, evaluation: EvaluationSection) -> None:
    """Raise ValueError for sampling settings that the learner's log-probs do not model, or that
    vLLM would change."""
    for name, off in SHAPING.items():
        given = getattr(generation, name)
        if given == off:
            continue
        if name.endswith("penalty"):
            what = "a distribution that depends on how often each token came"
            why = "The learner's log-probs do not depend on it"
        else:
            what = "a truncated distribution"
            why = "The learner computes log-probs of the whole distribution"
        raise ValueError(
            f"generation.{name} is {given:g}, {what}; expected {off} in training. {why}, so its ratios would be wrong. "
            f"Leave it at {off}; evaluation.{name} may be set"
        )
    if generation.engine == "vllm":
        temperatures = {"generation": generation.temperature} | {
            what: one.temperature for what, one in evaluation.named()
        }
        for what, temperature in temperatures.items():
            if 0.0 < temperature < _LEAST_OF_VLLM:
                raise ValueError(
                    f"{what}.temperature is {temperature:g}, but vLLM would sample at {_LEAST_OF_VLLM}; expected at least "
                    f"{_LEAST_OF_VLLM}{', or 0 (greedy)' if what != 'generation' else ''}: raise it"
                )


def check_limits(generation: GenerationSection, data: DataSection, evaluation: EvaluationSection) -> None:
    """Raise ValueError for a set whose responses may be longer than the run's."""
    limits = {what: one.max_response_tokens for what, one in evaluation.named()}
    limits |= {f"data.sets {one.name}": one.max_response_tokens for one in data.sets}
    for what, limit in limits.items():
        if limit is not None and limit > generation.max_response_tokens:
            raise ValueError(
                f"{what}.max_response_tokens is {limit}, above generation.max_response_tokens "
                f"{generation.max_response_tokens}, for which engines and ledger are sized; lower it, or raise "
                "generation.max_response_tokens"
            )


def check_punishment(reward: RewardSection, data: DataSection) -> None:
    """Raise ValueError for a data set with its own length limit if the soft over-long penalty is
    on, since the penalty is relative to the run's limit."""
    for one in data.sets:
        if one.max_response_tokens is not None and "soft" in reward.overlong:
            raise ValueError(
                f"data.sets {one.name}.max_response_tokens is {one.max_response_tokens}, and reward.overlong is "
                f"{reward.overlong}, which punishes relative to generation.max_response_tokens in every set; remove "
                f"the set's limit, or set reward.overlong to filter or none"
            )


def check_recorded(data: DataSection, algorithm: AlgorithmSection, staleness: StalenessSection) -> None:
    """Raise ValueError for settings that do not work with recorded responses."""
    if not data.responses:
        return
    if algorithm.group_size != 1:
        raise ValueError(
            f"algorithm.group_size is {algorithm.group_size}, but a line of data.responses is one response, compared with "
            "no others; set algorithm.group_size to 1"
        )
    if isinstance(algorithm, SampledSettings):
        reading = {
            "importance": algorithm.importance is not Importance.NONE,
            "rejection": algorithm.rejection is not Rejection.NONE,
            "proximal": algorithm.proximal is not Proximal.RECOMPUTE,
        }
        for name in (name for name, reads in reading.items() if reads):
            expected = "recompute" if name == "proximal" else "none"
            raise ValueError(
                f"algorithm.{name} is {getattr(algorithm, name)}, which reads the sampling policy's log-probs, but these are "
                f"unknown for data.responses; set algorithm.{name} to {expected}"
            )
    if staleness.late != "wait":
        raise ValueError(
            f"staleness.late is {staleness.late}, which drops responses that wait too long, but a recorded response does not "
            "age; set staleness.late to wait"
        )


BUILT_IN_TOOLS: Final = ("calculator", "python", "search")
TOOLS: Final = "tools"
"""The environment that only has tools."""
BUILT_IN_ENVIRONMENTS: Final = (TOOLS, "gymnasium", "textarena", "verifiers", "verifiers-v0")
TOOL_TIMEOUT_S: Final = 20.0
SEARCH: Final = "search:"
"""Begins the name of a tool; the folder follows."""


def check_environment(
    environment: EnvironmentSection,
    generation: GenerationSection,
    data: DataSection,
    evaluation: EvaluationSection,
    *,
    needs_guidance: bool,
) -> None:
    """Raise ValueError for an environment that cannot exist, and for settings that do not work with one."""
    if environment.agent and environment.path:
        raise ValueError(
            f"environment.path is {environment.path!r} and environment.agent {environment.agent!r}; set one of them: an agent "
            "is an environment of its own"
        )
    if environment.agent and not is_import_path(environment.agent):
        raise ValueError(
            f"environment.agent is {environment.agent!r}; expected your function as package.module:function"
        )
    if environment.agent and "run" in environment.arguments:
        raise ValueError("environment.arguments has run, which names the agent itself; give the argument another name")
    if environment.agent and environment.tools:
        raise ValueError("environment.tools is set, but an agent brings its own tools; remove it")
    if not environment.agent and environment.path not in BUILT_IN_ENVIRONMENTS and not is_import_path(environment.path):
        raise ValueError(
            f"environment.path is {environment.path!r}; expected {', '.join(BUILT_IN_ENVIRONMENTS)}, or your class as "
            "package.module:Class"
        )
    for tool in environment.tools:
        if tool.partition(":")[0] not in BUILT_IN_TOOLS and not is_import_path(tool):
            raise ValueError(
                f"environment.tools has {tool!r}; expected {', '.join(BUILT_IN_TOOLS)}, or your function as "
                "package.module:function"
            )
    if environment.path == TOOLS and not environment.tools:
        raise ValueError(f"environment.path is {TOOLS}, but environment.tools is empty; name a tool")
    tool_s = environment.arguments.get("tool_timeout_s", TOOL_TIMEOUT_S)
    if environment.path == TOOLS and isinstance(tool_s, int | float) and tool_s >= environment.timeout_s:
        raise ValueError(
            f"environment.timeout_s is {environment.timeout_s:g}, and a tool may take {tool_s:g} s "
            "(environment.arguments.tool_timeout_s), so the turn would be given up before the model is told that its tool "
            "is late; raise environment.timeout_s above that, or lower tool_timeout_s"
        )
    if needs_guidance:
        raise ValueError(
            "guidance is about a single answer, and there is an environment; choose an algorithm without guidance"
        )
    if data.responses:
        raise ValueError("data.responses are recorded answers, which no environment answers; remove the environment")
    if generation.stop_strings:
        raise ValueError(
            f"generation.stop_strings is {list(generation.stop_strings)}, but with an environment a turn ends where the chat "
            "template ends it; remove the stop strings"
        )
    own = [f"data.sets {one.name}" for one in data.sets if one.max_response_tokens is not None]
    own += [what for what, one in evaluation.named() if one.max_response_tokens is not None]
    if own:
        raise ValueError(
            f"{own[0]}.max_response_tokens is set, but an environment knows one limit of the context, "
            "generation.max_response_tokens; remove the set's"
        )

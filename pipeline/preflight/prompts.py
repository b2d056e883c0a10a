"""What the model reads: the form of the prompts, the first of them, and the tokens and strings that
end a response."""

from __future__ import annotations

from typing import Final

from pipeline.config.schema import RunConfig
from pipeline.data.end_tokens import end_tokens
from pipeline.data.prompt_form import Form
from pipeline.data.report import DataReport
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import TextTokenizer
from pipeline.preflight.findings import CheckFinding, fine, warn
from protocol.errors import ConfigError
from protocol.trajectory import Prompt

PROMPTS: Final = "prompts"
_SHOWN_CHARS: Final = 800


def check_prompts(config: RunConfig, source: PromptSource, tokenizer: TextTokenizer) -> list[CheckFinding]:
    """Return findings about the form of prompts, the first of them, and the end tokens. Raises
    ConfigError or DataError for an end token outside the vocabulary."""
    if config.has_environment:
        what = f"{config.environment.name} begins each conversation from its row: `headrace try` shows what the model reads"
        found = [fine(PROMPTS, what)]
    else:
        found = _forms("training", source.report, source.at(0), tokenizer)
        if source.num_evaluation_prompts:
            found += _forms("evaluation", source.evaluation_report, source.evaluation_at(0), tokenizer)
    ends = end_tokens(config.model.path, tokenizer, config.generation.stop_token_ids)
    if ends:
        named = ", ".join(f"{tokenizer.decode([end], skip_special_tokens=False)!r} ({end})" for end in ends)
        return [*found, fine("end tokens", f"a response ends with {named}")]
    # responses may end by text alone
    limit = config.generation.max_response_tokens
    if config.generation.stop_strings:
        return [*found, fine("end tokens", "no token ends a response, generation.stop_strings do")]
    what = f"tokenizer, model and chat template name no end token, so every response has {limit} tokens"
    return [*found, warn("end tokens", what, "a token that ends it", "set generation.stop_token_ids or stop_strings")]


def _forms(what: str, report: DataReport, first: Prompt, tokenizer: TextTokenizer) -> list[CheckFinding]:
    forms = "; ".join(f"{count} are {form}" for form, count in report.forms.items())
    shown = tokenizer.decode(first.tokens.tolist(), skip_special_tokens=False)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[: _SHOWN_CHARS // 2]} ... {shown[-_SHOWN_CHARS // 2 :]}"
    told = f"{what} prompts: {forms}; the model reads {first.prompt_id} as {shown!r}"
    is_bypassed = tokenizer.has_chat_template and Form.TEXT in report.forms
    unless = "; the tokenizer has a chat template, which data.chat = true uses" if is_bypassed else ""
    return [fine(PROMPTS, told + unless)]


def check_stop_strings(config: RunConfig, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError for a stop string that no response can contain: a part of it is a special
    token, which is not text, or the tokenizer writes it differently."""
    given = {"generation": config.generation.stop_strings}
    given |= {what: one.stop_strings or () for what, one in config.evaluation.named()}
    given |= {f"data.sets {one.name}": one.stop_strings or () for one in config.data.sets}
    for what, strings in given.items():
        for stop in strings:
            for special, token in tokenizer.special_ids.items():
                if special in stop:
                    raise ConfigError(
                        f"{what}.stop_strings has {stop!r}, but {special!r} is the special token {token}, and a response's "
                        f"text has no special tokens; expected characters of the text: set generation.stop_token_ids = "
                        f"[{token}]"
                    )
            if not any(stop in _written(tokenizer, text) for text in (stop, f"a{stop}", f"a {stop} a")):
                raise ConfigError(
                    f"{what}.stop_strings has {stop!r}, which {config.model.path}'s tokenizer writes as "
                    f"{_written(tokenizer, stop)!r}; expected a text that it can write, since no response would hold this "
                    "one: correct it"
                )


def _written(tokenizer: TextTokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))

"""Whether the run's tokenizer can write the stop strings of a configuration."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from pipeline.data.tokenizer import TextTokenizer
from protocol.errors import ConfigError


def check_stop_strings(config: RunConfig, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError for a stop string that no response can hold.

    A part of it is a special token, which is no text, or the tokenizer writes it otherwise."""
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

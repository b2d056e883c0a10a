"""The configuration of a small DAPO run: a real tiny model, the local engine, even sums."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.config.learning import algorithm_settings
from pipeline.config.runtime import GenerationSection, RunSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from tests.byte_tokenizer import NUM_TOKENS, write_byte_tokenizer
from tests.workers.engines.tiny import tiny_model


def small_run(folder: Path) -> RunConfig:
    model = folder / "model"
    tiny_model(vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1).save_pretrained(model)
    write_byte_tokenizer(model)
    data = folder / "train.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        run=RunSection(name="walk", dir=folder, num_updates=1),
        model=ModelSection(path=model),
        data=DataSection(train=(data,), verifier="tests.even_sum:is_even"),
        algorithm=algorithm_settings(group_size=4, groups_per_update=2, num_minibatches=1),
        generation=GenerationSection(window_tokens=4, max_response_tokens=8),
    )

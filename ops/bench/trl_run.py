"""TRL's GRPO trainer on a run file's model, prompts and reward: the contender of ``ops.bench.against_trl``.

    python -m ops.bench.trl_run configs/smollm2.toml --seed 0 --out trl.jsonl

Sampling, rewards, batches and optimiser are the trainer's own. Weights are float32 and compute is bfloat16, as a run
with ``model.dtype = "bfloat16"`` does. Writes a line a logged step, and one for every evaluation: the seconds since
this process began, without those that evaluations took, and the greedy accuracy on held-out prompts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.rewards.arithmetic import verify
from pipeline.rewards.verifier import Response, Verdict

_BEGAN = psutil.Process().create_time()


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": row["messages"], "answer": row["answer"]} for row in rows]


def _accuracy(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """The run's verifier as a reward function of TRL."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    responses = [
        Response(response_text=text, answer=right, verifier="arithmetic")
        for text, right in zip(texts, answer, strict=True)
    ]
    return [outcome.accuracy for outcome in verify(responses) if isinstance(outcome, Verdict)]


class _Recorder(TrainerCallback):
    """Evaluates before the first step and every ``every`` steps, with the clock stopped."""

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig, options: argparse.Namespace) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._every, self._until, self._out = options.every, options.until, options.out
        self._rows = _rows(Path(config.data.evaluation[0]))
        self._limit = config.generation.max_response_tokens
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16")
        self._paused_s = 0.0

    def write(self, **row: object) -> None:
        seconds = time.time() - _BEGAN - self._paused_s
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seconds": round(seconds, 2), **row}) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._every == 0:
            control.should_training_stop |= self._evaluate(state.global_step) >= self._until

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.write(kind="step", update=state.global_step, logs=given["logs"])

    @torch.no_grad()
    def _evaluate(self, update: int) -> float:
        started = time.monotonic()
        prompts = [
            self._tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            for row in self._rows
        ]
        inputs = self._tokenizer(
            prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        training = self._model.training
        with self._autocast:
            tokens = self._model.eval().generate(**inputs, do_sample=False, max_new_tokens=self._limit)
        self._model.train(training)
        texts = self._tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right = _accuracy(texts, [row["answer"] for row in self._rows])
        self._paused_s += time.monotonic() - started
        accuracy = sum(right) / len(right)
        self.write(kind="evaluation", update=update, accuracy=accuracy)
        return accuracy


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.bench.trl_run", description="Train by TRL's GRPO trainer.")
    parser.add_argument("config", type=Path, help="a run file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, help="default: as in the run file")
    parser.add_argument("--every", type=int, default=4, help="updates between evaluations (default: %(default)s)")
    parser.add_argument("--until", type=float, default=1.0, help="end at this held-out accuracy (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=32, help="responses (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of the computation")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config = load_config([options.config])
    updates = options.updates or config.run.num_updates
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    algorithm, learner, sampling = config.algorithm, config.learner, config.generation
    responses = algorithm.group_size * algorithm.groups_per_update
    recorder = _Recorder(model, tokenizer, config, options)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_accuracy,
        args=GRPOConfig(
            output_dir=f"{options.out}.trainer",
            use_cpu=True,
            bf16=options.dtype == "bfloat16",
            seed=options.seed,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            max_steps=updates,
            num_generations=algorithm.group_size,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=responses // options.micro_batch,
            max_completion_length=sampling.max_response_tokens,
            temperature=sampling.temperature,
            loss_type="grpo",
            scale_rewards="group",
            beta=0.0,
            epsilon=0.2,
            learning_rate=learner.learning_rate,
            lr_scheduler_type="linear",
            weight_decay=0.0,
            max_grad_norm=learner.max_grad_norm,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(_rows(Path(config.data.train[0]))),
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    recorder.write(kind="ready")
    trainer.train()


if __name__ == "__main__":
    main()

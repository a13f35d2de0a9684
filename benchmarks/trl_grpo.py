"""GRPO by TRL, as a program for TRL's own environment: `peer.py` starts it with a JSON object of settings.

Prints one line of JSON a step: its number, seconds from the end of the step before, of these in generation and in
log-probabilities without gradient, response tokens, and mean reward.
"""

import importlib.util
import json
import sys
import time
from contextlib import contextmanager

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """TRL's trainer with a clock in its hands."""

    def __init__(self, *args, **kwargs) -> None:
        self.seconds = dict.fromkeys(("generation", "logprob"), 0.0)
        super().__init__(*args, **kwargs)

    @contextmanager
    def timed(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def _generate(self, *args, **kwargs):
        with self.timed("generation"):
            return super()._generate(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.timed("logprob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class Reporter(TrainerCallback):
    """Prints a line when a step's metrics are there."""

    def __init__(self, responses: int) -> None:
        self.responses = responses
        self.last = time.perf_counter()
        self.trainer: TimedTrainer | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "completions/mean_length" not in logs:
            return
        now, trainer = time.perf_counter(), self.trainer
        line = {"step": state.global_step, "seconds": now - self.last, **trainer.seconds}
        line |= {"tokens": logs["completions/mean_length"] * self.responses, "reward": logs["reward"]}
        print(json.dumps(line), flush=True)
        self.last = now
        trainer.seconds = dict.fromkeys(trainer.seconds, 0.0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    spec = importlib.util.spec_from_file_location("rules", settings["rules"])
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)

    def digit_share(prompts, completions, **_):
        return rules.digit_share(prompts, completions)

    config = GRPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["responses"],
        num_generations=settings["samples"],
        max_completion_length=settings["max_response"],
        max_steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        beta=settings["beta"],
        epsilon=settings["clip"],
        use_bias_correction_kl=False,
        temperature=1.0,
        top_k=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=settings["seed"],
        disable_tqdm=True,
    )
    reporter = Reporter(settings["responses"])
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=digit_share,
        args=config,
        train_dataset=load_dataset("json", data_files=settings["prompts"], split="train"),
        processing_class=PreTrainedTokenizerFast.from_pretrained(settings["model"], padding_side="left"),
        callbacks=[reporter],
    )
    reporter.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()

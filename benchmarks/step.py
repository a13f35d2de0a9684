"""Whole steps of GRPO, beside TRL's with its default generation: trained tokens a second, and where the time goes.

Both start from the same random model of 31.5 million parameters in float32 and take the same prompts, temperature,
reward, batch and one optimizer step a batch. Responses end at the end-of-sequence token, which a random model draws
once in 98 tokens, or at the limit: lengths vary as in practice. The two run in turn; the first step of each run is
left out. Tokens are those of responses up to their end.

    python benchmarks/step.py [--rounds 2] [--steps 3]
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peer import Step, Task, our_steps, trl_steps

MODEL = {
    "architecture": "qwen2",
    "config": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
    },
}
PHASES = ("generation", "logprob", "update", "sync", "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a run")
    parser.add_argument("--prompts", type=int, default=6, help="prompts a step, with 8 responses each")
    parser.add_argument("--max-response", type=int, default=128, help="tokens")
    options = parser.parse_args()
    rounds: list[dict[str, list[Step]]] = []
    for seed in range(options.rounds):
        task = Task(MODEL, options.steps + 1, options.prompts, 8, options.max_response, 1e-5, seed)
        with tempfile.TemporaryDirectory() as folder:
            rounds.append({"TRL": trl_steps(task, Path(folder))[1:], "ours": our_steps(task, Path(folder))[1:]})
    ratios = [_speed(made["ours"]) / _speed(made["TRL"]) for made in rounds]
    result = {
        "benchmark": "step",
        "ratio_median": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "responses": options.prompts * 8,
        "max_response": options.max_response,
        "cpus": os.cpu_count(),
    }
    print(f"{'a step':14}{'TRL':>12}{'ours':>12}")
    both = {name: [step for made in rounds for step in made[name]] for name in ("TRL", "ours")}
    for phase in PHASES:
        seconds = {name: statistics.median(step.phases[phase] for step in steps) for name, steps in both.items()}
        print(f"{phase:14}{seconds['TRL']:10.2f} s{seconds['ours']:10.2f} s")
        result[phase] = {name: round(value, 2) for name, value in seconds.items()}
    for title, unit, of in (
        ("step", "s", lambda steps: statistics.median(step.seconds for step in steps)),
        ("tokens", "", lambda steps: statistics.median(step.tokens for step in steps)),
        ("tokens/s", "", _speed),
    ):
        found = {name: of(steps) for name, steps in both.items()}
        print(f"{title:14}{found['TRL']:10.2f} {unit:1}{found['ours']:10.2f} {unit:1}")
        result[title] = {name: round(value, 2) for name, value in found.items()}
    print(f"{'ratio':14}{result['ratio_median']:10.2f}")
    print(json.dumps(result))


def _speed(steps: Sequence[Step]) -> float:
    """Response tokens a second of whole steps."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


if __name__ == "__main__":
    main()

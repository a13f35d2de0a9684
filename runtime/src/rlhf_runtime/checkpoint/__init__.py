"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    trainer ─ Saver.begin ─ each rank: copy to CPU ─ thread: one safetensors file a role and rank ─┐
                            driver: its own state, the metrics, the model's small files ───────────┤
                                                     manifest with sizes and checksums, rename ─ retention

    step-000020/
        checkpoint.json                         what the rest is, and what it was trained from (`manifest.py`)
        driver.json  metrics.jsonl              what the driver knows
        model/                                  config and tokenizer, so that `rlhf export` needs nothing else
        policy-00000-of-00002.safetensors       rows of every parameter and optimizer state, random generators
        reward-00000-of-00001.safetensors       random generators
        critic-00000-of-00001.safetensors

torch.distributed.checkpoint writes an index that only pickle reads, which runs whatever code the file holds. These are
JSON and safetensors alone: nothing in them can be run, and any number of ranks reads the rows that it needs.
"""

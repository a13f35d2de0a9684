"""Small prompt sets shipped with the runtime, one JSONL file each."""

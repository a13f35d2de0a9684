"""The control plane: from a manifest to a plan, and from a plan to a run.

    job.yaml -> RLHFJob -> apply_defaults -> validate -> build_plan -> RuntimeConfig

Defaults, validation, placement and plan are pure; `manifest` and `local` look at files, `cli` alone prints and writes.
Nothing here imports torch, Ray or vLLM, so that a bad manifest is answered at once, on a machine that has none of them.
Bad input of any kind ends as a `SpecError` that holds every problem.
"""

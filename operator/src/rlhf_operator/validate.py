"""What one field cannot say alone: the checks between the fields of a job."""

import posixpath
from collections.abc import Callable, Iterable, Iterator

from rlhf_api import FieldError, RLHFJob, RLHFJobSpec
from rlhf_api.placement import PlacementGroup
from rlhf_api.pools import NodePool
from rlhf_api.roles import TORCH_ROLES

from rlhf_operator.volumes import volume_of

Check = Callable[[RLHFJobSpec], Iterator[FieldError]]


def validate(job: RLHFJob) -> list[FieldError]:
    """Every problem of a job whose defaults were applied; pure. Whether bundles fit is `placement`'s to say."""
    return [error for check in CHECKS for error in check(job.spec)]


def groups_of(spec: RLHFJobSpec) -> list[tuple[str, PlacementGroup, NodePool | None]]:
    """Each group with its path and its pool, None where there is no such pool."""
    pools = {pool.name: pool for pool in reversed(spec.node_pools)}
    groups = spec.placement.groups if spec.placement else []
    return [(f"spec.placement.groups[{i}]", group, pools.get(group.pool)) for i, group in enumerate(groups)]


def _unique_names(spec: RLHFJobSpec) -> Iterator[FieldError]:
    lists: dict[str, Iterable[str]] = {
        "spec.nodePools[{}].name": (pool.name for pool in spec.node_pools),
        "spec.placement.groups[{}].name": (group.name for _, group, _ in groups_of(spec)),
        "spec.rewards[{}].name": (reward.name for reward in spec.rewards),
        "spec.storage[{}].name": (storage.name for storage in spec.storage),
        "spec.env[{}].name": (variable.name for variable in spec.env),
        "spec.head.env[{}].name": (variable.name for variable in spec.head.env),
        "spec.storage[{}].mountPath": (posixpath.normpath(storage.mount_path) for storage in spec.storage),
    }
    for index, pool in enumerate(spec.node_pools):
        lists[f"spec.nodePools[{index}].env[{{}}].name"] = (variable.name for variable in pool.env)
    for path, names in lists.items():
        first: dict[str, int] = {}
        for index, name in enumerate(names):
            if first.setdefault(name, index) != index:
                other = path.format(first[name])
                yield FieldError(
                    path.format(index), f"`{name}` again", f"another than {other}", "change one of the two"
                )


def _pools_exist(spec: RLHFJobSpec) -> Iterator[FieldError]:
    names = ", ".join(pool.name for pool in spec.node_pools)
    for path, group, pool in groups_of(spec):
        if pool is None:
            yield FieldError(f"{path}.pool", f"`{group.pool}`", f"one of {names}", "name a pool of spec.nodePools")


def _every_role_once(spec: RLHFJobSpec) -> Iterator[FieldError]:
    places: dict[str, str] = {}
    for path, group, _ in groups_of(spec):
        for index, role in enumerate(group.roles):
            here = f"{path}.roles[{index}]"
            if role in places:
                yield FieldError(here, f"`{role}` again", "each role once", f"remove it here or at {places[role]}")
            places.setdefault(role, here)
    for role in spec.algorithm.roles:
        if role not in places:
            fix = f"add `{role}` to a group's roles"
            fix += f", or set the kl.coefficient of {spec.algorithm.name} to 0" * (role == "reference")
            yield FieldError("spec.placement.groups", f"no `{role}`", "each role in one group", fix)


def _critic_with_ppo_alone(spec: RLHFJobSpec) -> Iterator[FieldError]:
    if spec.algorithm.ppo:
        return
    given = [
        f"{path}.roles[{group.roles.index('critic')}]" for path, group, _ in groups_of(spec) if "critic" in group.roles
    ]
    given += ["spec.models.critic"] if spec.models.critic else []
    given += ["spec.training.criticOptimizer"] if spec.training.critic_optimizer else []
    for path in given:
        fix = "remove it, or use ppo"
        yield FieldError(path, "a critic", f"none: {spec.algorithm.name} learns without one", fix)


def _reference_is_placed(spec: RLHFJobSpec) -> Iterator[FieldError]:
    placed = any("reference" in group.roles for _, group, _ in groups_of(spec))
    needed = "reference" in spec.algorithm.roles
    if spec.models.reference and not placed and not needed:
        fix = "remove it, or add `reference` to a group's roles to measure the KL by"
        yield FieldError("spec.models.reference", "a model", "none, since no group has the role", fix)


def _fallbacks_differ(spec: RLHFJobSpec) -> Iterator[FieldError]:
    for path, group, _ in groups_of(spec):
        strategies = [group.strategy, *group.fallback]
        for index, strategy in enumerate(group.fallback):
            if strategy in strategies[: index + 1]:
                expected = f"another than {', '.join(str(before) for before in strategies[: index + 1])}"
                fix = "remove it: it was tried by then"
                yield FieldError(f"{path}.fallback[{index}]", f"{strategy} again", expected, fix)


def _whole_engines(spec: RLHFJobSpec) -> Iterator[FieldError]:
    size = spec.rollout.tensor_parallel_size
    for path, group, _ in groups_of(spec):
        if "rollout" not in group.roles or size == 1:
            continue
        if group.workers % size:
            expected = f"a multiple of spec.rollout.tensorParallelSize {size}"
            yield FieldError(f"{path}.workers", str(group.workers), expected, "change one of the two")
        if TORCH_ROLES.intersection(group.roles):
            continue
        if "reward" in group.roles:
            expected = f"none beside engines of {size} devices, which take a bundle as a whole"
            yield FieldError(f"{path}.roles", "`reward`", expected, "put `reward` in another group")
        if not (gpus := group.gpus_per_worker or 0.0).is_integer():
            expected = f"whole GPUs for engines of {size} devices"
            yield FieldError(f"{path}.gpusPerWorker", f"{gpus:g}", expected, "use 1")


def _engine_divides_model(spec: RLHFJobSpec) -> Iterator[FieldError]:
    model, size = spec.models.policy.random, spec.rollout.tensor_parallel_size
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        width = model.config.get(name) if model else None
        if not isinstance(width, int) or not width % size:
            continue
        if name == "num_key_value_heads" and width > 0 and not size % width:
            continue  # vLLM gives several devices a copy of one
        expected = f"a multiple of spec.rollout.tensorParallelSize {size}"
        yield FieldError(f"spec.models.policy.random.config.{name}", str(width), expected, "change one of the two")


def _untruncated_sampling(spec: RLHFJobSpec) -> Iterator[FieldError]:
    if spec.rollout.top_p != 1.0:
        fix = "remove it: the trainer's log-probabilities are of the whole distribution, so ratios would be biased"
        yield FieldError("spec.rollout.topP", str(spec.rollout.top_p), "1.0", fix)


def _mini_batch_in_batch(spec: RLHFJobSpec) -> Iterator[FieldError]:
    size, batch, samples = _mini_batch_size(spec), spec.data.batch_size, spec.rollout.samples_per_prompt
    if size is not None and size > batch * samples:
        expected = f"at most {batch * samples} (batchSize {batch} times samplesPerPrompt {samples})"
        yield FieldError(_setting(spec, "miniBatchSize"), str(size), expected, "lower it, or leave it out")


def _mini_batch_over_ranks(spec: RLHFJobSpec) -> Iterator[FieldError]:
    size, whole = _mini_batch_size(spec), spec.data.batch_size * spec.rollout.samples_per_prompt
    for path, group, _ in groups_of(spec):
        trains = {"policy", "critic"}.intersection(group.roles)
        if trains and size not in (None, whole) and size % group.workers:
            expected = f"a multiple of the {group.workers} workers of {path}"
            fix = "choose one, so that every rank has as many samples"
            yield FieldError(_setting(spec, "miniBatchSize"), str(size), expected, fix)


def _mini_batch_size(spec: RLHFJobSpec) -> int | None:
    return spec.algorithm.settings.mini_batch_size


def _setting(spec: RLHFJobSpec, name: str) -> str:
    """The path of one of the algorithm's constants."""
    return f"spec.algorithm.{spec.algorithm.name}.{name}"


def _samples_to_compare(spec: RLHFJobSpec) -> Iterator[FieldError]:
    if spec.algorithm.settings.compares_samples and spec.rollout.samples_per_prompt == 1:
        name = spec.algorithm.name + " with baseline" * (spec.algorithm.reinforce_plus_plus is not None)
        expected = f"at least 2: {name} compares the samples of a prompt, and one alone has advantage 0"
        yield FieldError("spec.rollout.samplesPerPrompt", "1", expected, "raise it, as to 8, or use ppo")


def _signal_to_sample(spec: RLHFJobSpec) -> Iterator[FieldError]:
    grpo = spec.algorithm.grpo
    if grpo and grpo.dynamic_sampling and spec.rollout.samples_per_prompt == 1:
        expected = "none with samplesPerPrompt 1: no group ever has samples that differ, so no batch can be filled"
        fix = "raise spec.rollout.samplesPerPrompt, or remove it"
        yield FieldError(_setting(spec, "dynamicSampling"), "dynamic sampling", expected, fix)


def _horizon_of_a_step(spec: RLHFJobSpec) -> Iterator[FieldError]:
    adaptive, samples = spec.algorithm.settings.kl.adaptive, spec.data.batch_size * spec.rollout.samples_per_prompt
    if adaptive and adaptive.horizon < samples:
        expected, fix = f"at least the {samples} samples of a step", "raise it: the KL is looked at once a step"
        yield FieldError(_setting(spec, "kl.adaptive.horizon"), str(adaptive.horizon), expected, fix)


def _overlong_within_response(spec: RLHFJobSpec) -> Iterator[FieldError]:
    grpo, most = spec.algorithm.grpo, spec.data.max_response_length
    if grpo and grpo.overlong and grpo.overlong.buffer >= most:
        expected, fix = f"less than spec.data.maxResponseLength {most}", "lower it, or raise maxResponseLength"
        yield FieldError(_setting(spec, "overlong.buffer"), str(grpo.overlong.buffer), expected, fix)


def _sample_in_micro_batch(spec: RLHFJobSpec) -> Iterator[FieldError]:
    prompt, response, most = (
        spec.data.max_prompt_length,
        spec.data.max_response_length,
        spec.training.micro_batch_tokens,
    )
    if most < prompt + response:
        expected = f"at least {prompt + response} (maxPromptLength {prompt} plus maxResponseLength {response})"
        yield FieldError("spec.training.microBatchTokens", str(most), expected, "raise it, so that a sample fits")


def _sample_in_positions(spec: RLHFJobSpec) -> Iterator[FieldError]:
    trained = spec.data.max_prompt_length + spec.data.max_response_length
    models = {"policy": spec.models.policy, "critic": spec.models.critic, "reference": spec.models.reference}
    for role, model in models.items():
        positions = model.random.config.get("max_position_embeddings") if model and model.random else None
        tokens = spec.data.longest_sequence if role == "policy" else trained  # the others see no evaluation
        if isinstance(positions, int) and positions < tokens:
            path = f"spec.models.{role}.random.config.max_position_embeddings"
            expected = f"at least {tokens} (maxPromptLength plus the longest maxResponseLength)"
            yield FieldError(path, str(positions), expected, "raise it, or lower maxResponseLength")


def _checkpoints_can_be_written(spec: RLHFJobSpec) -> Iterator[FieldError]:
    volume = volume_of(spec.checkpoint.path, spec.storage) if spec.checkpoint else None
    if spec.checkpoint and volume and volume.read_only:
        got, fix = f"`{spec.checkpoint.path}` on the read-only storage `{volume.name}`", "remove its `readOnly`"
        yield FieldError("spec.checkpoint.path", got, "a place to write to", f"{fix}, or choose another path")


def _gpus_of_workers(spec: RLHFJobSpec) -> Iterator[FieldError]:
    for path, group, pool in groups_of(spec):
        gpus = group.gpus_per_worker or 0.0
        here = f"{path}.gpusPerWorker"
        computing = sorted(TORCH_ROLES.union({"rollout"}).intersection(group.roles))
        if pool is None or (gpus == 0 and not (pool.device == "cuda" and computing)):
            continue
        if gpus == 0:
            fix = "give them a GPU, or a pool with `device: cpu`"
            yield FieldError(here, "0", f"GPUs for {', '.join(computing)} on the `cuda` pool {pool.name}", fix)
        elif gpus > 1 and (pool.device == "cuda" or not gpus.is_integer()):
            yield FieldError(here, f"{gpus:g}", "at most 1: a worker computes on one GPU", "use 1, and more workers")
        elif round(gpus, 4) != gpus:
            yield FieldError(here, f"{gpus:g}", "at most four decimals, as Ray counts", "round it down")
        elif pool.device == "cuda" and group.workers > 1 and gpus <= 0.5 and TORCH_ROLES.intersection(group.roles):
            fix = "use 1, or one worker: NCCL refuses two ranks on one GPU"
            yield FieldError(here, f"{gpus:g} for {group.workers} ranks", "more than half a GPU a rank", fix)


def _only_rollouts_scale(spec: RLHFJobSpec) -> Iterator[FieldError]:
    for index, pool in enumerate(spec.node_pools):
        fixed = [
            f"group `{group.name}` with {', '.join(role for role in group.roles if role != 'rollout')}"
            for _, group, home in groups_of(spec)
            if home is pool and set(group.roles) != {"rollout"}
        ]
        if fixed and pool.node_bounds != (pool.nodes, pool.nodes):
            got = f"minNodes {pool.node_bounds[0]} and maxNodes {pool.node_bounds[1]} for {'; '.join(fixed)}"
            fix = "remove both, or give the rollout a pool of its own"
            yield FieldError(f"spec.nodePools[{index}]", got, f"{pool.nodes} for both: only rollouts scale", fix)


CHECKS: tuple[Check, ...] = (
    _unique_names,
    _pools_exist,
    _only_rollouts_scale,
    _every_role_once,
    _critic_with_ppo_alone,
    _reference_is_placed,
    _fallbacks_differ,
    _whole_engines,
    _engine_divides_model,
    _untruncated_sampling,
    _mini_batch_in_batch,
    _mini_batch_over_ranks,
    _samples_to_compare,
    _signal_to_sample,
    _horizon_of_a_step,
    _overlong_within_response,
    _sample_in_micro_batch,
    _sample_in_positions,
    _checkpoints_can_be_written,
    _gpus_of_workers,
)

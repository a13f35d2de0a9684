"""The training loop.

    prompts ─ generate ─ log-probabilities, values, rewards ─ advantages ─ update ─────── sync ─ next step
              rollout    policy │ reference │ critic │ reward   driver    critic │ policy   policy to rollout

Without a critic or a reference its part is left out.
What stands side by side is submitted together and runs at the same time where it runs on different workers. The next
version of the weights begins when all of it has ended.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlhf_api import RuntimeConfig
from rlhf_api.runtime_config import EXPORT

from rlhf_runtime.algorithms.kl import adapted_coefficient
from rlhf_runtime.balancing import ResponseLengths
from rlhf_runtime.checkpoint.driver_state import DriverState, read_metrics
from rlhf_runtime.checkpoint.identity import require_same, trained_from
from rlhf_runtime.checkpoint.manifest import Checkpoint
from rlhf_runtime.checkpoint.saver import Saver
from rlhf_runtime.checkpoint.store import CheckpointStore, Found
from rlhf_runtime.data import PromptLoader, make_batch
from rlhf_runtime.dynamic_sampling import fill_batch
from rlhf_runtime.evaluation import AFTER, BEFORE, Evaluator, Look, evaluation_metrics
from rlhf_runtime.experience import add_advantages, scored_by_update, step_metrics
from rlhf_runtime.export import export_checkpoint, trained_by
from rlhf_runtime.hugging_face import Trained
from rlhf_runtime.models import model_folder
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.replicas import require_agreement
from rlhf_runtime.report import Report, Sample, StepRecord
from rlhf_runtime.single_controller import HealthMonitor, ResourcePoolManager
from rlhf_runtime.single_controller.calls import Span, WorkerFuture
from rlhf_runtime.single_controller.object_store import object_store_bytes
from rlhf_runtime.timing import phase_seconds
from rlhf_runtime.types import PromptSets, StepMetrics
from rlhf_runtime.weight_sync import SyncReport, sync_weights
from rlhf_runtime.worker_groups import RoleGroups, spawn_worker_groups

PLACEMENT_SECONDS = 300
"""How long placement groups may take to be ready."""
DIGEST_STEPS = 20
"""Steps between comparisons of all that the ranks of a trained role hold."""

EXPORTED = "The trained model is in %s"
"""What is said of it once it is written."""

NOTHING = Found()

logger = logging.getLogger(__name__)


def train(config: RuntimeConfig, prompts: PromptSets, report: Report, found: Found = NOTHING) -> None:
    """Train a config to its end on the Ray that this process is connected to, and report on it.

    Args:
        config: The job.
        prompts: Its prompts.
        report: Not started yet.
        found: The checkpoint to go on from, if any.

    Raises:
        InputError: when the checkpoint was trained from something else; nothing was started then.
        RLHFError: when a worker, reward, number or placement failed. What was reported until then is kept.
    """
    origin = _origin(config, prompts)
    if found.checkpoint:
        require_same(found.checkpoint, origin)
    with ExitStack() as ending:
        ending.callback(report.close)
        report.start(read_metrics(found.checkpoint.folder) if found.checkpoint else [])
        for note in found.notes:
            logger.warning(note)
        if found.checkpoint and found.step >= config.training.steps:
            _tell_done(config, found.checkpoint)
            return
        store = _store(config, found)
        trainer = Trainer(config, prompts, report, ending.enter_context(HealthMonitor()))
        trainer.init_workers(found.checkpoint)
        if store:
            trainer.save_to(store, origin)
        trainer.fit()
        trainer.export()


def _origin(config: RuntimeConfig, prompts: PromptSets) -> dict[str, Any]:
    """What checkpoints say that they were trained from; nothing without checkpoints, as large files are read for it."""
    if config.checkpoint is None:
        return {}
    return trained_from(config, {role: model_folder(config, role) for role in config.models.by_role}, prompts.training)


def _store(config: RuntimeConfig, found: Found) -> CheckpointStore | None:
    """Where checkpoints go, rid of what was found damaged or unfinished."""
    if config.checkpoint is None:
        return None
    store = CheckpointStore(Path(config.checkpoint.path), config.checkpoint.keep)
    store.clear(found)
    return store


def _tell_done(config: RuntimeConfig, checkpoint: Checkpoint) -> None:
    """Say that nothing is left to train, and write the trained model unless that very one is there."""
    step, steps = checkpoint.manifest.step, config.training.steps
    logger.info("Nothing to train: %s is of step %d, and the job has %d", checkpoint.folder, step, steps)
    folder = Path(config.run_dir) / EXPORT
    if Trained.read(folder) != trained_by(checkpoint.manifest):
        export_checkpoint(checkpoint, folder)
        logger.info(EXPORTED, folder)


class Trainer:
    """The single controller of a run: one driver that commands the worker groups of all roles."""

    def __init__(self, config: RuntimeConfig, prompts: PromptSets, report: Report, health: HealthMonitor) -> None:
        self.config = config
        self.health = health
        self.prompts = PromptLoader(prompts.training, config.data.batch_size, config.seed)
        self.held_out = prompts.evaluation
        self.lengths = ResponseLengths(config.data.max_response_length)
        self.report = report
        self.pools = ResourcePoolManager(config.groups, PLACEMENT_SECONDS)
        self.roles: RoleGroups = {}
        self.version = 0
        self.kl_coefficient = config.algorithm.settings.kl.coefficient
        self.saver: Saver | None = None
        self.evaluator: Evaluator | None = None

    def init_workers(self, checkpoint: Checkpoint | None) -> None:
        """Reserve the pools, start every role, and give the engines the policy's weights.

        Args:
            checkpoint: What to go on from, if not from the start.
        """
        began = time.perf_counter()
        self.pools.create()
        for group in self.config.groups:
            logger.info("Starting group %s: %d × %s", group.name, group.workers, ", ".join(group.roles))
        self.roles = spawn_worker_groups(self.config, self.pools, self.health)
        for group in self.roles.values():
            group.wait_ready()
        if checkpoint:
            self.restore(checkpoint)
        self.roles["policy"].connect_engines(self.roles["rollout"].workers)
        self.sync(self.version)
        self.take_spans()  # those of the start belong to no step
        if self.config.data.evaluation:
            self.evaluator = Evaluator(self.config, self.held_out, self.roles)
        logger.info("Ready after %.0f s, first step begins", time.perf_counter() - began)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put driver and workers into the state of a checkpoint."""
        manifest, state = checkpoint.manifest, DriverState.read(checkpoint.folder)
        loading = [self.roles[role].load(str(checkpoint.folder), ranks) for role, ranks in manifest.ranks.items()]
        self.prompts.load_state_dict(state.prompts)
        self.lengths.load_state_dict(state.response_lengths)
        self.kl_coefficient = state.kl_coefficient
        self.version = manifest.weight_version
        for load in loading:
            load.get()
        logger.info("Goes on from step %d: %s", manifest.step, checkpoint.folder)

    def save_to(self, store: CheckpointStore, origin: dict[str, Any]) -> None:
        """Take checkpoints from now on."""
        saved = {role: self.roles[role] for role in ("policy", "critic", "reward") if role in self.roles}
        self.saver = Saver(store, saved, model_folder(self.config, "policy"), origin)

    def fit(self) -> None:
        """Run the steps that are left; each ends with the new weights in the engines, under its number as version."""
        looks = self.look(0) if self.version == 0 else []
        for step in range(self.version + 1, self.config.training.steps + 1):
            start = time.time()
            batch, sampled = self.rollout()
            batch = self.evaluate(batch)
            batch = add_advantages(batch, self.config, self.kl_coefficient)
            batch, trained = self.update(batch)
            synced = self.sync(version=step)
            if step % DIGEST_STEPS == 0:
                self.compare_ranks()
            end = time.time()
            spans = self.take_spans()
            seconds = phase_seconds(spans, start, end)
            metrics = step_metrics(step, batch, self.config, sampled | trained, synced, seconds, object_store_bytes())
            self.steer_kl(metrics, len(batch))
            samples = samples_of(batch, self.config.observability.samples_per_step)
            looks += self.look(step)
            whole = Span("driver", None, f"step {step}", 0, start, end)
            self.report.step(record_of(metrics, samples, [whole, *spans], looks))
            looks = []
            self.save(step)

    def look(self, step: int) -> list[Look]:
        """Evaluate the policy after a step, if it is to have that; 0 is before the first."""
        if self.evaluator is None or not self.evaluator.due(step):
            return []
        start, prefix = time.time(), AFTER if step else BEFORE
        batch = self.evaluator.run(self.version)
        metrics = evaluation_metrics(batch, prefix) | {f"time/{prefix}": time.time() - start}
        if step == 0:
            logger.info("Held-out prompts before the first step: reward %.3f", metrics[f"{prefix}/reward_mean"])
        samples = samples_of(batch, self.config.observability.samples_per_step)
        return [Look(metrics, samples, self.take_spans())]

    def rollout(self) -> tuple[DataProto, dict[str, float]]:
        """The step's prompts and their responses, with dynamic sampling scored ones, and metrics of how they came."""
        grpo, samples = self.config.algorithm.grpo, self.config.rollout.samples_per_prompt
        if grpo is None or grpo.dynamic_sampling is None:
            return self.generate(make_batch(next(self.prompts), samples)), {}

        def sample(number: int) -> DataProto:
            batch = self.generate(make_batch(next(self.prompts), samples, first_sample=number * prompts * samples))
            return batch.union(self.score(batch).get())

        prompts = self.config.data.batch_size
        batch, tries = fill_batch(sample, prompts, samples, grpo.dynamic_sampling.max_tries)
        return batch, {"sampling_tries": tries}

    def generate(self, batch: DataProto) -> DataProto:
        """Add a response to every prompt, as tokens and as text, from the engine that is expected to have time."""
        prompts = batch.select(["prompt_ids", "sample_index"]).union(self.lengths.forecast(batch))
        batch = batch.union(self.roles["rollout"].generate(prompts, self.version).get())
        self.lengths.observe(batch.batch["prompt_index"], batch.batch["response_ids"])
        return batch

    def evaluate(self, batch: DataProto) -> DataProto:
        """Add the log-probabilities of policy and reference, the critic's values and the rewards, side by side.

        Those of the policy are left to the update where it takes them anyway.
        """
        tokens = batch.select(["prompt_ids", "response_ids"])
        answers = [] if scored_by_update(self.config) else [self.roles["policy"].compute_log_probs(tokens)]
        if "reference" in self.roles:
            answers.append(self.roles["reference"].compute_log_probs(tokens))
        if "critic" in self.roles:
            answers.append(self.roles["critic"].compute_values(tokens))
        if "scores" not in batch.columns:
            answers.append(self.score(batch))
        for answer in answers:
            batch = batch.union(answer.get())
        return batch

    def score(self, batch: DataProto) -> WorkerFuture:
        """Ask for the rewards."""
        return self.roles["reward"].score(batch.select(["prompt", "response", "columns"]))

    def update(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Train critic and policy side by side.

        Returns:
            The batch with the policy's log-probabilities before the update, and the metrics of both roles, which every
            rank must agree on.
        """
        tokens, needed = ["prompt_ids", "response_ids"], ["advantages"]
        needed += [] if scored_by_update(self.config) else ["old_log_probs"]
        needed += ["ref_log_probs"] if self.config.algorithm.settings.kl.in_loss else []
        answers = {}
        if "critic" in self.roles:
            answers["critic"] = self.roles["critic"].update(batch.select([*tokens, "values", "returns"]))
        answers["policy"] = self.roles["policy"].update(batch.select([*tokens, *needed]))
        metrics: dict[str, float] = {}
        for role, answer in answers.items():
            reports = answer.get()
            require_agreement(role, reports)
            metrics |= reports[0]
        if scored_by_update(self.config):
            batch = batch.union(self.roles["policy"].scored(batch.select(tokens)).get())
        return batch, metrics

    def steer_kl(self, metrics: StepMetrics, samples: int) -> None:
        """Tell the step's KL coefficient and choose the next one, where it is adaptive."""
        if adaptive := self.config.algorithm.settings.kl.adaptive:
            metrics["kl_coefficient"] = self.kl_coefficient
            self.kl_coefficient = adapted_coefficient(self.kl_coefficient, float(metrics["kl"]), samples, adaptive)

    def sync(self, version: int) -> SyncReport:
        """Give the policy's weights to every engine under a new version."""
        report = sync_weights(self.roles["policy"], self.roles["rollout"], version)
        self.version = version
        return report

    def compare_ranks(self) -> None:
        """Refuse to go on when ranks of a trained role hold different weights.

        Raises:
            DesyncError: naming the role, the rank and the first parameter that differs.
        """
        ranked = [role for role in ("critic", "policy") if role in self.roles and self.roles[role].world_size > 1]
        digests = {role: self.roles[role].digests() for role in ranked}
        for role, answer in digests.items():
            require_agreement(role, answer.get())

    def save(self, step: int) -> None:
        """Begin the checkpoint of a step that is to have one, and complete those that are written by now.

        Raises:
            CheckpointError: when one cannot be written.
        """
        if self.saver is None or self.config.checkpoint is None:
            return
        last = step == self.config.training.steps
        if last or step % self.config.checkpoint.every_steps == 0:
            state = DriverState(
                prompts=self.prompts.state_dict(),
                response_lengths=self.lengths.state_dict(),
                kl_coefficient=self.kl_coefficient,
            )
            self.saver.begin(step, self.version, state, self.report.rows)
        self.saver.look(wait=last)

    def take_spans(self) -> list[Span]:
        """When each worker worked on what since the last time."""
        return [span for group in self.roles.values() for span in group.take_spans()]

    def export(self) -> None:
        """Write the trained policy as a Hugging Face folder into the run folder."""
        folder = Path(self.config.run_dir) / EXPORT
        manifest = self.saver.finished if self.saver else None
        self.roles["policy"].export(str(folder), trained_by(manifest) if manifest else Trained(step=self.version))
        logger.info(EXPORTED, folder)


def record_of(
    metrics: StepMetrics, samples: Sequence[Sample], spans: Sequence[Span], looks: Sequence[Look]
) -> StepRecord:
    """What is told of a step and the evaluations before and after it."""
    told = dict(metrics)
    for look in looks:
        told |= look.metrics
    spans = [*spans, *(span for look in looks for span in look.spans)]
    return StepRecord(told, samples, spans, held_out=[sample for look in looks for sample in look.samples])


def samples_of(batch: DataProto, count: int) -> list[Sample]:
    """The first `count` responses of a batch, to be read."""
    texts = batch.non_tensor_batch
    return [
        Sample(
            prompt=str(texts["prompt"][row]),
            response=str(texts["response"][row]),
            score=batch.batch["scores"][row].item(),
            weight_version=int(batch.batch["weight_version"][row]),
        )
        for row in range(min(count, len(batch)))
    ]

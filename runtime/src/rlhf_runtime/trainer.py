"""The training loop.

    prompts ─ generate ─ log-probabilities, values, rewards ─ advantages ─ update ─────── sync ─ next step
              rollout    policy │ reference │ critic │ reward   driver    critic │ policy   policy to rollout

Without a critic or a reference its part is left out.
What stands side by side is submitted together and runs at the same time where it runs on different workers. The next
version of the weights begins when all of it has ended.
"""

import logging
import time
from contextlib import ExitStack
from pathlib import Path

from rlhf_api import RuntimeConfig

from rlhf_runtime.algorithms.kl import adapted_coefficient
from rlhf_runtime.balancing import ResponseLengths
from rlhf_runtime.data import PromptLoader, make_batch
from rlhf_runtime.dynamic_sampling import fill_batch
from rlhf_runtime.experience import add_advantages, step_metrics
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.replicas import require_agreement
from rlhf_runtime.report import Report, Sample, StepRecord
from rlhf_runtime.single_controller import HealthMonitor, ResourcePoolManager
from rlhf_runtime.single_controller.calls import Span, WorkerFuture
from rlhf_runtime.single_controller.object_store import object_store_bytes
from rlhf_runtime.timing import phase_seconds
from rlhf_runtime.types import Prompt, StepMetrics
from rlhf_runtime.weight_sync import SyncReport, sync_weights
from rlhf_runtime.worker_groups import RoleGroups, spawn_worker_groups

PLACEMENT_SECONDS = 300
"""How long placement groups may take to be ready."""
DIGEST_STEPS = 20
"""Steps between comparisons of all that the ranks of a trained role hold."""

logger = logging.getLogger(__name__)


def train(config: RuntimeConfig, prompts: list[Prompt], report: Report) -> None:
    """Train a config to its end on the Ray that this process is connected to, and report on it.

    Raises:
        RLHFError: when a worker, reward, number or placement failed. What was reported until then is kept.
    """
    with ExitStack() as ending:
        ending.callback(report.close)
        report.start()
        trainer = Trainer(config, prompts, report, ending.enter_context(HealthMonitor()))
        trainer.init_workers()
        trainer.fit()
        trainer.export()


class Trainer:
    """The single controller of a run: one driver that commands the worker groups of all roles."""

    def __init__(self, config: RuntimeConfig, prompts: list[Prompt], report: Report, health: HealthMonitor) -> None:
        self.config = config
        self.health = health
        self.prompts = PromptLoader(prompts, config.data.batch_size, config.seed)
        self.lengths = ResponseLengths(config.data.max_response_length)
        self.report = report
        self.pools = ResourcePoolManager(config.groups, PLACEMENT_SECONDS)
        self.roles: RoleGroups = {}
        self.version = 0
        self.kl_coefficient = config.algorithm.settings.kl.coefficient

    def init_workers(self) -> None:
        """Reserve the pools, start every role, and give the engines the policy's first weights."""
        began = time.perf_counter()
        self.pools.create()
        for group in self.config.groups:
            logger.info("Starting group %s: %d × %s", group.name, group.workers, ", ".join(group.roles))
        self.roles = spawn_worker_groups(self.config, self.pools, self.health)
        for group in self.roles.values():
            group.wait_ready()
        self.roles["policy"].connect_engines(self.roles["rollout"].workers)
        self.sync(version=0)
        self.take_spans()  # those of the start belong to no step
        logger.info("Ready after %.0f s, first step begins", time.perf_counter() - began)

    def fit(self) -> None:
        """Run the job's steps; each ends with the new weights in the engines."""
        for step in range(1, self.config.training.steps + 1):
            start = time.time()
            batch, sampled = self.rollout()
            batch = self.evaluate(batch)
            batch = add_advantages(batch, self.config, self.kl_coefficient)
            trained = sampled | self.update(batch)
            synced = self.sync(version=step)
            if step % DIGEST_STEPS == 0:
                self.compare_ranks()
            end = time.time()
            spans = self.take_spans()
            seconds = phase_seconds(spans, start, end)
            metrics = step_metrics(step, batch, self.config, trained, synced, seconds, object_store_bytes())
            self.steer_kl(metrics, len(batch))
            samples = samples_of(batch, self.config.observability.samples_per_step)
            whole = Span("driver", None, f"step {step}", 0, start, end)
            self.report.step(StepRecord(metrics, samples, [whole, *spans]))

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
        """Add the log-probabilities of policy and reference, the critic's values and the rewards, side by side."""
        tokens = batch.select(["prompt_ids", "response_ids"])
        answers = [self.roles["policy"].compute_log_probs(tokens)]
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

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train critic and policy side by side, and return the metrics of both, which every rank must agree on."""
        tokens, needed = ["prompt_ids", "response_ids"], ["old_log_probs", "advantages"]
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
        return metrics

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
        for role in {"policy", "critic"} & self.roles.keys():
            if self.roles[role].world_size > 1:
                require_agreement(role, self.roles[role].digests())

    def take_spans(self) -> list[Span]:
        """When each worker worked on what since the last time."""
        return [span for group in self.roles.values() for span in group.take_spans()]

    def export(self) -> None:
        """Write the trained policy as a Hugging Face folder into the run folder."""
        folder = Path(self.config.run_dir) / "model"
        self.roles["policy"].export(str(folder))
        logger.info("The trained model is in %s", folder)


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

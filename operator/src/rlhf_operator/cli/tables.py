"""Jobs as text: tables as kubectl prints them, and the page of one job. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rlhf_api.status import Condition, Failure, Progress, RLHFJobStatus

from rlhf_operator.cli.durations import age
from rlhf_operator.cli.next_step import next_step

Object = Mapping[str, Any]
"""A Kubernetes object as the API server gives it."""
BAR = 30
"""Characters of a progress bar."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, each as wide as its widest entry, three spaces apart."""
    lines = [headings, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(headings))]
    return "\n".join(
        "   ".join(entry.ljust(width) for entry, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def job_table(jobs: Sequence[Object], namespaces: bool, wide: bool, now: datetime) -> str:
    """One line a job. Reads what it knows, so that jobs of an operator of another release are listed too.

    Args:
        jobs: the jobs.
        namespaces: name the namespace of each.
        wide: with pools, KL, speed, RayCluster and message.
        now: what ages are reckoned from.
    """
    headings = ["NAME", "PHASE", "STEP", "REWARD", "GPUS", "TRIES", "AGE"]
    headings += ["POOLS", "KL", "TOKENS/S", "RAYCLUSTER", "MESSAGE"] if wide else []
    rows = [_job_row(job, wide, now) for job in jobs]
    if namespaces:
        headings = ["NAMESPACE", *headings]
        rows = [[job["metadata"]["namespace"], *row] for job, row in zip(jobs, rows, strict=True)]
    return table(headings, rows)


def _job_row(job: Object, wide: bool, now: datetime) -> list[str]:
    status = job.get("status") or {}
    progress = status.get("progress") or {}
    step = f"{progress['step']}/{progress['steps']}" if "steps" in progress else "-"
    row = [job["metadata"]["name"], status.get("phase") or "-", step, _number(progress.get("reward"), ".3f")]
    row += [_number(status.get("gpus"), "d"), _number(status.get("tries"), "d")]
    row += [age(job["metadata"].get("creationTimestamp"), now)]
    if wide:
        row += [status.get("poolSummary") or "-", _number(progress.get("kl"), ".4f")]
        row += [_number(progress.get("tokensPerSecond"), ".0f"), status.get("rayCluster") or "-"]
        row += [_one_line(status.get("message") or "-")]
    return row


def event_table(events: Sequence[Object], times: Sequence[str], now: datetime) -> str:
    """One line an event, in the order in which they are given."""
    rows = [
        [
            age(time, now),
            event.get("type") or "-",
            event.get("reason") or "-",
            f"{event['involvedObject'].get('kind', '').lower()}/{event['involvedObject'].get('name', '')}",
            _one_line(event.get("message") or "") + _repeated(event),
        ]
        for event, time in zip(events, times, strict=True)
    ]
    return table(["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"], rows)


def _repeated(event: Object) -> str:
    count = (event.get("series") or {}).get("count") or event.get("count") or 1
    return f" (x{count})" if count > 1 else ""


def job_page(job: Object, status: RLHFJobStatus, now: datetime) -> str:
    """All about one job: how far it is, what is true of it, what went wrong, and what to do next."""
    metadata, spec = job["metadata"], job["spec"]
    facts = [("Job", f"{metadata['name']} in namespace {metadata['namespace']}, {_since(metadata, now)}")]
    facts += [("Phase", f"{status.phase or 'Unknown'}: {_one_line(status.message or 'not looked at yet')}")]
    facts += _progress(status.progress) if status.progress else []
    if status.ray_cluster:
        tried = f", try {status.try_} (number {status.tries})" if status.try_ else ""
        facts += [("Cluster", f"{status.ray_cluster}{tried}")]
    if status.pools:
        pools = ", ".join(f"{pool.name} {pool.ready}/{pool.desired} ready" for pool in status.pools)
        facts += [("Pools", pools + (f"; {status.gpus} GPUs" if status.gpus else ""))]
    if status.unreachable_since:
        facts += [("Unreachable", f"Ray's job API has not answered for {age(status.unreachable_since, now)}")]
    width = max(len(name) for name, _ in facts) + 2
    parts = ["\n".join(f"{name:<{width}}{text}" for name, text in facts)]
    parts += [_conditions(status.conditions, now)] if status.conditions else []
    parts += [_failures(status, spec, now)] if status.failures else []
    parts += ["Next: " + next_step(metadata["name"], status)]
    return "\n\n".join(parts)


def _since(metadata: Object, now: datetime) -> str:
    return f"{age(metadata.get('creationTimestamp'), now)} old"


def _progress(progress: Progress) -> list[tuple[str, str]]:
    share = progress.step / progress.steps if progress.steps else 0.0
    bar = "█" * int(share * BAR)
    eta = "" if progress.eta_seconds is None else f", {_duration(progress.eta_seconds)} to go"
    facts = [("Progress", f"{bar:░<{BAR}} step {progress.step} of {progress.steps}{eta}")]
    numbers = [("reward", progress.reward, ".3f"), ("KL", progress.kl, ".4f")]
    numbers += [("tokens/s", progress.tokens_per_second, ".0f")]
    told = [f"{name} {value:{form}}" for name, value, form in numbers if value is not None]
    told += [f"weights v{progress.weight_version}"] if progress.weight_version is not None else []
    facts += [("Newest", ", ".join(told))] if told else []
    facts += [("Checkpoint", progress.last_checkpoint)] if progress.last_checkpoint else []
    return facts


def _duration(seconds: int) -> str:
    return age(datetime.fromtimestamp(0, UTC).isoformat(), datetime.fromtimestamp(seconds, UTC))


def _conditions(conditions: Sequence[Condition], now: datetime) -> str:
    rows = [
        [each.type, each.status, age(each.last_transition_time, now), each.reason, _one_line(each.message)]
        for each in conditions
    ]
    return table(["CONDITION", "STATUS", "FOR", "REASON", "MESSAGE"], rows)


def _failures(status: RLHFJobStatus, spec: Object, now: datetime) -> str:
    counted = [
        f"{name} {count or 0}" + (f" of {spec[limit]}" if limit in spec else "")
        for name, count, limit in (
            ("program", status.program_failures, "backoffLimit"),
            ("infrastructure", status.infrastructure_failures, "infrastructureBackoffLimit"),
        )
    ]
    rows = [[age(failure.time, now), failure.kind, failure.reason, _place(failure), _one_line(failure.message)]
            for failure in status.failures]  # fmt: skip
    return f"Failures: {', '.join(counted)}\n{table(['AGO', 'KIND', 'REASON', 'WHERE', 'MESSAGE'], rows)}"


def _place(failure: Failure) -> str:
    step = "" if failure.step is None else f", step {failure.step}"
    return f"cluster {failure.cluster}, try {failure.try_}{step}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""The commands that change or show jobs on a cluster: apply, get, status, events, suspend, resume."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rlhf_api import FieldError, RLHFJob, SpecError
from rlhf_api.status import RLHFJobStatus

from rlhf_operator.cli.connection import Context, Kubeconfig, Name, Names, Namespace, bad_input, connected
from rlhf_operator.cli.problems import BAD_INPUT, told
from rlhf_operator.cli.tables import event_table, job_page, job_table
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifest import read_manifest

KIND = "rlhfjob.rlhf-operator.io"
OPERATORS_IMAGE = "the operator's default"
"""Stands for the image of a manifest that names none: only the operator knows."""

Output = Literal["wide", "json", "yaml", "name"]


def apply(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="RLHFJob manifests", show_default=False)
    ] = None,
    filename: Annotated[
        list[Path] | None, typer.Option("-f", "--filename", metavar="FILE", help="the same, as kubectl spells it")
    ] = None,
    dry_run: Annotated[
        Literal["none", "client", "server"],
        typer.Option(help="client: only check here; server: let the cluster look at it too, and change nothing"),
    ] = "none",
    force_conflicts: Annotated[
        bool, typer.Option("--force-conflicts", help="take over fields that others set, such as kubectl")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    r"""Run jobs on a cluster, or change them.

    Every manifest is checked here first, and nothing is applied before all of them are right. Then the API server takes
    them (server-side apply).

    \b
      rlhf apply job.yaml                      run it
      rlhf apply job.yaml --dry-run server     would the cluster take it?
      rlhf wait job --for Training && rlhf logs -f job
    """
    given = [*(files or []), *(filename or [])]
    if not given:
        raise bad_input("FILE: got nothing; expected RLHFJob manifests. Fix: name some, such as `rlhf apply job.yaml`")
    jobs = _checked(given, namespace)
    if dry_run == "client":
        for job in jobs:
            typer.echo(f"{KIND}/{job.metadata.name} is right (client dry run)")
        return
    for job in jobs:
        with connected(namespace or job.metadata.namespace, context, kubeconfig) as cluster:
            verb = cluster.apply(job, dry_run == "server", force_conflicts)
            typer.echo(f"{KIND}/{job.metadata.name} {verb}{' (server dry run)' * (dry_run == 'server')}")


def _checked(files: list[Path], namespace: str | None) -> list[RLHFJob]:
    """The manifests; every problem of every one is told before the command ends."""
    jobs = []
    for file in files:
        try:
            with told(file):
                job = read_manifest(file)
                plan_cluster(job, OPERATORS_IMAGE)
                if namespace and job.metadata.namespace not in (None, namespace):
                    got, fix = f"`{job.metadata.namespace}`", "leave out -n, or change the manifest"
                    raise SpecError([FieldError("metadata.namespace", got, f"`{namespace}`, as -n says", fix)])
                jobs.append(job)
        except typer.Exit:
            continue
    if len(jobs) < len(files):
        raise typer.Exit(BAD_INPUT)
    return jobs


def get(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="names of jobs (default: all)", show_default=False)
    ] = None,
    all_namespaces: Annotated[bool, typer.Option("-A", "--all-namespaces", help="the jobs of all namespaces")] = False,
    selector: Annotated[str, typer.Option("-l", "--selector", metavar="LABELS", help="only jobs with these")] = "",
    output: Annotated[
        Output | None, typer.Option("-o", "--output", help="more columns, whole objects, or names alone")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    r"""List jobs: where each is, how far, with what reward.

    \b
      rlhf get                 the namespace's jobs
      rlhf get -A -o wide      all jobs, with pools, KL, speed and message
      rlhf get job -o json     one job, whole
    """
    if names and (all_namespaces or selector):
        raise bad_input("NAME: got names beside -A or -l; expected one of them. Fix: leave the other out")
    with connected(namespace, context, kubeconfig) as cluster:
        jobs = [cluster.find(name) for name in names] if names else cluster.matching(all_namespaces, selector)
        if output in ("json", "yaml"):
            _print_objects(jobs[0] if names and len(names) == 1 else _list_of(jobs), output)
        elif output == "name":
            for job in jobs:
                typer.echo(f"{KIND}/{job['metadata']['name']}")
        elif jobs:
            typer.echo(job_table(jobs, all_namespaces, output == "wide", datetime.now(UTC)))
        else:
            where = "in any namespace" if all_namespaces else f"in namespace {cluster.namespace}"
            typer.echo(f"No jobs {where}.", err=True)


def status(name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Show all about one job: progress, conditions, pools, failures, and what to do next."""
    with connected(namespace, context, kubeconfig) as cluster:
        job = cluster.find(name)
        try:
            known = RLHFJobStatus.read(job.get("status"))
        except SpecError as error:
            raise bad_input(f"{error}\n`rlhf get {name} -o yaml` shows the status as it is.") from None
        typer.echo(job_page(job, known, datetime.now(UTC)))


def events(name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Show what happened to a job, its RayClusters and their pods, the oldest first."""
    with connected(namespace, context, kubeconfig) as cluster:
        from rlhf_operator.cli.jobs import time_of_event

        found = cluster.events(name)
        if not found:
            cluster.find(name)
            typer.echo(f"No events of {name}: the cluster keeps them for about an hour.", err=True)
            return
        typer.echo(event_table(found, [time_of_event(event) for event in found], datetime.now(UTC)))


def suspend(names: Names, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Stop jobs and free their GPUs. `rlhf resume` lets them go on from their newest checkpoint."""
    _set_suspend(names, True, namespace, context, kubeconfig)


def resume(names: Names, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Let suspended jobs go on from their newest checkpoint."""
    _set_suspend(names, False, namespace, context, kubeconfig)


def _set_suspend(
    names: list[str], value: bool, namespace: str | None, context: str | None, kubeconfig: str | None
) -> None:
    done, already = ("suspended", "was suspended already") if value else ("resumed", "was not suspended")
    with connected(namespace, context, kubeconfig) as cluster:
        for name in names:
            phase = (cluster.find(name).get("status") or {}).get("phase")
            if phase in ("Succeeded", "Failed"):
                typer.echo(f"{KIND}/{name} has ended ({phase}): nothing is changed")
            else:
                typer.echo(f"{KIND}/{name} {done if cluster.suspend(name, value) else already}")


def _list_of(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": jobs}


def _print_objects(document: dict[str, Any], output: Output) -> None:
    if output == "json":
        typer.echo(json.dumps(document, indent=4, ensure_ascii=False))
        return
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(document, sys.stdout)

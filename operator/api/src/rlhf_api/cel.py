"""What the API server itself checks between the fields of an RLHFJob, in its expression language CEL.

The clear cases alone, so that `kubectl apply` answers at once; the operator checks all of them again, and the rest.
Expressions cost by the most items that a list may have, so each list here has a `maxItems` in its model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_api.algorithm import ALGORITHMS
from rlhf_api.base import JsonSchema
from rlhf_api.roles import ROLES, Role
from rlhf_api.spec import RLHFJobSpec

ADJUSTABLE = frozenset(
    {
        "suspend",
        "backoffLimit",
        "infrastructureBackoffLimit",
        "activeDeadlineSeconds",
        "preRunningDeadlineSeconds",
        "ttlSecondsAfterFinished",
    }
)
"""Fields of a spec that take effect at any time."""
IDENTITY = ("models", "algorithm", "data.prompts", "data.batchSize", "data.seed")
"""Fields of a spec that its checkpoints were trained from: they stay as they are once the job has started."""


Culprits = Sequence[tuple[str, str]]
"""Names, each with the CEL condition under which it is wrong."""


@dataclass(frozen=True)
class Rule:
    """One rule of a schema's node."""

    path: str
    """The node, such as `spec.nodePools[]`; empty for the whole object."""
    holds: str
    """A CEL expression over `self`, and over `oldSelf` for one that is about changes."""
    message: str
    """What is wrong and what to do, for people."""
    details: str | None = None
    """A CEL expression of a message that names the culprits; where it fails, `message` is shown."""
    field: str | None = None
    """The field below the node that the API server names."""

    def as_json(self) -> JsonSchema:
        """The rule as `x-kubernetes-validations` holds it."""
        rule = {"rule": self.holds, "message": self.message, "reason": "FieldValueInvalid"}
        optional = {"messageExpression": self.details, "fieldPath": self.field}
        return rule | {key: value for key, value in optional.items() if value is not None}


def _listed(culprits: Culprits) -> str:
    """A CEL text of the names whose condition holds, each after a space.

    `join` would read better, but the API server takes its result to be of any size, and so too costly.
    """
    return " + ".join(f"({holds} ? ' `{name}`' : '')" for name, holds in culprits)


def _exactly_one(path: str, *names: str) -> Rule:
    given = ", ".join(f"has(self.{name})" for name in names)
    none = " || ".join(f"has(self.{name})" for name in names)
    advice = f"expected exactly one of {', '.join(names)}. Fix: give one of them"
    return Rule(
        path,
        f"[{given}].exists_one(given, given)",
        advice,
        f"'got' + {_listed([(name, f'has(self.{name})') for name in names])}"
        f" + ({none} ? '' : ' none of them') + '; {advice}'",
    )


def _at_most_one(path: str, first: str, second: str) -> Rule:
    message = f"got {first} and {second}; expected one of them at most. Fix: remove one of the two"
    return Rule(path, f"!has(self.{first}) || !has(self.{second})", message)


_SOURCES = (
    _exactly_one("spec.algorithm", *ALGORITHMS),
    _exactly_one("spec.models.policy", "path", "random"),
    _exactly_one("spec.models.critic", "path", "random"),
    _at_most_one("spec.models.reference", "path", "random"),
    _exactly_one("spec.rewards[]", "function", "model"),
    _exactly_one("spec.rewards[].function", "name", "importPath"),
    # CEL cannot see `inline`, whose rows are of two types; the operator checks it.
    _at_most_one("spec.data.prompts", "path", "builtin"),
    _at_most_one("spec.data.evaluation.prompts", "path", "builtin"),
    *(
        rule
        for path in ("spec.env[]", "spec.head.env[]", "spec.nodePools[].env[]")
        for rule in (
            _at_most_one(path, "value", "valueFrom"),
            _exactly_one(f"{path}.valueFrom", "secretKeyRef", "configMapKeyRef"),
        )
    ),
)


def _no_group(culprit: str, message: str, shown: str, *arguments: str) -> Rule:
    """A rule about a group `g` and its pool `p`: no pair may be a culprit.

    `shown` and its arguments tell of the first group that is one, `message` of any.
    """
    groups = "self.placement.groups"
    told = f"self.nodePools.filter(p, p.name == g.pool).map(p, '{shown}'.format([{', '.join(arguments)}]))[0]"
    return Rule(
        "spec",
        f"!has(self.placement) || {groups}.all(g, self.nodePools.all(p, p.name != g.pool || !({culprit})))",
        message,
        f"{groups}.filter(g, self.nodePools.exists(p, p.name == g.pool && {culprit})).map(g, {told})[0]",
        ".placement",
    )


_GPUS_PER_WORKER = "(has(g.gpusPerWorker) ? double(g.gpusPerWorker) : p.gpusPerNode > 0 ? 1.0 : 0.0)"
_GPUS = f"double(g.workers) * {_GPUS_PER_WORKER}"
_STRATEGY = "(has(g.strategy) ? g.strategy : self.placement.strategy)"
_BUNDLES = (
    "(g.roles.exists(r, r in ['policy', 'critic', 'reference']) || !('rollout' in g.roles) ? g.workers"
    " : g.workers / self.rollout.tensorParallelSize)"
)


def _alone(strategy: str) -> str:
    """That a group has this strategy and no other to fall back to."""
    return f"{_STRATEGY} == '{strategy}' && (!has(g.fallback) || g.fallback.all(s, s == '{strategy}'))"


_SCALES = "((has(p.minNodes) && p.minNodes != p.nodes) || (has(p.maxNodes) && p.maxNodes != p.nodes))"
_SHARED = [(role, f"self.groups.filter(g, '{role}' in g.roles).size() > 1") for role in ROLES]
_NEEDED: dict[Role, str] = {
    "critic": "has(self.algorithm.ppo)",
    "reference": " || ".join(f"self.algorithm.?{name}.?kl.?coefficient.orValue(0.0) > 0.0" for name in ALGORITHMS),
}
"""When the algorithm cannot run without a role; without the others it never can."""
_MISSING = [
    (role, f"({_NEEDED.get(role, 'true')}) && !self.placement.groups.exists(g, '{role}' in g.roles)") for role in ROLES
]

_LOST = "self.placement.groups.filter(g, !self.nodePools.exists(p, p.name == g.pool))"


def _none(culprits: Culprits) -> str:
    return " && ".join(f"!({holds})" for _, holds in culprits)


_PLACEMENT = (
    Rule(
        "spec",
        "!has(self.placement) || self.placement.groups.all(g, self.nodePools.exists(p, p.name == g.pool))",
        "a group's pool does not exist. Fix: name a pool of spec.nodePools",
        f"{_LOST}.map(g, 'group `%s`: got pool `%s`; expected one of %s. Fix: name a pool of spec.nodePools'"
        ".format([g.name, g.pool, self.nodePools.map(p, p.name)]))[0]",
        ".placement",
    ),
    Rule(
        "spec.placement",
        _none(_SHARED),
        "got a role in several groups; expected each role once. Fix: remove it from all but one",
        f"'got' + {_listed(_SHARED)} + ' in several groups; expected each role once. Fix: remove it from all but one'",
    ),
    Rule(
        "spec",
        f"!has(self.placement) || ({_none(_MISSING)})",
        "got no group with a role that the algorithm needs. Fix: add it to a group's roles",
        f"'got no' + {_listed(_MISSING)} + '; expected each role that the algorithm needs in one group. Fix: add it"
        " to a group, or for `reference` set the kl.coefficient to 0'",
        ".placement",
    ),
    Rule(
        "spec",
        "has(self.algorithm.ppo) || !(has(self.models.critic) || has(self.training.criticOptimizer)"
        " || (has(self.placement) && self.placement.groups.exists(g, 'critic' in g.roles)))",
        "got a critic; expected none: this algorithm learns without one. Fix: remove it from models, placement and"
        " training, or use ppo",
    ),
    _no_group(
        f"{_GPUS} > double(p.nodes * p.gpusPerNode) + 0.0001",
        "a group needs more GPUs than its pool has. Fix: lower workers, or raise nodes or gpusPerNode",
        "group `%s`: got %d workers of %s GPUs; expected at most the %d GPUs on each of %d nodes of pool `%s`."
        " Fix: lower workers, or raise nodes or gpusPerNode",
        *("g.name", "g.workers", _GPUS_PER_WORKER, "p.gpusPerNode", "p.nodes", "p.name"),
    ),
    _no_group(
        f"{_alone('STRICT_PACK')} && {_GPUS} > double(p.gpusPerNode) + 0.0001",
        "a STRICT_PACK group needs more GPUs than a node of its pool has. Fix: use PACK, or raise gpusPerNode",
        "group `%s`: got %d workers of %s GPUs on one node (STRICT_PACK); expected at most the %d GPUs of a node of"
        " pool `%s`. Fix: use PACK, lower workers, or raise gpusPerNode",
        *("g.name", "g.workers", _GPUS_PER_WORKER, "p.gpusPerNode", "p.name"),
    ),
    _no_group(
        f"{_alone('STRICT_SPREAD')} && {_BUNDLES} > p.nodes",
        "a STRICT_SPREAD group has more bundles than its pool has nodes. Fix: use SPREAD, or raise nodes",
        "group `%s`: got %d workers, each or each engine on a node of its own (STRICT_SPREAD); expected at most the %d"
        " nodes of pool `%s`."
        " Fix: use SPREAD, lower workers, or raise nodes",
        *("g.name", "g.workers", "p.nodes", "p.name"),
    ),
    Rule(
        "spec.nodePools[]",
        "(!has(self.minNodes) || self.minNodes <= self.nodes) && (!has(self.maxNodes) || self.nodes <= self.maxNodes)",
        "expected minNodes <= nodes <= maxNodes. Fix: change one of them",
    ),
    _no_group(
        f"{_SCALES} && !(g.roles.all(r, r == 'rollout'))",
        "a pool that scales has other roles than rollout. Fix: remove its minNodes and maxNodes",
        "group `%s`: got pool `%s`, which scales; expected minNodes and maxNodes equal to nodes: only rollouts scale."
        " Fix: remove both, or give the rollout a pool of its own",
        *("g.name", "p.name"),
    ),
    Rule(
        "spec",
        f"has(self.placement) || self.nodePools.filter(p, {_SCALES}).all(p, p.name != self.nodePools[0].name)",
        "got a first pool that scales, without a placement: all roles go there, and only rollouts scale. Fix: remove"
        " its minNodes and maxNodes, or write a placement",
        field=".nodePools",
    ),
)

_NAME = Rule(
    "",
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name.size() <= 45",
    "metadata.name: expected at most 45 lower-case letters, digits and `-`, with a letter first and a letter or digit"
    " last: names of pods and services are made from it. Fix: choose such a name",
)

_PHASE = "(has(oldSelf.status) && has(oldSelf.status.phase) ? oldSelf.status.phase : '')"
_STARTED = "(has(oldSelf.status) && has(oldSelf.status.tries) && oldSelf.status.tries > 0)"
_ENDED = f"({_PHASE} in ['Succeeded', 'Failed'])"
# A queue that suspends a cluster keeps it as it is, to resume it later.
_HAS_CLUSTER = "(has(oldSelf.status) && has(oldSelf.status.rayCluster))"
_RUNS = f"({_PHASE} in ['Provisioning', 'Training', 'Restarting'] || ({_HAS_CLUSTER} && !{_ENDED}))"


def _changed(fields: tuple[str, ...]) -> Culprits:
    """The fields, each with the condition that it is not as it was."""
    paths = [(field, f"self.spec.{field}", f"oldSelf.spec.{field}") for field in fields]
    return [(field, f"(has({new}) != has({old}) || (has({new}) && {new} != {old}))") for field, new, old in paths]


def _fixed(fields: tuple[str, ...], when: str, why: str, fix: str) -> Rule:
    changed = _changed(fields)
    return Rule(
        "",
        # The whole first: the API server asks at each write of the status too, and each field costs it a search.
        f"!{when} || self.spec == oldSelf.spec || ({_none(changed)})",
        f"got a change; expected none: {why}. Fix: {fix}",
        f"'got a change of' + {_listed(changed)} + '; expected none: {why}. Fix: {fix}'",
        ".spec",
    )


def change_rules() -> tuple[Rule, ...]:
    """Which fields stay as they are, and until when."""
    names = [field.alias or name for name, field in RLHFJobSpec.model_fields.items()]
    settings = tuple(name for name in names if name not in ADJUSTABLE)
    return (
        _fixed(
            IDENTITY,
            f"({_STARTED} && !{_ENDED})",
            "the checkpoints of a job that has started were trained from it",
            "delete the job and create another",
        ),
        _fixed(
            tuple(name for name in settings if name not in IDENTITY),
            _RUNS,
            "it cannot change while there is a cluster",
            "set spec.suspend to true and wait until status.rayCluster is gone, or delete the job and create another",
        ),
        _fixed(settings, _ENDED, "the job has ended", "delete the job and create another"),
    )


def rules() -> tuple[Rule, ...]:
    """All rules."""
    return (*_SOURCES, *_PLACEMENT, _NAME, *change_rules())

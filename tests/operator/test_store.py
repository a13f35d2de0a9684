"""What is remembered of the objects that are watched."""

from rlhf_operator.kube import Listing
from rlhf_operator.observe import cluster_view
from rlhf_operator.store import Store, keep_job

KEY = ("team", "math")


def job(version, name="math", uid="u", **spec):
    meta = {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version), "managedFields": [1]}
    return keep_job({"apiVersion": "rlhf-operator.io/v1alpha1", "kind": "RLHFJob", "metadata": meta, "spec": spec})


def ray_cluster(version, name="math-1", uid="c"):
    labels = {"rlhf-operator.io/job": "math", "rlhf-operator.io/cluster": name[-1]}
    meta = {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return cluster_view({"metadata": meta | {"creationTimestamp": "2026-01-01T00:00:00Z"}})


def test_news_is_what_is_newer():
    store = Store()
    assert store.see_job(job(5))
    assert not store.see_job(job(5))
    assert not store.see_job(job(4, suspend=True))
    assert store.job(KEY).manifest["spec"] == {}
    assert store.see_job(job(10, suspend=True))
    assert store.job(KEY).manifest["spec"] == {"suspend": True}


def test_a_list_forgets_what_is_gone_but_not_what_is_younger_than_it():
    store = Store()
    store.see_job(job(5, "old"))
    store.see_job(job(9, "young"))
    assert store.replace_jobs(Listing([job(6)], "8")) == {KEY, ("team", "old")}
    assert sorted(store.keys) == [KEY, ("team", "young")]
    assert store.replace_jobs(Listing([job(6), job(9, "young")], "10")) == set()


def test_a_list_of_some_namespaces_says_nothing_of_others():
    store = Store()
    store.see_job(job(5))
    store.replace_jobs(Listing([], "9"), ("other",))
    assert store.keys == [KEY]


def test_a_lost_watch_of_a_cluster_is_news_of_its_job():
    store = Store()
    store.see_cluster(ray_cluster(5))
    store.see_cluster(ray_cluster(5, "math-2", "d"))
    assert [cluster.number for cluster in store.clusters_of(KEY)] == [1, 2]
    assert store.replace_clusters(Listing([ray_cluster(5, "math-2", "d")], "9")) == {KEY}
    assert [cluster.name for cluster in store.clusters_of(KEY)] == ["math-2"]


def test_another_of_the_same_name_is_not_forgotten_with_its_predecessor():
    store = Store()
    store.see_job(job(5, uid="new"))
    store.forget_job(KEY, "old")
    assert store.job(KEY)
    store.see_cluster(ray_cluster(5, uid="new"))
    store.forget_cluster(("team", "math-1"), "old")
    assert store.clusters_of(KEY)

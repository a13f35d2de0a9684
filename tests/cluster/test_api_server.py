"""What the API server alone does, which the tests of the contract stand on."""

from control_plane import ControlPlane


def test_every_request_is_told_by_the_name_of_who_asked(api_server: ControlPlane, namespace: str) -> None:
    mark = api_server.audit_size
    kubeconfig = api_server.kubeconfig_of("rlhf-operator")
    api_server.kubectl(f"--kubeconfig={kubeconfig}", "create", "configmap", "told", "-n", namespace)
    (write,) = [request for request in api_server.requests("rlhf-operator", mark) if request.writes]
    assert (write.verb, write.resource, write.namespace, write.code) == ("create", "configmaps", namespace, 201)


def test_an_api_server_that_was_killed_comes_back_with_all_it_had(api_server: ControlPlane, namespace: str) -> None:
    api_server.kubectl("create", "configmap", "kept", "-n", namespace)
    api_server.restart("kube-apiserver")
    assert api_server.get("configmap", "kept", namespace)["metadata"]["name"] == "kept"

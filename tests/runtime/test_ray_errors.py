import pytest
from ray.exceptions import OutOfMemoryError, RayError
from rlhf_runtime.single_controller.ray_errors import exit_known, pid_of, reason

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: Role
\tpid: 9739
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: """
EXIT = "Worker exits unexpectedly. Worker exits with an exit code 3."
SILENT = "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: OOM"
MEMORY = (
    "3 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: b3) was "
    "22.38GB used / 23.54GB limit (0.950814)\nOOM kill reason: ..."
)


@pytest.mark.parametrize(
    ("error", "told", "known"),
    [
        (RayError(DIED + EXIT), "exit code 3", "exit code 3"),
        (RayError(DIED + SILENT), "its process ended without a word, as by SIGKILL", ""),
        (RayError("The actor is dead because it was killed by `ray.kill`."), "it was killed by `ray.kill`", ""),
        (OutOfMemoryError(MEMORY), "ran out of memory: 22.38GB used / 23.54GB limit", "22.38GB used / 23.54GB limit"),
    ],
    ids=["exit code", "no word", "ray.kill", "memory"],
)
def test_rays_words_are_cut_to_what_tells_people(error: RayError, told: str, known: str) -> None:
    assert reason(error).endswith(told)
    assert len(reason(error)) < 200
    assert exit_known(error).endswith(known)
    assert bool(exit_known(error)) == bool(known)


def test_the_process_is_told_where_ray_names_it() -> None:
    assert pid_of(RayError(DIED + EXIT)) == 9739
    assert pid_of(RayError("The actor is dead")) is None

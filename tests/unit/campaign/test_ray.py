import json
from pathlib import Path

import pytest
from helpers.campaigns import run_cli
from jsonschema import validate

from retrain.campaign.executors.ray_connection import slots_in
from retrain.config import load, parse_dict
from retrain.errors import UsageError

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def config(devices="auto", workers="auto", cpus=1, each=1.0, **backend):
    campaign = {"executor": "ray", "seeds": [1], "max_steps": 1, "gpus_per_cohort": each}
    campaign |= {} if workers == "auto" else {"workers": workers}
    return parse_dict({"campaign": campaign, "backend": {"devices": devices, **backend}, "ray": {"cpus": cpus}})


def nodes(*resources, dead=()):
    return [{"Alive": number not in dead, "Resources": each} for number, each in enumerate(resources)]


HEAD, SMALL, LARGE = {}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 16.0, "GPU": 8.0}


@pytest.mark.parametrize(("cluster", "asked", "slots"), [
    (nodes(HEAD, SMALL, LARGE), {}, (9, True)),
    (nodes(HEAD, SMALL, LARGE), {"cpus": 4}, (5, True)),  # as many as there are CPUs for
    (nodes(HEAD, SMALL, LARGE, dead=[2]), {}, (1, True)),
    (nodes(HEAD, SMALL, LARGE), {"each": 0.25}, (4 + 16, True)),  # as many as there are CPUs for
    (nodes(HEAD, SMALL, LARGE), {"each": 3, "shard": "dp"}, (2, True)),  # never over two nodes
    (nodes(HEAD, {"CPU": 4.0}), {"ranks": 2, "shard": "dp", "cpus": 2}, (2, False)),
])  # fmt: skip
def test_what_a_cluster_has_becomes_workers(cluster, asked, slots):
    assert slots_in(cluster, config(**asked)) == slots


@pytest.mark.parametrize(("cluster", "asked", "lacks"), [
    (nodes({"CPU": 3.0}), {"cpus": 4}, "4 CPUs,"),
    (nodes({"CPU": 3.0}), {"devices": "all"}, "1 CPU and 1 GPU,"),
    (nodes({"CPU": 1.0, "GPU": 1.0}), {"cpus": 2, "each": 0.5}, "2 CPUs and 0.5 of a GPU,"),
])  # fmt: skip
def test_a_cluster_without_room_for_anybody(cluster, asked, lacks):
    with pytest.raises(UsageError, match=f"no node of the Ray cluster has {lacks} .*--workers 4"):
        slots_in(cluster, config(**asked))
    with pytest.raises(UsageError, match=r"gpus_per_cohort = 0.5 has no effect: the Ray cluster has no GPU"):
        slots_in(nodes({"CPU": 4.0}), config(each=0.5))


def test_the_address_is_an_option(tmp_path):
    file = tmp_path / "some.toml"
    file.write_text("[campaign]\nseeds = [1]\nmax_steps = 1\n")
    loaded = load(file, ["ray.address=10.0.0.1:6379", "ray.runtime_env={pip = ['a'], env_vars = {B = 'c'}}"])
    assert (loaded.config.ray.address, loaded.config.ray.runtime_env["env_vars"]) == ("10.0.0.1:6379", {"B": "c"})
    for executor, address, words in (
        ("processes", "auto", "type --executor ray"),
        ("ray", "nowhere", '"auto", "local" or host:port'),
        ("ray", "ray://head:10001", "the address of a Ray client"),
    ):
        refused = run_cli("train", file, "--executor", executor, "--address", address)
        assert (refused.exit_code, words in refused.stderr) == (2, True)


def test_the_cluster_of_the_example_is_what_ray_up_reads():
    ray, yaml = pytest.importorskip("ray"), pytest.importorskip("yaml")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    validate(yaml.safe_load((EXAMPLES / "cluster.yaml").read_text()), schema)


def test_kuberay_s_example_is_what_ray_reads_there():
    """Ray's reader of a cluster in Kubernetes compares with Ray's schema itself."""
    pytest.importorskip("ray")
    yaml = pytest.importorskip("yaml")
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as read

    content = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    assert (content["apiVersion"], content["kind"]) == ("ray.io/v1", "RayJob")
    found = read({"metadata": {"name": "retrain", "namespace": "x"}, "spec": content["spec"]["rayClusterSpec"]})
    kinds = found["available_node_types"]
    assert kinds["headgroup"]["resources"]["CPU"] == 0
    assert (kinds["gpu"]["resources"]["GPU"], kinds["gpu"]["max_workers"]) == (1, 4)
    assert "--executor ray --workers 4" in content["spec"]["entrypoint"]

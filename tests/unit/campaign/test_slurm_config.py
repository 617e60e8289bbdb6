import pytest
from helpers.models import config_errors

from retrain.config import parse_dict
from retrain.config.machine import minutes_of
from retrain.errors import ConfigError

ASKED = {"campaign": {"executor": "slurm", "workers": 3, "seeds": [1, 2]}}


LIMITS = {"90": 90, "90:30": 91, "4:00:00": 240, "2-12": 3600, "1-0:30": 1470, "2-12:00:00": 3600, "0:0:1": 1}


def test_time_limits_as_sbatch_takes_them():
    assert {limit: minutes_of(limit) for limit in LIMITS} == LIMITS


@pytest.mark.parametrize("limit", ["", "four hours", "1:2:3:4", "0", "-1", "1-"])
def test_other_time_limits_are_refused(limit):
    with pytest.raises(ConfigError, match=r"slurm\.time"):
        parse_dict(ASKED | {"slurm": {"time": limit}})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"campaign": {"executor": "slurm"}}, 'campaign.workers  is "auto": say how many are asked of Slurm'),
        (ASKED | {"backend": {"devices": "all"}}, 'each worker has the GPU that Slurm gives it: devices = "auto"'),
        (ASKED | {"slurm": {"cluster": "local"}}, 'cluster = "slurm", or devices = "cpu"'),
        (ASKED | {"slurm": {"memory": "64GB"}}, 'memory = "64G"'),
        (ASKED | {"slurm": {"extra": {"array": "0-1"}}}, 'has "array", which stands here in its own place'),
        (ASKED | {"slurm": {"gpu_type": "h100", "extra": {"gres": "gpu:1"}}}, "has no effect with gres in extra"),
        (ASKED | {"slurm": {"gpu_type": "h100"}, "backend": {"devices": "cpu"}}, 'no effect with devices = "cpu"'),
        ({"campaign": {}, "slurm": {"partition": "gpu"}}, 'has no effect with executor = "inprocess": remove the line'),
        (ASKED | {"inference": {"engine": "vllm", "launch": "vllm serve"}}, "url, with the addresses of servers of"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(data, says):
    assert says in config_errors(data)

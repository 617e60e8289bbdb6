from retrain.config.machine import minutes_of

LIMITS = {"90": 90, "90:30": 91, "4:00:00": 240, "2-12": 3600, "1-0:30": 1470, "2-12:00:00": 3600, "0:0:1": 1}


def test_time_limits_as_sbatch_takes_them():
    assert {limit: minutes_of(limit) for limit in LIMITS} == LIMITS

"""Run jobs: in this process, in ranks, or in workers that the controller feeds."""

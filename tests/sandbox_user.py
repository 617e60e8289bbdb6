"""Runs a tool's calls as another user: job as JSON on stdin, answers as JSON on stdout.

``python sandbox_user.py UID``: becomes that user, makes ``Python(**job["limits"])`` and runs each of ``job["code"]``.
"""

import json
import os
import sys
import time


def main() -> None:
    uid = int(sys.argv[1])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    from retrain.environments.tools.python import Python

    job = json.load(sys.stdin)
    tool, answers = Python(**job["limits"]), []
    for code in job["code"]:
        start = time.monotonic()
        answers.append([tool(code), time.monotonic() - start])
    tool.close()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

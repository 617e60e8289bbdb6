"""Addresses of pages over what ``conftest.py`` serves, each under a name."""

from urllib.parse import quote

from retrain.ui.server import VIEWS
from tests.ui.hostile import ALONE, KEYS, RUNS, SCRIPT, TEXTS

HOME = "/logs/quickstart"
FIRST, SECOND = f"{HOME}/runs/grpo+none_s1", f"{HOME}/runs/maxrl+gtpo_sepa_s1"
A, B = quote(FIRST[1:]), quote(SECOND[1:])
HOSTILE = "/hostile"
WORST = f"/hostile/runs/{RUNS[0]}"
ODD = quote(f"/{ALONE}")

TRAINED = {
    "campaigns": "/", "campaigns, sorted": "/?sort=name&state=done", "campaign": f"/campaign{HOME}",
    "campaign, other curve": f"/campaign{HOME}?key=entropy&x=tokens&smooth=5", "watch": f"/metrics{HOME}",
    "all": f"/metrics{HOME}?tab=all&lines=conditions", "mine": f"/metrics{FIRST}?tab=mine&keys=mean_reward,entropy",
    "large": f"/metrics{HOME}?open=mean_reward&logx=1&clip=1", "distribution": f"/metrics{HOME}?hist=reward",
    "search": f"/metrics{HOME}?tab=all&q=reward", "problems": f"/problems{HOME}",
    "problem": f"/problems{HOME}?id=arithmetic/174-83&sort=hard", "prompt": f"/prompt{HOME}",
    "prompt, two steps": f"/prompt{FIRST}?a={A}&b={A}&step_a=0&step_b=12", "rollouts": f"/rollouts{HOME}",
    "rollout": f"/rollouts{FIRST}?iteration=10&index=9&sort=length&down=1",
    "siblings": f"/rollouts{SECOND}?index=1&beside=1", "held out": f"/rollouts{SECOND}?split=eval/heldout&index=3",
    "tokens": f"/tokens{HOME}", "tokens, entropy": f"/tokens{SECOND}?iteration=10&index=3&colour=entropy&pos=4",
    "no tokens": f"/tokens{FIRST}?iteration=3", "timeline": f"/timeline{FIRST}?step=5", "timelines": f"/timeline{HOME}",
    "lora": f"/lora{HOME}", "lora of a run": f"/lora{FIRST}", "compare": f"/compare{HOME}",
    "compared": f"/compare{HOME}?a={A}&b={B}", "notes": f"/notes{HOME}", "log": f"/notes{SECOND}?q=step",
}  # fmt: skip
OTHERS = {f"{view} of {place}": f"/{view}/{place}" for place in ("math_rl", "grpo_out") for view in VIEWS}
NASTY = {
    "campaigns": "/?q=hostile", "campaign": f"/campaign{HOSTILE}", "curve": f"/campaign{HOSTILE}?key={quote(KEYS[0])}",
    "metrics": f"/metrics{HOSTILE}?tab=all", "metrics of a run": f"/metrics{WORST}?tab=all&tag={quote(SCRIPT)}",
    "mine": f"/metrics{HOSTILE}?keys={','.join(quote(quote(key, safe=''), safe='') for key in KEYS)}",
    "large": f"/metrics{HOSTILE}?open={quote(KEYS[4], safe='')}",
    "wrong search": f"/metrics{HOSTILE}?tab=all&q={quote('(' + SCRIPT, safe='')}",
    "distribution": f"/metrics{HOSTILE}?hist=reward&run={quote(WORST[1:], safe='')}", "problems": f"/problems{HOSTILE}",
    "problem": f"/problems{HOSTILE}?id={quote(TEXTS[0], safe='')}",
    "prompt": f"/prompt{HOSTILE}?problem={quote(TEXTS[1], safe='')}", "rollouts": f"/rollouts{HOSTILE}?index=4",
    "siblings": f"/rollouts{HOSTILE}?index=0&beside=1",
    "filters": f"/rollouts{HOSTILE}?text={quote(SCRIPT, safe='')}&problem={quote(TEXTS[0], safe='')}",
    "tokens": f"/tokens{HOSTILE}?index=3", "tokens of a run": f"/tokens{WORST}?index=1&colour=entropy&pos=2",
    "timeline": f"/timeline{ODD}", "lora": f"/lora{HOSTILE}", "compare": f"/compare{HOSTILE}",
    "notes": f"/notes{HOSTILE}", "metrics of an odd name": f"/metrics{ODD}",
    "rollouts of an odd name": f"/rollouts{ODD}?index=2", "tokens of an odd name": f"/tokens{ODD}",
    "log": f"/notes{ODD}?q={quote('<script>', safe='')}",
}  # fmt: skip

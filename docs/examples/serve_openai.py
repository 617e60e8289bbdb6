"""OpenAI's client against adapters that were just trained: how many held-out sums each of them answers.

    retrain train campaigns/quickstart.toml --out logs/quickstart
    retrain serve logs/quickstart --port 8000 &
    python docs/examples/serve_openai.py http://127.0.0.1:8000/v1

Every model of the server is asked, the base first, with the same seed for all sums. ``pip install openai``. After the
quickstart's 30 steps:

    tiny-reasoner            24 of 60
    grpo+none_s1             48 of 60
    maxrl+gtpo_sepa_s1       42 of 60
    grpo+none_s2             46 of 60
    maxrl+gtpo_sepa_s2       46 of 60

The evaluation of these runs, on 200 held-out sums, says 38.0 % of the base and 81.8 % and 77.8 % of the two
conditions.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from retrain.data.arithmetic import arithmetic_problems

client = OpenAI(base_url=sys.argv[1], api_key="none")
asked = arithmetic_problems("heldout", 60, seed=1)


def correct(model: str, prompt: str, answer: str) -> bool:
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=80, seed=1
    )
    return (reply.choices[0].message.content or "").rstrip().endswith(rf"\boxed{{{answer}}}")


for model in [each.id for each in client.models.list()]:
    with ThreadPoolExecutor(16) as pool:
        right = sum(pool.map(lambda each, model=model: correct(model, each.prompt, each.answer), asked))
    print(f"{model:<24} {right} of {len(asked)}")

question = str(asked[0].prompt)
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": question}], max_tokens=80, seed=1, stream=True
)
print(question, end=" ")
for event in stream:
    print(event.choices[0].delta.content or "", end="", flush=True)
print()

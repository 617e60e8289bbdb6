"""TextArena's games behind the environment protocol, played by scripted players."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from retrain.errors import DataError, UsageError
from retrain.types import Action

pytest.importorskip("textarena", reason="pip install '.[textarena]'")

from retrain.environments.providers.textarena import TextArena, TextArenaEpisode

GUESS = "GuessTheNumber-v0"


def move(episode, text):
    return episode.step(Action([1], text, np.zeros(1), None, "stop"))


def bisect(episode):
    """Play to the end by halving what is left; returns the steps."""
    low, high, steps = 1, 20, []
    while not steps or not steps[-1].done:
        guess = (low + high) // 2
        steps.append(move(episode, f"I say [{guess}]."))
        if not steps[-1].done:
            lower = "lower" in steps[-1].messages[-1]["content"]
            low, high = (low, guess - 1) if lower else (guess + 1, high)
    return steps


def test_a_scripted_player_wins_every_game():
    environment = TextArena(GUESS, size=6, heldout=3, reward_range=[0, 1])
    train, held = environment.problems("train"), environment.problems("test")
    assert [problem.metadata["seed"] for problem in [*held, *train]] == list(range(9))
    lengths = []
    for problem in train:
        episode = environment.start(problem, seed=5)
        (prompt,) = episode.observe().messages
        assert prompt["role"] == "user"
        assert "guess the number between 1 and 20 within 10 turns" in prompt["content"]
        steps = bisect(episode)
        assert all(
            re.fullmatch(r"The target number is (lower|higher)\.", step.messages[0]["content"]) for step in steps[:-1]
        )
        assert "Congratulations" in steps[-1].logs["reason"]
        result = episode.result()
        assert result.total_reward == 1
        assert result.sample_metrics == {"invalid_moves": 0, "moves": len(steps), "finished": 1}
        lengths.append(len(steps))
    assert len(set(lengths)) > 1  # the seeds pick different numbers


def test_games_that_take_turns_do_not_disturb_each_other_or_the_process():
    environment = TextArena("2048-v0-easy")  # draws a tile after each move
    one, other = environment.problems("train")[:2]
    moves = ["[up]", "[left]", "[up]", "[left]", "[down]", "[right]"]

    def said(episode):
        return [move(episode, text).messages for text in moves]

    alone = said(environment.start(one, 0))
    random.seed(4)
    expected = random.Random(4).random()
    first, second = environment.start(one, 0), environment.start(other, 0)
    together = []
    for text in moves:
        together.append(move(first, text).messages)
        move(second, text)
    assert together == alone
    assert random.random() == expected
    assert said(environment.start(other, 0)) != alone


def test_invalid_moves_are_counted_and_end_the_game():
    environment = TextArena(GUESS)
    episode = environment.start(environment.problems("train")[0], 0)
    first = move(episode, "[99]")
    assert (first.done, first.metrics) == (False, {"invalid_moves": 1.0})
    assert "attempted an invalid move" in first.messages[0]["content"]
    assert move(episode, "10").metrics == {"invalid_moves": 0.0}  # the library adds the brackets
    assert move(episode, "[10]").metrics == {"invalid_moves": 1.0}
    last = move(episode, "[10]")
    assert (last.done, last.metrics) == (True, {"invalid_moves": 1.0})
    assert "Invalid Move" in last.logs["reason"]
    result = episode.result()
    assert result.sample_metrics == {"invalid_moves": 3, "moves": 4, "finished": 1}
    assert 0 < result.total_reward < 1  # how near the guess was


def test_a_game_that_is_cut_off():
    environment = TextArena(GUESS, unfinished_reward=-0.5)
    episode = environment.start(environment.problems("train")[0], 0)
    assert episode.result().total_reward == -0.5
    assert episode.result().sample_metrics["finished"] == 0


def test_arguments_of_the_game_and_several_games():
    environment = TextArena(GUESS, game={"max_number": 3})
    prompt = environment.start(environment.problems("train")[0], 0).observe().messages[0]["content"]
    assert "between 1 and 3" in prompt
    both = TextArena([GUESS, "Mastermind-v0"], size=4)
    assert [problem.tags[0] for problem in both.problems("train")] == [GUESS, "Mastermind-v0"] * 2


def test_exact_is_measured_unless_it_is_told(monkeypatch):
    assert TextArena([GUESS, "2048-v0-easy"]).exact
    assert not TextArena(GUESS, exact=False).exact

    def forgetful(self, name, seed, *rest, begin=TextArenaEpisode.__init__):
        begin(self, name, random.SystemRandom().randrange(1 << 40), *rest)

    monkeypatch.setattr(TextArenaEpisode, "__init__", forgetful)
    assert not TextArena("2048-v0-easy").exact


@pytest.mark.parametrize(
    ("id", "arguments", "message"),
    [
        ("GuesTheNumber-v0", {}, "has no game 'GuesTheNumber-v0'; did you mean GuessTheNumber-v0"),
        (None, {}, 'type the name of a game, such as id = "GuessTheNumber-v0"'),
        (GUESS, {"hold_out": 3}, "has no argument 'hold_out'; did you mean heldout"),
        (GUESS, {"game": {"max_numbr": 3}}, f"{GUESS} has no argument 'max_numbr'; did you mean max_number"),
        (GUESS, {"unfinished_reward": "x"}, "unfinished_reward is 'x', not a number"),
        (GUESS, {"reward_range": [1]}, "not a list of two numbers"),
        (GUESS, {"exact": "no"}, "exact is 'no', neither true nor false"),
    ],
)
def test_mistakes_are_told_in_one_line(id, arguments, message):
    with pytest.raises(UsageError, match=message):
        TextArena(id, **arguments)


def test_games_that_cannot_be_played_are_refused():
    with pytest.raises(DataError, match="Countdown-v0: the game's reward is 'Invalid action format"):
        TextArena("Countdown-v0").problems("train")
    with pytest.raises(DataError, match="QuantumTicTacToe-v0 is not a game for one player"):
        TextArena("QuantumTicTacToe-v0").problems("train")
    with pytest.raises(
        DataError, match="TicTacToe-v0 cannot be set up: AssertionError: The number of players has to be 2"
    ):
        TextArena("TicTacToe-v0").problems("train")


def test_words_that_are_not_on_this_machine_are_named(monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *names, **how: False)
    with pytest.raises(DataError, match=r"Hangman-v0 needs data of nltk .* type: python -m nltk.downloader \w+$"):
        TextArena("Hangman-v0").problems("train")
